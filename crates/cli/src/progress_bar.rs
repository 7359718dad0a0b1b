//! The line that shows on a terminal how far a job is.

use crate::output::units::size_short;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Columns of a terminal that does not tell how many it has.
const USUAL_WIDTH: usize = 80;
/// Most columns of the bar itself, brackets included.
const LONGEST_BAR: usize = 42;
/// Fewest columns of a bar that still shows something.
const SHORTEST_BAR: usize = 10;
/// Time over which the rate is measured.
const WINDOW: Duration = Duration::from_secs(10);
/// Least time over which it is told: the first pieces of work come in bursts.
const LEAST_WINDOW: Duration = Duration::from_millis(500);
/// Longest time left that is told; what is longer is a guess.
const LONGEST_LEFT: u64 = 100 * 86400;

/// How fast the job was in the last seconds.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    samples: VecDeque<(Instant, u64)>,
}

impl Pace {
    /// Notes that `done` bytes are done. A job that begins a new phase starts again.
    pub(crate) fn note(&mut self, now: Instant, done: u64) {
        if self.samples.back().is_some_and(|(_, before)| *before > done) {
            self.samples.clear();
        }
        self.samples.push_back((now, done));
        while self.samples.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
            self.samples.pop_front();
        }
    }

    /// Bytes per second, once it is known; `None` while nothing moves.
    pub(crate) fn rate(&self) -> Option<f64> {
        let ((first, from), (last, to)) = (self.samples.front()?, self.samples.back()?);
        let time = last.duration_since(*first);
        (time >= LEAST_WINDOW && to > from).then(|| (to - from) as f64 / time.as_secs_f64())
    }
}

/// How far a job is, as the line shows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown {
    /// The present phase.
    pub(crate) phase: &'static str,
    /// Bytes done.
    pub(crate) done: u64,
    /// Bytes in all, above 0.
    pub(crate) total: u64,
    /// Bytes per second, if known.
    pub(crate) rate: Option<f64>,
}

/// The line for a terminal of `width` columns, which never fills the last one: many terminals go to the next line then.
/// Parts that do not fit are left out, the percentage last.
pub(crate) fn line(shown: Shown, width: Option<usize>) -> String {
    let room = width.filter(|width| *width > 0).unwrap_or(USUAL_WIDTH).saturating_sub(1);
    let done = shown.done.min(shown.total);
    let percent = format!("{:>3}%", (u128::from(done) * 100 / u128::from(shown.total.max(1))) as u64);
    let rate = shown.rate.map(|rate| format!("{}/s", size_short(rate as u64)));
    let left = shown.rate.and_then(|rate| time_left(shown.total - done, rate));
    let mut texts = vec![shown.phase.to_owned(), percent.clone()];
    texts.extend(rate);
    texts.extend(left);
    // From the end, but the phase goes before the percentage does.
    while columns(&texts) > room && texts.len() > 2 {
        texts.pop();
    }
    if columns(&texts) > room {
        texts = vec![percent];
    }
    let free = room.saturating_sub(columns(&texts) + 1).min(LONGEST_BAR);
    if free >= SHORTEST_BAR && texts.len() > 1 {
        texts.insert(1, bar(done, shown.total, free));
    }
    let line = texts.join(" ");
    line.chars().take(room).collect()
}

fn columns(texts: &[String]) -> usize {
    texts.iter().map(|text| text.chars().count() + 1).sum::<usize>().saturating_sub(1)
}

/// A bar of `columns` columns.
fn bar(done: u64, total: u64, columns: usize) -> String {
    let inner = columns - 2;
    let filled = (u128::from(done) * inner as u128 / u128::from(total.max(1))) as usize;
    format!("[{}{}]", "#".repeat(filled), "-".repeat(inner - filled))
}

/// Such as `1h02m left`; `None` where that is anybody's guess, and at the end.
fn time_left(bytes: u64, rate: f64) -> Option<String> {
    let seconds = (bytes as f64 / rate).ceil();
    if bytes == 0 || !seconds.is_finite() || seconds > LONGEST_LEFT as f64 {
        return None;
    }
    let seconds = seconds as u64;
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    let mut text = String::new();
    let _ = match (days, hours, minutes) {
        (0, 0, 0) => write!(text, "{seconds}s left"),
        (0, 0, _) => write!(text, "{minutes}m{:02}s left", seconds % 60),
        (0, ..) => write!(text, "{hours}h{minutes:02}m left"),
        _ => write!(text, "{days}d{hours:02}h left"),
    };
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(done: u64, rate: Option<f64>) -> Shown {
        Shown { phase: "copying", done, total: 1 << 30, rate }
    }

    #[test]
    fn rates_have_the_units_of_the_options() {
        let text = line(shown(512 << 20, Some(f64::from(40 << 20))), Some(80));
        assert!(text.starts_with("copying [####"), "{text}");
        assert!(text.ends_with("]  50% 40 MiB/s 13s left"), "{text}");
    }

    #[test]
    fn what_is_not_known_is_not_told() {
        let text = line(shown(0, None), Some(80));
        assert!(text.ends_with("]   0%"), "{text}");
        let text = line(shown(1, Some(1.0)), Some(80));
        assert!(text.ends_with("1 B/s"), "{text}");
        assert!(!line(shown(1 << 30, Some(1e9)), Some(80)).contains("left"));
    }

    #[test]
    fn the_line_fits_every_width() {
        for width in 0..200 {
            for rate in [None, Some(123_456_789.0), Some(3.0e5)] {
                for done in [0, 1 << 20, 1 << 30, u64::MAX] {
                    let text = line(shown(done, rate), Some(width));
                    let room = if width == 0 { USUAL_WIDTH } else { width };
                    assert!(text.chars().count() < room.max(1), "{width}: {text}");
                    assert!(width < 6 && width != 0 || text.contains('%'), "{width}: {text}");
                }
            }
        }
        assert_eq!(line(shown(512 << 20, Some(1e6)), Some(16)), "copying  50%");
        assert_eq!(line(shown(512 << 20, None), Some(30)), "copying [#######-------]  50%");
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let mut pace = Pace::default();
        pace.note(at(0), 0);
        assert_eq!(pace.rate(), None);
        pace.note(at(200), 1000);
        assert_eq!(pace.rate(), None, "too early");
        pace.note(at(1000), 1000);
        assert_eq!(pace.rate(), Some(1000.0));
        for second in 2..60 {
            pace.note(at(second * 1000), 1000);
        }
        assert_eq!(pace.rate(), None, "it stands still");
        pace.note(at(60_000), 21_000);
        assert_eq!(pace.rate(), Some(2000.0));
        pace.note(at(61_000), 500);
        assert_eq!(pace.rate(), None, "a new phase");
    }

    #[test]
    fn times_have_two_units() {
        for (seconds, text) in
            [(1, "1s left"), (61, "1m01s left"), (3_720, "1h02m left"), (90_000, "1d01h left")]
        {
            assert_eq!(time_left(seconds, 1.0).as_deref(), Some(text));
        }
        assert_eq!(time_left(u64::MAX, 1.0), None);
        assert_eq!(time_left(5, 0.0), None);
    }
}
