//! The workspace that is built and measured.

use crate::Outcome;
use crate::process::output;
use std::path::PathBuf;
use std::process::Command;

/// The root of the workspace.
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or(here.clone(), PathBuf::from)
}

/// Cargo, in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root());
    // What `cargo run` sets for this process would choose its toolchain and directories for the child.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO_MANIFEST_DIR");
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
