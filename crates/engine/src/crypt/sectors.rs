//! Guest data that is encrypted on its way to a file, and decrypted on its way back.
//!
//! The unit is a sector. A write of less reads the rest of the sector first, so it excludes every other request for that sector.
//! The guest's own memory is never changed by a write: the sectors are encrypted in a buffer of the worker's pool.

use super::cipher_run::{COUNTED, Direction, apply};
use crate::compress::{CodecPool, Outcome, Work};
use futures_util::future::join_all;
use std::fmt;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use zebu_luks::SectorCipher;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, Hold, IoBuf, IoBufs, IoError, Worker, WriteTable};

/// Bytes up to which a request is encrypted where it is asked for: it takes less time than the way to another thread and back.
const IN_LINE: usize = 64 << 10;
/// Bytes that one thread encrypts at once, of larger requests.
const PIECE: usize = 128 << 10;
/// Bytes of the largest buffer of a write. Longer ones are written in several steps.
const MOST_AT_ONCE: u64 = 2 << 20;
/// The number from which a sector's initialization vector is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbering {
    /// Its place in the file: LUKS within qcow2.
    Host,
    /// Its place on the disk, where the first sector has this number: all else.
    Guest { first: u64 },
}

/// The offsets of a range in its file and on the disk, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SectorOffsets {
    pub(crate) host: u64,
    pub(crate) guest: u64,
}

impl SectorOffsets {
    fn after(self, len: u64) -> Self {
        Self { host: self.host + len, guest: self.guest + len }
    }

    fn before(self, len: u64) -> Self {
        Self { host: self.host - len, guest: self.guest - len }
    }
}

/// The data of an encrypted disk: its cipher with the key, and the requests that are under way.
pub(crate) struct EncryptedSectors {
    cipher: Arc<SectorCipher>,
    numbering: Numbering,
    pool: CodecPool,
    /// By bytes of the file.
    under_way: WriteTable,
}

/// A range of sectors, until the request for it is over.
struct Held<'a> {
    table: &'a WriteTable,
    hold: Option<Hold>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.table.release(hold);
        }
    }
}

impl EncryptedSectors {
    pub(crate) fn new(cipher: SectorCipher, numbering: Numbering, pool: CodecPool) -> Self {
        Self { cipher: Arc::new(cipher), numbering, pool, under_way: WriteTable::default() }
    }

    /// Bytes of a sector.
    pub(crate) fn sector_size(&self) -> u64 {
        self.cipher.sector_size() as u64
    }

    /// Reads and decrypts `bufs.len()` bytes at `place` of `file`.
    pub(crate) async fn read(
        &self,
        worker: &Worker,
        file: &File,
        place: SectorOffsets,
        mut bufs: IoBufs,
    ) -> (Result<(), IoError>, IoBufs) {
        let sector = self.sector_size();
        let len = bufs.len() as u64;
        let whole = self.widen(place, len);
        let _held = self.hold(worker, whole.clone(), Sectors::Whole).await;
        let is_whole = whole == (place.host..place.host + len)
            && bufs.parts().iter().all(|buf| (buf.len() as u64).is_multiple_of(sector));
        if is_whole {
            let (result, bufs) = worker.read(file, place.host, bufs).await;
            if result.is_err() {
                return (result, bufs);
            }
            return (Ok(()), self.run(worker, Direction::Decrypt, place, bufs).await);
        }
        let head = place.host - whole.start;
        let buffer = worker.buffer((whole.end - whole.start) as usize);
        let (result, bounced) = worker.read(file, whole.start, buffer.into()).await;
        if result.is_err() {
            return (result, bufs);
        }
        let bounced = self.run(worker, Direction::Decrypt, place.before(head), bounced).await;
        let mut skip = head as usize;
        for piece in bufs.parts_mut() {
            bounced.copy_to(skip, piece.as_mut_slice());
            skip += piece.len();
        }
        (Ok(()), bufs)
    }

    /// Encrypts `bufs` and writes them at `place` of `file`. They keep their content.
    pub(crate) async fn write(
        &self,
        worker: &Worker,
        file: &File,
        place: SectorOffsets,
        bufs: IoBufs,
    ) -> (Result<(), IoError>, IoBufs) {
        let len = bufs.len() as u64;
        let mut at = 0;
        while at < len {
            let step = (len - at).min(MOST_AT_ONCE);
            if let Err(error) = self.write_step(worker, file, place.after(at), &bufs, at..at + step).await {
                return (Err(error), bufs);
            }
            at += step;
        }
        (Ok(()), bufs)
    }

