//! The two files of an object in the cache: its bytes, with holes, and the map that says which of them are there.

use super::record::{self, BLOCK, BLOCKS, HEAD, HEADER, Head, RANGE, RECORD, Record, Sum, bit, sum_of};
use rustix::fs::{FallocateFlags, FlockOperation, SeekFrom, fallocate, flock, seek};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use zebu_storage::sync::Mutex;

const DATA: &str = "data";
const MAP: &str = "map";
/// How often a read begins again because the range was changed meanwhile.
const TURNS: usize = 3;

/// An object's files. Whoever has them open holds a shared lock on the map.
pub(super) struct ObjectFiles {
    key: [u8; 32],
    len: u64,
    data: File,
    map: File,
    /// By range: blocks whose sums this process has compared, and the generation of that time.
    verified: Mutex<HashMap<u64, (u32, u16)>>,
}

/// The result of a look for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Its bytes were copied.
    Hit,
    /// It is not there.
    Absent,
    /// Its bytes are not those that were stored.
    Bad,
}

impl ObjectFiles {
    /// Makes the files of an object. The directory must not be there.
    pub(super) fn create(directory: &Path, key: &[u8; 32], len: u64) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().mode(0o700).create(directory)?;
        let mut make = OpenOptions::new();
        make.write(true).create_new(true).mode(0o600);
        make.open(directory.join(DATA))?.set_len(len)?;
        // With the header, the object is there.
        make.open(directory.join(MAP))?.write_all_at(&record::header(key, len), 0)
    }

    /// Opens them; `None` if they are no object's, or one of them is damaged or a symbolic link.
    pub(super) fn open(directory: &Path) -> io::Result<Option<Self>> {
        let mut open = OpenOptions::new();
        open.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let files =
            open.open(directory.join(DATA)).and_then(|data| Ok((data, open.open(directory.join(MAP))?)));
        let (data, map) = match files {
            Ok(files) => files,
            Err(error)
                if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ELOOP) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let mut header = vec![0; HEADER as usize];
        let known = map.read_exact_at(&mut header, 0).ok().and_then(|()| record::read_header(&header));
        let Some((key, len)) = known.filter(|(_, len)| data.metadata().is_ok_and(|data| data.len() == *len))
        else {
            return Ok(None);
        };
        flock(&map, FlockOperation::LockShared)?;
        Ok(Some(Self { key, len, data, map, verified: Mutex::default() }))
    }

    /// Removes the files, unless a process has them open.
    pub(super) fn remove(directory: &Path, own: Option<Self>) {
        if let Some(own) = own
            && flock(&own.map, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            return;
        }
        for name in [MAP, DATA] {
            let _ = std::fs::remove_file(directory.join(name));
        }
        let _ = std::fs::remove_dir(directory);
    }

    pub(super) fn key(&self) -> &[u8; 32] {
        &self.key
    }

    /// Bytes of a block.
    pub(super) fn block_len(&self, block: u64) -> usize {
        (self.len.saturating_sub(block * BLOCK)).min(BLOCK) as usize
    }

    fn head(&self, range: u64) -> Option<Head> {
        let mut bytes = [0; HEAD];
        self.map.read_exact_at(&mut bytes, Record::offset(range)).ok()?;
        Some(Head::decode(&bytes))
    }

    /// The record of a range; an empty one where nothing was written yet.
    fn record(&self, range: u64) -> io::Result<Record> {
        let mut bytes = [0; RECORD];
        match self.map.read_exact_at(&mut bytes, Record::offset(range)) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Record::default()),
            read => read.map(|()| Record::decode(&bytes)),
        }
    }

    fn write_record(&self, range: u64, record: &Record) -> io::Result<()> {
        self.map.write_all_at(&record.encode(), Record::offset(range))
    }

    /// Whether the map says that a block is there, its bytes unseen.
    pub(super) fn has(&self, block: u64) -> bool {
        self.head(block / BLOCKS).is_some_and(|head| head.has(block))
    }

    /// Copies bytes of a block, from its byte `from` on, into `out`, if the block is there and right.
    pub(super) fn read(&self, block: u64, from: usize, out: &mut [u8]) -> Look {
        let range = block / BLOCKS;
        let known = self.verified.lock().get(&range).copied();
        if let Some((generation, mask)) = known
            && mask & bit(block) != 0
        {
            let read = self.data.read_exact_at(out, block * BLOCK + from as u64);
            // The generation grows before a block loses its bytes. So if it is still the one of the comparison, all that
            // was read was there.
            if read.is_ok() && self.head(range).is_some_and(|head| head.generation == generation) {
                return Look::Hit;
            }
            self.verified.lock().remove(&range);
        }
        let mut bytes = vec![0; self.block_len(block)];
        for _ in 0..TURNS {
            let Ok(record) = self.record(range) else { return Look::Absent };
            let Some(sum) = record.sum(block) else { return Look::Absent };
            let read = self.data.read_exact_at(&mut bytes, block * BLOCK);
            let generation = record.head.generation;
            if self.head(range).is_none_or(|head| head.generation != generation) {
                continue;
            }
            let Some(wanted) = bytes.get(from..from + out.len()) else { return Look::Absent };
            if read.is_err() || sum_of(&self.key, block, &bytes) != *sum {
                return Look::Bad;
            }
            out.copy_from_slice(wanted);
            let mut verified = self.verified.lock();
            let known = verified.entry(range).or_insert((generation, 0));
            if known.0 != generation {
                *known = (generation, 0);
            }
            known.1 |= bit(block);
            return Look::Hit;
        }
        Look::Absent
    }

    /// Bytes that `blocks` from `first` on would add to what the cache counts. The directory is locked.
    pub(super) fn missing_bytes(&self, first: u64, blocks: u64) -> u64 {
        (first..first + blocks).filter(|block| !self.has(*block)).count() as u64 * BLOCK
    }

    /// Stores whole blocks, one behind the other; bytes that were added. The directory is locked.
    pub(super) fn store(&self, first: u64, blocks: &[impl AsRef<[u8]>], now: u32) -> io::Result<u64> {
        for (number, bytes) in (first..).zip(blocks) {
            self.data.write_all_at(bytes.as_ref(), number * BLOCK)?;
        }
        let mut added = 0;
        let mut at = first;
        let end = first + blocks.len() as u64;
        while at < end {
            let range = at / BLOCKS;
            let next = ((range + 1) * BLOCKS).min(end);
            let mut record = self.record(range)?;
            let before = record.bytes();
            for number in at..next {
                let Some(bytes) = blocks.get((number - first) as usize) else { break };
                record.add(number, sum_of(&self.key, number, bytes.as_ref()));
            }
            record.head.used = now;
            self.write_record(range, &record)?;
            added += record.bytes() - before;
            at = next;
        }
        Ok(added)
    }

    /// Gives up the blocks of a range that was not used since `last_use`; their bytes. An error: when it was used. The
    /// directory is locked.
    pub(super) fn evict(&self, range: u64, last_use: u32) -> Result<u64, u32> {
        let Ok(mut record) = self.record(range) else { return Ok(0) };
        if record.head.used > last_use {
            return Err(record.head.used);
        }
        let bytes = record.bytes();
        // First, so that nobody believes what it reads from then on.
        record.head.generation = record.head.generation.wrapping_add(1);
        record.head.present = 0;
        if self.write_record(range, &record).is_err() {
            return Ok(0);
        }
        self.punch(range * RANGE, RANGE);
        Ok(bytes)
    }

    fn punch(&self, offset: u64, len: u64) {
        // Space that stays is found at the next opening.
        let _ = fallocate(&self.data, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len);
    }

    /// Gives the space of blocks back that were being stored. The directory is locked.
    pub(super) fn give_back(&self, first: u64, blocks: u64) {
        for block in (first..first + blocks).filter(|block| !self.has(*block)) {
            self.punch(block * BLOCK, BLOCK);
        }
    }

    /// Notes when a range was used, if it matters to other processes.
    pub(super) fn write_used(&self, range: u64, now: u32) {
        let _ = self.map.write_all_at(&now.to_le_bytes(), Record::offset(range) + 8);
    }

    /// Ranges with blocks: number, bytes, latest use. Blocks that are not in the map give their space back. The directory
    /// is locked.
    pub(super) fn scan(&self) -> Vec<(u64, u64, u32)> {
        let mut found = Vec::new();
        for range in ranges_with_data(&self.map, HEADER, RECORD as u64) {
            if let Ok(record) = self.record(range)
                && record.head.present != 0
            {
                found.push((range, record.bytes(), record.head.used));
            }
        }
        for range in ranges_with_data(&self.data, 0, RANGE) {
            let present = self.head(range).unwrap_or_default().present;
            if present == u16::MAX {
                continue;
            }
            for block in (range * BLOCKS..(range + 1) * BLOCKS).filter(|block| present & bit(*block) == 0) {
                self.punch(block * BLOCK, BLOCK);
            }
        }
        found
    }
}

/// Numbers of the pieces of `unit` bytes, counted from `start`, that a file has data in.
fn ranges_with_data(file: &File, start: u64, unit: u64) -> Vec<u64> {
    let mut found = Vec::new();
    let Ok(len) = file.metadata().map(|metadata| metadata.len()) else { return found };
    let mut at = start;
    while at < len {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.max(at),
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => at,
        };
        let hole = seek(file, SeekFrom::Hole(data)).ok().filter(|hole| *hole > data).unwrap_or(len);
        let first = (data - start) / unit;
        let end = (hole.min(len) - start).div_ceil(unit).max(first + 1);
        found.extend(first..end);
        at = start + end * unit;
    }
    found
}

const _: () = assert!(size_of::<Sum>() * BLOCKS as usize + HEAD <= RECORD);
