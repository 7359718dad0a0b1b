//! Building what a run needs, once.

use crate::test_programs::{BLACK_BOX, BUILT, Qemu, TestPrograms};
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::run;
use zebu_bench::workspace::{cargo, root, target_dir};

/// The engine, and its tests on the simulated disk.
const ENGINE: &str = "zebu-engine";
const SIMULATED: &str = "simulated";

/// Which program, and what of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A simulated test of the engine that runs over seeds.
    Seeds { test: &'static str },
    /// Every deliberate fault, which the simulated tests must catch.
    Faults,
    /// The tests of a module of a target of `zebu-tests`.
    BlackBox { target: &'static str, module: &'static str },
    /// `cargo xtask differential`.
    Differential,
    /// The fuzz targets in a plain loop.
    Fuzz,
}

impl Kind {
    /// Whether it is one of the tests against QEMU, which pass without having looked where QEMU is left out.
    pub(super) fn needs_qemu(self) -> bool {
        match self {
            Self::BlackBox { .. } | Self::Differential => true,
            Self::Seeds { .. } | Self::Faults | Self::Fuzz => false,
        }
    }
}

/// The built programs.
pub(super) struct Programs {
    tests: TestPrograms,
    qemu: Qemu,
    zebu: PathBuf,
    differential: PathBuf,
    fuzz: PathBuf,
}

impl Programs {
    /// Builds what jobs of these kinds need.
    pub(super) fn build(kinds: &[Kind], qemu: Qemu) -> Outcome<Self> {
        let tests = TestPrograms::build()?;
        for kind in kinds {
            if let Kind::BlackBox { target, .. } = kind {
                tests.of(BLACK_BOX, target)?;
            }
        }
        tests.of(ENGINE, SIMULATED)?;
        if kinds.contains(&Kind::Fuzz) {
            // In the profile and the directory of the tests: most of what it depends on is built already.
            let mut build = cargo();
            build.current_dir(root().join("fuzz")).args([
                "build",
                "--quiet",
                "--locked",
                "--example",
                "steady",
            ]);
            run(build.arg("--target-dir").arg(target_dir()?))?;
        }
        Ok(Self {
            zebu: tests.binary("zebu"),
            differential: tests.binary("differential"),
            tests,
            qemu,
            fuzz: target_dir()?.join(BUILT).join("examples/steady"),
        })
    }

    /// A command that runs the engine's simulated tests.
    pub(super) fn simulated(&self) -> Outcome<Command> {
        let mut command = self.tests.of(ENGINE, SIMULATED)?.command();
        self.qemu.tell(&mut command);
        Ok(command)
    }

    /// A command that runs the tests of a module of a target of `zebu-tests`.
    pub(super) fn black_box(&self, target: &str, module: &str) -> Outcome<Command> {
        let mut command = self.tests.of(BLACK_BOX, target)?.command();
        command.env("ZEBU_BIN", &self.zebu).arg(module);
        Ok(command)
    }

    pub(super) fn zebu(&self) -> &Path {
        &self.zebu
    }

    pub(super) fn differential(&self) -> &Path {
        &self.differential
    }

    pub(super) fn fuzz(&self) -> &Path {
        &self.fuzz
    }
}
