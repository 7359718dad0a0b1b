//! The command lines of QEMU's programs, for links of their names.
//!
//! The commands are zebu's own. What differs is the grammar: an option that is given twice counts as given last, long
//! options may be cut short, `-T` and `--` may stand before the command.

mod img;
mod io;
mod nbd;
mod nbd_objects;
mod object_help;
pub(crate) mod option_lists;
mod own_options;
mod usage;

pub(crate) use img::main as qemu_img;
pub(crate) use io::main as qemu_io;
pub(crate) use nbd::main as qemu_nbd;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// Text after the program's name in the answer to `--version`; scripts look for its first words. It names the release of
/// QEMU whose behaviour the names stand for.
const VERSION: &str = concat!("version 10.2.2 (zebu ", env!("CARGO_PKG_VERSION"), ")");

/// The grammar that QEMU's programs share.
fn with_qemu_grammar(command: Command) -> Command {
    command
        .version(VERSION)
        .disable_version_flag(true)
        .disable_help_flag(true)
        .args_override_self(true)
        .infer_long_args(true)
        .arg(
            Arg::new("version")
                .short('V')
                .long("version")
                .action(ArgAction::Version)
                .help("Print the version"),
        )
        .arg(help_argument())
}

/// `-h`, which each command of a program has as well.
fn help_argument() -> Arg {
    Arg::new("help")
        .short('h')
        .long("help")
        .action(ArgAction::Help)
        .help("Print this help")
        .display_order(1000)
}

/// `-T`, which a QEMU without trace backends takes and does nothing for.
fn trace_argument() -> Arg {
    Arg::new("trace")
        .short('T')
        .long("trace")
        .value_name("PATTERN")
        .action(ArgAction::Append)
        .help("Taken and without effect: there are no trace events")
}

/// Reads a command line as getopt does: a value that can't be understood does not matter if the option is given again.
fn parse(command: &Command, arguments: Vec<OsString>) -> Result<ArgMatches, clap::Error> {
    let mut arguments = with_equals_signs(command, arguments);
    loop {
        let error = match command.clone().try_get_matches_from(&arguments) {
            Ok(matches) => return Ok(matches),
            Err(error) => error,
        };
        match overridden(&error, &arguments) {
            Some(range) => drop(arguments.drain(range)),
            None => return Err(error),
        }
    }
}

/// The command line with `-f=V` as `-f` and `=V`: to getopt the sign is a part of the value.
fn with_equals_signs(command: &Command, arguments: Vec<OsString>) -> Vec<OsString> {
    let end = arguments.iter().position(|word| word == "--").unwrap_or(arguments.len());
    let short = |word: &OsString| match word.as_bytes() {
        [b'-', short, b'=', ..] => Some(char::from(*short)),
        _ => None,
    };
    if !arguments[..end].iter().any(|word| short(word).is_some()) {
        return arguments;
    }
    let mut names = arguments.iter().filter_map(|word| word.to_str());
    let mut command = names.find_map(|name| command.find_subcommand(name)).unwrap_or(command).clone();
    command.build();
    let has_value = |short: char| {
        let mut options = command.get_arguments();
        options.any(|option| option.get_short() == Some(short) && option.get_action().takes_values())
    };
    let (options, names) = arguments.split_at(end);
    let options = options.iter().flat_map(|word| match short(word).filter(|short| has_value(*short)) {
        Some(short) => vec![format!("-{short}").into(), OsStr::from_bytes(&word.as_bytes()[2..]).into()],
        None => vec![word.clone()],
    });
    options.chain(names.iter().cloned()).collect()
}

/// Words of the option that `error` is about, if it is given again behind them.
fn overridden(error: &clap::Error, arguments: &[OsString]) -> Option<std::ops::Range<usize>> {
    if !matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue) {
        return None;
    }
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else { return None };
    let value = value.as_str();
    let words: Vec<&str> = arguments.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    // The ways to write an option with a value: `-f V`, `--format V`; `-fV`; `--format=V`.
    let option = |at: usize| -> Option<(&str, &str, usize)> {
        let word = words[at];
        if let Some((name, value)) = word.split_once('=').filter(|_| word.starts_with("--")) {
            return Some((name, value, 1));
        }
        if word.starts_with("--") || word.len() == 2 && word.starts_with('-') {
            return Some((word, words.get(at + 1)?, 2));
        }
        let value = word.get(2..).filter(|_| word.starts_with('-'))?;
        Some((&word[..2], value, 1))
    };
    let (at, (name, _, count)) = (1..words.len())
        .filter_map(|at| option(at).map(|found| (at, found)))
        .find(|(_, (_, found, _))| *found == value)?;
    let again = (at + count..words.len()).any(|later| option(later).is_some_and(|(other, ..)| other == name));
    again.then_some(at..at + count)
}
