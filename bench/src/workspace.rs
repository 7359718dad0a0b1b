//! The workspace that is built and measured.

use crate::Outcome;
use crate::process::output;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

/// The root of the workspace.
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), PathBuf::from)
}

/// Cargo, in the workspace.
pub fn cargo() -> Command {
    in_workspace("cargo")
}

/// A program that builds in the workspace, without the variables that `cargo run` has set for this process. They would choose its
/// toolchain and directories, and have crates whose build scripts look at them be built anew, with all that stands on them.
pub fn in_workspace(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).env_remove("RUSTUP_TOOLCHAIN");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    command
}

/// The directory in which cargo builds.
pub fn target_dir() -> Outcome<PathBuf> {
    let text = output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| format!("cargo metadata: {e}"))?;
    metadata["target_directory"]
        .as_str()
        .map(Into::into)
        .ok_or_else(|| "cargo metadata: no target directory".into())
}
