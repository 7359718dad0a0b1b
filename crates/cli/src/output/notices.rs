//! Messages of disks, for people at a terminal.

use super::{stderr, stdout};
use crate::serve::log_lines::LogLines;
use zebu_disks::{Notice, Notices, Program, printable};

/// The way to standard error; lines about stopped requests go to standard output.
pub(crate) fn of(dialect: Program) -> Notices {
    let lines = LogLines::default();
    Notices::to(move |notice| match notice {
        // QEMU's programs do not say it.
        Notice::Unversioned(_) if dialect.is_qemu() => {}
        // Whoever reads the messages may take none for as long as they like, and reads are not to wait for that.
        Notice::Cache(line) => lines.say(format!("{}: {}\n", dialect.name(), printable(line))),
        Notice::CacheFinished => lines.finish(),
        // Where standard output is gone, nobody looks.
        Notice::Stopped(line) => drop(stdout::print(&format!("{line}\n"))),
        Notice::Differs(line) => {
            stderr::tell(dialect, line);
            std::process::exit(1);
        }
        Notice::Fact(line) | Notice::Unversioned(line) => stderr::tell(dialect, line),
        _ => {}
    })
}
