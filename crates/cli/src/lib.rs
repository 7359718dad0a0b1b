//! The command `zebu`: disk images with the habits of qemu-img.
//!
//! A library of its own, so that the fuzz targets reach the parsers (`fuzzing`). It promises nothing to anybody else.

mod arguments;
mod backing;
mod bench;
mod cli;
mod commands;
mod compression;
mod create_opts;
mod examples;
mod failure;
mod foreign_opts;
#[doc(hidden)]
pub mod fuzzing;
mod image_opts;
mod image_spec;
mod io;
mod json_name;
mod keyval;
mod local_name;
mod manual;
mod nbd_list;
mod nbd_opts;
mod output;
mod packed;
mod program;
mod progress_bar;
mod qemu_names;
mod reference_defaults;
mod remote_names;
mod serve;
mod session;
mod size;
mod snapshot_name;
mod stop_signals;
mod temporary_overlay;
mod values;
mod watch;

use std::process::ExitCode;

/// Runs the program on the arguments of this process.
pub fn main() -> ExitCode {
    // Without it, such a write ends the process, as it does every other.
    let _ = stop_signals::survive_size_limit();
    cli::main()
}
