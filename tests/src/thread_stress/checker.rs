//! The rules by which a sector's history is judged.
//!
//! A sector is a regular register (Lamport, "On interprocess communication", 1986): what is seen is explained by some
//! order of the requests that overlap it. While a change is under way, one may see the new value and a later one the old
//! value again; after its end, all see the new one. (A read may have looked its mapping up before zeroes were asked for,
//! and find there what is being written over them.)
//!
//! For a value that was written once, the moments at which it must have been there are known: from the end of the request
//! that wrote it to the last begin of one that saw it (Gibbons and Korach, "Testing shared memories", 1997). Two such
//! spans never overlap, and nothing else is surely written within one. A value that was written several times (zeroes,
//! what a snapshot brings back) is judged by the weaker rule alone: it was not surely overwritten.

use super::sector::{self, Seen, Tearing};
use std::collections::{HashMap, HashSet};

/// The end of what has not ended.
pub const NEVER: u64 = u64::MAX;

/// Whether a change took effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certainty {
    /// It did, if it ended.
    Must,
    /// It may have.
    May,
}

/// When the effect of a change outlives a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasting {
    /// From its own end on.
    AtItsEnd,
    /// From the end of a flush on that began after its end.
    AfterFlush,
}

/// A change of one sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// When it began.
    pub begin: u64,
    /// When it had ended, or [`NEVER`].
    pub end: u64,
    /// The value that it leaves.
    pub value: u64,
    /// Whether it took effect.
    pub certainty: Certainty,
    /// When it lasts.
    pub lasting: Lasting,
}

/// The observation of one sector by a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// When it began.
    pub begin: u64,
    /// When it had ended.
    pub end: u64,
    /// The value seen.
    pub seen: Seen,
}

/// The changes of a sector, as far as observations tell.
pub struct Sector<'a> {
    number: u64,
    tearing: Tearing,
    changes: &'a [Change],
    /// For each change, its end if it surely took effect.
    effective: Vec<u64>,
    /// The latest begin of the changes that had surely taken effect by then, in this order.
    settled: Vec<(u64, u64)>,
    /// The changes with a value.
    by_value: HashMap<u64, Vec<usize>>,
}

impl<'a> Sector<'a> {
    /// The sector of this number. Of `changes`, one is what was there before all others.
    pub fn new(number: u64, tearing: Tearing, changes: &'a [Change], looks: &[Look]) -> Self {
        let mut by_value: HashMap<u64, Vec<usize>> = HashMap::new();
        for (index, change) in changes.iter().enumerate() {
            by_value.entry(change.value).or_default().push(index);
        }
        let seen: HashSet<u64> = looks
            .iter()
            .filter_map(|look| if let Seen::Value(value) = look.seen { Some(value) } else { None })
            .collect();
        let took_effect = |change: &Change| {
            change.certainty == Certainty::Must
                || (seen.contains(&change.value) && by_value[&change.value].len() == 1)
        };
        let effective: Vec<u64> =
            changes.iter().map(|change| if took_effect(change) { change.end } else { NEVER }).collect();
        let settled = settled(changes, &effective);
        Self { number, tearing, changes, effective, settled, by_value }
    }

    /// The latest begin of a change that had surely taken effect before `moment`.
    fn latest_before(&self, moment: u64) -> u64 {
        let count = self.settled.partition_point(|(effective, _)| *effective < moment);
        self.settled[..count].last().map_or(0, |(_, begin)| *begin)
    }

    /// Whether a change may be what is found between `begin` and `end`.
    fn may_show(&self, index: usize, latest: u64, end: u64) -> bool {
        self.changes[index].begin < end && self.effective[index] >= latest
    }

    /// Whether a change to `value` is under way during a look.
    fn is_under_way(&self, value: u64, look: &Look) -> bool {
        let changes = self.by_value.get(&value).into_iter().flatten().map(|index| &self.changes[*index]);
        changes.into_iter().any(|change| change.begin < look.end && change.end > look.begin)
    }

