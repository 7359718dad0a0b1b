//! One call of a command: its words, its output, its end.

use super::table::CommandInfo;
use super::words::{OptionError, Parsed, parse_options};
use crate::failure::Failure;
use crate::output::stdout;
use std::io::Write;
use zebu_disks::{Program, printable};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Well.
    Done,
    /// It failed, which it has told.
    Failed,
    /// It ends the session.
    Quit,
}

/// Arguments and state of one command.
pub(crate) struct Call<'a> {
    pub(crate) info: &'static CommandInfo,
    /// The words after the name of the command.
    pub(crate) words: Vec<&'a str>,
}

impl<'a> Call<'a> {
    /// Reads the options of the command. `None` after a wrong one, which is told then.
    pub(crate) fn options(&self, letters: &str) -> Result<Option<Parsed<'a>>, Failure> {
        match parse_options(&self.words, letters) {
            Ok(parsed) => Ok(Some(parsed)),
            Err(error) => {
                let name = self.info.text;
                tell_error(&match error {
                    OptionError::Invalid(letter) => format!("{name}: invalid option -- '{letter}'"),
                    OptionError::MissingArgument(letter) => {
                        format!("{name}: option requires an argument -- '{letter}'")
                    }
                });
                self.usage()?;
                Ok(None)
            }
        }
    }

    /// Tells how the command is used.
    pub(crate) fn usage(&self) -> Result<Outcome, Failure> {
        stdout::print(&self.info.line())?;
        Ok(Outcome::Failed)
    }
}

/// Prints a message on standard output and fails, as most commands do.
pub(crate) fn fail(message: &str) -> Result<Outcome, Failure> {
    stdout::print(&format!("{message}\n"))?;
    Ok(Outcome::Failed)
}

/// Prints a message on standard error.
pub(crate) fn tell_error(message: &str) {
    // Where standard error is gone, there is nobody to tell it to.
    let _ = writeln!(std::io::stderr(), "{}", printable(message));
}

/// Tells a failure as the whole command would, and goes on.
pub(crate) fn tell_failure(dialect: Program, failure: &Failure) -> Outcome {
    let _ = std::io::stderr().write_all(failure.text(dialect, None).as_bytes());
    Outcome::Failed
}
