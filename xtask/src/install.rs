//! The command `install`: the library for C, its header and what pkg-config asks for.

use crate::package::manifest_value;
use clap::Args;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::run;
use zebu_bench::workspace::{cargo, root, target_dir};

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask install --prefix /usr/local
  PKG_CONFIG_PATH=/usr/local/lib/pkgconfig cc copy.c $(pkg-config --cflags --libs zebu)

Needs Linux and a C compiler (CC, or cc).")]
pub(crate) struct InstallArgs {
    /// The folder in which `lib` and `include` are, or will be
    #[arg(long, value_name = "DIR")]
    prefix: PathBuf,
}

/// The name that programs have in them: it changes with what they could not go on with.
const SONAME: &str = "libzebu.so.0";
/// The libraries of the system that the standard library of Rust is linked to.
const NATIVE: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

pub(crate) fn command(args: &InstallArgs) -> Outcome {
    run(cargo().args(["build", "--release", "--locked", "--package", "zebu-capi"]))?;
    let prefix = std::path::absolute(&args.prefix).map_err(|e| format!("{}: {e}", args.prefix.display()))?;
    place(&target_dir()?.join("release"), &prefix)
}

/// The folder of the crate.
pub(crate) fn source() -> PathBuf {
    root().join("crates/capi")
}

/// Places the library that was built in a folder of Cargo's.
pub(crate) fn place(built: &Path, prefix: &Path) -> Outcome {
    if !cfg!(target_os = "linux") {
        return Err("libzebu is installed on Linux only".to_owned());
    }
    let (lib, include) = (prefix.join("lib"), prefix.join("include"));
    let pkgconfig = lib.join("pkgconfig");
    for folder in [&pkgconfig, &include] {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let archive = built.join("libzebu_capi.a");
    let version = manifest_value("version")?;
    let shared = format!("libzebu.so.{version}");
    link(&archive, &lib.join(&shared))?;
    for name in [SONAME, "libzebu.so"] {
        point(&lib.join(name), &shared)?;
    }
    copy(&archive, &lib.join("libzebu.a"))?;
    copy(&source().join("include/zebu.h"), &include.join("zebu.h"))?;
    let described = pkgconfig.join("zebu.pc");
    fs::write(&described, description(prefix, &version)).map_err(|e| format!("{}: {e}", described.display()))
}

fn copy(from: &Path, to: &Path) -> Outcome {
    fs::copy(from, to).map(drop).map_err(|e| format!("{} to {}: {e}", from.display(), to.display()))
}

/// Makes a symbolic link, also in the place of an older one.
fn point(link: &Path, to: &str) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", link.display());
    if link.is_symlink() {
        fs::remove_file(link).map_err(said)?;
    }
    symlink(to, link).map_err(said)
}

/// Makes the shared library: what the functions of the map need, under the map's versions.
fn link(archive: &Path, shared: &Path) -> Outcome {
    let map = source().join("zebu.map");
    let mut command = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    command.args(["-shared", "-Wl,-z,defs", "-Wl,--gc-sections"]).arg(format!("-Wl,-soname,{SONAME}"));
    command.arg(format!("-Wl,--version-script={}", map.display()));
    command.args(functions(&map)?.iter().map(|name| format!("-Wl,--undefined={name}")));
    // A process that uses an older one goes on with it.
    if shared.exists() {
        fs::remove_file(shared).map_err(|e| format!("{}: {e}", shared.display()))?;
    }
    run(command.arg("-o").arg(shared).arg(archive).args(NATIVE))
}

/// The functions of a map of symbols.
pub(crate) fn functions(map: &Path) -> Outcome<Vec<String>> {
    let text = fs::read_to_string(map).map_err(|e| format!("{}: {e}", map.display()))?;
    let names = text.lines().filter_map(|line| line.trim().strip_suffix(';'));
    Ok(names.filter(|name| name.starts_with("zebu_")).map(str::to_owned).collect())
}

/// The text of `zebu.pc`.
fn description(prefix: &Path, version: &str) -> String {
    format!(
        "prefix={}\n\
         libdir=${{prefix}}/lib\n\
         includedir=${{prefix}}/include\n\n\
         Name: zebu\n\
         Description: Disk images: open, read, write, convert and check them\n\
         Version: {version}\n\
         Cflags: -I${{includedir}}\n\
         Libs: -L${{libdir}} -lzebu\n\
         Libs.private: {}\n",
        prefix.display(),
        NATIVE.join(" ")
    )
}
