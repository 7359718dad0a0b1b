//! The log of a server.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::sync::Mutex;

/// How important a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[non_exhaustive]
pub enum Level {
    /// Something failed.
    Error,
    /// Something is not as it should be, and the server goes on.
    #[default]
    Warning,
    /// Clients come and go.
    Info,
    /// Details of each client.
    Debug,
}

impl Level {
    /// As in a log.
    pub fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}

/// The time in which messages that could come many times a second are counted.
const SELDOM: Duration = Duration::from_secs(60);

/// Lets messages through now and then.
#[derive(Debug)]
pub(crate) struct Seldom {
    /// So many a minute.
    most: u32,
    since: Option<Instant>,
    told: u32,
    left_out: u64,
}

impl Default for Seldom {
    fn default() -> Self {
        Self::new(1)
    }
}

impl Seldom {
    /// Lets `most` messages through, and as many a minute later.
    pub(crate) fn new(most: u32) -> Self {
        Self { most, since: None, told: 0, left_out: 0 }
    }

    /// Whether the message is to be told now.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        self.after(now).is_some()
    }

    /// How many messages were left out before this one, or `None` if it is to be left out, too.
    fn after(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= SELDOM) {
            (self.since, self.told) = (Some(now), 0);
        }
        if self.told >= self.most {
            self.left_out += 1;
            return None;
        }
        self.told += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

type Sink = dyn Fn(Level, fmt::Arguments<'_>) + Send + Sync;

/// Where messages go. Cheap to clone.
#[derive(Clone)]
pub struct Log {
    most: Level,
    sink: Arc<Sink>,
}

impl Log {
    /// Messages up to the level `most` go to `sink`, which is called on any thread and must not wait long.
    pub fn new(most: Level, sink: impl Fn(Level, fmt::Arguments<'_>) + Send + Sync + 'static) -> Self {
        Self { most, sink: Arc::new(sink) }
    }

    /// Messages go nowhere.
    pub fn none() -> Self {
        Self::new(Level::Error, |_, _| ())
    }

    /// The same log for messages that a client can cause as often as it likes: `most` errors and warnings a minute.
    pub(crate) fn sparing(&self, most: u32) -> Self {
        let (log, seldom) = (self.clone(), Mutex::new(Seldom::new(most)));
        Self::new(self.most, move |level, message| {
            if level > Level::Warning {
                log.write(level, message);
                return;
            }
            match seldom.lock().after(Instant::now()) {
                None => {}
                Some(0) => log.write(level, message),
                Some(left_out) => {
                    log.write(level, format_args!("{message} ({left_out} messages before it were left out)"));
                }
            }
        })
    }

    /// Tells something.
    pub fn write(&self, level: Level, message: fmt::Arguments<'_>) {
        if level <= self.most {
            (self.sink)(level, message);
        }
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Log({})", self.most.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_comes_once_a_minute() {
        let (mut seldom, start) = (Seldom::default(), Instant::now());
        let told: Vec<u64> =
            (0..130).filter(|second| seldom.is_due(start + Duration::from_secs(*second))).collect();
        assert_eq!(told, [0, 60, 120]);
    }

    #[test]
    fn what_clients_cause_all_the_time_is_told_now_and_then() {
        let (mut seldom, start) = (Seldom::new(2), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let told = [0, 1, 2, 3, 59, 60, 61, 62].map(|second| seldom.after(at(second)));
        assert_eq!(told, [Some(0), Some(0), None, None, None, Some(3), Some(0), None]);
        let (sender, messages) = std::sync::mpsc::channel();
        let log =
            Log::new(Level::Info, move |_, message| sender.send(message.to_string()).unwrap()).sparing(3);
        for number in 0..10 {
            log.write(Level::Warning, format_args!("warning {number}"));
            log.write(Level::Info, format_args!("asked for"));
        }
        let (warnings, others): (Vec<_>, Vec<_>) =
            messages.try_iter().partition(|message| message.starts_with("warning"));
        assert_eq!(warnings, ["warning 0", "warning 1", "warning 2"]);
        assert_eq!(others.len(), 10, "whoever asks for details gets them");
    }
}
