//! `qemu-img`: the commands that it has, of zebu's.

use super::own_options::with_options_of_qemu;
use super::{VERSION, help_argument, object_help, parse, trace_argument, usage, with_qemu_grammar};
use crate::cli::{self, Cli};
use crate::commands::amend::AmendArgs;
use crate::commands::bench::BenchArgs;
use crate::commands::bitmap::BitmapArgs;
use crate::commands::check::CheckArgs;
use crate::commands::commit::CommitArgs;
use crate::commands::compare::CompareArgs;
use crate::commands::convert::ConvertArgs;
use crate::commands::create::CreateArgs;
use crate::commands::dd::DdArgs;
use crate::commands::info::InfoArgs;
use crate::commands::map::MapArgs;
use crate::commands::measure::MeasureArgs;
use crate::commands::rebase::RebaseArgs;
use crate::commands::resize::ResizeArgs;
use crate::commands::snapshot::SnapshotArgs;
use crate::failure::Failure;
use clap::{CommandFactory, FromArgMatches};
use std::ffi::OsString;
use std::process::ExitCode;
use zebu_disks::Context;

/// Commands of qemu-img, in the order of its help.
const COMMANDS: [&str; 16] = [
    "amend", "bench", "bitmap", "check", "commit", "compare", "convert", "create", "dd", "info", "map",
    "measure", "rebase", "resize", "snapshot", "help",
];

/// Formats, protocols and drivers, in the form that scripts look for.
const FORMATS: &str = "Supported image formats:

  blkdebug blkverify cloop compress copy-on-read dmg file host_device http https
  luks nbd null-aio null-co parallels preallocate qcow qcow2 qed raw vdi vhdx
  vmdk vpc";

/// Reads the command line as qemu-img does, and runs the command.
pub(crate) fn main(arguments: Vec<OsString>, context: &Context) -> ExitCode {
    if let Some(code) = object_help::answer(context.dialect, &arguments) {
        return code;
    }
    let matches = match parse(&command(), leading(arguments)) {
        Ok(matches) => matches,
        Err(error) => return cli::report_usage_as(context.dialect, &error, usage::failure),
    };
    match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli.finish(context),
        Err(error) => cli::report(context.dialect, &Failure::usage(cli::usage_message(&error)), None),
    }
}

/// The command line with what may stand before the command brought into the form that the parser knows.
fn leading(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let mut at = 1;
    while let Some(word) = arguments.get(at) {
        match word.to_str() {
            Some("--") => {
                arguments.remove(at);
                break;
            }
            Some("-T" | "--trace") => at += 2,
            Some(word) if word.starts_with("-T") || word.starts_with("--trace=") => at += 1,
            _ => break,
        }
    }
    arguments
}

fn command() -> clap::Command {
    let commands = Cli::command();
    let known = commands.get_subcommands().filter(|command| COMMANDS.contains(&command.get_name()));
    let known = known.map(|command| described(command.clone().disable_help_flag(true).arg(help_argument())));
    with_qemu_grammar(clap::Command::new("qemu-img").bin_name("qemu-img"))
        .about(format!("qemu-img {VERSION}\nQEMU's disk image utility, by zebu"))
        .override_usage("qemu-img [standard options] command [command options]")
        .after_help(FORMATS)
        .disable_help_subcommand(true)
        .subcommand_required(true)
        .arg(trace_argument())
        .subcommands(known)
}

