//! Completions and manual pages, from the definition of the command line itself.

use crate::failure::Failure;
use crate::output::stdout;
use std::path::Path;

/// Prints the completion script for `shell`.
pub(crate) fn completions(mut command: clap::Command, shell: clap_complete::Shell) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "zebu", &mut script);
    stdout::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Writes a manual page for zebu and one for each command into `directory`, or prints the first one.
pub(crate) fn pages(command: clap::Command, directory: Option<&Path>) -> Result<u8, Failure> {
    if let Some(directory) = directory {
        clap_mangen::generate_to(command, directory).map_err(|error| {
            Failure::new(format!("could not write manual pages to '{}': {error}", directory.display()))
        })?;
        return Ok(0);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|error| Failure::new(format!("could not make the manual page: {error}")))?;
    stdout::print(&String::from_utf8_lossy(&page))?;
    Ok(0)
}
