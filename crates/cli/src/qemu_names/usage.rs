//! A wrong command line, in the words of QEMU's programs.

use crate::cli::{hide_secrets, usage_message};
use crate::failure::Failure;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Failure that tells of `error` in `command` as QEMU's program does.
pub(super) fn failure(error: &clap::Error, command: Option<&str>) -> Failure {
    let named = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => hide_secrets(error, text.clone()),
        Some(ContextValue::Strings(texts)) => hide_secrets(error, texts.first().cloned().unwrap_or_default()),
        _ => String::new(),
    };
    let argument = named(ContextKind::InvalidArg);
    match error.kind() {
        ErrorKind::UnknownArgument if argument.starts_with("--") => {
            Failure::option(format!("unrecognized option '{argument}'"))
        }
        ErrorKind::UnknownArgument => match argument.strip_prefix('-') {
            Some(letter) => Failure::option(format!("invalid option -- '{letter}'")),
            None => Failure::usage(operands(command)),
        },
        ErrorKind::InvalidSubcommand => {
            Failure::usage(format!("Command not found: {}", named(ContextKind::InvalidSubcommand)))
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Failure::usage("Not enough arguments")
        }
        ErrorKind::MissingRequiredArgument if argument.starts_with('<') => Failure::usage(operands(command)),
        ErrorKind::InvalidValue if named(ContextKind::InvalidValue).is_empty() => without_value(&argument),
        // The reason that a value's own parser gave is in QEMU's words.
        ErrorKind::ValueValidation => match std::error::Error::source(error) {
            Some(reason) => Failure::new(hide_secrets(error, reason.to_string())),
            None => Failure::usage(usage_message(error)),
        },
        _ => Failure::usage(usage_message(error)),
    }
}

/// Words for the operands that a command expects.
fn operands(command: Option<&str>) -> &'static str {
    match command {
        Some("create") => "Expecting image file name",
        Some("compare") => "Expecting two image file names",
        Some("resize") => "Expecting image file name and size",
        Some("convert") => "Must specify image file name",
        Some("dd") => "Must specify both input and output files",
        Some("bitmap") => "Expecting filename and bitmap name",
        _ => "Expecting one image file name",
    }
}

/// Words for an option that lacks its value; clap names it as `--format <FMT>`.
fn without_value(argument: &str) -> Failure {
    let option = argument.split([' ', '=']).next().unwrap_or_default();
    Failure::option(format!("option '{option}' requires an argument"))
}
