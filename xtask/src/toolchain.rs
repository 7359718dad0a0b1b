//! Commands that need another toolchain or tool: the oldest supported Rust, the static binary, cargo-deny.

use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{find, output, run};
use zebu_bench::workspace::{cargo, root, target_dir};

const MUSL: &str = "x86_64-unknown-linux-musl";

/// Why there is no toolchain of the oldest supported Rust here, and none to be had, or `None`.
pub(crate) fn msrv_obstacle() -> Option<String> {
    let install = || {
        let version = rust_version()?;
        if output(cargo().args([format!("+{version}"), "--version".into()])).is_ok() {
            return Ok(());
        }
        run(Command::new("rustup").args(["toolchain", "install", &version, "--profile", "minimal"]))
            .map_err(|e| format!("Rust {version} can't be had: {e}"))
    };
    install().err()
}

/// Builds the library and the command with the oldest supported Rust.
pub(crate) fn msrv() -> Outcome {
    if let Some(obstacle) = msrv_obstacle() {
        return Err(obstacle);
    }
    let toolchain = format!("+{}", rust_version()?);
    run(cargo().args([
        toolchain.as_str(),
        "check",
        "--locked",
        "--package",
        "zebu-cli",
        "--package",
        "zebu-adapters",
    ]))
}

fn rust_version() -> Outcome<String> {
    let manifest = root().join("Cargo.toml");
    let text = std::fs::read_to_string(&manifest).map_err(|e| format!("{}: {e}", manifest.display()))?;
    text.lines()
        .find_map(|l| l.strip_prefix("rust-version = "))
        .map(|v| v.trim_matches('"').to_owned())
        .ok_or_else(|| "Cargo.toml states no rust-version".into())
}

/// Makes sure that each crate is published or private, and that what is published is described.
pub(crate) fn manifests_are_complete() -> Outcome {
    let manifests = workspace_manifests()?;
    for (name, manifest) in &manifests {
        let is_private = manifest.lines().any(|line| line == "publish = false");
        if is_private == PUBLISHED.contains(&name.as_str()) {
            return Err(format!(
                "{name}: either `publish = false`, or a place in the list of published crates"
            ));
        }
        if let Some(key) =
            DESCRIBED_BY.iter().find(|key| !is_private && !manifest.contains(&format!("\n{key}")))
        {
            return Err(format!("{name}: its manifest has no `{key}`"));
        }
    }
    Ok(())
}

/// Packs the crates that are published as they would be, in their order, and builds each from what was packed: the command
/// as a static binary, which is run. Returns its path.
pub(crate) fn publish() -> Outcome<PathBuf> {
    manifests_are_complete()?;
    if let Some(obstacle) = musl_obstacle() {
        return Err(obstacle);
    }
    let packages = PUBLISHED.iter().flat_map(|name| ["--package", name]);
    let target = target_dir()?;
    forget_packed(&target);
    let mut command = cargo();
    // A packed crate does not have the workspace's profiles.
    command.env("CARGO_PROFILE_DEV_DEBUG", "none");
    command.args(["package", "--locked", "--allow-dirty", "--target", MUSL, "--target-dir"]).arg(&target);
    run(command.args(packages))?;
    let program = target.join(MUSL).join("debug/zebu");
    is_static(&program)?;
    Ok(program)
}

