//! The log of a server.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// How often a message is told that could come many times a second.
const SELDOM: Duration = Duration::from_secs(60);

/// Lets a message through now and then.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Option<Instant>);

impl Seldom {
    /// Whether the message is to be told now.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.0.is_none_or(|last| now.saturating_duration_since(last) >= SELDOM);
        if is_due {
            self.0 = Some(now);
        }
        is_due
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
}