    /// Writes the bytes `part` of `bufs` at `place`.
    async fn write_step(
        &self,
        worker: &Worker,
        file: &File,
        place: SectorOffsets,
        bufs: &IoBufs,
        part: Range<u64>,
    ) -> Result<(), IoError> {
        let len = part.end - part.start;
        let whole = self.widen(place, len);
        let head = place.host - whole.start;
        let kind = if whole.end - whole.start == len { Sectors::Whole } else { Sectors::InPart };
        let _held = self.hold(worker, whole.clone(), kind).await;
        let mut buffer = worker.buffer((whole.end - whole.start) as usize);
        if kind == Sectors::InPart {
            self.fill_edges(worker, file, place, len, &mut buffer).await?;
        }
        let (from, to) = (head as usize, (head + len) as usize);
        bufs.copy_to(part.start as usize, &mut buffer.as_mut_slice()[from..to]);
        let mut bytes = IoBufs::from(buffer);
        if !sabotage::is(Fault::WritePlainText) {
            bytes = self.run(worker, Direction::Encrypt, place.before(head), bytes).await;
        }
        worker.write(file, whole.start, bytes).await.0
    }

    /// Puts what the first and the last sector hold into `buffer`, where a write at `place` covers them in part.
    async fn fill_edges(
        &self,
        worker: &Worker,
        file: &File,
        place: SectorOffsets,
        len: u64,
        buffer: &mut IoBuf,
    ) -> Result<(), IoError> {
        let sector = self.sector_size();
        let whole = self.widen(place, len);
        let first = place.before(place.host - whole.start);
        let last = first.after(whole.end - whole.start - sector);
        let mut edges = [Some(first).filter(|first| first.host != place.host), None];
        if whole.end != place.host + len && edges[0] != Some(last) {
            edges[1] = Some(last);
        }
        for edge in edges.into_iter().flatten() {
            let (result, bytes) = worker.read(file, edge.host, worker.buffer(sector as usize).into()).await;
            result?;
            let bytes = self.run(worker, Direction::Decrypt, edge, bytes).await;
            let at = (edge.host - whole.start) as usize;
            bytes.copy_to(0, &mut buffer.as_mut_slice()[at..at + sector as usize]);
        }
        Ok(())
    }

    /// The sectors that `len` bytes at `place` touch, as bytes of the file.
    fn widen(&self, place: SectorOffsets, len: u64) -> Range<u64> {
        let sector = self.sector_size();
        let start = place.guest % sector;
        place.host - start..place.host - start + (start + len).next_multiple_of(sector)
    }

    /// Whether a sector is noise where an older and a newer part of it meet. What is written at once is sectors of 512 bytes; in larger
    /// ones of CBC, blocks hang on those before.
    fn parts_depend(&self) -> bool {
        self.sector_size() > COUNTED && !self.cipher.spec().mode().is_xts()
    }

    /// Waits until nobody writes a part of these sectors; and, to write a part of them, until nobody uses them at all. Where parts depend
    /// on each other, whole sectors have one user at a time, too: a read beside a write would find noise, and two writes would leave it.
    async fn hold(&self, worker: &Worker, range: Range<u64>, kind: Sectors) -> Held<'_> {
        let table = &self.under_way;
        if range.is_empty() || sabotage::is(Fault::ShareSectors) {
            return Held { table, hold: None };
        }
        if kind == Sectors::Whole
            && !self.parts_depend()
            && let Some(hold) = table.try_write(worker.id(), range.clone())
        {
            return Held { table, hold: Some(hold) };
        }
        let ticket = table.claim(range);
        let held = Held { table, hold: Some(Hold::Claim(ticket)) };
        poll_fn(|cx| table.poll_claim(ticket, cx)).await;
        held
    }

    /// Encrypts or decrypts whole sectors in place; of each buffer, too.
    async fn run(
        &self,
        worker: &Worker,
        direction: Direction,
        place: SectorOffsets,
        mut bufs: IoBufs,
    ) -> IoBufs {
        let first = match self.numbering {
            Numbering::Host => place.host / COUNTED,
            Numbering::Guest { first } => first.wrapping_add(place.guest / COUNTED),
        };
        if bufs.len() <= IN_LINE || self.pool.has_no_threads() {
            apply(&self.cipher, direction, first, &mut bufs);
            return bufs;
        }
        let mut pieces = Vec::new();
        let mut at = 0;
        while !bufs.is_empty() {
            let input = bufs.split_to(bufs.len().min(PIECE));
            let (cipher, first) = (Arc::clone(&self.cipher), first.wrapping_add(at as u64 / COUNTED));
            at += input.len();
            pieces.push(async move {
                let mut done = self.pool.run(worker, Work::Crypt { cipher, direction, first, input }).await;
                // What is not encrypted must not get any further.
                assert!(matches!(done.outcome, Outcome::Bytes(_)), "a cipher failed");
                std::mem::take(&mut done.input)
            });
        }
        for piece in join_all(pieces).await {
            bufs.append(piece);
        }
        bufs
    }
}

/// Whether a request covers its sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sectors {
    Whole,
    InPart,
}

/// Says the cipher, not the key.
impl fmt::Debug for EncryptedSectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncryptedSectors")
            .field("cipher", &self.cipher)
            .field("numbering", &self.numbering)
            .finish_non_exhaustive()
    }
}
