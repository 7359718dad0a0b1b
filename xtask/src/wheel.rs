//! The command `wheel`: the package of Python, for each machine and each C library.

use crate::built_tools::{self, ZIG};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};
use zebu_bench::workspace::{in_workspace, root, target_dir};

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask wheel --out dist
  cargo xtask wheel --out dist --platform x86_64-unknown-linux-gnu

maturin and Zig are installed from PyPI. A wheel serves CPython 3.11 and all later ones.")]
pub(crate) struct WheelArgs {
    /// The folder, made if it is not there
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Only this platform, in Rust's words; may be given again
    #[arg(long = "platform", value_name = "TARGET", value_parser = PLATFORMS.map(|platform| platform.target))]
    platforms: Vec<String>,
}

/// The folder of the package, a workspace of its own.
pub(crate) const PACKAGE: &str = "bindings/python";

/// The packages of PyPI that make wheels, in the versions that are known to.
const TOOLS: [&str; 2] = ["maturin==1.16.0", ZIG];

/// A machine and a C library.
struct Platform {
    target: &'static str,
    /// The oldest systems that a wheel is for, in the words of Python's packages.
    tag: &'static str,
}

/// The platforms that there are wheels for: glibc 2.28 (2018) or musl 1.2 (2020), and newer.
const PLATFORMS: [Platform; 4] = [
    Platform { target: "x86_64-unknown-linux-gnu", tag: "manylinux_2_28" },
    Platform { target: "aarch64-unknown-linux-gnu", tag: "manylinux_2_28" },
    Platform { target: "x86_64-unknown-linux-musl", tag: "musllinux_1_2" },
    Platform { target: "aarch64-unknown-linux-musl", tag: "musllinux_1_2" },
];

/// Makes the wheels of a release.
pub(crate) fn command(args: &WheelArgs) -> Outcome {
    let out = std::path::absolute(&args.out).map_err(|e| format!("{}: {e}", args.out.display()))?;
    let is_asked =
        |target: &str| args.platforms.is_empty() || args.platforms.iter().any(|asked| asked == target);
    for Platform { target, tag } in PLATFORMS.iter().filter(|platform| is_asked(platform.target)) {
        output(Command::new("rustup").args(["target", "add", target]))?;
        let mut command = maturin(&out)?;
        run(command.args(["--release", "--strip", "--zig", "--target", target, "--compatibility", tag]))?;
    }
    Ok(())
}

/// Makes a wheel for this machine alone, in the profile of the tests, and returns its path.
pub(crate) fn for_tests(out: &Path) -> Outcome<PathBuf> {
    run(maturin(out)?.args(["--profile", "dev", "--compatibility", "linux"]))?;
    let made = std::fs::read_dir(out).map_err(|e| format!("{}: {e}", out.display()))?.flatten();
    let mut wheels =
        made.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "whl"));
    wheels.next().ok_or_else(|| format!("maturin left no wheel in {}", out.display()))
}

/// Why wheels can't be made here, if so.
pub(crate) fn obstacle() -> Option<String> {
    let old = "there is no Python 3.11 or newer with venv and pip (Debian: python3-venv)";
    let looks = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))";
    if output(Command::new("python3").args(["-c", looks])).is_err() {
        return Some(old.to_owned());
    }
    built_tools::environment(&TOOLS).err()
}

/// maturin, which makes a wheel in a folder.
fn maturin(out: &Path) -> Outcome<Command> {
    let mut command = in_workspace(built_tools::environment(&TOOLS)?.join("bin/maturin"));
    command.current_dir(root().join(PACKAGE)).env("PATH", built_tools::path_with(&TOOLS)?);
    command.args(["build", "--locked", "--out"]).arg(out);
    command.arg("--target-dir").arg(target()?);
    Ok(command)
}

/// The folder that the package is built in. What has the features of the workspace's is not built again.
pub(crate) fn target() -> Outcome<PathBuf> {
    Ok(target_dir()?.join("python"))
}