    /// Judges what was seen by one request.
    ///
    /// # Errors
    /// No order of the requests explains it.
    fn judge_look(&self, look: &Look) -> Result<(), String> {
        let latest = self.latest_before(look.begin);
        match &look.seen {
            Seen::Value(value) => {
                let Some(changes) = self.by_value.get(value) else {
                    return Err(format!("{} was never written here", sector::name(*value)));
                };
                if changes.iter().any(|index| self.may_show(*index, latest, look.end)) {
                    return Ok(());
                }
                let is_later = changes.iter().all(|index| self.changes[*index].begin > look.end);
                let why = if is_later { "not written yet" } else { "surely overwritten before" };
                Err(format!("{} was {why}", sector::name(*value)))
            }
            Seen::Torn(bytes) => {
                let shown = (0..self.changes.len()).filter(|index| self.may_show(*index, latest, look.end));
                let shown: Vec<usize> = shown.collect();
                // Half of a sector is there only while it is being written.
                let is_busy = shown.iter().any(|index| self.changes[*index].end > look.begin);
                let values: Vec<u64> = shown.iter().map(|index| self.changes[*index].value).collect();
                if is_busy && sector::is_made_of(bytes, self.number, &values, self.tearing) {
                    return Ok(());
                }
                let when = if is_busy { "of other values" } else { "while nobody writes it" };
                Err(format!("a torn sector {when}: {}", self.parts(&bytes[..])))
            }
        }
    }

    /// The values that the words of a torn sector are from, each with its first word.
    fn parts(&self, bytes: &[u8]) -> String {
        let mut parts: Vec<(usize, String)> = Vec::new();
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let known = self
                .changes
                .iter()
                .rev()
                .find(|change| sector::is_word_of(word, self.number, index, change.value));
            let part = known.map_or_else(|| format!("{word:02x?}"), |change| sector::name(change.value));
            if parts.last().is_none_or(|(_, last)| *last != part) {
                parts.push((index, part));
            }
        }
        parts.iter().map(|(index, part)| format!("from word {index}: {part}")).collect::<Vec<_>>().join(", ")
    }
}

/// By the moments of taking effect, the latest begin up to there.
fn settled(changes: &[Change], effective: &[u64]) -> Vec<(u64, u64)> {
    let mut settled: Vec<(u64, u64)> =
        effective.iter().zip(changes).map(|(effective, change)| (*effective, change.begin)).collect();
    settled.sort_unstable();
    let mut latest = 0;
    for (_, begin) in &mut settled {
        latest = latest.max(*begin);
        *begin = latest;
    }
    settled
}

/// The span of a value: the end of its write, and the last begin of a look at it after that (or the begin of its write, if
/// there was none).
#[derive(Debug, Clone, Copy)]
struct Span {
    first: u64,
    last: u64,
    value: u64,
}

/// Something that no order of the requests explains.
#[derive(Debug)]
pub struct Unexplained {
    /// A moment of it.
    pub at: u64,
    /// The violation, in words.
    pub why: String,
}

