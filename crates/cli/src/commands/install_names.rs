//! `zebu install-names`: links of QEMU's names to this binary.

use crate::failure::Failure;
use crate::output::stdout;
use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use zebu_disks::{Program, printable};

/// Arguments of `zebu install-names`.
#[derive(Debug, clap::Args)]
pub(crate) struct InstallNamesArgs {
    /// The directory, which has to exist; put it first on PATH
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Runs the command.
pub(crate) fn run(args: &InstallNamesArgs) -> Result<u8, Failure> {
    let binary = std::env::current_exe()
        .map_err(|error| Failure::new(format!("could not find the binary that runs: {error}")))?;
    let mut report = String::new();
    for program in Program::LINKS {
        let link = args.directory.join(program.name());
        place(&binary, &link)?;
        let _ = writeln!(
            report,
            "{} -> {}",
            printable(&link.to_string_lossy()),
            printable(&binary.to_string_lossy())
        );
    }
    stdout::print(&report)?;
    Ok(0)
}

/// Makes `link` lead to `binary`. A link that does so already stays; anything else of this name is left alone.
fn place(binary: &Path, link: &Path) -> Result<(), Failure> {
    let Err(error) = symlink(binary, link) else { return Ok(()) };
    if error.kind() == io::ErrorKind::AlreadyExists {
        if std::fs::read_link(link).is_ok_and(|target| target == binary) {
            return Ok(());
        }
        return Err(Failure::new(format!("'{}' exists already: remove it first", link.display())));
    }
    Err(Failure::new(format!("could not make the link '{}': {error}", link.display())))
}
