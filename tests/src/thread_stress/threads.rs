//! The process that runs a case: threads that share one image, each with a worker or by calls of the disk.

use super::disk;
use super::hands::Hands;
use super::journal::{Kind, Outcome};
use super::operator::Operator;
use super::plan::{Case, Place, Places};
use super::recorder::{Clock, Recorder, fail};
use super::sector::{SECTOR, fill, look_at_all};
use crate::driver::worker;
use crate::random::Random;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zebu_engine::storage::{Engine, IoBuf, IoBufs, Worker};
use zebu_engine::{Durability, Error, ErrorKind, Image, ZeroMode};

/// Writers of a round; each round has numbers of its own.
const WRITERS: u64 = 8;

/// Runs a case in a directory, whole. A failure ends the process.
pub fn run(case: &Case, dir: &Path) {
    let clock: Clock = Arc::new(AtomicU64::new(1));
    let main = worker(Engine::Threads);
    let asked = |what: &str, error: Error| -> ! { fail(&format!("{what}: {error}")) };
    main.block_on(disk::make(&main, dir, case)).unwrap_or_else(|e| asked("making the image", e));
    let mut operator = Operator::new(case.clone(), dir);
    for round in 0..case.rounds {
        let first = round * WRITERS;
        let opened = disk::open_disk(dir, case).unwrap_or_else(|e| asked("opening", e));
        let image = opened.image().clone();
        let busy = AtomicU64::new(case.threads.len() as u64);
        std::thread::scope(|scope| {
            for (index, surface) in (0..).zip(&case.threads) {
                let (disk, busy, clock) = (&opened, &busy, &clock);
                scope.spawn(move || {
                    thread(case, dir, Hands::new(*surface, disk), clock, first + index, index);
                    busy.fetch_sub(1, Ordering::SeqCst);
                });
            }
            let recorder = Recorder::new(dir, case.seed, first + 5, &clock);
            operator.run(&image, &recorder, round, &busy);
            recorder.over();
        });
        let recorder = Recorder::new(dir, case.seed, first + 6, &clock);
        main.block_on(read_all(&main, &image, &recorder)).unwrap_or_else(|e| asked("reading all", e));
        let stats = image.stats();
        if stats.cache_bytes > 2 * stats.cache_limit + (1 << 20) {
            fail(&format!("the cache holds {} bytes, its limit is {}", stats.cache_bytes, stats.cache_limit));
        }
        let number = recorder.begin(Kind::Flush, 0, 0, 0);
        main.block_on(image.close(&main)).unwrap_or_else(|e| asked("closing", e));
        recorder.end(number, Outcome::Done, Vec::new());
        drop((image, opened));
        // Nothing is known of what was cached.
        let image = main.block_on(disk::open(&main, dir, case)).unwrap_or_else(|e| asked("opening", e));
        main.block_on(read_all(&main, &image, &recorder)).unwrap_or_else(|e| asked("reading all", e));
        main.block_on(image.close(&main)).unwrap_or_else(|e| asked("closing", e));
        recorder.over();
    }
}

/// Reads the whole disk.
async fn read_all(worker: &Worker, image: &Image, recorder: &Recorder) -> Result<(), Error> {
    const PIECE: u64 = 128;
    let sectors = image.virtual_size() / SECTOR as u64;
    let mut first = 0;
    while first < sectors {
        let count = PIECE.min(sectors - first);
        let number = recorder.begin(Kind::Read, first, count, 0);
        let bufs = IoBuf::zeroed(count as usize * SECTOR).into();
        let (result, bufs) = image.read(worker, first * SECTOR as u64, bufs).await;
        result?;
        recorder.end(number, Outcome::Done, look_at_all(&bytes_of(&bufs), first));
        first += count;
    }
    Ok(())
}

/// The bytes of buffers.
pub(super) fn bytes_of(bufs: &IoBufs) -> Vec<u8> {
    let mut bytes = vec![0; bufs.len()];
    bufs.copy_to(0, &mut bytes);
    bytes
}

/// One thread of a round.
fn thread(case: &Case, dir: &Path, hands: Hands, clock: &Clock, writer: u64, index: u64) {
    let recorder = Rc::new(Recorder::new(dir, case.seed, writer, clock));
    let lanes = (0..case.lanes).map(|lane| Lane {
        case: case.clone(),
        hands: hands.clone(),
        recorder: recorder.clone(),
        places: Places::new(case, index),
        random: Random::new(case.seed ^ (writer * 100 + lane + 1) << 32),
    });
    hands.run(lanes.map(Lane::run));
    recorder.over();
}

/// One of the requests that a thread has in flight, and those that follow it.
struct Lane {
    case: Case,
    hands: Hands,
    recorder: Rc<Recorder>,
    places: Places,
    random: Random,
}

