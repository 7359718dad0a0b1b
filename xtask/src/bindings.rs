//! The bindings of other languages, tested with the program that was built.

use crate::test_programs::{BUILT, TestPrograms};
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{find, output, run};
use zebu_bench::workspace::{root, target_dir};

/// Why the module of Go can't be tested here, if so.
pub(crate) fn go_obstacle() -> Option<String> {
    find("go").is_none().then(|| "there is no Go (Debian: golang-go)".to_owned())
}

/// Formats, vets and tests the module of Go, with its detector of data races.
pub(crate) fn go() -> Outcome {
    TestPrograms::build()?;
    let folder = root().join("bindings/go");
    let unformatted = output(Command::new("gofmt").arg("-l").arg(&folder))?;
    if !unformatted.trim().is_empty() {
        return Err(format!("not as gofmt has it: {}", unformatted.trim()));
    }
    run(go_command(&folder)?.args(["vet", "./..."]))?;
    run(go_command(&folder)?.args(["test", "-race", "-count=1", "./..."]))
}

/// Go in the folder of its module, with the built program as `zebu`.
fn go_command(folder: &Path) -> Outcome<Command> {
    let mut command = Command::new("go");
    let built = target_dir()?.join(BUILT);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(built).chain(std::env::split_paths(&path)));
    command.current_dir(folder).env("PATH", path.map_err(|e| e.to_string())?).env("GOTOOLCHAIN", "auto");
    Ok(command)
}
