//! Reading by ranges: the queue of fetches, the threads that get them, and readers that wait for blocks.

use super::cache::{BLOCK, Cache, Cause};
use super::connection::{Connection, INPUT, Patience};
use super::fetch::{Fetch, Memory, answer};
use super::read_around::ReadAround;
use super::source::{Reply, Source, Trouble};
use crate::afresh::AfreshCount;
use crate::reader::{Reader, copy};
use crate::streaks::{Found, Streaks};
use std::collections::HashMap;
use std::collections::VecDeque;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zebu_storage::sync::{Condvar, Mutex, MutexGuard};
use zebu_storage::{Completer, StorageDone};

/// Reads of at least so many bytes go past the cache.
const DIRECT: u64 = 256 << 10;
/// The most bytes of one request to the server that several reads share.
const MOST_MERGED: u64 = 8 << 20;
/// The most bytes of one fetch of blocks.
const MOST_BLOCKS: u64 = 2 << 20;
/// The most bytes ahead of a reader that goes forward.
const MOST_AHEAD: u64 = 8 << 20;
/// Pauses between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How often a pause looks whether it is over.
const SLICE: Duration = Duration::from_millis(100);
/// The longest that a server may be silent before another connection is tried.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);

/// An object that is read by ranges.
pub(super) struct Ranged {
    pub(super) source: Source,
    state: Mutex<State>,
    more: Condvar,
    limits: Limits,
    /// A cache above keeps what is read: each read is fetched as it is.
    pub(super) is_below_cache: AtomicBool,
    pub(super) afresh: AfreshCount,
}

/// The division of a disk's memory.
#[derive(Debug, Clone, Copy)]
struct Limits {
    threads: usize,
    /// Bytes of one fetch of blocks.
    run: u64,
    cache: u64,
    ahead: u64,
}

impl Limits {
    fn of(memory: u64, connections: usize) -> Self {
        // A thread has what it receives into, and the block that it fills.
        let least = INPUT as u64 + BLOCK;
        let threads = connections.clamp(1, (memory / 2 / least).max(1) as usize);
        let share = (memory / 2 / threads as u64).saturating_sub(INPUT as u64);
        let run = (share / BLOCK * BLOCK).clamp(BLOCK, MOST_BLOCKS);
        let cache = memory.saturating_sub(threads as u64 * least);
        Self { threads, run, cache, ahead: (cache / 4).min(MOST_AHEAD) }
    }
}

struct State {
    queue: VecDeque<Fetch>,
    /// Blocks that are being fetched, and who waits for each.
    loading: HashMap<u64, Vec<Arc<SmallRead>>>,
    cache: Cache,
    streaks: Streaks,
    threads: usize,
    idle: usize,
    /// A connection from the opening.
    spare: Option<Connection>,
    is_closed: bool,
    /// The object is another now.
    is_changed: bool,
}

/// A small read that waits for blocks.
struct SmallRead {
    deadline: Instant,
    reader: Reader,
}

impl Ranged {
    /// The object of `source`, which is pinned. `spare` is a connection to its server.
    pub(super) fn new(source: Source, spare: Option<Connection>) -> Arc<Self> {
        let limits = Limits::of(source.options.memory, source.options.connections);
        let state = State {
            queue: VecDeque::new(),
            loading: HashMap::new(),
            cache: Cache::new(limits.cache, ReadAround::new(source.options.readahead, BLOCK)),
            streaks: Streaks::new(limits.ahead),
            threads: 0,
            idle: 0,
            spare,
            is_closed: false,
            is_changed: false,
        };
        Arc::new(Self {
            source,
            state: Mutex::new(state),
            more: Condvar::new(),
            limits,
            is_below_cache: AtomicBool::new(false),
            afresh: AfreshCount::default(),
        })
    }

    /// Adds the beginning of the object, which is there already: whole blocks, but for the object's last one.
    pub(super) fn put_first(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        for (number, block) in (0..).zip(bytes.chunks(BLOCK as usize)) {
            state.cache.insert(number, block.into(), Cause::Read);
        }
    }

