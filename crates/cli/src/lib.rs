//! The command `zebu`: disk images with the habits of qemu-img.
//!
//! A library of its own, so that the fuzz targets reach the parsers (`fuzzing`). It promises nothing to anybody else.

mod arguments;
mod attached;
mod authorization_objects;
mod backing;
mod backing_opts;
mod bench;
mod cli;
mod commands;
mod compression;
mod context;
mod create_opts;
mod damage_told;
mod default_cache_mode;
mod deferred;
mod descriptors;
mod disks;
mod drained_pipes;
mod dry_run;
mod encrypt_opts;
mod encrypted_file;
mod errno_text;
mod examples;
mod failure;
mod file_driver;
mod foreign_opts;
#[doc(hidden)]
pub mod fuzzing;
mod graph;
mod http_opts;
mod image_opts;
mod image_spec;
mod io;
mod json_name;
mod key_opts;
mod key_slot_opts;
mod keyval;
mod local_name;
mod lock_patience;
mod manual;
mod misnamed;
mod named_disks;
mod nbd_list;
mod nbd_opts;
mod objects;
mod output;
mod output_pipe;
mod packed;
mod passphrase_prompt;
mod program;
mod progress_bar;
mod qemu_names;
mod rbd_opts;
mod reference_defaults;
mod registry_args;
mod remote_cache;
mod remote_disk;
mod remote_names;
mod secrets;
mod secrets_in_names;
mod sector_size;
mod serve;
mod session;
mod size;
mod snapshot_name;
mod stop_signals;
mod store_target;
mod temporary_directory;
mod temporary_overlay;
mod tls_objects;
mod unreadable;
mod uploads;
mod values;
mod watch;

use context::Context;
use program::Program;
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the program on the arguments of this process.
pub fn main() -> ExitCode {
    // Without it, such a write ends the process, as it does every other.
    let _ = stop_signals::survive_size_limit();
    if !has_small_stack() {
        return run();
    }
    match std::thread::Builder::new().stack_size(STACK).spawn(run).map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        // It has panicked, which was told.
        Ok(Err(_)) => ExitCode::from(101),
        // Perhaps the little that there is does.
        Err(_) => run(),
    }
}

fn run() -> ExitCode {
    descriptors::raise_limit();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let dialect = arguments.first().map(|path| Program::by_path(path)).unwrap_or_default();
    let context = Context { dialect, ..Context::default() };
    let code = cli::main(arguments, &context);
    context.disks.close();
    code
}

/// Bytes of stack that a command has wherever the limit of the system is smaller.
const STACK: usize = 8 << 20;

/// Whether the caller has left the first thread less stack than a command may need.
fn has_small_stack() -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack);
    limit.current.is_some_and(|bytes| bytes < (STACK / 2) as u64)
}
