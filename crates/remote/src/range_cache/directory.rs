//! The directory of a cache: its objects, its lock, and how much it has.
//!
//! Processes that share a directory take the lock of the file `state` to store and to evict, and count there what all of
//! them have stored. Reads take no lock.

use super::object::ObjectFiles;
use super::record::{BLOCK, RANGE, VERSION};
use super::uses::Uses;
use super::version::{ObjectVersion, directory_of};
use super::workers::Workers;
use crate::error::RemoteError;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use zebu_storage::sync::{Mutex, MutexGuard};

const STATE: &str = "state";
const OBJECTS: &str = "objects";
/// Bytes of `state`.
const STATE_LEN: u64 = 4096;
const MAGIC: &[u8; 8] = b"zebucach";
/// Byte of `state` at which is counted what all processes have stored.
const USAGE: u64 = 16;
/// The least size of a cache: less would be evicted while it is read.
const LEAST_SIZE: u64 = 16 << 20;
/// The most objects of others that are open, to be evicted when there is no room.
const MOST_OBJECTS: usize = 256;
/// How long a process evicts by what it knows before it looks what others have stored.
const STOCK_INTERVAL: Duration = Duration::from_secs(300);
/// How long nothing is stored after there was no place for it.
const PAUSE: Duration = Duration::from_secs(10);
/// Seconds after which others learn that a range was used.
const USE_INTERVAL: u32 = 60;
/// The longest that the end of a cache waits for what is to be stored.
const LONGEST_END: Duration = Duration::from_secs(10);
/// Bad blocks that are reported one by one.
const MOST_REPORTS: u64 = 16;

/// Takes a message for people.
type Report = Box<dyn Fn(&str) + Send + Sync>;

/// The bounds of a cache, and who is told what went wrong in it.
pub struct RangeCacheOptions {
    size: u64,
    report: Report,
}

impl RangeCacheOptions {
    /// A cache of at most `size` bytes, at least 16 MiB. `report` is told what people should know, by any thread.
    pub fn new(size: u64, report: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { size, report: Box::new(report) }
    }
}

/// Counters of a cache since it was opened by this process, in bytes unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Read from the local disk.
    pub hits: u64,
    /// Fetched from servers.
    pub fetched: u64,
    /// Stored.
    pub stored: u64,
    /// Fetched and not stored: there was no room, or no time.
    pub not_stored: u64,
    /// Given up for others.
    pub evicted: u64,
    /// Blocks that were not as they had been stored, and were fetched again.
    pub bad_blocks: u64,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) hits: AtomicU64,
    pub(super) fetched: AtomicU64,
    stored: AtomicU64,
    pub(super) not_stored: AtomicU64,
    evicted: AtomicU64,
    bad_blocks: AtomicU64,
}

/// A directory with ranges of objects.
pub struct RangeCache {
    /// That of the objects, with nothing else in it.
    path: PathBuf,
    size: u64,
    report: Report,
    /// The file `state`, and the objects that this process has open. Held while the file is locked.
    shared: Mutex<Shared>,
    uses: Mutex<Uses>,
    pub(super) counters: Counters,
    pub(super) workers: Arc<Workers>,
    /// When there was no place last, unless something was stored since.
    no_place: Mutex<Option<Instant>>,
    /// That was told once.
    is_told: AtomicBool,
}

struct Shared {
    state: File,
    /// By number; `None` for one that was given up.
    objects: Vec<Option<Arc<ObjectFiles>>>,
    /// When it was looked last what there is.
    stock_taken: Instant,
}

impl Shared {
    fn number_of(&self, is_it: impl Fn(&ObjectFiles) -> bool) -> Option<usize> {
        self.objects.iter().position(|object| object.as_deref().is_some_and(&is_it))
    }

    /// Keeps an object open; its number.
    fn keep(&mut self, object: Arc<ObjectFiles>) -> usize {
        let number = self.objects.iter().position(Option::is_none).unwrap_or(self.objects.len());
        if number == self.objects.len() {
            self.objects.push(None);
        }
        self.objects[number] = Some(object);
        number
    }
}

