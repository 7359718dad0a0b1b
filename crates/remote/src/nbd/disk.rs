//! An export as a storage: its threads, their connections, and what they may promise.

use super::address::{Endpoint, NbdAddress};
use super::connection::{Connection, FAREWELL, Lost, Terms, Unanswered, Watcher};
use super::durability::Durability;
use super::handshake::{self, Export};
use super::protocol::{BASE_ALLOCATION, STATE_DIRTY, STATE_ZERO, command, command_flag, export};
use super::queue::Queue;
use super::request::{Answer, Request, SharedFlush, StatusRun};
use super::wire::Style;
use crate::error::RemoteError;
use crate::network::Network;
use crate::network::deadline::LONGEST;
use crate::stats::{RemoteStats, StatsSnapshot};
use crate::stream::Stream;
use crate::tls::Tls;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use zebu_storage::sync::Mutex;
use zebu_storage::{Alignment, Completer, Storage, StorageAbilities, StorageDone, StorageOp};

/// The most bytes of a request without data, where lengths have 32 bits: a multiple of every block size.
const MOST_RANGE: u64 = 1 << 30;
/// A flush may take so much longer than other requests.
const FLUSH_FACTOR: u32 = 10;
/// Pauses between attempts to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The pause between attempts to open a disk.
const OPEN_PAUSE: Duration = Duration::from_millis(100);
/// The least time of an attempt to connect.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(10);
/// The pause after an attempt to make a connection more that failed.
const EXTRA_PAUSE: Duration = Duration::from_secs(30);

/// How an export is used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdOptions {
    /// The most connections, not 0. More than one are made only if the server says that it is safe.
    pub connections: usize,
    /// How long a request waits while no bytes come, broken connections included; a flush waits ten times as long. Not 0. As long
    /// as bytes come, it waits for those of the requests before it and for its own, 64 KiB a second at least. A tenth of a
    /// year at most.
    pub timeout: Duration,
    /// How long connecting and agreeing may take. Not 0; a year at most.
    pub connect_timeout: Duration,
    /// How long it is tried again to connect, if nobody listens or answers when the disk is opened. 0: once, for
    /// [`Self::connect_timeout`].
    pub patience: Duration,
    /// A metadata context whose first bit counts as a hole, instead of those of `base:allocation`: what a dirty bitmap marks. The
    /// bytes are as they are.
    pub holes_from: Option<String>,
    /// Metadata contexts to ask for beside `base:allocation`, as `qemu:dirty-bitmap:NAME`.
    pub contexts: Vec<String>,
    /// The way to the server.
    pub network: Network,
}

zebu_storage::option_setters!(NbdOptions {
    connections: usize,
    timeout: Duration,
    connect_timeout: Duration,
    patience: Duration,
    holes_from: Option<String>,
    contexts: Vec<String>,
    network: Network,
});

impl Default for NbdOptions {
    fn default() -> Self {
        Self {
            connections: 4,
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(15),
            patience: Duration::ZERO,
            holes_from: None,
            contexts: Vec::new(),
            network: Network::default(),
        }
    }
}

/// A disk that a server has.
///
/// When a connection breaks, another is made, and unanswered requests are sent again until their time is over. If changes
/// were answered and not flushed when it broke, flushes fail from then on: the server may have lost these changes. So they do
/// once a change was given up whose connection the server has not closed: it may still be done, after later ones.
///
/// A flush goes over each connection that has answered changes since its last flush. One that another connection answers may
/// be of a server that was started again.
pub struct NbdDisk {
    shared: Arc<Shared>,
}

/// State that the disk and its connections share.
struct Shared {
    address: NbdAddress,
    tls: Option<Tls>,
    options: NbdOptions,
    export: Export,
    queue: Queue,
    stats: RemoteStats,
    durability: Mutex<Durability>,
    /// The latest block status, from an offset on, of a disk that nobody changes through this client.
    runs: Mutex<Option<(u64, Vec<StatusRun>)>>,
    /// Whether somebody changed the disk through this client.
    changed: std::sync::atomic::AtomicBool,
}

