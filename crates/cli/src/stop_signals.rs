//! Signals that ask a command to end, and one that must not.

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::io::Error;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Signals that ask a command to end.
const STOP: [i32; 3] = [SIGHUP, SIGINT, SIGTERM];
/// How long a signal counts as the same one: `timeout`, shells and terminals send it to the process and to its group.
const SAME: Duration = Duration::from_secs(1);

/// The answer to a signal that asks a command or a server to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It begins to end in good order.
    Begin,
    /// Nothing more.
    Wait,
    /// The process ends at once.
    EndAtOnce,
}

/// The signals that have asked a process to end.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// When the first one came.
    first: Option<Instant>,
}

impl Asked {
    /// The answer to `signal`, which comes `now`.
    pub(crate) fn answer(&mut self, signal: i32, now: Instant) -> Answer {
        match self.first {
            None => {
                self.first = Some(now);
                Answer::Begin
            }
            // A terminal that closes insists on nothing.
            Some(at) if signal == SIGHUP || now.duration_since(at) < SAME => Answer::Wait,
            Some(_) => Answer::EndAtOnce,
        }
    }
}

/// The signals that ask this process to end. Those that whoever started it has it ignore are left alone: SIGHUP under
/// nohup, SIGINT for a job that a script has put into the background.
pub(crate) fn stop_signals() -> Vec<i32> {
    let ignored = ignored();
    STOP.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect()
}

/// The signals that ask a server to end: SIGHUP is left alone under nohup, the others are not.
pub(crate) fn signals_of_servers() -> Vec<i32> {
    let ignored = ignored();
    STOP.into_iter().filter(|signal| *signal != SIGHUP || ignored & (1 << (signal - 1)) == 0).collect()
}

/// The signals that whoever started this process had it ignore.
fn ignored() -> u64 {
    // Without /proc none of them counts as ignored, which is what they are by default.
    std::fs::read_to_string("/proc/self/status").map_or(0, |status| ignored_of(&status))
}

/// The effect of a signal that nothing else handles, after a question has handled it.
#[derive(Default)]
struct AfterQuestions {
    /// It ends the process.
    ends: Arc<AtomicBool>,
    /// Its handler is there, and stays.
    is_handled: AtomicBool,
}

fn after_questions() -> &'static AfterQuestions {
    // Handlers are the process's, and outlive whoever sets them.
    static AFTER: LazyLock<AfterQuestions> = LazyLock::new(AfterQuestions::default);
    &AFTER
}

/// From now on, signals are up to the handlers that the caller registers.
pub(crate) fn take_over_signals() {
    after_questions().ends.store(false, Ordering::SeqCst);
}

/// Signals that come while somebody is asked for something. They end the question, not the process: the terminal is to be put right
/// first.
pub(crate) struct DuringQuestion {
    came: Arc<AtomicUsize>,
    ids: Vec<SigId>,
    /// Signals that nothing else handles.
    unhandled: Vec<i32>,
}

impl DuringQuestion {
    pub(crate) fn begin() -> Result<Self, Error> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let handled = mask_of(&status, "SigCgt:");
        let was_asked = after_questions().ends.swap(false, Ordering::SeqCst);
        let stop = stop_signals();
        let unhandled = stop.iter().copied().filter(|signal| was_asked || handled & (1 << (signal - 1)) == 0);
        let mut question = Self { came: Arc::default(), ids: Vec::new(), unhandled: unhandled.collect() };
        for signal in stop {
            let came = Arc::clone(&question.came);
            question.ids.push(signal_hook::flag::register_usize(signal, came, signal as usize)?);
        }
        Ok(question)
    }

    /// Whether one has come.
    pub(crate) fn has_come(&self) -> bool {
        self.came.load(Ordering::SeqCst) != 0
    }

    /// The end of the question. The signal that came is answered now.
    pub(crate) fn end(self) {
        let after = after_questions();
        for id in &self.ids {
            signal_hook::low_level::unregister(*id);
        }
        let came = self.came.load(Ordering::SeqCst) as i32;
        if self.unhandled.contains(&came) {
            let _ = signal_hook::low_level::emulate_default_handler(came);
        }
        // The handlers of this process stay where they are, and would swallow the next one.
        if !after.is_handled.swap(true, Ordering::SeqCst) {
            for signal in &self.unhandled {
                let _ = signal_hook::flag::register_conditional_default(*signal, Arc::clone(&after.ends));
            }
        }
        after.ends.store(!self.unhandled.is_empty(), Ordering::SeqCst);
    }
}

/// The set of ignored signals in a process's status.
fn ignored_of(status: &str) -> u64 {
    mask_of(status, "SigIgn:")
}

/// A set of signals in a process's status (proc_pid_status(5)): bit 0 is signal 1.
fn mask_of(status: &str, name: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Lets a write past the limit on the size of files (`ulimit -f`) fail instead of ending the process. A handler does so
/// here only; to ignore the signal would be inherited by the programs that this one starts.
pub(crate) fn survive_size_limit() -> Result<(), Error> {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_sent_twice_is_one_and_a_later_one_insists() {
        let began = Instant::now();
        let soon = began + Duration::from_millis(5);
        for signal in STOP {
            for second in [SIGINT, SIGTERM] {
                let mut asked = Asked::default();
                assert_eq!(asked.answer(signal, began), Answer::Begin);
                assert_eq!(asked.answer(second, soon), Answer::Wait);
                assert_eq!(asked.answer(SIGHUP, soon + SAME), Answer::Wait);
                assert_eq!(asked.answer(second, began + SAME), Answer::EndAtOnce);
            }
        }
    }

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        assert_eq!(ignored_of("Name:\tzebu\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored_of("Name:\tzebu\n"), 0);
        assert_eq!(ignored_of("SigIgn:\tnonsense\n"), 0);
    }
}
