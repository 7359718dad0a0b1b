//! The history of a disk: the journals of all threads together, sector by sector.

use super::checker::{Certainty, Change, Lasting, Look, NEVER, Unexplained, judge, judge_crash};
use super::journal::{Begin, Entry, Kind, Outcome};
use super::sector::{Seen, Tearing, ZERO};
use std::collections::HashMap;

/// A request of a thread, with its end if it had one.
#[derive(Debug, Clone)]
struct Request {
    begin: Begin,
    end: u64,
    outcome: Outcome,
    seen: Vec<Seen>,
}

/// The requests of all threads.
#[derive(Debug)]
pub struct History {
    /// The value of each sector before.
    initial: Vec<u64>,
    /// Sectors of a cluster.
    cluster: u64,
    tearing: Tearing,
    requests: Vec<Request>,
    /// The content of snapshots, by number.
    snapshots: HashMap<u64, Vec<Seen>>,
    /// For each sector, the requests that it is part of.
    of_sector: Vec<Vec<u32>>,
}

/// Counts of requests and observations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that ended.
    pub requests: u64,
    /// Of these, flushes.
    pub flushes: u64,
    /// Sectors that were seen, and judged.
    pub looks: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.flushes += other.flushes;
        self.looks += other.looks;
    }
}

impl History {
    /// The history of a disk that held `initial`, with clusters of so many sectors.
    pub fn new(initial: Vec<u64>, cluster: u64, tearing: Tearing, journals: Vec<Vec<Entry>>) -> Self {
        let mut requests = Vec::new();
        for journal in journals {
            let mut open: HashMap<u64, usize> = HashMap::new();
            for entry in journal {
                match entry {
                    Entry::Begin(begin) => {
                        open.insert(begin.number, requests.len());
                        requests.push(Request {
                            begin,
                            end: NEVER,
                            outcome: Outcome::Done,
                            seen: Vec::new(),
                        });
                    }
                    Entry::End { number, clock, outcome, seen } => {
                        if let Some(index) = open.remove(&number) {
                            let request: &mut Request = &mut requests[index];
                            (request.end, request.outcome, request.seen) = (clock, outcome, seen);
                        }
                    }
                    Entry::Over => {}
                }
            }
        }
        let mut snapshots = HashMap::new();
        for request in &requests {
            if request.begin.kind == Kind::TakeSnapshot && request.end != NEVER {
                snapshots.insert(request.begin.value, request.seen.clone());
            }
        }
        let mut of_sector = vec![Vec::new(); initial.len()];
        for (index, Request { begin, .. }) in (0..).zip(&requests) {
            if !matches!(begin.kind, Kind::Flush | Kind::Other) {
                let end = (begin.first + begin.count).min(initial.len() as u64);
                for sector in begin.first.min(end)..end {
                    of_sector[sector as usize].push(index);
                }
            }
        }
        Self { initial, cluster, tearing, requests, snapshots, of_sector }
    }

    /// Adds what a disk shows at rest, after all requests: sectors from the first one on.
    pub fn add_final(&mut self, seen: Vec<Seen>) {
        let last = self.requests.iter().map(|request| request.begin.clock);
        let ends = self.requests.iter().filter(|request| request.end != NEVER).map(|request| request.end);
        let clock = last.chain(ends).max().unwrap_or(0) + 1;
        let count = seen.len() as u64;
        let begin = Begin { number: 0, clock, kind: Kind::Read, first: 0, count, value: 0 };
        let index = self.requests.len() as u32;
        for requests in self.of_sector.iter_mut().take(seen.len()) {
            requests.push(index);
        }
        self.requests.push(Request { begin, end: clock + 1, outcome: Outcome::Done, seen });
    }

    /// Counts of the whole history.
    pub fn counts(&self) -> Counts {
        let ended = || self.requests.iter().filter(|request| request.end != NEVER);
        Counts {
            requests: ended().count() as u64,
            flushes: ended().filter(|request| request.begin.kind == Kind::Flush).count() as u64,
            looks: ended().map(|request| request.seen.len() as u64).sum(),
        }
    }

    /// The content of a snapshot, if it was taken.
    pub fn snapshot(&self, number: u64) -> Option<&[Seen]> {
        self.snapshots.get(&number).map(Vec::as_slice)
    }

    /// Requests that have not ended, in words.
    pub fn under_way(&self) -> Vec<String> {
        let open = self.requests.iter().filter(|request| request.end == NEVER);
        open.map(|request| format!("{:?}", request.begin)).collect()
    }

