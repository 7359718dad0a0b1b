//! One build for all tests: the whole workspace, in the profile of development.
//!
//! Packages or targets that are named alone have other features of what they share, so that everything below them would
//! be built once more. Whoever needs a test program builds all of them, and runs those that it wants.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use zebu_bench::Outcome;
use zebu_bench::process::shown;
use zebu_bench::workspace::{cargo, target_dir};

/// The folder of Cargo's profile `dev` below the target directory.
pub(crate) const BUILT: &str = "debug";

/// The package of the tests against QEMU.
pub(crate) const BLACK_BOX: &str = "zebu-tests";

/// Package and target of tests that all compare with QEMU: they can't be told to pass without it.
pub(crate) const BESIDE_QEMU: (&str, &str) = ("zebu-engine", "jobs");

/// Whether tests may ask QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Qemu {
    Asked,
    LeftOut,
}

impl Qemu {
    /// Tells it to tests, or to a command that runs some.
    pub(crate) fn tell(self, command: &mut Command) -> &mut Command {
        if self == Self::LeftOut {
            command.env("ZEBU_SKIP_QEMU", "1");
        }
        command
    }
}

/// A program that runs the tests of one target.
pub(crate) struct TestProgram {
    package: String,
    /// The directory of the package.
    directory: PathBuf,
    target: String,
    path: PathBuf,
}

impl TestProgram {
    /// A command that runs it as `cargo test` does.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        // A seed that fails says which command repeats it.
        command.env("CARGO_PKG_NAME", &self.package).env("CARGO_MANIFEST_DIR", &self.directory);
        on_this_machine(&mut command);
        command.current_dir(&self.directory);
        command
    }
}

/// The tests of the workspace, built.
pub(crate) struct TestPrograms {
    all: Vec<TestProgram>,
    folder: PathBuf,
}

impl TestPrograms {
    pub(crate) fn build() -> Outcome<Self> {
        let mut command = cargo_test();
        command.args(["--no-run", "--message-format=json-render-diagnostics"]);
        let out = command
            .stderr(Stdio::inherit())
            .output()
            .map_err(|e| format!("cannot run {}: {e}", shown(&command)))?;
        if !out.status.success() {
            return Err(format!("{}: {}", shown(&command), out.status));
        }
        let said = String::from_utf8_lossy(&out.stdout);
        let all = said.lines().filter_map(|line| test_program(&serde_json::from_str(line).ok()?)).collect();
        Ok(Self { all, folder: target_dir()?.join(BUILT) })
    }

    /// The program of this target of a package.
    pub(crate) fn of(&self, package: &str, target: &str) -> Outcome<&TestProgram> {
        let found = self.all.iter().find(|program| program.package == package && program.target == target);
        found.ok_or_else(|| format!("{package} has no tests {target}"))
    }

    /// A program that the tests start: the command `zebu`, or one of the package of the tests.
    pub(crate) fn binary(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// `cargo test` for the whole workspace.
pub(crate) fn cargo_test() -> Command {
    let mut command = cargo();
    command.args(["test", "--workspace", "--locked"]);
    command
}

/// Says to tests, or to what runs them, that their servers are on this machine. Where no_proxy is empty, NO_PROXY would
/// count.
pub(crate) fn on_this_machine(command: &mut Command) -> &mut Command {
    command.env("no_proxy", "127.0.0.1,localhost").env_remove("NO_PROXY")
}

/// The test program that a message of Cargo is about.
fn test_program(message: &Value) -> Option<TestProgram> {
    if message["profile"]["test"] != true {
        return None;
    }
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let directory = manifest.parent()?.to_owned();
    Some(TestProgram {
        package: package(message["package_id"].as_str()?)?.to_owned(),
        directory,
        target: message["target"]["name"].as_str()?.to_owned(),
        path: message["executable"].as_str()?.into(),
    })
}

/// The name in the identity of a package: `path+file:///x/crates/engine#zebu-engine@0.1.0`, or without the name where it is
/// that of the folder: `path+file:///x/xtask#0.1.0`.
fn package(id: &str) -> Option<&str> {
    let (place, version) = id.rsplit_once('#')?;
    match version.split_once('@') {
        Some((name, _)) => Some(name),
        None => place.rsplit_once('/').map(|(_, folder)| folder),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_named_by_its_identity_or_its_folder() {
        assert_eq!(package("path+file:///x/crates/engine#zebu-engine@0.1.0"), Some("zebu-engine"));
        assert_eq!(package("path+file:///x/xtask#0.1.0"), Some("xtask"));
        assert_eq!(package("zebu"), None);
    }

    #[test]
    fn only_tests_are_test_programs() {
        let message = |test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "package_id": "path+file:///x/tests#zebu-tests@0.1.0",
                "manifest_path": "/x/tests/Cargo.toml", "profile": { "test": test },
                "target": { "name": "nbd", "src_path": "/x/tests/tests/nbd/main.rs" }, "executable": "/x/target/nbd-1",
            })
        };
        assert!(test_program(&message(false)).is_none());
        assert_eq!(test_program(&message(true)).map(|program| program.target).as_deref(), Some("nbd"));
    }
}