/// Has cargo forget what it unpacked and built of these crates when they were packed before: it takes a crate of the same
/// version for the same.
fn forget_packed(target: &Path) {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let registries = home.map(|home| entries(&home.join("registry/src"))).unwrap_or_default();
    // Those that are directories of this machine have no host before the hash.
    let own = registries.iter().filter(|path| name_of(path).starts_with('-'));
    let unpacked = own.flat_map(|path| entries(path)).filter(|path| is_published(path));
    let built =
        entries(&target.join(MUSL).join("debug/.fingerprint")).into_iter().filter(|path| is_published(path));
    for path in unpacked.chain(built) {
        // What stays is found by the build that fails.
        let _ = std::fs::remove_dir_all(path);
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(directory).into_iter().flatten();
    found.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a folder is called by a published crate and its version or hash.
fn is_published(path: &Path) -> bool {
    name_of(path).rsplit_once('-').is_some_and(|(name, _)| PUBLISHED.contains(&name))
}

/// The beginnings of lines that a registry and docs.rs want of a manifest.
const DESCRIBED_BY: [&str; 6] =
    ["description = ", "license.workspace = ", "readme = ", "keywords = ", "categories = ", "rust-version"];

/// The name of each crate of the workspace, and its manifest.
fn workspace_manifests() -> Outcome<Vec<(String, String)>> {
    let metadata = output(cargo().args(["metadata", "--no-deps", "--locked", "--format-version", "1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata).map_err(|e| e.to_string())?;
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    let text = |package: &serde_json::Value, key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let read = |package: &serde_json::Value| {
        let path = text(package, "manifest_path");
        let manifest = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
        Ok((text(package, "name"), manifest))
    };
    packages.iter().map(read).collect()
}

/// The crates that are published, each after those that it needs.
const PUBLISHED: [&str; 15] = [
    "zebu-qcow2",
    "zebu-foreign",
    "zebu-storage",
    "zebu-luks",
    "zebu-tls",
    "zebu-remote",
    "zebu-store",
    "zebu-oci",
    "zebu-rbd",
    "zebu-engine",
    "zebu-drivers",
    "zebu-disks",
    "zebu",
    "zebu-export",
    "zebu-cli",
];

/// Why the static binary can't be built here, or `None`.
pub(crate) fn musl_obstacle() -> Option<String> {
    if find("musl-gcc").is_none() {
        return Some("musl-gcc is missing (package musl-tools)".into());
    }
    let installed =
        output(Command::new("rustup").args(["target", "list", "--installed"])).unwrap_or_default();
    if installed.lines().any(|l| l == MUSL) {
        return None;
    }
    run(Command::new("rustup").args(["target", "add", MUSL])).err()
}

/// Runs a program, and makes sure that it needs no library.
fn is_static(program: &Path) -> Outcome {
    has_no_loader(program)?;
    run(Command::new(program).arg("--version"))
}

/// Makes sure that a program needs no library.
pub(crate) fn has_no_loader(program: &Path) -> Outcome {
    let bytes = std::fs::read(program).map_err(|e| format!("{}: {e}", program.display()))?;
    if has_interpreter(&bytes) {
        return Err(format!("{} is not static: it names a dynamic loader", program.display()));
    }
    Ok(())
}

/// Whether a little-endian 64-bit ELF file has a `PT_INTERP` program header (elf(5)): a dynamic loader.
fn has_interpreter(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let bytes = |at: usize, len: usize| elf.get(at..at + len).unwrap_or_default();
    let u16_at = |at| bytes(at, 2).try_into().map_or(0, u16::from_le_bytes) as usize;
    let u32_at = |at| bytes(at, 4).try_into().map_or(0, u32::from_le_bytes);
    let table = bytes(32, 8).try_into().map_or(0, u64::from_le_bytes) as usize;
    let (size, count) = (u16_at(54), u16_at(56));
    (0..count).any(|i| u32_at(table + i * size) == PT_INTERP)
}

/// Runs cargo-deny, which is installed first if it is not there (some minutes). Advisories need their database; where
/// that can't be reached they are left out, with a note.
pub(crate) fn deny() -> Outcome {
    if find("cargo-deny").is_none() {
        run(cargo().args(["install", "--locked", "cargo-deny"]))?;
    }
    run(cargo().args(["deny", "check", "licenses", "bans", "sources"]))?;
    if let Err(error) = output(cargo().args(["deny", "fetch", "db"])) {
        println!("note: advisories not checked, their database can't be reached: {error}");
        return Ok(());
    }
    run(cargo().args(["deny", "check", "--disable-fetch", "advisories"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_a_dynamic_program() {
        let own = std::fs::read(std::env::current_exe().expect("has a name")).expect("readable");
        assert!(has_interpreter(&own));
        assert!(!has_interpreter(b"\x7fELF"));
    }
}
