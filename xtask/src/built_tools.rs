//! Programs that no release of Debian has: they are built or fetched once, and kept by their version.

use crate::tenth::Tenth;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{find, is_root, output, run};
use zebu_bench::workspace::cargo;

/// A program and its version. The version stands for all of its inputs: a lock file or a table of sums pins the rest.
struct Tool {
    program: &'static str,
    version: &'static str,
    source: Source,
}

/// The place that a program is built from.
enum Source {
    /// A module of Go.
    Go { module: &'static str },
    /// A crate, which is called as its program.
    Crate,
}

/// A server of an object store: S3.
const MINIO: Tool = Tool {
    program: "minio",
    version: "v0.0.0-20260212201848-7aac2a2c5b7c",
    source: Source::Go { module: "github.com/minio/minio" },
};

/// Clients of registries, each with the tests of `zebu-tests::remote` that need it.
const CLIENTS: [(Tool, &str); 2] = [
    (
        Tool { program: "oras", version: "v1.3.6", source: Source::Go { module: "oras.land/oras/cmd/oras" } },
        "registry_clients::oras_pushes_what_zebu_reads_and_pulls_what_zebu_pushes",
    ),
    (
        Tool {
            program: "crane",
            version: "v0.22.1",
            source: Source::Go { module: "github.com/google/go-containerregistry/cmd/crane" },
        },
        "registry_clients::crane_copies_and_exports_what_zebu_pushes",
    ),
];

/// The runner of tests.
const NEXTEST: Tool = Tool { program: "cargo-nextest", version: "0.9.151", source: Source::Crate };

/// The lister of what a program is made of.
const CYCLONEDX: Tool = Tool { program: "cargo-cyclonedx", version: "0.5.7", source: Source::Crate };

/// A compiler and linker for other machines, of PyPI.
pub(crate) const ZIG: &str = "ziglang==0.17.1";

/// The place where programs that are not Debian's are looked for.
const PATH: &str = "/usr/local/bin";

/// The folder of what is built or fetched once.
pub(crate) fn cache() -> Outcome<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let cache = cache.ok_or("neither HOME nor XDG_CACHE_HOME is set: there is no place for tools")?;
    Ok(cache.join("zebu-tools"))
}

/// An environment of Python with these packages of PyPI, each with its version. It is made once for each version of Python.
pub(crate) fn environment(packages: &[&str]) -> Outcome<PathBuf> {
    let version = output(Command::new("python3").arg("--version"))?.trim().replace(' ', "-");
    let place = cache()?.join(format!("{version}-{}", packages.join("-").replace("==", "-")));
    let complete = place.join("complete");
    if !complete.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&place))?;
        run(Command::new(place.join("bin/pip")).args(["install", "--quiet"]).args(packages))?;
        std::fs::write(&complete, "").map_err(|e| format!("{}: {e}", complete.display()))?;
    }
    Ok(place)
}