/// The directory's lock.
struct Locked<'a>(MutexGuard<'a, Shared>);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let _ = flock(&self.0.state, FlockOperation::Unlock);
    }
}

impl Locked<'_> {
    fn usage(&self) -> u64 {
        let mut bytes = [0; 8];
        let read = self.0.state.read_exact_at(&mut bytes, USAGE);
        read.map_or(0, |()| u64::from_le_bytes(bytes))
    }

    fn set_usage(&self, usage: u64) {
        let _ = self.0.state.write_all_at(&usage.to_le_bytes(), USAGE);
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as u32)
}

impl RangeCache {
    /// Opens a directory, or makes it; what is in it from before is used.
    ///
    /// # Errors
    /// The directory belongs to another user or others may write in it, its file system can't punch holes, it has a cache
    /// of another format, or `size` is too small.
    pub fn open(path: &Path, options: RangeCacheOptions) -> Result<Arc<Self>, RemoteError> {
        let shown = path.to_string_lossy().into_owned();
        let fail = |errno: i32, reason: &str| RemoteError::new(&shown, errno, format!("the cache: {reason}"));
        let failed = |error: io::Error| fail(error.raw_os_error().unwrap_or(libc::EIO), &error.to_string());
        if options.size < LEAST_SIZE {
            return Err(fail(libc::EINVAL, &format!("it needs at least {} MiB", LEAST_SIZE >> 20)));
        }
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        let found = std::fs::metadata(path).map_err(failed)?;
        if !found.is_dir() {
            return Err(fail(libc::ENOTDIR, "it is no directory"));
        }
        let me = rustix::process::geteuid().as_raw();
        if found.uid() != me || found.mode() & 0o022 != 0 {
            let reason = "others may write in it, or it is another user's, and could show wrong bytes: give a directory of \
                          your own with mode 0700";
            return Err(fail(libc::EACCES, reason));
        }
        let mut open = OpenOptions::new();
        open.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let state = open.open(path.join(STATE)).map_err(failed)?;
        let objects = Self::objects_in(path);
        match std::fs::DirBuilder::new().mode(0o700).create(&objects) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        if !std::fs::symlink_metadata(&objects).map_err(failed)?.is_dir() {
            return Err(fail(libc::ENOTDIR, "'objects' in it is no directory"));
        }
        let workers = Workers::start().map_err(failed)?;
        let cache = Self {
            path: objects,
            size: options.size,
            report: options.report,
            shared: Mutex::new(Shared { state, objects: Vec::new(), stock_taken: Instant::now() }),
            uses: Mutex::default(),
            counters: Counters::default(),
            workers,
            no_place: Mutex::default(),
            is_told: AtomicBool::new(false),
        };
        {
            let mut locked = cache.lock().map_err(failed)?;
            check_state(&locked.0.state).map_err(|refusal| match refusal {
                Refusal::Io(error) => failed(error),
                Refusal::Unusable(reason) => fail(libc::EOPNOTSUPP, &reason),
            })?;
            cache.take_stock(&mut locked).map_err(failed)?;
            cache.make_room(&mut locked, 0);
        }
        Ok(Arc::new(cache))
    }

    /// The directory below that of a cache in which files are opened while it is used: those of objects.
    pub fn objects_in(path: &Path) -> PathBuf {
        path.join(OBJECTS)
    }

    /// Counters since it was opened.
    pub fn stats(&self) -> CacheStats {
        let Counters { hits, fetched, stored, not_stored, evicted, bad_blocks } = &self.counters;
        CacheStats {
            hits: hits.load(Relaxed),
            fetched: fetched.load(Relaxed),
            stored: stored.load(Relaxed),
            not_stored: not_stored.load(Relaxed),
            evicted: evicted.load(Relaxed),
            bad_blocks: bad_blocks.load(Relaxed),
        }
    }

    /// Waits until what was fetched is stored, for ten seconds at most. A process that is about to end loses the rest.
    pub fn settle(&self) {
        self.workers.settle(LONGEST_END);
    }