    /// Changes and looks of a sector.
    fn of(&self, sector: u64) -> (Vec<Change>, Vec<Look>) {
        let before = Change {
            begin: 0,
            end: 0,
            value: self.initial[sector as usize],
            certainty: Certainty::Must,
            lasting: Lasting::AtItsEnd,
        };
        let (mut changes, mut looks) = (vec![before], Vec::new());
        for request in &self.of_sector[sector as usize] {
            let request = &self.requests[*request as usize];
            let seen = request.seen.get((sector - request.begin.first) as usize);
            if let Some(seen) = seen
                && request.end != NEVER
            {
                looks.push(Look { begin: request.begin.clock, end: request.end, seen: seen.clone() });
            }
            changes.extend(self.change(request, sector));
        }
        (changes, looks)
    }

    fn change(&self, request: &Request, sector: u64) -> Option<Change> {
        let Begin { clock, kind, first, count, value, .. } = request.begin;
        let mut certainty = Certainty::Must;
        let mut lasting = Lasting::AfterFlush;
        let value = match kind {
            Kind::Read | Kind::TakeSnapshot | Kind::Flush | Kind::Other => return None,
            Kind::Write => value,
            Kind::DurableWrite => {
                lasting = Lasting::AtItsEnd;
                value
            }
            Kind::Zero | Kind::Resize => ZERO,
            Kind::Discard => {
                let start = sector / self.cluster * self.cluster;
                if start < first || start + self.cluster > first + count {
                    certainty = Certainty::May;
                }
                ZERO
            }
            Kind::ApplySnapshot => {
                lasting = Lasting::AtItsEnd;
                match self.snapshots.get(&value)?.get(sector as usize) {
                    Some(Seen::Value(value)) => *value,
                    // What was torn has been found by now.
                    Some(Seen::Torn(_)) => return None,
                    // The disk ended before.
                    None => ZERO,
                }
            }
        };
        if request.outcome == Outcome::Refused {
            certainty = Certainty::May;
        }
        Some(Change { begin: clock, end: request.end, value, certainty, lasting })
    }

    /// Judges all that was seen; what is wrong, in words, at most so many of them.
    pub fn judge(&self, most: usize) -> Vec<String> {
        let wrong = (0..self.initial.len() as u64).filter_map(|sector| {
            let (changes, looks) = self.of(sector);
            let Unexplained { at, why } = judge(sector, self.tearing, &changes, &looks).err()?;
            Some(format!("sector {sector}: {why}\n{}", shown(&changes, &looks, at)))
        });
        wrong.take(most).collect()
    }

    /// Judges what a crash at the end of the journals has left.
    pub fn judge_crash(&self, left: &[Seen], most: usize) -> Vec<String> {
        let flushes = self.requests.iter().filter(|request| {
            matches!(request.begin.kind, Kind::Flush | Kind::TakeSnapshot) && request.end != NEVER
        });
        let flushed = flushes.map(|request| request.begin.clock).max().unwrap_or(0);
        let wrong = (0..).zip(left.iter().take(self.initial.len())).filter_map(|(sector, left)| {
            let (changes, looks) = self.of(sector);
            let why = judge_crash(sector, self.tearing, &changes, &looks, flushed, left).err()?;
            Some(format!("sector {sector} after a crash: {why}\n{}", shown(&changes, &looks, NEVER)))
        });
        wrong.take(most).collect()
    }
}

/// A sector's history around a moment.
fn shown(changes: &[Change], looks: &[Look], at: u64) -> String {
    const AROUND: usize = 10;
    let time = |end: u64| if end == NEVER { "...".to_owned() } else { end.to_string() };
    let mut lines: Vec<(u64, String)> = Vec::new();
    for change in changes {
        let may = if change.certainty == Certainty::May { " (perhaps)" } else { "" };
        let what = format!("changed to {}{may}", super::sector::name(change.value));
        lines.push((change.begin, format!("    {}-{} {what}", change.begin, time(change.end))));
    }
    for look in looks {
        let what = match &look.seen {
            Seen::Value(value) => super::sector::name(*value),
            Seen::Torn(_) => "a torn sector".to_owned(),
        };
        lines.push((look.begin, format!("    {}-{} saw {what}", look.begin, time(look.end))));
    }
    lines.sort();
    let skipped = lines.partition_point(|(begin, _)| *begin < at).min(lines.len().saturating_sub(AROUND));
    lines
        .into_iter()
        .skip(skipped.saturating_sub(AROUND))
        .take(2 * AROUND)
        .map(|(_, line)| line)
        .collect::<Vec<_>>()
        .join("\n")
}
