//! Static programs for each machine.

use crate::built_tools;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{find, output, run};
use zebu_bench::workspace::{cargo, root, target_dir};

/// A kind of machine that there are packages for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Machine {
    #[value(name = "x86_64")]
    X86_64,
    Aarch64,
}

impl Machine {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    pub(super) fn target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-musl",
            Self::Aarch64 => "aarch64-unknown-linux-musl",
        }
    }

    /// Why no program can be built for it here, or `None`.
    pub(super) fn obstacle(self) -> Option<String> {
        output(Command::new("rustup").args(["target", "add", self.target()])).err()
    }

    /// In the words of Debian and of OCI images.
    pub(super) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }
}

/// The most that a program may have.
const LARGEST: u64 = 30 << 20;
/// The packages of PyPI that build for other machines, in the versions that are known to.
const ZIG: [&str; 2] = [built_tools::ZIG, "cargo-zigbuild==0.24.1"];
/// Files that no program is made of, below the folders that it is made of.
const NOT_BUILT: &str = ":(exclude)*.md";

/// A program that was built.
pub(super) struct Program {
    pub(super) machine: Machine,
    /// Without symbols.
    pub(super) stripped: PathBuf,
    /// Its symbols.
    pub(super) symbols: PathBuf,
}

impl Program {
    /// Builds the program, or takes the one that was built from the same sources by the same compiler.
    pub(super) fn build(machine: Machine) -> Outcome<Self> {
        let kept =
            built_tools::cache()?.join(format!("release-{}", hash_of_sources()?)).join(machine.target());
        let program = Self { machine, stripped: kept.join("zebu"), symbols: kept.join("zebu.debug") };
        if !program.stripped.is_file() {
            program.strip(&Self::compile(machine)?, &kept)?;
        }
        let len = fs::metadata(&program.stripped).map_err(|e| said(&program.stripped, e))?.len();
        if len > LARGEST {
            return Err(format!("{} has {len} bytes, more than {LARGEST}", program.stripped.display()));
        }
        crate::toolchain::has_no_loader(&program.stripped)?;
        Ok(program)
    }

    /// The static program of this machine that the packed crates were built to, in the profile of the tests.
    pub(super) fn of_packed_crates(built: &Path, scratch: &Path) -> Outcome<Self> {
        let (stripped, symbols) = (scratch.join("zebu"), scratch.join("zebu.debug"));
        let program = Self { machine: Machine::X86_64, stripped, symbols };
        program.strip(built, scratch)?;
        Ok(program)
    }

    /// Builds the program with its symbols.
    fn compile(machine: Machine) -> Outcome<PathBuf> {
        let target = machine.target();
        if let Some(obstacle) = machine.obstacle() {
            return Err(obstacle);
        }
        let is_own = machine.name() == std::env::consts::ARCH;
        let mut command = cargo();
        command.arg(if is_own { "build" } else { "zigbuild" });
        command.args(["--release", "--locked", "--package", "zebu-cli", "--target", target]);
        if !is_own {
            command.env("PATH", built_tools::path_with(&ZIG)?);
        }
        run(&mut command)?;
        Ok(target_dir()?.join(target).join("release/zebu"))
    }

    /// Takes the symbols from what was built.
    fn strip(&self, built: &Path, kept: &Path) -> Outcome {
        fs::create_dir_all(kept).map_err(|e| said(kept, e))?;
        // GNU's reads programs of its own machine only.
        let objcopy = find("llvm-objcopy").ok_or("llvm-objcopy is missing (package llvm)")?;
        run(Command::new(&objcopy).arg("--only-keep-debug").arg(built).arg(&self.symbols))?;
        let unnamed = kept.join("zebu.new");
        let mut strip = Command::new(&objcopy);
        strip.arg("--strip-all").arg(format!("--add-gnu-debuglink={}", self.symbols.display()));
        run(strip.arg(built).arg(&unnamed))?;
        fs::rename(&unnamed, &self.stripped).map_err(|e| said(&self.stripped, e))
    }
}

fn said(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// The SHA-256 sum of the sources of the command, and of the version of their compiler.
fn hash_of_sources() -> Outcome<String> {
    let mut list = Command::new("git");
    list.args(["ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "--"]);
    let files = output(list.args(["crates", "Cargo.toml", "Cargo.lock", NOT_BUILT]).current_dir(root()))?;
    let there = files.lines().filter(|file| root().join(file).is_file());
    let mut text = output(Command::new("sha256sum").arg("--").args(there).current_dir(root()))?;
    text += &output(Command::new("rustc").arg("-vV").current_dir(root()))?;
    text += &ZIG.concat();
    let file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
    fs::write(file.path(), text).map_err(|e| said(file.path(), e))?;
    let sum = output(Command::new("sha256sum").arg(file.path()))?;
    Ok(sum.chars().take(16).collect())
}

/// The program that runs on this machine.
pub(super) fn runnable(programs: &[Program]) -> Outcome<PathBuf> {
    let own = programs.iter().find(|program| program.machine.name() == std::env::consts::ARCH);
    own.map(|program| program.stripped.clone())
        .ok_or_else(|| "manual pages are printed by a program of this machine: build it, too".to_owned())
}
