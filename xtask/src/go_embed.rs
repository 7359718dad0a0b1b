//! The command `go-embed`: the module of Go that has the program in it.

use crate::package::manifest_value;
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use zebu_bench::Outcome;
use zebu_bench::workspace::root;

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask go-embed --out zebuembed --program amd64=x86_64/zebu --program arm64=aarch64/zebu

The programs are static ones, as `cargo xtask package` makes them. The folder is a module, to be published under its tag.")]
pub(crate) struct GoEmbedArgs {
    /// The folder, which must not be there
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// A machine in Go's words, and its program; may be given again
    #[arg(long = "program", value_name = "amd64|arm64=FILE", required = true)]
    programs: Vec<Program>,
}

/// The folder of the module of Go.
pub(crate) const MODULE: &str = "bindings/go";

/// The machines that there are programs for.
const MACHINES: [&str; 2] = ["amd64", "arm64"];

/// The program of a machine.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) machine: &'static str,
    pub(crate) path: PathBuf,
}

impl FromStr for Program {
    type Err = String;

    fn from_str(text: &str) -> Outcome<Self> {
        let (name, path) = text.split_once('=').ok_or("a machine and its program: amd64=FILE")?;
        let machine = MACHINES.into_iter().find(|machine| *machine == name);
        let machine =
            machine.ok_or_else(|| format!("the machine '{name}' is none of {}", MACHINES.join(", ")))?;
        Ok(Self { machine, path: path.into() })
    }
}

pub(crate) fn command(args: &GoEmbedArgs) -> Outcome {
    make(&args.out, &args.programs)
}

/// Makes the module in a new folder.
pub(crate) fn make(out: &Path, programs: &[Program]) -> Outcome {
    let template = root().join(MODULE).join("zebuembed");
    fs::create_dir(out).map_err(|e| format!("{}: {e}", out.display()))?;
    for name in ["go.mod", "zebuembed.go", "program_other.go", "example_test.go"] {
        copy(&template.join(name), &out.join(name))?;
    }
    for license in ["LICENSE-MIT", "LICENSE-APACHE"] {
        copy(&root().join(license), &out.join(license))?;
    }
    for machine in MACHINES {
        let source = format!("program_linux_{machine}.go");
        if let Some(program) = programs.iter().find(|program| program.machine == machine) {
            copy(&template.join(&source), &out.join(&source))?;
            copy(&program.path, &out.join(format!("zebu-linux-{machine}")))?;
        } else {
            let none = "package zebuembed\n\nvar program []byte\n";
            fs::write(out.join(&source), none).map_err(|e| format!("{}: {e}", out.display()))?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Outcome {
    fs::copy(from, to).map(drop).map_err(|e| format!("{} to {}: {e}", from.display(), to.display()))
}

/// Looks whether the modules say the version and the place that the workspace says.
pub(crate) fn agrees() -> Outcome {
    let folder = root().join(MODULE);
    let version = manifest_value("version")?;
    let repository = manifest_value("repository")?;
    let place = format!("{}/{MODULE}", repository.trim_start_matches("https://"));
    let wanted = [
        ("version.go", format!("const Version = \"{version}\"")),
        ("go.mod", format!("module {place}")),
        ("zebuembed/go.mod", format!("module {place}/zebuembed")),
        ("zebuembed/go.mod", format!("require {place} v{version}")),
    ];
    for (name, line) in wanted {
        let path = folder.join(name);
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        if !text.lines().any(|found| found == line) {
            return Err(format!("{} lacks the line `{line}`, which follows from Cargo.toml", path.display()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_named_with_their_machine() {
        assert_eq!("arm64=a=b".parse::<Program>().unwrap().path, PathBuf::from("a=b"));
        assert!("arm64".parse::<Program>().is_err());
        assert!("mips=x".parse::<Program>().unwrap_err().contains("mips"));
    }

    #[test]
    fn the_modules_agree_with_the_workspace() {
        agrees().unwrap();
    }
}
