//! Commands that need nightly Rust: Miri, coverage to guide the fuzzing.

use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::output;
use zebu_bench::workspace::cargo;

/// The target that the fuzzing is built for.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Requires nightly Rust with these components. The error says how to get what is missing.
pub(crate) fn ensure(components: &[&str]) -> Outcome {
    let installed = output(Command::new("rustup").args(["component", "list", "--toolchain", "nightly"]))
        .map_err(|_| install_hint(components))?;
    let is_there = |name: &&str| {
        installed.lines().any(|line| line.starts_with(name) && line.trim_end().ends_with("(installed)"))
    };
    if components.iter().all(is_there) { Ok(()) } else { Err(install_hint(components)) }
}

fn install_hint(components: &[&str]) -> String {
    let components = components.join(",");
    format!(
        "this needs nightly Rust: rustup toolchain install nightly --profile minimal --component {components}"
    )
}

/// Nightly cargo, in the workspace.
pub(crate) fn cargo_nightly() -> Command {
    let mut command = cargo();
    command.arg("+nightly");
    command
}

/// Requires a subcommand of cargo.
pub(crate) fn ensure_subcommand(name: &str) -> Outcome {
    output(cargo().args([name, "--version"]))
        .map(drop)
        .map_err(|_| format!("cargo-{name} is missing: cargo install --locked cargo-{name}"))
}