impl NbdDisk {
    /// Connects to an export.
    ///
    /// # Errors
    /// The name, the errno and the reason: nobody listens, no such export, TLS that fails, a server that breaks the
    /// protocol or is silent.
    pub fn open(address: NbdAddress, options: NbdOptions) -> Result<Self, RemoteError> {
        let name = address.to_string();
        let fail = |errno, reason: String| RemoteError::new(&name, errno, reason);
        let (timeout, connect_timeout) =
            (options.timeout.min(LONGEST / FLUSH_FACTOR), options.connect_timeout.min(LONGEST));
        let options = options.timeout(timeout).connect_timeout(connect_timeout);
        let tls = match &address.tls {
            None => None,
            Some(files) => {
                let host = match &address.endpoint {
                    Endpoint::Tcp { host, .. } => host.as_str(),
                    Endpoint::Unix(_) => "localhost",
                };
                Some(Tls::load(files, host).map_err(|reason| fail(libc::EINVAL, reason))?)
            }
        };
        let begun = Instant::now();
        let (stream, export) = loop {
            let attempt = match options.patience {
                Duration::ZERO => options.connect_timeout,
                patience => {
                    options.connect_timeout.min(patience.saturating_sub(begun.elapsed())).max(OPEN_PAUSE)
                }
            };
            let until = Instant::now() + attempt;
            match handshake::connect(&options.network, &address, tls.as_ref(), &options.contexts, until) {
                Ok(connected) => break connected,
                Err(refused) if begun.elapsed() >= options.patience => {
                    return Err(fail(refused.errno, refused.reason));
                }
                Err(_) => {
                    let left = options.patience.saturating_sub(begun.elapsed());
                    std::thread::sleep(left.min(OPEN_PAUSE));
                }
            }
        };
        for context in &options.contexts {
            if !export.contexts.iter().any(|(name, _)| name == context) {
                return Err(fail(libc::ENOENT, format!("the server has no metadata context '{context}'")));
            }
        }
        let is_shared = export.flags & self::export::CAN_MULTI_CONN != 0;
        let connections = if is_shared { options.connections.max(1) } else { 1 };
        let queue = Queue::new(connections)
            .map_err(|error| fail(error.raw_os_error().unwrap_or(libc::EMFILE), error.to_string()))?;
        let shared = Arc::new(Shared {
            address,
            tls,
            options,
            export,
            queue,
            stats: RemoteStats::default(),
            durability: Mutex::new(Durability::new(connections)),
            runs: Mutex::default(),
            changed: false.into(),
        });
        let disk = Self { shared: Arc::clone(&shared) };
        let mut first = Some(stream);
        for number in 0..connections {
            let (shared, stream) = (Arc::clone(&shared), first.take());
            let thread = std::thread::Builder::new().name("zebu-nbd".to_owned());
            // Fewer connections do as well, but not none.
            if let Err(error) = thread.spawn(move || shared.run(number, stream))
                && number == 0
            {
                return Err(fail(libc::EAGAIN, format!("no thread could be made: {error}")));
            }
        }
        Ok(disk)
    }

    /// Its name, which has no secrets.
    pub fn name(&self) -> String {
        self.shared.address.to_string()
    }

    /// Counters since it was opened.
    pub fn stats(&self) -> StatsSnapshot {
        self.shared.stats.snapshot()
    }

    /// Why a connection broke or could not be made last, if that ever happened.
    pub fn last_failure(&self) -> Option<String> {
        self.shared.queue.failure()
    }

    /// Why a request was given up first, if that ever happened.
    pub fn given_up(&self) -> Option<String> {
        self.shared.queue.given_up()
    }

    /// Has requests end soon: from now on, each fails when its server has given no sign for a few seconds, a flush when it has
    /// given none for a quarter of a minute. For programs that are told to end.
    pub fn hurry(&self) {
        self.shared.queue.hurry();
    }

    /// Metadata contexts that the server has of those that were asked for.
    pub fn contexts(&self) -> impl Iterator<Item = &str> {
        self.shared.export.contexts.iter().map(|(name, _)| name.as_str())
    }

    /// The runs of a metadata context from `offset` on, as many as the server tells at once. In a dirty bitmap, bit 0 of
    /// the flags is set where the disk was written. Waits for the answer.
    ///
    /// # Errors
    /// An errno: ENOENT if the context was not asked for, EINVAL for a range outside the disk, EIO at the deadline.
    pub fn runs(&self, context: &str, offset: u64, len: u64) -> Result<Vec<StatusRun>, i32> {
        let known = self.shared.export.contexts.iter().find(|(name, _)| name == context);
        let &(_, number) = known.ok_or(libc::ENOENT)?;
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= self.shared.export.size);
        let end = end.ok_or(libc::EINVAL)?;
        let (sender, receiver) = mpsc::channel();
        let wanted = Box::new(move |runs| drop(sender.send(runs)));
        self.shared.ask_for_runs(number, offset..end, wanted);
        receiver.recv().unwrap_or(Err(libc::EIO))
    }
}

impl Drop for NbdDisk {
    fn drop(&mut self) {
        self.shared.queue.close();
        self.shared.queue.wait_for_farewells(FAREWELL * 2);
    }
}

impl Storage for NbdDisk {
    fn len(&self) -> u64 {
        self.shared.export.size
    }

    fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.shared.address.to_string().hash(&mut hasher);
        hasher.finish()
    }

    fn alignment(&self) -> Alignment {
        let block = self.shared.export.smallest_block;
        Alignment { memory: 1, offset: block, length: block }
    }

    fn abilities(&self) -> StorageAbilities {
        let flags = self.shared.export.flags;
        let mut abilities = StorageAbilities::empty();
        if flags & export::READ_ONLY == 0 {
            abilities |= StorageAbilities::WRITE;
            if flags & export::SEND_WRITE_ZEROES != 0 {
                abilities |= StorageAbilities::PUNCH;
                // Zeroing that is as slow as writing is not what the ability means.
                abilities.set(StorageAbilities::ZERO_RANGE, flags & export::SEND_FAST_ZERO != 0);
            }
        }
        abilities.set(StorageAbilities::EXTENTS, self.shared.allocation().is_some());
        abilities
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let shared = &self.shared;
        let flags = shared.export.flags;
        let fua = if flags & export::SEND_FLUSH == 0 && flags & export::SEND_FUA != 0 {
            // There is no flush that would make it durable later.
            command_flag::FUA
        } else {
            0
        };
        let (command, flags, range) = match op {
            StorageOp::Read { offset, len } => (command::READ, 0, offset..offset + len),
            StorageOp::Write { offset, len } => (command::WRITE, fua, offset..offset + len),
            StorageOp::Punch { offset, len } => (command::WRITE_ZEROES, fua, offset..offset + len),
            StorageOp::ZeroRange { offset, len } => {
                let flags = fua | command_flag::NO_HOLE | command_flag::FAST_ZERO;
                (command::WRITE_ZEROES, flags, offset..offset + len)
            }
            // A server that knows no flush has nothing that one would write.
            StorageOp::Flush if flags & export::SEND_FLUSH == 0 => {
                // A change that was given up may come all the same.
                let is_lost = shared.durability.lock().is_lost();
                done.finish(if is_lost { Err(libc::EIO) } else { Ok(StorageDone::Done) });
                return;
            }
            StorageOp::Flush => {
                shared.flush(done);
                return;
            }
            StorageOp::ExtentAt { offset } => {
                shared.extent_at(offset, done);
                return;
            }
            _ => {
                done.finish(Err(libc::EOPNOTSUPP));
                return;
            }
        };
        let has_data = matches!(command, command::READ | command::WRITE);
        let bytes = if has_data { range.end - range.start } else { 0 };
        let allowance = shared.queue.allowance(shared.timeout(command), bytes);
        let request = Request::new(command, flags, range, allowance, Answer::Storage(done));
        if request.is_change() {
            shared.changed.store(true, std::sync::atomic::Ordering::SeqCst);
        }
        shared.queue.push(request);
    }
}

impl Shared {
    fn timeout(&self, command: u16) -> Duration {
        let timeout = self.options.timeout;
        if command == command::FLUSH { timeout * FLUSH_FACTOR } else { timeout }
    }

    /// The number of the context that tells of holes.
    fn allocation(&self) -> Option<u32> {
        let wanted = self.options.holes_from.as_deref().unwrap_or(BASE_ALLOCATION);
        self.export.contexts.iter().find(|(name, _)| name == wanted).map(|(_, number)| *number)
    }

    /// The bit of that context by which a run is a hole.
    fn hole_bit(&self) -> u64 {
        if self.options.holes_from.is_some() { STATE_DIRTY } else { STATE_ZERO }
    }

    fn terms(&self) -> Terms {
        let most_range = match self.export.style {
            Style::Extended => u64::MAX,
            Style::Simple | Style::Structured => MOST_RANGE,
        };
        Terms { style: self.export.style, most_payload: u64::from(self.export.most_payload), most_range }
    }

