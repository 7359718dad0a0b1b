//! Rates of exports in a second, from two samples.

use super::sample::{Counter, Export, Sample};
use std::time::Duration;

/// Requests of one kind, by the second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rate {
    pub(crate) requests: f64,
    pub(crate) bytes: f64,
    /// Mean time of those that ended; `None` if none did.
    pub(crate) latency: Option<Duration>,
}

/// An export with what it does.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) export: Export,
    /// `None` until there are two samples of it.
    pub(crate) reads: Option<Rate>,
    pub(crate) writes: Option<Rate>,
    /// The part of look-ups in the mapping cache that found what they looked for, from 0 to 100; since the last sample if there
    /// were any, else since the start.
    pub(crate) cache_hits: Option<f64>,
}

/// The exports of a server, with what they did between two samples of it.
pub(crate) fn rows(before: Option<&Sample>, after: &Sample) -> Vec<Row> {
    let Ok(exports) = &after.found else { return Vec::new() };
    let earlier = before.and_then(|sample| Some((sample.at, sample.found.as_ref().ok()?)));
    let row = |export: &Export| {
        let old = earlier.and_then(|(at, all)| {
            let old = all.iter().find(|old| old.name == export.name)?;
            Some((old, after.at.saturating_duration_since(at)))
        });
        Row {
            reads: old.and_then(|(old, time)| rate(old.reads, export.reads, time)),
            writes: old.and_then(|(old, time)| rate(old.writes, export.writes, time)),
            cache_hits: cache_hits(old.map(|(old, _)| old), export),
            export: export.clone(),
        }
    };
    exports.iter().map(row).collect()
}

/// `None` if no time has passed, or the counters were set back: the server is another one.
fn rate(before: Counter, after: Counter, time: Duration) -> Option<Rate> {
    let seconds = time.as_secs_f64();
    let requests = after.requests.checked_sub(before.requests)?;
    let bytes = after.bytes.checked_sub(before.bytes)?;
    if seconds <= 0.0 {
        return None;
    }
    let nanoseconds = after.nanoseconds.saturating_sub(before.nanoseconds);
    Some(Rate {
        requests: requests as f64 / seconds,
        bytes: bytes as f64 / seconds,
        latency: nanoseconds.checked_div(requests).map(Duration::from_nanos),
    })
}

fn cache_hits(before: Option<&Export>, after: &Export) -> Option<f64> {
    let part = |hits: u64, misses: u64| {
        let all = hits.saturating_add(misses);
        (all > 0).then(|| hits as f64 * 100.0 / all as f64)
    };
    let recent = before.and_then(|before| {
        let hits = after.cache_hits.checked_sub(before.cache_hits)?;
        part(hits, after.cache_misses.checked_sub(before.cache_misses)?)
    });
    recent.or_else(|| part(after.cache_hits, after.cache_misses))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn counter(requests: u64, bytes: u64, nanoseconds: u64) -> Counter {
        Counter { requests, bytes, nanoseconds }
    }

    fn sample(at: Instant, reads: Counter, hits: u64, misses: u64) -> Sample {
        let export =
            Export { name: "a".into(), reads, cache_hits: hits, cache_misses: misses, ..Export::default() };
        Sample { at, found: Ok(vec![export]) }
    }

    #[test]
    fn a_rate_is_what_was_counted_between_two_samples() {
        let start = Instant::now();
        let before = sample(start, counter(100, 4096, 1000), 50, 50);
        let after = sample(start + Duration::from_secs(2), counter(300, 8192, 401_000), 149, 51);
        let row = &rows(Some(&before), &after)[0];
        let reads = row.reads.unwrap();
        assert_eq!((reads.requests, reads.bytes), (100.0, 2048.0));
        assert_eq!(reads.latency, Some(Duration::from_micros(2)));
        assert_eq!(row.writes.unwrap().latency, None);
        assert_eq!(row.cache_hits, Some(99.0));
    }

    #[test]
    fn without_a_sample_before_there_is_none() {
        let after = sample(Instant::now(), counter(300, 0, 0), 1, 3);
        assert_eq!((rows(None, &after)[0].reads, rows(None, &after)[0].cache_hits), (None, Some(25.0)));
        let gone = Sample { at: after.at, found: Err("gone".into()) };
        assert!(rows(Some(&gone), &after)[0].reads.is_none());
        assert!(rows(Some(&after), &gone).is_empty());
    }

    #[test]
    fn a_server_that_was_started_again_has_none_at_first() {
        let start = Instant::now();
        let before = sample(start, counter(100, 0, 0), 9, 9);
        let after = sample(start + Duration::from_secs(1), counter(3, 0, 0), 1, 0);
        assert_eq!(rows(Some(&before), &after)[0].reads, None);
        assert_eq!(rows(Some(&before), &after)[0].cache_hits, Some(100.0));
        let same_moment = sample(start, counter(200, 0, 0), 9, 9);
        assert_eq!(rows(Some(&before), &same_moment)[0].reads, None);
    }
}
