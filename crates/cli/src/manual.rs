//! Completions and manual pages, from the definition of the command line itself.

use crate::failure::Failure;
use crate::output::stdout;
use std::path::Path;

/// Prints the completion script for `shell`.
pub(crate) fn completions(command: clap::Command, shell: clap_complete::Shell) -> Result<u8, Failure> {
    let mut command = visible(&command);
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "zebu", &mut script);
    stdout::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// The command line without the commands that its help does not list.
fn visible(command: &clap::Command) -> clap::Command {
    clap::Command::new("zebu")
        .version(env!("CARGO_PKG_VERSION"))
        .about(command.get_about().cloned().unwrap_or_default())
        .disable_help_subcommand(true)
        .args(command.get_arguments().cloned())
        .subcommands(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

/// Writes a manual page for zebu and one for each command into `directory`, which is made, or prints the first one.
pub(crate) fn pages(command: clap::Command, directory: Option<&Path>) -> Result<u8, Failure> {
    if let Some(directory) = directory {
        let made = std::fs::create_dir_all(directory);
        made.and_then(|()| clap_mangen::generate_to(command, directory)).map_err(|error| {
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