    fn lock(&self) -> io::Result<Locked<'_>> {
        let shared = self.shared.lock();
        loop {
            match flock(&shared.state, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Locked(shared)),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Looks for the objects that are there, keeps those open that may be evicted from, and counts what all have.
    fn take_stock(&self, locked: &mut Locked<'_>) -> io::Result<()> {
        locked.0.stock_taken = Instant::now();
        let entries = std::fs::read_dir(&self.path)?;
        *self.uses.lock() = Uses::default();
        for object in &mut locked.0.objects {
            // Nobody here reads it: it is open to be evicted from, if it is still among the latest.
            object.take_if(|object| Arc::strong_count(object) == 1);
        }
        let mut found = Vec::new();
        let mut usage = 0;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let is_ours = name.len() == 64 && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit);
            if !is_ours || !entry.file_type()?.is_dir() {
                continue;
            }
            let is_named_so =
                |object: &ObjectFiles| directory_of(object.key()).as_bytes() == name.as_encoded_bytes();
            if let Some(number) = locked.0.number_of(is_named_so) {
                let Some(object) = &locked.0.objects[number] else { continue };
                usage += self.note_ranges(number, object);
                continue;
            }
            let path = entry.path();
            let Some(files) = self.open_found(&path) else { continue };
            let ranges = files.scan();
            let bytes = ranges.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
            match ranges.iter().map(|(_, _, used)| *used).max() {
                Some(latest) => found.push((latest, path, bytes)),
                None => ObjectFiles::remove(&path, Some(files)),
            }
            // Closed again: there may be more objects than a process may have files.
        }
        found.sort_by_key(|(latest, ..)| std::cmp::Reverse(*latest));
        let others = found.split_off(found.len().min(MOST_OBJECTS));
        usage += others.iter().map(|(.., bytes)| bytes).sum::<u64>();
        let given_up = self.give_up_oldest(&others);
        for (_, path, _) in found {
            let Some(files) = self.open_found(&path) else { continue };
            let object = Arc::new(files);
            let number = locked.0.keep(Arc::clone(&object));
            usage += self.note_ranges(number, &object);
        }
        locked.set_usage(usage.saturating_sub(given_up));
        Ok(())
    }

    /// Notes the ranges of an object, so that they can be evicted; their bytes.
    fn note_ranges(&self, number: usize, object: &ObjectFiles) -> u64 {
        let ranges = object.scan();
        let mut uses = self.uses.lock();
        for (range, _, used) in &ranges {
            uses.note((number, *range), *used);
        }
        ranges.iter().map(|(_, bytes, _)| bytes).sum()
    }

    /// The files of an object that was found; `None` if it is none, or can't be opened.
    fn open_found(&self, path: &Path) -> Option<ObjectFiles> {
        match ObjectFiles::open(path) {
            Ok(Some(files)) => return Some(files),
            Ok(None) => ObjectFiles::remove(path, None),
            // The others can be used all the same.
            Err(error) => (self.report)(&format!(
                "the object '{}' of the cache can't be opened, and is left out: {error}. It may be removed",
                path.display()
            )),
        }
        None
    }

    /// Gives up objects that this process does not keep open, the oldest first, until those that stay leave half of the cache to
    /// what it can evict; their bytes.
    fn give_up_oldest(&self, others: &[(u32, PathBuf, u64)]) -> u64 {
        let mut rest = others.iter().map(|(.., bytes)| bytes).sum::<u64>();
        let mut given_up = 0;
        for (_, path, bytes) in others.iter().rev() {
            if rest <= self.size / 2 {
                break;
            }
            let Some(files) = self.open_found(path) else { continue };
            let evicted: u64 =
                files.scan().iter().filter_map(|(range, ..)| files.evict(*range, u32::MAX).ok()).sum();
            ObjectFiles::remove(path, Some(files));
            rest -= bytes;
            given_up += evicted;
        }
        self.counters.evicted.fetch_add(given_up, Relaxed);
        given_up
    }

    /// The files of an object, which are made if they are not there, and its number.
    ///
    /// # Errors
    /// They can't be made or opened.
    pub(super) fn object(&self, version: &ObjectVersion) -> Result<(usize, Arc<ObjectFiles>), RemoteError> {
        self.open_object(version).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let directory = self.path.join(version.directory());
            RemoteError::new(&directory.to_string_lossy(), errno, format!("the cache: {error}"))
        })
    }

    fn open_object(&self, version: &ObjectVersion) -> io::Result<(usize, Arc<ObjectFiles>)> {
        let mut locked = self.lock()?;
        if let Some(number) = locked.0.number_of(|object| object.key() == version.key())
            && let Some(object) = &locked.0.objects[number]
        {
            return Ok((number, Arc::clone(object)));
        }
        let directory = self.path.join(version.directory());
        let object = if let Some(object) = ObjectFiles::open(&directory)? {
            object
        } else {
            ObjectFiles::remove(&directory, None);
            let made = ObjectFiles::create(&directory, version.key(), version.len());
            made.inspect_err(|_| ObjectFiles::remove(&directory, None))?;
            ObjectFiles::open(&directory)?
                .ok_or_else(|| io::Error::other("its files are not as they were made"))?
        };
        let object = Arc::new(object);
        let number = locked.0.keep(Arc::clone(&object));
        self.note_ranges(number, &object);
        Ok((number, object))
    }

    /// Evicts what was not used for longest, until `wanted` more bytes fit; whether they do.
    fn make_room(&self, locked: &mut Locked<'_>, wanted: u64) -> bool {
        if locked.usage().saturating_add(wanted) <= self.size {
            return true;
        }
        // What other processes have stored since is evicted as well, the oldest first.
        let is_old = locked.0.stock_taken.elapsed() >= STOCK_INTERVAL;
        if is_old && self.take_stock(locked).is_err() {
            return self.evict(locked, wanted);
        }
        self.evict(locked, wanted) || !is_old && self.take_stock(locked).is_ok() && self.evict(locked, wanted)
    }

    /// The same, of the ranges that this process knows of.
    fn evict(&self, locked: &mut Locked<'_>, wanted: u64) -> bool {
        let mut usage = locked.usage();
        // Somewhat more, so that not each block evicts another.
        let least = self.size - (self.size / 64).max(wanted).min(self.size);
        while usage > least {
            let Some(((number, range), last_use)) = self.uses.lock().take_oldest() else { break };
            let Some(Some(object)) = locked.0.objects.get(number) else { continue };
            match object.evict(range, last_use) {
                Ok(bytes) => {
                    usage = usage.saturating_sub(bytes);
                    self.counters.evicted.fetch_add(bytes, Relaxed);
                }
                // Another process has used it.
                Err(used) => drop(self.uses.lock().note((number, range), used)),
            }
        }
        locked.set_usage(usage);
        usage.saturating_add(wanted) <= self.size
    }

    /// Gives up a range of an object, whatever it is used for.
    pub(super) fn give_up(&self, object: &ObjectFiles, range: u64) {
        // Without the lock, it stays: who reads it then finds the same.
        let Ok(locked) = self.lock() else { return };
        if let Ok(bytes) = object.evict(range, u32::MAX) {
            let usage = locked.usage();
            locked.set_usage(usage.saturating_sub(bytes));
            self.counters.evicted.fetch_add(bytes, Relaxed);
        }
    }

    /// Stores whole blocks of an object.
    pub(super) fn store(&self, number: usize, object: &ObjectFiles, first: u64, blocks: &[Arc<[u8]>]) {
        let bytes = blocks.iter().map(|block| block.len() as u64).sum::<u64>();
        match self.try_store(number, object, first, blocks) {
            Ok(true) => {
                self.counters.stored.fetch_add(bytes, Relaxed);
                *self.no_place.lock() = None;
            }
            Ok(false) => {
                self.counters.not_stored.fetch_add(bytes, Relaxed);
                self.pause_storing("other objects fill it that can't be evicted");
            }
            Err(error) => {
                self.counters.not_stored.fetch_add(bytes, Relaxed);
                self.pause_storing(&error.to_string());
            }
        }
    }

    fn try_store(
        &self,
        number: usize,
        object: &ObjectFiles,
        first: u64,
        blocks: &[Arc<[u8]>],
    ) -> io::Result<bool> {
        let mut locked = self.lock()?;
        let wanted = object.missing_bytes(first, blocks.len() as u64);
        if !self.make_room(&mut locked, wanted) {
            return Ok(false);
        }
        let now = now();
        let stored = object.store(first, blocks, now);
        let added = stored.inspect_err(|_| object.give_back(first, blocks.len() as u64))?;
        locked.set_usage(locked.usage().saturating_add(added));
        let end = first + blocks.len() as u64;
        let mut uses = self.uses.lock();
        for range in first * BLOCK / RANGE..(end * BLOCK).div_ceil(RANGE) {
            uses.note((number, range), now);
        }
        Ok(true)
    }

    /// Whether what is fetched is to be stored.
    pub(super) fn stores(&self) -> bool {
        self.no_place.lock().is_none_or(|since| since.elapsed() >= PAUSE)
    }

    /// Stores nothing for a while.
    fn pause_storing(&self, reason: &str) {
        *self.no_place.lock() = Some(Instant::now());
        if !self.is_told.swap(true, Relaxed) {
            (self.report)(&format!(
                "nothing is stored in the cache '{}' at present: {reason}. What it has is used, the rest comes from the server",
                self.path.display()
            ));
        }
    }

    /// Notes that a range was used.
    pub(super) fn note_use(&self, number: usize, object: &ObjectFiles, range: u64) {
        let now = now();
        let before = self.uses.lock().note((number, range), now);
        if before.is_none_or(|before| before.saturating_add(USE_INTERVAL) <= now) {
            object.write_used(range, now);
        }
    }

    /// Reports a block that is not as it was stored.
    pub(super) fn note_bad(&self, name: &str, block: u64) {
        let before = self.counters.bad_blocks.fetch_add(1, Relaxed);
        if before < MOST_REPORTS {
            let last = if before + 1 == MOST_REPORTS { "; more are not told of one by one" } else { "" };
            (self.report)(&format!(
                "the cache '{}' has wrong bytes for '{name}' at {}: they are fetched again{last}",
                self.path.display(),
                block * BLOCK
            ));
        }
    }
}

