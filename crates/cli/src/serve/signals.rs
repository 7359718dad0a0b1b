//! Signals, as something that a worker can wait for.

use crate::failure::Failure;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use std::os::unix::net::UnixStream;
use zebu::storage::{Socket, Worker};

/// SIGTERM and SIGINT.
pub(crate) struct Signals(Socket);

impl Signals {
    /// Begins to watch: from now on, these signals do not end the process.
    pub(crate) fn watch() -> Result<Self, Failure> {
        let fail = |error: std::io::Error| Failure::new(format!("could not watch for signals: {error}"));
        let (ours, theirs) = UnixStream::pair().map_err(fail)?;
        for signal in [SIGTERM, SIGINT] {
            pipe::register(signal, theirs.try_clone().map_err(fail)?).map_err(fail)?;
        }
        Socket::new(ours).map(Self).map_err(fail)
    }

    /// Waits for one.
    pub(crate) async fn wait(&self, worker: &Worker) -> Result<(), Failure> {
        worker
            .readable(&self.0)
            .await
            .map_err(|error| Failure::new(format!("could not wait for signals: {error}")))
    }
}