/// The PATH with the programs of these packages of PyPI first.
pub(crate) fn path_with(packages: &[&str]) -> Outcome<OsString> {
    let bin = environment(packages)?.join("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path))).map_err(|e| e.to_string())
}

/// The runner of tests, built if it is not here yet.
pub(crate) fn nextest() -> Outcome<PathBuf> {
    NEXTEST.ensure(Path::new(""))
}

/// The lister of what a program is made of, built if it is not here yet.
pub(crate) fn cyclonedx() -> Outcome<PathBuf> {
    CYCLONEDX.ensure(Path::new(""))
}

/// Builds the servers that are not on the PATH in the version that tests want. `go` says how Go is installed.
pub(crate) fn servers(go: impl FnOnce() -> Outcome<PathBuf>) -> Outcome {
    MINIO.offer(go)
}

/// Builds the clients of registries that the tests of this tenth need: that takes longer than their tests. One that can't be had is
/// noted, and its tests leave themselves out.
pub(crate) fn registry_clients(tenth: Tenth, go: impl Fn() -> Outcome<PathBuf>) {
    for (client, test) in CLIENTS {
        if tenth.has_test(&format!("zebu-tests::remote {test}"))
            && let Err(error) = client.offer(&go)
        {
            println!("note: {error}");
        }
    }
}

impl Tool {
    /// Puts it on the PATH in this version, and builds it if it is not here yet.
    fn offer(&self, go: impl FnOnce() -> Outcome<PathBuf>) -> Outcome {
        if self.is_on_path() {
            return Ok(());
        }
        if !is_root() {
            return if find(self.program).is_some() { Ok(()) } else { Err(self.by_hand()) };
        }
        let go = if self.kept()?.is_file() { PathBuf::new() } else { go()? };
        let built = self.ensure(&go)?;
        let link = Path::new(PATH).join(self.program);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&built, &link).map_err(|e| format!("{}: {e}", link.display()))
    }

    /// The file that holds this version.
    fn kept(&self) -> Outcome<PathBuf> {
        let folder = cache()?.join(format!("{}-{}", self.program, self.version));
        Ok(folder.join("bin").join(self.program))
    }

    /// Tells whether the program on the PATH is the kept one.
    fn is_on_path(&self) -> bool {
        let kept = self.kept().and_then(|kept| kept.canonicalize().map_err(|e| e.to_string()));
        find(self.program).and_then(|found| found.canonicalize().ok()).is_some_and(|found| kept == Ok(found))
    }

    fn by_hand(&self) -> String {
        match self.source {
            Source::Go { module } => format!(
                "{} is missing. Build it with Go 1.21 or newer, and put it on the PATH: go install {module}@{}",
                self.program, self.version
            ),
            Source::Crate => {
                format!("{0} is missing: cargo install --locked {0}@{1}", self.program, self.version)
            }
        }
    }

    /// Builds it if this version is not kept yet. It takes some minutes.
    fn ensure(&self, go: &Path) -> Outcome<PathBuf> {
        let kept = self.kept()?;
        if kept.is_file() {
            return Ok(kept);
        }
        println!("building {} {}", self.program, self.version);
        let again = |error: String| {
            println!("note: {error}; once more");
            self.build(go, &kept)
        };
        let built = self.build(go, &kept).or_else(again).or_else(again);
        built.map_err(|error| format!("{error}\n       {}", self.by_hand()))?;
        Ok(kept)
    }

    fn build(&self, go: &Path, kept: &Path) -> Outcome {
        let bin = kept.parent().unwrap_or(kept);
        let root = bin.parent().unwrap_or(bin);
        match self.source {
            Source::Go { module } => {
                let mut command = Command::new(go);
                command.args([
                    "install",
                    "-trimpath",
                    "-ldflags=-s -w",
                    &format!("{module}@{}", self.version),
                ]);
                // Beside its place: half of a program, of a build that was ended, is none.
                let built = root.join("built");
                command.env("GOBIN", &built).env("GOTOOLCHAIN", "auto").env("GOFLAGS", "-buildvcs=false");
                run(&mut command)?;
                std::fs::create_dir_all(bin).map_err(|e| format!("{}: {e}", bin.display()))?;
                let built = built.join(self.program);
                std::fs::rename(&built, kept).map_err(|e| format!("{}: {e}", built.display()))
            }
            Source::Crate => {
                let target = tempfile::tempdir().map_err(|e| e.to_string())?;
                let mut command = cargo();
                command.args(["install", "--locked", "--no-track", "--root"]).arg(root);
                command.arg(format!("{}@{}", self.program, self.version));
                // It waits for tests: building it quickly is worth more.
                command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0").env("CARGO_PROFILE_RELEASE_LTO", "off");
                command
                    .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
                    .env("CARGO_TARGET_DIR", target.path());
                run(&mut command)
            }
        }
    }
}
