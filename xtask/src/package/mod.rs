//! The command `package`: everything that a release consists of, in one folder.

mod archives;
mod binaries;
mod oci;
mod repositories;
mod system;
mod tree;
mod trial;

use crate::setup::{self, Need};
use crate::toolchain;
use binaries::{Machine, Program};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};
use zebu_bench::workspace::{cargo, root};

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask package --out dist
  cargo xtask package --out dist --machine x86_64
  cargo xtask package --out dist --try      # installs each in a clean Debian, as root

Needs Debian's dpkg-dev, rpm, createrepo-c, llvm and musl-tools; aarch64 is built by cargo-zigbuild, which is installed
from PyPI. What was built from the same sources before is taken again.")]
pub(crate) struct PackageArgs {
    /// The folder, which must be empty or new
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Only this machine; may be given again
    #[arg(long = "machine", value_enum, value_name = "x86_64|aarch64", hide_possible_values = true)]
    machines: Vec<Machine>,
    /// Install each package in a clean Debian 12 then, and use and remove it there (root; mmdebstrap, dnf, skopeo)
    #[arg(long = "try")]
    tries: bool,
}

/// The machines that a release is for.
const ALL: [Machine; 2] = [Machine::X86_64, Machine::Aarch64];

/// The facts that all packages share.
struct Release {
    version: String,
    /// Where the project is, an address.
    place: String,
    out: PathBuf,
}

impl Release {
    /// The release of this version, in a folder.
    fn new(out: PathBuf) -> Outcome<Self> {
        Ok(Self { version: manifest_value("version")?, place: manifest_value("repository")?, out })
    }

    /// Makes everything of it.
    fn make(&self, programs: &[Program]) -> Outcome {
        let pages = tree::Pages::make(&binaries::runnable(programs)?)?;
        for program in programs {
            let tree = tree::Tree::stage(program, &pages)?;
            archives::tarball(self, program, &tree)?;
            archives::debug_files(self, program)?;
            system::deb(self, program, &tree)?;
            system::rpm(self, program, &tree)?;
        }
        oci::image(self, programs)?;
        sbom(self)?;
        install_script(self)?;
        repositories::apt(self)?;
        repositories::dnf(self)?;
        sums(self)?;
        println!("{}", self.out.display());
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.out.join(name)
    }
}

pub(crate) use trial::obstacle;

/// Installs and fetches all that the trial of packages needs.
pub(crate) fn bring() -> Outcome {
    setup::ensure(Need::Release)?;
    setup::ensure(Need::Trial)?;
    crate::built_tools::cyclonedx()?;
    trial::clean_system().map(drop)
}

/// Makes everything in a scratch folder, of the program that the packed crates were built to, and tries it.
pub(crate) fn try_packed(built: &Path) -> Outcome {
    bring()?;
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let program = Program::of_packed_crates(built, &scratch.path().join("program"))?;
    let release = Release::new(scratch.path().join("release"))?;
    fs::create_dir_all(&release.out).map_err(|e| format!("{}: {e}", release.out.display()))?;
    let programs = [program];
    release.make(&programs)?;
    trial::command(&release, &programs)
}

/// Makes everything in a scratch folder, and tries it: for each machine that programs can be built for here.
pub(crate) fn try_all() -> Outcome {
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let mut machines = ALL.to_vec();
    machines.retain(|machine| match machine.obstacle() {
        Some(obstacle) => {
            println!("note: nothing for {}: {obstacle}", machine.name());
            false
        }
        None => true,
    });
    command(&PackageArgs { out: scratch.path().join("release"), machines, tries: true })
}

pub(crate) fn command(args: &PackageArgs) -> Outcome {
    if let Some(obstacle) = args.tries.then(obstacle).flatten() {
        return Err(obstacle);
    }
    let out = std::path::absolute(&args.out).map_err(|e| format!("{}: {e}", args.out.display()))?;
    let said = |e: std::io::Error| format!("{}: {e}", out.display());
    fs::create_dir_all(&out).map_err(said)?;
    if fs::read_dir(&out).map_err(said)?.next().is_some() {
        return Err(format!("{} is not empty", out.display()));
    }
    setup::ensure(Need::Release)?;
    if args.tries {
        setup::ensure(Need::Trial)?;
    }
    let release = Release::new(out)?;
    let machines = if args.machines.is_empty() { &ALL[..] } else { &args.machines[..] };
    toolchain::manifests_are_complete()?;
    let mut programs = Vec::new();
    for machine in machines {
        programs.push(Program::build(*machine)?);
    }
    release.make(&programs)?;
    if args.tries { trial::command(&release, &programs) } else { Ok(()) }
}

/// A value of `[workspace.package]`.
pub(crate) fn manifest_value(key: &str) -> Outcome<String> {
    let manifest = root().join("Cargo.toml");
    let text = fs::read_to_string(&manifest).map_err(|e| format!("{}: {e}", manifest.display()))?;
    let (_, package) =
        text.split_once("[workspace.package]").ok_or("Cargo.toml has no [workspace.package]")?;
    let line = package.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")));
    line.map(|value| value.trim_matches('"').to_owned()).ok_or_else(|| format!("Cargo.toml states no {key}"))
}

/// The list of what the command is made of, by cargo-cyclonedx.
fn sbom(release: &Release) -> Outcome {
    let name = format!("zebu-{}.cdx", release.version);
    let tool = crate::built_tools::cyclonedx()?;
    let manifest = root().join("crates/cli/Cargo.toml");
    let mut command = Command::new(tool);
    command.args(["cyclonedx", "--format", "json", "--override-filename", &name, "--manifest-path"]);
    run(command.arg(&manifest).current_dir(root()))?;
    let made = root().join("crates/cli").join(format!("{name}.json"));
    let text = fs::read_to_string(&made).map_err(|e| format!("{}: {e}", made.display()))?;
    // Crates of the workspace are named by where they are on this machine.
    let text = text.replace(&root().display().to_string(), "/zebu");
    let to = release.path(&format!("{name}.json"));
    fs::write(&to, text).map_err(|e| format!("{}: {e}", to.display()))?;
    // It describes each crate of the workspace beside its manifest.
    let metadata = output(cargo().args(["metadata", "--no-deps", "--locked", "--format-version", "1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata).map_err(|e| e.to_string())?;
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let folder =
            Path::new(package["manifest_path"].as_str().unwrap_or_default()).parent().map(Path::to_owned);
        if let Some(folder) = folder {
            let _ = fs::remove_file(folder.join(format!("{name}.json")));
        }
    }
    Ok(())
}

fn install_script(release: &Release) -> Outcome {
    let from = root().join("packaging/install.sh");
    let text = fs::read_to_string(&from).map_err(|e| format!("{}: {e}", from.display()))?;
    let place = format!("{}/releases/download/v{}", release.place, release.version);
    let text = text.replace("@VERSION@", &release.version).replace("@PLACE@", &place);
    let to = release.path("install.sh");
    fs::write(&to, text).map_err(|e| format!("{}: {e}", to.display()))
}

/// SHA256SUMS of all files beside it.
fn sums(release: &Release) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", release.out.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&release.out).map_err(said)? {
        let entry = entry.map_err(said)?;
        if entry.file_type().map_err(said)?.is_file() {
            names.push(entry.file_name());
        }
    }
    names.sort();
    let text = output(Command::new("sha256sum").arg("--").args(&names).current_dir(&release.out))?;
    let to = release.path("SHA256SUMS");
    fs::write(&to, text).map_err(|e| format!("{}: {e}", to.display()))
}
