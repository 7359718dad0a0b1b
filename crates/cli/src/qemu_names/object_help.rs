//! `--object help` and `--object TYPE,help`, which QEMU's programs answer before anything else.

use crate::cli;
use crate::output::stdout;
use std::ffi::OsString;
use std::process::ExitCode;
use zebu_disks::Program;
use zebu_disks::objects::object_help;

/// The option, and how much of it stands for it at least.
const OPTION: (&str, usize) = ("--object", "--obj".len());

/// Prints the help that the command line asks for; `None` if it asks for none.
pub(super) fn answer(dialect: Program, arguments: &[OsString]) -> Option<ExitCode> {
    let help = asked(arguments)?;
    Some(match stdout::print(&help) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => cli::report(dialect, &failure, None),
    })
}

fn asked(arguments: &[OsString]) -> Option<String> {
    let mut words = arguments.iter().skip(1).map_while(|word| word.to_str()).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        if name.len() >= OPTION.1 && OPTION.0.starts_with(name) {
            let help = object_help(value.or_else(|| words.next())?);
            if help.is_some() {
                return help;
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_is_asked_for_by_any_form_of_the_option() {
        let asked = |line: &str| asked(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        for line in [
            "qemu-img info --object help",
            "qemu-img info --object=secret,help",
            "qemu-nbd --object secret,id=a,data=x --obj tls-creds-x509,help -k /s a",
        ] {
            assert!(asked(line).is_some(), "{line}");
        }
        for line in ["qemu-img info help", "qemu-img info -- --object help", "qemu-img info --object"] {
            assert_eq!(asked(line), None, "{line}");
        }
    }
}
