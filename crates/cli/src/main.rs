//! The command `zebu`: disk images with the habits of qemu-img.

mod arguments;
mod backing;
mod bench;
mod cli;
mod commands;
mod compression;
mod create_opts;
mod examples;
mod failure;
mod image_opts;
mod image_spec;
mod io;
mod keyval;
mod manual;
mod output;
mod serve;
mod session;
mod size;
mod snapshot_name;
mod values;
mod watch;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
