//! The bindings of other languages, tested with the program that was built.

use crate::go_embed::{self, MODULE, Program};
use crate::test_programs::{BUILT, TestPrograms};
use crate::{built_tools, wheel};
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{find, output, run};
use zebu_bench::workspace::{cargo, root, target_dir};

/// Why the module of Go can't be tested here, if so.
pub(crate) fn go_obstacle() -> Option<String> {
    find("go").is_none().then(|| "there is no Go (Debian: golang-go)".to_owned())
}

/// Fetches what the module of Go needs.
pub(crate) fn bring_go() -> Outcome {
    run(go_command(&root().join(MODULE), None)?.args(["mod", "download"]))
}

/// Formats, vets and tests the module of Go with its detector of data races, and the module that has the program in it.
pub(crate) fn go() -> Outcome {
    go_embed::agrees()?;
    TestPrograms::build()?;
    let folder = root().join(MODULE);
    let built = target_dir()?.join(BUILT);
    let unformatted = output(Command::new("gofmt").arg("-l").arg(&folder))?;
    if !unformatted.trim().is_empty() {
        return Err(format!("not as gofmt has it: {}", unformatted.trim()));
    }
    run(go_command(&folder, Some(&built))?.args(["vet", "./..."]))?;
    run(go_command(&folder, Some(&built))?.args(["test", "-race", "-count=1", "-timeout=30m", "./..."]))?;
    embedded(&folder, &built.join("zebu"))
}

/// Tests the module that has the program in it, where there is no other program.
fn embedded(folder: &Path, program: &Path) -> Outcome {
    let machine = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let module = scratch.path().join("zebuembed");
    go_embed::make(&module, &[Program { machine, path: program.to_owned() }])?;
    let place = output(go_command(folder, None)?.args(["list", "-m"]))?;
    let replaced = format!("{}={}", place.trim(), folder.display());
    run(go_command(&module, None)?.args(["mod", "edit", "-replace", &replaced]))?;
    let mut test = go_command(&module, None)?;
    run(test.args(["test", "-count=1", "./..."]).env("XDG_CACHE_HOME", scratch.path().join("cache")))
}

/// Go in the folder of a module, with the programs of a folder before others.
fn go_command(module: &Path, programs: Option<&Path>) -> Outcome<Command> {
    let mut command = Command::new("go");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let first = programs.map(Path::to_owned).into_iter();
    let path = std::env::join_paths(first.chain(std::env::split_paths(&path)));
    command.current_dir(module).env("PATH", path.map_err(|e| e.to_string())?).env("GOTOOLCHAIN", "auto");
    command.env_remove("ZEBU");
    Ok(command)
}

/// The packages of PyPI that its tests need: a runner, programs that take files, and a judge of its stubs.
const TESTED_WITH: [&str; 5] =
    ["pytest==9.2.0", "fsspec==2026.9.0", "dissect.target==3.25.1", "dissect.volume==3.18", "mypy==2.4.1"];

/// Fetches what its tests need.
pub(crate) fn bring_python() -> Outcome {
    built_tools::environment(&TESTED_WITH).map(drop)
}

/// Looks at the package of Python, makes a wheel for this machine, and tests it in a fresh environment.
pub(crate) fn python() -> Outcome {
    let folder = root().join(wheel::PACKAGE);
    let cargo_there = || {
        let mut command = cargo();
        // Nothing that is only looked at needs an interpreter, or is linked to one.
        command.current_dir(&folder).env("PYO3_NO_PYTHON", "1").env("PYO3_BUILD_EXTENSION_MODULE", "1");
        command
    };
    run(cargo_there().args(["fmt", "--check"]))?;
    run(cargo_there()
        .args(["clippy", "--locked", "--target-dir"])
        .arg(wheel::target()?)
        .args(["--", "-D", "warnings"]))?;
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let built = wheel::for_tests(&scratch.path().join("wheel"))?;
    let fresh = scratch.path().join("environment");
    // What the tests need besides is fetched once. The package is installed where it never was.
    let packages = built_tools::environment(&TESTED_WITH)?;
    run(Command::new(packages.join("bin/python")).args(["-m", "venv"]).arg(&fresh))?;
    let python = fresh.join("bin/python");
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-index"]).arg(&built))?;
    let site = output(Command::new(packages.join("bin/python")).args(["-c", SITE]))?;
    let python = || {
        let mut command = Command::new(&python);
        command.current_dir(scratch.path()).env("PYTHONPATH", site.trim());
        command
    };
    run(python().args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).arg(&folder))?;
    run(python().args(["-m", "mypy.stubtest", "zebu", "--allowlist"]).arg(folder.join("tests/stubtest.txt")))
}

/// A program that prints where the packages of an environment are.
const SITE: &str = "import sysconfig; print(sysconfig.get_path('purelib'))";