/// A command that gets its options, those of QEMU's program, when it is asked for.
fn described(command: clap::Command) -> clap::Command {
    let describe = match command.get_name() {
        "amend" => with_options_of_qemu::<AmendArgs>,
        "bench" => with_options_of_qemu::<BenchArgs>,
        "bitmap" => with_options_of_qemu::<BitmapArgs>,
        "check" => with_options_of_qemu::<CheckArgs>,
        "commit" => with_options_of_qemu::<CommitArgs>,
        "compare" => with_options_of_qemu::<CompareArgs>,
        "convert" => with_options_of_qemu::<ConvertArgs>,
        "create" => with_options_of_qemu::<CreateArgs>,
        "dd" => with_options_of_qemu::<DdArgs>,
        "info" => with_options_of_qemu::<InfoArgs>,
        "map" => with_options_of_qemu::<MapArgs>,
        "measure" => with_options_of_qemu::<MeasureArgs>,
        "rebase" => with_options_of_qemu::<RebaseArgs>,
        "resize" => with_options_of_qemu::<ResizeArgs>,
        "snapshot" => with_options_of_qemu::<SnapshotArgs>,
        _ => return command,
    };
    command.defer(describe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::NamedFormat;
    use zebu_disks::Program;

    fn parse(line: &str) -> Result<clap::ArgMatches, clap::Error> {
        super::parse(&command(), leading(line.split(' ').map(OsString::from).collect()))
    }

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn a_wrong_command_line_is_told_without_secrets() {
        for line in [
            "qemu-img http://u:PW@h/x",
            "qemu-img convert -S http://u:PW@h/x?PW a b",
            "qemu-img convert -m http://u:PW@h/x a b",
            "qemu-img create -f http://u:PW@h/x a",
            "qemu-img resize a http://u:PW@h/x http://u:PW@h/x y",
            "qemu-img info --http://u:PW@h/x",
        ] {
            let error = parse(line).unwrap_err();
            let text = usage::failure(&error, line.split(' ').nth(1)).text(Program::QemuImg, None);
            assert!(!text.contains("PW"), "{line}: {text}");
        }
    }

    #[test]
    fn an_option_that_is_given_twice_counts_as_given_last() {
        let matches = parse("qemu-img convert -p -t writeback -T none -t none -O raw -O qcow2 a b").unwrap();
        let convert = matches.subcommand_matches("convert").unwrap();
        let format = convert.get_one::<NamedFormat>("target_format");
        assert_eq!(format.map(|named| named.format), Some(zebu_engine::Format::Qcow2));
    }

    #[test]
    fn options_may_be_cut_short_and_stand_anywhere() {
        for line in [
            "qemu-img info --out=json a",
            "qemu-img info --backing a",
            "qemu-img info a --output json -fqcow2",
            "qemu-img -T qcow2_* info a",
            "qemu-img --trace enable=bdrv_* info a",
            "qemu-img -- info a",
            "qemu-img -T qcow2_* -- info a",
            "qemu-img --trace=x -Ty -- info -- a",
            "qemu-img info -U -U a",
            "qemu-img check -q -q a",
            "qemu-img create -f foo -fqcow2 a 1M",
            "qemu-img info --format=foo --format raw a",
        ] {
            assert!(parse(line).is_ok(), "{line}: {}", parse(line).unwrap_err());
        }
    }

    #[test]
    fn a_sign_behind_a_short_option_is_of_its_value() {
        for line in ["qemu-img create -f=qcow2 a 1M", "qemu-img info -f=qcow2 a", "qemu-img info -U=x a"] {
            assert!(parse(line).is_err(), "{line}");
        }
        let matches = parse("qemu-img create -o=x -- -f=raw").unwrap();
        let create = matches.subcommand_matches("create").unwrap();
        assert_eq!(create.get_one::<String>("options").unwrap(), "=x");
    }

    #[test]
    fn options_of_zebu_alone_are_unknown() {
        for line in [
            "qemu-img create --force a 1M",
            "qemu-img create -p a 1M",
            "qemu-img create --allow-refs all a 1M",
            "qemu-img convert --workers 2 a b",
            "qemu-img convert --seed=1 a b",
            "qemu-img convert -v a b",
            "qemu-img convert -i threads a b",
            "qemu-img info --cache-size 1M a",
            "qemu-img info --verdict a",
            "qemu-img info --tree a",
            "qemu-img map --picture a",
            "qemu-img amend --unseal a",
            "qemu-img snapshot --output json a",
            "qemu-img bench --random a",
        ] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::UnknownArgument, "{line}: {error}");
        }
        // Nothing of them makes a shortened name ambiguous: `--force` is `--force-share`.
        for line in [
            "qemu-img create --for qcow2 a 1M",
            "qemu-img convert --com a b",
            "qemu-img convert --force a b",
            "qemu-img info --back a",
        ] {
            assert!(parse(line).is_ok(), "{line}: {}", parse(line).unwrap_err());
        }
        let mut command = command();
        command.build();
        for program in command.get_subcommands_mut() {
            let help = program.render_long_help().to_string();
            assert!(!help.contains('\0') && !help.contains("--allow-refs"), "{help}");
        }
    }

    #[test]
    fn commands_of_zebu_alone_are_not_there() {
        for line in ["qemu-img serve a", "qemu-img clone a b", "qemu-img backup a b", "qemu-img io a"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
