//! The command lines of QEMU's programs, for links of their names.
//!
//! The commands are zebu's own. What differs is the grammar: an option that is given twice counts as given last, long
//! options may be cut short, `-T` and `--` may stand before the command.

mod img;
mod io;
mod usage;

pub(crate) use img::main as qemu_img;
pub(crate) use io::main as qemu_io;

use clap::{Arg, ArgAction, Command};

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
        .arg(Arg::new("help").short('h').long("help").action(ArgAction::Help).help("Print this help"))
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
