//! Lines of the log on standard error, written by a thread of their own: whoever reads them may take none for as long as they
//! like, and clients can cause many.

use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Lines that wait to be taken, at most.
const WAITING: usize = 1024;
/// How long the end of the server waits for them.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it looks whether one more can wait.
const STEP: Duration = Duration::from_millis(5);

enum Line {
    Text(String),
    /// All lines before it are written.
    End(Sender<()>),
}

/// The way to the thread.
struct Writer {
    sender: SyncSender<Line>,
    /// Lines that were left out, since too many waited.
    left_out: Arc<AtomicU64>,
}

/// Lines of one log. Clones write to the same one.
#[derive(Clone, Default)]
pub(crate) struct LogLines(Arc<OnceLock<Option<Writer>>>);

impl LogLines {
    /// The thread, which the first line starts; `None` if the system gives none.
    fn writer(&self) -> Option<&Writer> {
        let start = || {
            let (sender, receiver) = sync_channel(WAITING);
            let left_out = Arc::<AtomicU64>::default();
            let counted = Arc::clone(&left_out);
            let started =
                Builder::new().name("zebu-log".to_owned()).spawn(move || write(&receiver, &counted));
            started.ok().map(|_| Writer { sender, left_out })
        };
        self.0.get_or_init(start).as_ref()
    }

    /// Writes a line, or several, when they are taken. Never waits for that.
    pub(crate) fn say(&self, text: String) {
        let Some(writer) = self.writer() else {
            let _ = std::io::stderr().write_all(text.as_bytes());
            return;
        };
        if writer.sender.try_send(Line::Text(text)).is_err() {
            writer.left_out.fetch_add(1, Relaxed);
        }
    }

    /// Waits until everything is written, a moment at most.
    pub(crate) fn finish(&self) {
        let Some(Some(writer)) = self.0.get() else { return };
        let deadline = Instant::now() + PATIENCE;
        let (sender, written) = channel();
        while writer.sender.try_send(Line::End(sender.clone())).is_err() {
            if Instant::now() > deadline {
                return;
            }
            std::thread::sleep(STEP);
        }
        let _ = written.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

fn write(lines: &Receiver<Line>, left_out: &AtomicU64) {
    for line in lines {
        // There is nobody left to tell if standard error is gone.
        let _ = match line {
            Line::Text(text) => std::io::stderr().write_all(text.as_bytes()),
            Line::End(sender) => sender.send(()).map_err(std::io::Error::other),
        };
        let left_out = left_out.swap(0, Relaxed);
        if left_out > 0 {
            let what = "messages were dropped, since earlier ones were not read";
            let _ = writeln!(std::io::stderr(), "zebu: warning: {left_out} {what}");
        }
    }
}