/// Judges a sector by all that was seen of it. `changes` begin with what was there before all others.
///
/// # Errors
/// An observation that no order explains.
pub fn judge(number: u64, tearing: Tearing, changes: &[Change], looks: &[Look]) -> Result<(), Unexplained> {
    let sector = Sector::new(number, tearing, changes, looks);
    for look in looks {
        sector.judge_look(look).map_err(|what| Unexplained {
            at: look.begin,
            why: format!("seen between {} and {}: {what}", look.begin, look.end),
        })?;
    }
    let spans = spans(&sector, looks);
    let mut sure: Vec<Span> = spans.iter().copied().filter(|span| span.first < span.last).collect();
    sure.sort_unstable_by_key(|span| span.first);
    for pair in sure.windows(2) {
        if pair[1].first < pair[0].last {
            return Err(came_back(pair[0], pair[1].value));
        }
    }
    // The sure span around these moments, if there is one.
    let around = |from: u64, to: u64| {
        let index = sure.partition_point(|span| span.first < from);
        let span = sure[..index].last()?;
        (to < span.last).then_some(*span)
    };
    for span in spans.iter().filter(|span| span.first >= span.last) {
        if let Some(outer) = around(span.last, span.first) {
            return Err(came_back(outer, span.value));
        }
    }
    for look in looks {
        if let Seen::Value(value) = look.seen
            && sector.by_value.get(&value).is_some_and(|changes| changes.len() > 1)
            && !sector.is_under_way(value, look)
            && let Some(outer) = around(look.begin, look.end)
        {
            return Err(came_back(outer, value));
        }
    }
    Ok(())
}

fn came_back(outer: Span, between: u64) -> Unexplained {
    let why = format!(
        "{} was there at {} and at {}, and {} between",
        sector::name(outer.value),
        outer.first,
        outer.last,
        sector::name(between)
    );
    Unexplained { at: outer.first, why }
}

/// The spans of the values that were written once.
fn spans(sector: &Sector<'_>, looks: &[Look]) -> Vec<Span> {
    let mut last: HashMap<u64, u64> = HashMap::new();
    for look in looks {
        if let Seen::Value(value) = look.seen {
            let last = last.entry(value).or_insert(0);
            *last = (*last).max(look.begin);
        }
    }
    let last_of = |index: usize| {
        let Change { begin, end, value, .. } = sector.changes[index];
        last.get(&value).copied().filter(|look| *look > end).unwrap_or(begin)
    };
    let once = sector.by_value.iter().filter_map(|(value, changes)| match changes.as_slice() {
        [only] => Some((*value, *only)),
        _ => None,
    });
    once.map(|(value, index)| Span { first: sector.effective[index], last: last_of(index), value })
        .filter(|span| span.first != NEVER)
        .collect()
}

/// Judges what a crash left in a sector. `flushed` is the latest begin of a flush that had ended.
///
/// # Errors
/// What lasts was lost, or something is there that can't be, in words.
pub fn judge_crash(
    number: u64,
    tearing: Tearing,
    changes: &[Change],
    looks: &[Look],
    flushed: u64,
    left: &Seen,
) -> Result<(), String> {
    let sector = Sector::new(number, tearing, changes, looks);
    let lasts = |change: &&Change| match change.lasting {
        _ if change.certainty == Certainty::May => false,
        Lasting::AtItsEnd => change.end != NEVER,
        Lasting::AfterFlush => change.end < flushed,
    };
    let latest = changes.iter().filter(lasts).map(|change| change.begin).max().unwrap_or(0);
    match left {
        Seen::Value(value) => {
            let Some(candidates) = sector.by_value.get(value) else {
                return Err(format!("{} was never written here", sector::name(*value)));
            };
            if candidates.iter().any(|index| sector.may_show(*index, latest, NEVER)) {
                return Ok(());
            }
            let kept = changes.iter().filter(|change| change.begin == latest).map(|c| sector::name(c.value));
            let kept = kept.collect::<Vec<_>>().join(", ");
            Err(format!("{} is left, although {kept} was durable (since {latest})", sector::name(*value)))
        }
        Seen::Torn(bytes) => {
            let shown: Vec<usize> =
                (0..changes.len()).filter(|index| sector.may_show(*index, latest, NEVER)).collect();
            let values: Vec<u64> = shown.iter().map(|index| changes[*index].value).collect();
            let is_busy = shown.iter().any(|index| changes[*index].end == NEVER);
            if is_busy && sector::is_made_of(bytes, number, &values, tearing) {
                return Ok(());
            }
            Err(format!("a torn sector is left, which begins with {:02x?}", &bytes[..24]))
        }
    }
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