    /// The work of the thread of one connection.
    fn run(&self, number: usize, mut stream: Option<Stream>) {
        let mut pause = FIRST_PAUSE;
        // The first connection is made when the disk is opened.
        let mut had_one = number == 0;
        loop {
            if let Some(stream) = stream.take() {
                let begin = Instant::now();
                let terms = self.terms();
                let connection = Connection::new(number, stream, terms, &self.queue, self, &self.stats);
                let lost = connection.run();
                if matches!(lost, Lost::Closed) {
                    return;
                }
                if begin.elapsed() > LONGEST_PAUSE {
                    pause = FIRST_PAUSE;
                }
                if self.queue.pause(pause) {
                    return;
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            if self.queue.wait_for_work() {
                return;
            }
            // What waits has its own time, which ends during the handshake, too.
            let left = self.queue.expire().map_or(self.options.connect_timeout, |left| {
                left.clamp(SHORTEST_ATTEMPT, self.options.connect_timeout.max(SHORTEST_ATTEMPT))
            });
            let until = Instant::now() + left;
            let connected = handshake::connect(
                &self.options.network,
                &self.address,
                self.tls.as_ref(),
                &self.options.contexts,
                until,
            );
            match connected {
                // Requests were made for the export as it was.
                Ok((connected, export)) if export == self.export => {
                    if std::mem::replace(&mut had_one, true) {
                        self.stats.count_reconnect();
                    }
                    stream = Some(connected);
                }
                other => {
                    self.queue.note_failure(match other {
                        Ok(_) => "the export is not what it was when it was opened".to_owned(),
                        Err(refused) => refused.reason,
                    });
                    // Another connection does the work meanwhile; the server may take no more than that one.
                    if self.queue.pause(if number == 0 { pause } else { EXTRA_PAUSE }) {
                        return;
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Has every connection flush that has something to flush.
    fn flush(&self, done: Completer) {
        let connections: Vec<usize> = {
            let durability = self.durability.lock();
            if durability.is_lost() {
                drop(durability);
                done.finish(Err(libc::EIO));
                return;
            }
            durability.unflushed()
        };
        let allowance = || self.queue.allowance(self.timeout(command::FLUSH), 0);
        let request = |answer| Request::new(command::FLUSH, 0, 0..0, allowance(), answer);
        if connections.is_empty() {
            // Others may have written to the disk.
            self.queue.push(request(Answer::Storage(done)));
            return;
        }
        let shared = SharedFlush::new(connections.len(), done);
        for connection in connections {
            self.queue.push_to(connection, request(Answer::Flush(Arc::clone(&shared))));
        }
    }

    fn ask_for_runs(&self, context: u32, range: std::ops::Range<u64>, wanted: super::request::RunsWanted) {
        let allowance = self.queue.allowance(self.timeout(command::BLOCK_STATUS), 0);
        let answer = Answer::Runs(Some(wanted));
        let mut request = Request::new(command::BLOCK_STATUS, 0, range, allowance, answer);
        request.context = context;
        self.queue.push(request);
    }
}

/// The run of data or hole at `offset` within runs that begin at `start`.
fn extent_in(start: u64, runs: &[StatusRun], offset: u64, hole_bit: u64) -> Option<(u64, bool)> {
    let mut at = start;
    let mut found: Option<(u64, bool)> = None;
    for run in runs {
        let end = at.saturating_add(run.len);
        if end > offset {
            let hole = run.flags & hole_bit != 0;
            match &mut found {
                None => found = Some((end - offset, hole)),
                Some((len, is_hole)) if *is_hole == hole => *len = end - offset,
                Some(_) => break,
            }
        }
        at = end;
    }
    found
}

impl Shared {
    /// Answers from the latest block status, or asks for another.
    fn extent_at(self: &Arc<Self>, offset: u64, done: Completer) {
        let Some(context) = self.allocation() else {
            done.finish(Err(libc::EOPNOTSUPP));
            return;
        };
        let is_changed = || self.changed.load(std::sync::atomic::Ordering::SeqCst);
        let size = self.export.size;
        if !is_changed() {
            let runs = self.runs.lock();
            let known = runs.as_ref().filter(|(start, _)| *start <= offset);
            if let Some((len, hole)) =
                known.and_then(|(start, runs)| extent_in(*start, runs, offset, self.hole_bit()))
            {
                drop(runs);
                done.finish(Ok(StorageDone::Extent { len: len.min(size - offset), hole }));
                return;
            }
        }
        let block = u64::from(self.export.smallest_block);
        let start = offset - offset % block;
        // As the server may tell more than was asked for, so may it less.
        let end = size.min(start.saturating_add(MOST_RANGE));
        let (shared, hole_bit) = (Arc::downgrade(self), self.hole_bit());
        let wanted = Box::new(move |runs: Result<Vec<StatusRun>, i32>| {
            let result = runs.and_then(|runs| {
                let (len, hole) = extent_in(start, &runs, offset, hole_bit).ok_or(libc::EIO)?;
                if let Some(shared) = shared.upgrade() {
                    *shared.runs.lock() = Some((start, runs));
                }
                Ok(StorageDone::Extent { len: len.min(size - offset), hole })
            });
            done.finish(result);
        });
        self.ask_for_runs(context, start..end, wanted);
    }
}

impl Watcher for Shared {
    fn may_send(&self, connection: usize, request: &mut Request) -> bool {
        if request.command != command::FLUSH {
            return true;
        }
        let durability = self.durability.lock();
        request.covers = durability.covered(connection);
        !durability.is_lost()
    }

    fn succeeded(&self, connection: usize, request: &Request) {
        let has_flush = self.export.flags & export::SEND_FLUSH != 0;
        let mut durability = self.durability.lock();
        if request.command == command::FLUSH {
            durability.note_flush(connection, request.covers);
        } else if request.is_change() && !request.is_durable() && has_flush {
            durability.note_change(connection);
        }
    }

    fn is_over(&self, connection: usize, unanswered: Unanswered) {
        self.durability.lock().note_end(connection, unanswered == Unanswered::MayCome);
    }
}