impl Drop for RangeCache {
    fn drop(&mut self) {
        self.workers.close();
    }
}

/// Why the file `state` can't be used.
enum Refusal {
    Io(io::Error),
    Unusable(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Fills a new `state`, or checks that the one that is there can be used.
fn check_state(state: &File) -> Result<(), Refusal> {
    let mut header = [0; 12];
    let foreign =
        || Refusal::Unusable("its file 'state' is none of a cache: give another directory".to_owned());
    let len = state.metadata()?.len();
    match state.read_exact_at(&mut header, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && len > 0 => return Err(foreign()),
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error.into()),
        _ => {}
    }
    // A file that was made and not filled, because its disk was full or its machine failed, has no bytes or zeroes.
    if header == [0; 12] && len <= STATE_LEN {
        header[..8].copy_from_slice(MAGIC);
        header[8..].copy_from_slice(&VERSION.to_le_bytes());
        state.write_all_at(&header, 0).and_then(|()| state.set_len(STATE_LEN))?;
    }
    let (magic, version) = header.split_at(8);
    if magic != MAGIC {
        return Err(foreign());
    }
    if version != VERSION.to_le_bytes() {
        let found = u32::from_le_bytes([version[0], version[1], version[2], version[3]]);
        return Err(Refusal::Unusable(format!(
            "it has the format {found}, and this program knows format {VERSION}: give another directory, or remove it"
        )));
    }
    let punched =
        fallocate(state, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, STATE_LEN, STATE_LEN);
    punched.map_err(|_| {
        Refusal::Unusable("its file system can't punch holes, so nothing could be evicted".to_owned())
    })
}
