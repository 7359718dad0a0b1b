//! `qemu-io`: the options that it has, of `zebu io`.

use super::own_options::with_options_of_qemu;
use super::{VERSION, object_help, parse, trace_argument, usage, with_qemu_grammar};
use crate::cli;
use crate::commands::io::{self, IoArgs};
use crate::failure::Failure;
use clap::FromArgMatches;
use std::ffi::OsString;
use std::process::ExitCode;
use zebu_disks::Context;

/// Reads the command line as qemu-io does, and runs it.
pub(crate) fn main(arguments: Vec<OsString>, context: &Context) -> ExitCode {
    if let Some(code) = object_help::answer(context.dialect, &arguments) {
        return code;
    }
    let matches = match parse(&command(), arguments) {
        Ok(matches) => matches,
        Err(error) => return cli::report_usage_as(context.dialect, &error, usage::failure),
    };
    let outcome = IoArgs::from_arg_matches(&matches)
        .map_err(|error| Failure::usage(cli::usage_message(&error)))
        .and_then(|args| io::run(&args, context));
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => cli::report(context.dialect, &failure, None),
    }
}

fn command() -> clap::Command {
    with_qemu_grammar(with_options_of_qemu::<IoArgs>(clap::Command::new("qemu-io").bin_name("qemu-io")))
        .about(format!("qemu-io {VERSION}\nQEMU's disk exerciser, by zebu"))
        .arg(trace_argument())
        .after_help("See 'qemu-io -c help' for the commands.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_qemu_io_are_taken() {
        command().debug_assert();
        for line in [
            "qemu-io -f qcow2 -f raw -c length -c quit a",
            "qemu-io --cache none --read-only -U a",
            "qemu-io --cmd length -n -T bdrv_* a",
            "qemu-io -i threads -d unmap -m a",
        ] {
            let parsed = command().try_get_matches_from(line.split(' '));
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }
}
