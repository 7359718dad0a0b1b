//! Signals, as something that a worker can wait for.
//!
//! SIGTERM, SIGINT and SIGHUP end the server in good order; the second one ends it at once (of a process that `isolate.rs`
//! started, the second that its starter tells of). Under QEMU's name it goes on in good order, as `qemu-nbd` does: timeout(1)
//! and supervisors signal a process and its group. SIGXFSZ is ignored: a file
//! that may not grow is an error of the request. (SIGPIPE is ignored by every Rust program, SIGBUS is the matter of
//! `storage/mapping_guard.rs`.)

use super::log_lines;
use crate::failure::Failure;
use crate::program;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::low_level::{exit, pipe};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use zebu_export::Exports;
use zebu_storage::{Socket, Worker};

/// The exit code of a server that a second signal ended.
const CUT_SHORT: i32 = 1;
/// Stands for a signal on the standard input of a process that another has started (`isolate.rs`).
pub(crate) const FROM_STARTER: u8 = b'S';
/// Stands for the end of whoever started it.
const STARTER_GONE: u8 = b'G';

/// Which signals count: the second one ends the server at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    /// The signals of this process.
    Own,
    /// The signals that its starter tells of, on standard input. The process's own end it in good order, however many
    /// come: they may have been sent to both.
    FromStarter,
}

/// The signals that end a server.
pub(crate) struct Signals {
    /// Readable when the first one has come.
    first: Socket,
    exports: Arc<OnceLock<Exports>>,
}

impl Signals {
    /// Begins to watch: from now on, the first signal does not end the process.
    pub(crate) fn watch(counted: Counted) -> Result<Self, Failure> {
        let fail = |error: io::Error| Failure::new(format!("could not watch for signals: {error}"));
        let (mut signals, theirs) = UnixStream::pair().map_err(fail)?;
        let (first, mut told) = UnixStream::pair().map_err(fail)?;
        crate::stop_signals::take_over_signals();
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            // nohup(1) ignores it for the program that it runs.
            if signal != SIGHUP || !is_ignored(SIGHUP) {
                pipe::register(signal, theirs.try_clone().map_err(fail)?).map_err(fail)?;
            }
        }
        signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map_err(fail)?;
        if counted == Counted::FromStarter {
            listen_to_starter(theirs).map_err(fail)?;
        }
        let exports = Arc::new(OnceLock::<Exports>::new());
        let served = Arc::clone(&exports);
        // A thread of its own, since the others wait for clients and disks when the second one comes.
        let wait = move || {
            let (mut byte, mut came, mut count) = ([0], false, 0);
            // Until the second one comes, or the process ends.
            while signals.read_exact(&mut byte).is_ok() {
                if !came && told.write_all(&byte).is_err() {
                    return;
                }
                came = true;
                count += u32::from(counted == Counted::Own || byte == [FROM_STARTER]);
                if count == 2 && !program::called().is_qemu() {
                    say_what_is_lost(served.get());
                    exit(CUT_SHORT);
                }
            }
        };
        Builder::new().name("zebu-signals".to_owned()).spawn(wait).map_err(fail)?;
        Ok(Self { first: Socket::new(first).map_err(fail)?, exports })
    }

    /// From now on, the second signal tells what these exports lose.
    pub(crate) fn tell_of(&self, exports: &Exports) {
        let _ = self.exports.set(exports.clone());
    }

    /// Waits for the first one.
    pub(crate) async fn wait(&self, worker: &Worker) -> Result<(), Failure> {
        worker
            .readable(&self.first)
            .await
            .map_err(|error| Failure::new(format!("could not wait for signals: {error}")))
    }
}

/// Has what comes on standard input go to `signals`.
fn listen_to_starter(mut signals: UnixStream) -> io::Result<()> {
    let listen = move || {
        let mut byte = [0];
        while io::stdin().read_exact(&mut byte).is_ok() && signals.write_all(&[FROM_STARTER]).is_ok() {}
        let _ = signals.write_all(&[STARTER_GONE]);
    };
    Builder::new().name("zebu-starter".to_owned()).spawn(listen).map(drop)
}

/// Whether whoever started this process had it ignore a signal (proc_pid_status(5)).
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

fn say_what_is_lost(exports: Option<&Exports>) {
    let mut text = "zebu: error: ended at once by a second signal\n".to_owned();
    for export in exports.into_iter().flat_map(Exports::iter) {
        let (name, bytes) = (export.name(), export.metrics().unflushed());
        if bytes > 0 {
            text += &format!(
                "zebu: error: '{name}': up to {bytes} bytes were written since the last flush and may be lost\n"
            );
        }
    }
    log_lines::say(text);
    log_lines::finish();
}
