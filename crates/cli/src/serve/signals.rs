//! Signals, as something that a worker can wait for.
//!
//! SIGTERM, SIGINT and SIGHUP end the server in good order. With a configuration file, SIGHUP has that read again. SIGTERM or
//! SIGINT, a second after the first of these, end it at once (`stop_signals.rs`); of a process that `isolate.rs` started, those that its starter tells of. Under QEMU's name it
//! goes on in good order, as `qemu-nbd` does. SIGXFSZ is ignored: a file that may not grow is an error of the request.
//! (SIGPIPE is ignored by every Rust program, SIGBUS is the matter of `storage/mapping_guard.rs`.)

use super::log_lines::LogLines;
use crate::failure::Failure;
use crate::stop_signals::{Answer, Asked, signals_of_servers, survive_size_limit, take_over_signals};
use signal_hook::consts::SIGHUP;
use signal_hook::iterator;
use signal_hook::low_level::exit;
use std::future::pending;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use std::time::Instant;
use zebu_disks::Program;
use zebu_export::Exports;
use zebu_storage::sync::Mutex;
use zebu_storage::{IoBuf, IoBufs, Socket, Worker};

/// Requests to read the configuration again that are taken as one.
const REQUESTS: usize = 64;
/// The exit code of a server that a second signal ended.
const CUT_SHORT: i32 = 1;

/// Which signals may insist: a second one ends the server at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    /// The signals of this process.
    Own,
    /// The signals that its starter tells of, on standard input. The process's own end it in good order, however many
    /// come: they may have been sent to both.
    FromStarter,
}

/// The effect of SIGHUP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hangup {
    /// It ends the server.
    Ends,
    /// The configuration is read again.
    Reloads,
}

/// The signals that end a server.
pub(crate) struct Signals {
    /// Readable when the first one has come.
    first: Socket,
    /// Bytes come for each SIGHUP that has the configuration read again.
    reloads: Option<Socket>,
    exports: Arc<OnceLock<Exports>>,
}

impl Signals {
    /// Begins to watch: from now on, the first signal does not end the process.
    pub(crate) fn watch(
        dialect: Program,
        lines: &LogLines,
        counted: Counted,
        hangup: Hangup,
    ) -> Result<Self, Failure> {
        let fail = |error: io::Error| Failure::new(format!("could not watch for signals: {error}"));
        let (first, told) = UnixStream::pair().map_err(fail)?;
        let (reloads, told_of_reloads) = match hangup {
            Hangup::Ends => (None, None),
            Hangup::Reloads => {
                let (reloads, told) = UnixStream::pair().map_err(fail)?;
                // Many signals are one, once as many wait as the socket holds.
                told.set_nonblocking(true).map_err(fail)?;
                (Some(Socket::new(reloads).map_err(fail)?), Some(told))
            }
        };
        take_over_signals();
        let mut signals = iterator::Signals::new(signals_of_servers()).map_err(fail)?;
        survive_size_limit().map_err(fail)?;
        let exports = Arc::new(OnceLock::<Exports>::new());
        let ending = Ending {
            dialect,
            lines: lines.clone(),
            asked: Asked::default(),
            told: Some(told),
            exports: Arc::clone(&exports),
        };
        let ending = Arc::new(Mutex::new(ending));
        if counted == Counted::FromStarter {
            listen_to_starter(Arc::clone(&ending)).map_err(fail)?;
        }
        // A thread of its own, since the others wait for clients and disks when a second one comes.
        let wait = move || {
            for signal in &mut signals {
                if let Some(mut told) = told_of_reloads.as_ref().filter(|_| signal == SIGHUP) {
                    let _ = told.write_all(&[1]);
                    continue;
                }
                let mut ending = ending.lock();
                match counted {
                    Counted::Own => ending.take(signal),
                    Counted::FromStarter => ending.begin(),
                }
            }
        };
        Builder::new().name("zebu-signals".to_owned()).spawn(wait).map_err(fail)?;
        Ok(Self { first: Socket::new(first).map_err(fail)?, reloads, exports })
    }

    /// From now on, the second signal tells what these exports lose.
    pub(crate) fn tell_of(&self, exports: &Exports) {
        let _ = self.exports.set(exports.clone());
    }

    /// Waits until the configuration is to be read again.
    pub(crate) async fn wait_for_reload(&self, worker: &Worker) {
        let Some(socket) = &self.reloads else { return pending().await };
        let received = worker.receive(socket, IoBufs::from(IoBuf::zeroed(REQUESTS))).await;
        if !matches!(received.0, Ok(1..)) {
            // The thread of the signals is gone.
            pending::<()>().await;
        }
    }

    /// Waits for the first one.
    pub(crate) async fn wait(&self, worker: &Worker) -> Result<(), Failure> {
        worker
            .readable(&self.first)
            .await
            .map_err(|error| Failure::new(format!("could not wait for signals: {error}")))
    }
}

/// The end of a server, as signals bring it about.
struct Ending {
    dialect: Program,
    lines: LogLines,
    asked: Asked,
    /// Closed to have the server begin to end.
    told: Option<UnixStream>,
    exports: Arc<OnceLock<Exports>>,
}

impl Ending {
    /// Answers a signal that may insist.
    fn take(&mut self, signal: i32) {
        match self.asked.answer(signal, Instant::now()) {
            Answer::Begin => {
                if signal == SIGHUP && !self.dialect.is_qemu() {
                    self.lines.say(
                        "zebu: warning: SIGHUP ends the server: there is no --config to read again\n"
                            .to_owned(),
                    );
                }
                self.begin();
            }
            Answer::EndAtOnce if !self.dialect.is_qemu() => {
                say_what_is_lost(&self.lines, self.exports.get());
                exit(CUT_SHORT);
            }
            Answer::Wait | Answer::EndAtOnce => {}
        }
    }

    fn begin(&mut self) {
        self.told = None;
    }
}

/// Has the signals that come on standard input, as their numbers, be answered.
fn listen_to_starter(ending: Arc<Mutex<Ending>>) -> io::Result<()> {
    let listen = move || {
        let mut number = [0];
        let take = |signal: i32| ending.lock().take(signal);
        while io::stdin().read_exact(&mut number).is_ok() {
            take(number[0].into());
        }
        // Whoever started it is gone, which insists on nothing.
        ending.lock().begin();
    };
    Builder::new().name("zebu-starter".to_owned()).spawn(listen).map(drop)
}

fn say_what_is_lost(lines: &LogLines, exports: Option<&Exports>) {
    let mut text = "zebu: error: ended at once by a second signal\n".to_owned();
    for export in exports.into_iter().flat_map(Exports::iter) {
        let (name, bytes) = (export.name(), export.metrics().unflushed());
        if bytes > 0 {
            text += &format!(
                "zebu: error: '{name}': up to {bytes} bytes were written since the last flush and may be lost\n"
            );
        }
    }
    lines.say(text);
    lines.finish();
}
