//! Archives that are unpacked by hand, or by the install script.

use super::Release;
use super::binaries::Program;
use super::tree::Tree;
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::run;

/// A packed archive whose files have no times and no owners of this machine.
pub(super) fn tar(folder: &Path, what: &str, prefix: &str, to: &Path) -> Outcome {
    let mut command = Command::new("tar");
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--gzip"]);
    command.arg(format!("--transform=s,^\\./*,{prefix},S"));
    run(command.arg("-C").arg(folder).arg("-cf").arg(to).arg(what))
}

pub(super) fn tarball(release: &Release, program: &Program, tree: &Tree) -> Outcome {
    let name = format!("zebu-{}-{}", release.version, program.machine.target());
    tar(tree.path(), ".", &format!("{name}/"), &release.path(&format!("{name}.tar.gz")))
}

/// The symbols, for debuggers.
pub(super) fn debug_files(release: &Release, program: &Program) -> Outcome {
    let name = format!("zebu-{}-{}-debug", release.version, program.machine.target());
    let folder = program.symbols.parent().unwrap_or(Path::new("."));
    tar(folder, "./zebu.debug", &format!("{name}/"), &release.path(&format!("{name}.tar.gz")))
}