impl Lane {
    async fn run(mut self) {
        for turn in 0..self.case.requests {
            let place = self.places.next(&mut self.random, turn);
            match self.random.below(100) {
                36..64 => self.read(place).await,
                64..72 => self.zero(place).await,
                72..80 => self.discard(place).await,
                80..90 if self.case.has_compression() => self.compress(place).await,
                90..97 => self.flush().await,
                97..100 => self.write(place, Durability::Durable).await,
                _ => self.write(place, Durability::Volatile).await,
            }
        }
    }

    /// How a request on this place ended. One that failed for no reason ends the process.
    fn outcome(&self, what: &str, place: Place, result: Result<(), Error>) -> Outcome {
        match result {
            Ok(()) => Outcome::Done,
            // The end of the disk moves there.
            Err(e) if e.kind() == ErrorKind::OutOfRange && place.first + place.count > self.case.sectors => {
                Outcome::Refused
            }
            Err(e) => fail(&format!("{what} {place:?}: {e}")),
        }
    }

    /// Buffers with this content, in one piece or several, at odd places.
    fn buffers(&mut self, bytes: &[u8]) -> IoBufs {
        let mut bufs = IoBufs::new();
        let mut rest = bytes;
        while self.random.chance(30) && rest.len() > 8 {
            let unit = *self.random.pick(&[1, 8, 512, 4096]);
            let len = (self.random.below(rest.len() as u64) as usize / unit * unit).max(1);
            bufs.push(IoBuf::copy_of(&rest[..len]));
            rest = &rest[len..];
        }
        bufs.push(IoBuf::copy_of(rest));
        bufs
    }

    fn content(&mut self, place: Place) -> (u64, IoBufs) {
        let value = self.recorder.value();
        let mut bytes = vec![0; place.count as usize * SECTOR];
        fill(&mut bytes, value, place.first);
        (value, self.buffers(&bytes))
    }

    async fn write(&mut self, place: Place, durability: Durability) {
        let (value, bufs) = self.content(place);
        let kind = if durability == Durability::Durable { Kind::DurableWrite } else { Kind::Write };
        let number = self.recorder.begin(kind, place.first, place.count, value);
        let offset = place.first * SECTOR as u64;
        let result = self.hands.write(offset, bufs, durability).await;
        self.recorder.end(number, self.outcome("write", place, result), Vec::new());
    }

    async fn read(&mut self, place: Place) {
        let empty = vec![0x55; place.count as usize * SECTOR];
        let bufs = self.buffers(&empty);
        let number = self.recorder.begin(Kind::Read, place.first, place.count, 0);
        let offset = place.first * SECTOR as u64;
        if self.case.copy_on_read {
            let filled = self.hands.fill_from_backing(offset, bufs.len() as u64).await;
            // Refused, the read finds the same.
            self.outcome("copy on read", place, filled);
        }
        let (result, bufs) = self.hands.read(offset, bufs).await;
        let outcome = self.outcome("read", place, result);
        let ended = self.recorder.now();
        let seen = match outcome {
            Outcome::Done => look_at_all(&bytes_of(&bufs), place.first),
            Outcome::Refused => Vec::new(),
        };
        self.recorder.end_at(number, ended, outcome, seen);
    }

    async fn zero(&mut self, place: Place) {
        let mode = *self.random.pick(&[ZeroMode::Keep, ZeroMode::Unmap]);
        let number = self.recorder.begin(Kind::Zero, place.first, place.count, 0);
        let [offset, len] = [place.first, place.count].map(|sectors| sectors * SECTOR as u64);
        let result = self.hands.write_zeroes(offset, len, mode).await;
        self.recorder.end(number, self.outcome("zero", place, result), Vec::new());
    }

    async fn discard(&mut self, place: Place) {
        let number = self.recorder.begin(Kind::Discard, place.first, place.count, 0);
        let [offset, len] = [place.first, place.count].map(|sectors| sectors * SECTOR as u64);
        let result = self.hands.discard(offset, len).await;
        self.recorder.end(number, self.outcome("discard", place, result), Vec::new());
    }

    /// Writes whole clusters compressed, away from the end that moves.
    async fn compress(&mut self, place: Place) {
        let unit = self.case.cluster_sectors();
        let count = (place.count / unit).max(1) * unit;
        let first =
            (place.first / unit * unit).min((self.case.sectors / unit).saturating_sub(count / unit) * unit);
        let count = count.min(self.case.sectors / unit * unit - first);
        let place = Place { first, count };
        let (value, bufs) = self.content(place);
        let number = self.recorder.begin(Kind::Write, place.first, place.count, value);
        let offset = place.first * SECTOR as u64;
        let result = self.hands.write_compressed(offset, bufs).await;
        self.recorder.end(number, self.outcome("compressed write", place, result), Vec::new());
    }

    async fn flush(&mut self) {
        let number = self.recorder.begin(Kind::Flush, 0, 0, 0);
        if let Err(e) = self.hands.flush().await {
            fail(&format!("flush: {e}"));
        }
        self.recorder.end(number, Outcome::Done, Vec::new());
    }
}
