//! The command `zebu`: disk images with the habits of qemu-img.
//!
//! A library of its own, so that the fuzz targets reach the parsers (`fuzzing`). It promises nothing to anybody else.

mod arguments;
mod attached;
mod authorization_objects;
mod backing;
mod bench;
mod blob_digests;
mod cli;
mod commands;
mod compression;
mod create_opts;
mod damage_notice;
mod default_cache_mode;
mod deferred;
mod descriptors;
mod dry_run;
mod encrypt_opts;
mod encrypted_file;
mod examples;
mod failure;
mod foreign_opts;
#[doc(hidden)]
pub mod fuzzing;
mod image_failure;
mod io;
mod key_slot_opts;
mod local_argument;
mod lock_patience;
mod manual;
mod nbd_list;
mod new_file;
mod output;
mod output_pipe;
mod packed;
mod passphrase_prompt;
mod progress_bar;
mod qemu_names;
mod registry_args;
mod secrets;
mod sector_size;
mod serve;
mod session;
mod snapshot_name;
mod stop_signals;
mod store_target;
mod suggestion;
mod temporary_directory;
mod temporary_overlay;
mod tls_servers;
mod top;
mod topics;
mod unreadable;
mod values;
mod watch;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use zebu_disks::{Context, Disks, Program};

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
    let context = Context { dialect, disks: Arc::new(Disks::new(output::notices::of(dialect))) };
    let code = cli::main(arguments, &context);
    match context.disks.close() {
        Ok(()) => code,
        Err(error) => {
            output::stderr::tell(dialect, &error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Bytes of stack that a command has wherever the limit of the system is smaller.
const STACK: usize = 8 << 20;

/// Whether the caller has left the first thread less stack than a command may need.
fn has_small_stack() -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack);
    limit.current.is_some_and(|bytes| bytes < (STACK / 2) as u64)
}