    /// No more reads: what waits gets EIO.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.spare = None;
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        self.more.notify_all();
        for fetch in queue {
            self.fail(fetch, "the disk is closed");
        }
    }

    /// Reads a range within the object, not empty.
    pub(super) fn read(self: &Arc<Self>, range: Range<u64>, mut done: Completer) {
        let len = range.end - range.start;
        let asked = Instant::now();
        let deadline = asked + self.source.options.timeout;
        let mut state = self.state.lock();
        if state.is_closed || state.is_changed {
            drop(state);
            done.finish(Err(libc::EIO));
            return;
        }
        let is_afresh = self.afresh.is_wanted();
        if is_afresh {
            blocks(&range).for_each(|number| state.cache.remove(number));
        }
        // What the opening brought is in the cache in any case.
        let is_direct = len >= DIRECT
            || is_afresh
            || self.is_below_cache.load(Ordering::Relaxed)
                && blocks(&range).any(|number| !state.cache.has(number));
        if is_direct {
            state.queue.push_back(Fetch::of_reader(range, done, self.source.allowance(asked, len)));
            self.begin(state, 1);
            return;
        }
        let ahead =
            state.streaks.note(&range, Found::Away).filter(|_| !self.is_below_cache.load(Ordering::Relaxed));
        let mut missing = Vec::new();
        for number in blocks(&range) {
            match state.cache.get(number) {
                Some(block) => copy(&mut done, number * BLOCK, block),
                None => missing.push(number),
            }
        }
        let mut wanted = Vec::new();
        let mut answered = None;
        if missing.is_empty() {
            answered = Some(done);
        } else {
            let reader = Reader::new(done, missing.len());
            let read = Arc::new(SmallRead { deadline, reader });
            for number in missing {
                match state.loading.entry(number) {
                    Entry::Occupied(mut others) => others.get_mut().push(Arc::clone(&read)),
                    Entry::Vacant(place) => {
                        place.insert(vec![Arc::clone(&read)]);
                        wanted.push(number);
                    }
                }
            }
        }
        if !wanted.is_empty() {
            let bytes = state.cache.bytes_around();
            let start = range.start / bytes * bytes;
            self.add(&mut state, start..start.saturating_add(bytes), &mut wanted);
        }
        let mut added = self.queue_blocks(&mut state, wanted, asked);
        if let Some(ahead) = ahead {
            // Apart, so that the reader does not wait for it.
            let mut wanted = Vec::new();
            self.add(&mut state, ahead, &mut wanted);
            added += self.queue_blocks(&mut state, wanted, asked);
        }
        self.begin(state, added);
        if let Some(done) = answered {
            done.finish(Ok(StorageDone::Moved(len)));
        }
    }

    /// Adds blocks of a range that nobody waits for yet, as far as memory allows.
    fn add(&self, state: &mut State, range: Range<u64>, wanted: &mut Vec<u64>) {
        let range = range.start..range.end.min(self.source.len());
        if range.is_empty() {
            return;
        }
        for number in blocks(&range) {
            if (state.loading.len() as u64 + 1) * BLOCK > state.cache.most() / 2 {
                return;
            }
            if !state.cache.has(number) && !state.loading.contains_key(&number) {
                state.loading.insert(number, Vec::new());
                wanted.push(number);
            }
        }
    }

    /// Queues fetches of blocks that are marked as loading; how many.
    fn queue_blocks(&self, state: &mut State, mut wanted: Vec<u64>, asked: Instant) -> usize {
        wanted.sort_unstable();
        let mut added = 0;
        let mut from = 0;
        while from < wanted.len() {
            let first = wanted[from];
            let most = (self.limits.run / BLOCK) as usize;
            let run = wanted[from..].iter().take(most).zip(first..).take_while(|(a, b)| *a == b).count();
            let end = ((first + run as u64) * BLOCK).min(self.source.len());
            let allowance = self.source.allowance(asked, end - first * BLOCK);
            state.queue.push_back(Fetch::of_blocks(first * BLOCK..end, allowance));
            added += 1;
            from += run;
        }
        added
    }

    /// Has threads take what was queued.
    fn begin(self: &Arc<Self>, mut state: MutexGuard<'_, State>, added: usize) {
        let wake = added.min(state.idle);
        let mut spawn =
            added.saturating_sub(state.idle).min(self.limits.threads.saturating_sub(state.threads));
        let mut orphans = VecDeque::new();
        while spawn > 0 {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("zebu-http".to_owned());
            match thread.spawn(move || shared.run()) {
                Ok(_) => state.threads += 1,
                // Fewer do as well, but not none.
                Err(_) if state.threads > 0 => break,
                Err(_) => orphans = std::mem::take(&mut state.queue),
            }
            spawn -= 1;
        }
        drop(state);
        for _ in 0..wake {
            self.more.notify_one();
        }
        for fetch in orphans {
            self.fail(fetch, "no thread could be made");
        }
    }

    /// The work of a thread.
    fn run(&self) {
        let mut link = Link { connection: None, random: RandomState::new().hash_one(0) | 1 };
        link.connection = self.state.lock().spare.take().map(|spare| (self.source.place().1, spare));
        while let Some(fetch) = self.next() {
            self.perform(fetch, &mut link);
        }
    }

    /// Waits for a fetch, and takes those that follow it in; `None` if the disk is closed.
    fn next(&self) -> Option<Fetch> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(mut fetch) = state.queue.pop_front() {
                let most = match &fetch.memory {
                    Memory::Readers(_) => MOST_MERGED,
                    Memory::Blocks(_) => self.limits.run,
                };
                // As long as others are free, more connections are faster than longer requests.
                let is_busy = state.idle == 0 && state.threads >= self.limits.threads;
                while is_busy && let Some(next) = state.queue.pop_front() {
                    if let Err(other) = fetch.join(next, most) {
                        state.queue.push_front(*other);
                        break;
                    }
                }
                return Some(fetch);
            }
            state.idle += 1;
            state = self.more.wait(state);
            state.idle -= 1;
        }
    }

    /// Whether nobody waits for a fetch any more.
    fn is_unwanted(&self, fetch: &Fetch) -> bool {
        let state = self.state.lock();
        if state.is_closed || state.is_changed {
            return true;
        }
        match &fetch.memory {
            Memory::Readers(_) => fetch.is_cancelled(),
            Memory::Blocks(_) => {
                let mut reads =
                    blocks(&fetch.range).filter_map(|number| state.loading.get(&number)).flatten().peekable();
                reads.peek().is_some() && reads.all(|read| read.reader.is_cancelled())
            }
        }
    }

    /// Gets a range, by as many attempts as its time allows.
    fn perform(&self, mut fetch: Fetch, link: &mut Link) {
        let mut pause = FIRST_PAUSE;
        loop {
            if self.is_unwanted(&fetch) {
                self.fail(fetch, "given up");
                return;
            }
            if self.source.is_late(fetch.deadline(), fetch.limit()) {
                let reason = self.source.last_failure();
                self.fail(fetch, reason.as_deref().unwrap_or("the server does not answer in time"));
                return;
            }
            let before = fetch.progress();
            let was_used = link.connection.as_ref().is_some_and(|(_, connection)| connection.has_answered());
            let trouble = match self.attempt(&mut fetch, link) {
                Ok(()) => {
                    // Blocks were handed over as they came.
                    if let Memory::Readers(readers) = fetch.memory {
                        answer(readers, Ok(()));
                    }
                    return;
                }
                Err(trouble) => trouble,
            };
            link.connection = None;
            // A server may close a connection between two requests.
            if was_used
                && fetch.progress() == before
                && matches!(&trouble, Trouble::Passing { pause: None, .. })
            {
                self.source.stats.count_reconnect();
                continue;
            }
            if !matches!(trouble, Trouble::Cancelled) {
                self.source.note_failure(trouble.reason());
            }
            if let Trouble::Changed(reason) = &trouble {
                self.state.lock().is_changed = true;
                self.fail(fetch, reason);
                return;
            }
            self.source.stats.count_retries(1);
            if fetch.progress() > before {
                pause = FIRST_PAUSE;
            }
            let asked = if let Trouble::Passing { pause: Some(asked), .. } = trouble {
                asked
            } else {
                Duration::ZERO
            };
            let until = Instant::now() + pause.mul_f64(link.jitter()).max(asked);
            while Instant::now() < until
                && !self.source.is_late(fetch.deadline(), fetch.limit())
                && !self.is_unwanted(&fetch)
            {
                std::thread::sleep(SLICE.min(until.saturating_duration_since(Instant::now())));
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// One attempt to get what is missing.
    fn attempt(&self, fetch: &mut Fetch, link: &mut Link) -> Result<(), Trouble> {
        let (mut url, mut generation) = self.source.place();
        let (deadline, limit) = (fetch.deadline(), fetch.limit());
        let mut is_renewed = false;
        let silence = (self.source.options.timeout / 4).min(LONGEST_SILENCE);
        while !fetch.rest().is_empty() {
            let range = fetch.rest();
            let is_over = || self.state.lock().is_closed || self.source.is_late(deadline, limit);
            let patience = Patience { until: limit, silence, is_cancelled: &is_over };
            if link
                .connection
                .as_ref()
                .is_some_and(|(of, connection)| *of != generation || !connection.is_ready())
            {
                link.connection = None;
            }
            if link.connection.is_none() {
                link.connection = Some((generation, self.source.connect(&url, limit)?));
            }
            let Some((_, connection)) = &mut link.connection else { continue };
            let response = self.source.ask(connection, &url, Some(&range), &patience)?;
            let may_have_moved = self.source.is_moved(&url) || response.status().is_redirection();
            let reply = match self.source.judge(&response, Some(&range), connection, &patience) {
                Err(Trouble::Denied { .. }) if may_have_moved && !is_renewed => {
                    is_renewed = true;
                    // Places that redirects lead to are often good for minutes only.
                    self.source.renew(generation, &patience)?;
                    let now = self.source.place();
                    if now.0 == url {
                        link.connection = None;
                        return Err(Trouble::Passing {
                            reason: "the server does not give the object where its redirect leads".to_owned(),
                            pause: None,
                        });
                    }
                    (url, generation) = now;
                    continue;
                }
                reply => reply?,
            };
            let Reply::Part { range: part, .. } = reply else {
                return Err(Trouble::Passing {
                    reason: "the server has no ranges any more: it sends all of the object".to_owned(),
                    pause: None,
                });
            };
            let mut left = part.end - part.start;
            while left > 0 {
                let memory = fetch.next_memory();
                let most = (memory.len() as u64).min(left) as usize;
                let read = connection.read(&mut memory[..most], &patience)?;
                if read == 0 {
                    return Err(Trouble::Passing {
                        reason: "the body of a response is too short".to_owned(),
                        pause: None,
                    });
                }
                fetch.done += read as u64;
                left -= read as u64;
                self.source.count_read(read as u64);
                while let Some((number, block)) = fetch.next_whole() {
                    self.hand_over(number, block);
                }
            }
            // The end of the body, which is where the next response begins.
            if connection.read(&mut [0], &patience)? != 0 {
                link.connection = None;
            }
        }
        Ok(())
    }

    /// Gives a block to the cache and to those who wait for it.
    fn hand_over(&self, number: u64, block: Arc<[u8]>) {
        let mut state = self.state.lock();
        let waiting = state.loading.remove(&number).unwrap_or_default();
        let cause = if waiting.is_empty() { Cause::Neighbour } else { Cause::Read };
        state.cache.insert(number, Arc::clone(&block), cause);
        drop(state);
        for read in waiting {
            read.reader.take(number * BLOCK, &block);
        }
    }

    fn fail(&self, fetch: Fetch, reason: &str) {
        match fetch.memory {
            Memory::Readers(readers) => {
                if !readers.iter().all(Completer::is_cancelled) {
                    self.source.note_given_up(reason);
                }
                answer(readers, Err(libc::EIO));
            }
            Memory::Blocks(_) => self.fail_blocks(&fetch.range, reason),
        }
    }

    /// Fails the readers of blocks; but those that came later have their own time.
    fn fail_blocks(&self, range: &Range<u64>, reason: &str) {
        let now = Instant::now();
        let mut over = Vec::new();
        let mut state = self.state.lock();
        let is_final = state.is_closed || state.is_changed || self.source.is_out_of_grace();
        for number in blocks(range) {
            let reads = state.loading.remove(&number).unwrap_or_default();
            let is_patient =
                |read: &Arc<SmallRead>| !is_final && read.deadline > now && !read.reader.is_cancelled();
            let (patient, failed): (Vec<_>, Vec<_>) = reads.into_iter().partition(is_patient);
            over.extend(failed);
            if let Some(deadline) = patient.iter().map(|read| read.deadline).min() {
                state.loading.insert(number, patient);
                let asked = deadline.checked_sub(self.source.options.timeout).unwrap_or(now);
                self.queue_blocks(&mut state, vec![number], asked);
            }
        }
        drop(state);
        self.more.notify_all();
        if !over.is_empty() {
            self.source.note_given_up(reason);
        }
        for read in over {
            read.reader.fail(libc::EIO);
        }
    }
}

/// Numbers of the blocks that a range touches.
fn blocks(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// A thread's way to the server.
struct Link {
    /// A connection, and which search for the object led to it.
    connection: Option<(u64, Connection)>,
    random: u64,
}

impl Link {
    /// A factor from 0.5 to 1.5, so that threads don't come back all at once.
    fn jitter(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        0.5 + (self.random >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_divided_and_never_more_than_it_is() {
        for memory in [4 << 20, 8 << 20, 64 << 20, 1 << 30] {
            for connections in [1, 2, 16, 64, 1000] {
                let limits = Limits::of(memory, connections);
                let threads = limits.threads as u64 * (INPUT as u64 + BLOCK);
                assert!(threads + limits.cache <= memory, "{memory} {connections} {limits:?}");
                assert!(
                    limits.cache >= memory / 4 && limits.run >= BLOCK,
                    "{memory} {connections} {limits:?}"
                );
                assert_eq!(limits.run % BLOCK, 0);
            }
        }
        let mut link = Link { connection: None, random: 1 };
        assert!((0..1000).all(|_| (0.5..1.5).contains(&link.jitter())));
    }
}
