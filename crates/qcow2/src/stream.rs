//! New images that are written in the order of the disk, each byte of the file once.
//!
//! The first cluster of the file is left for the header, which is known at the end. Behind it come clusters, packed streams
//! and, as soon as they are complete, the L2 tables and refcount blocks of what went before; at the end the L1 table, the
//! last refcount blocks and the refcount table. So the tables in memory are one L2 table, up to two refcount blocks, and eight
//! bytes for each one that was written.
//!
//! A writer that can go back gives clusters places only ([`ImageStream::place`]), and writes their bytes itself. There the L1 table and
//! the refcount table lie behind the header, and each L2 table before what it maps: a file that was cut can be read as far as it goes.
//!
//! Clusters that did not become shorter lie between others that did. Up to [`LOOK_AHEAD`] bytes of them are held until the host
//! cluster of packed streams before them is full.

use crate::geometry::Geometry;
use crate::header::Header;
use crate::l1::L1Entry;
use crate::l2::L2Entry;
use crate::limits;
use crate::offsets::{GuestOffset, HostOffset};
use crate::version::Version;
use std::ops::Range;

mod error;
mod front;
mod refcounts;

pub use error::StreamError;
use front::Front;
use refcounts::{Refcounts, Tables};

/// Bytes that are held for the sake of a host cluster of streams that is not full.
pub const LOOK_AHEAD: usize = 4 << 20;

/// A host cluster that has room for more packed streams.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Where the next stream goes, as an offset in the file.
    at: u64,
    /// The end of the host cluster.
    end: u64,
}

/// An L2 table that is being filled.
#[derive(Debug)]
struct OpenTable {
    number: u64,
    bytes: Vec<u8>,
    /// Its place, unless it gets one when it is full.
    at: Option<u64>,
}

/// An image that is being laid out.
#[derive(Debug)]
pub struct ImageStream {
    header: Header,
    geometry: Geometry,
    /// The offset in the file of the first byte of what the caller has not taken.
    taken: u64,
    /// Bytes that were made and not taken.
    made: Vec<u8>,
    /// Room for tables in front, if the caller writes clusters itself.
    front: Option<Front>,
    /// Tables that are complete and not taken, with their offsets.
    tables: Vec<(u64, Vec<u8>)>,
    slot: Option<Slot>,
    l1: Vec<L1Entry>,
    /// The L2 table that is being filled.
    l2: Option<OpenTable>,
    /// The next guest cluster at least.
    next: u64,
    refcounts: Refcounts,
}

impl ImageStream {
    /// An image that is written from its beginning to its end. The header's tables have no places yet; the data is in the image.
    ///
    /// # Errors
    /// The disk needs an L1 table that is larger than the format allows.
    pub fn new(header: Header) -> Result<Self, StreamError> {
        Self::with(header, |_, _, _| None)
    }

    /// An image whose clusters the caller writes, in any order.
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn placed(header: Header) -> Result<Self, StreamError> {
        Self::with(header, |geometry, size, l1_entries| Some(Front::new(geometry, size, l1_entries)))
    }

    fn with(
        header: Header,
        front: impl FnOnce(&Geometry, u64, u64) -> Option<Front>,
    ) -> Result<Self, StreamError> {
        let geometry = header.geometry();
        let entries = geometry.l1_entries_for(header.virtual_size()).ok_or(StreamError::TooLarge)?;
        let most = limits::MAX_L1_ENTRIES;
        let front = front(&geometry, header.virtual_size(), entries);
        let entries = usize::try_from(entries).ok().filter(|entries| *entries as u64 <= most);
        let l1 = vec![L1Entry::UNALLOCATED; entries.ok_or(StreamError::TooLarge)?];
        let refcounts = Refcounts::new(&geometry);
        let (made, tables) = (Vec::new(), Vec::new());
        let mut image = Self {
            header,
            geometry,
            taken: 0,
            made,
            front,
            tables,
            slot: None,
            l1,
            l2: None,
            next: 0,
            refcounts,
        };
        for _ in 0..front.map_or(1, Front::clusters) {
            image.reserve_cluster()?;
        }
        Ok(image)
    }

    /// The offset in the file behind the last byte that was made.
    fn end(&self) -> u64 {
        self.taken.saturating_add(self.made.len() as u64)
    }

    /// Adds a guest cluster with its bytes as they are; the last one of the disk may be shorter.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn plain(&mut self, cluster: u64, bytes: &[u8]) -> Result<(), StreamError> {
        self.check(bytes)?;
        self.begin(cluster)?;
        let host = self.append_cluster(bytes)?;
        self.set(cluster, L2Entry::data(HostOffset(host), &self.geometry))
    }

    /// Adds a guest cluster that is packed: `bytes` are shorter than a cluster.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn packed(&mut self, cluster: u64, bytes: &[u8]) -> Result<(), StreamError> {
        self.check(bytes)?;
        self.begin(cluster)?;
        let at = self.append_stream(bytes)?;
        let entry = L2Entry::compressed(HostOffset(at), bytes.len() as u64, &self.geometry);
        self.set(cluster, entry.map_err(|_| StreamError::TooLarge)?)
    }

    /// Gives a guest cluster a place, for bytes that the caller writes: the offset in the file. With subclusters, it holds none until
    /// [`Self::fill`].
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn place(&mut self, cluster: u64) -> Result<u64, StreamError> {
        self.begin(cluster)?;
        let host = self.reserve_cluster()?;
        let entry = if self.geometry.extended_l2 {
            // What is not filled must not show the backing file.
            let zero = if self.header.backing_file().is_some() { u32::MAX } else { 0 };
            L2Entry::subclusters(Some(HostOffset(host)), 0, zero)
        } else {
            L2Entry::data(HostOffset(host), &self.geometry)
        };
        self.set(cluster, entry)?;
        Ok(host)
    }

    /// Notes that bytes of the cluster that was placed last are written. Other subclusters read as zero.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn fill(&mut self, cluster: u64, bytes: Range<u64>) -> Result<(), StreamError> {
        if !self.geometry.extended_l2 || bytes.is_empty() {
            return Ok(());
        }
        if self.next != cluster.saturating_add(1) {
            return Err(StreamError::OutOfOrder);
        }
        let size = self.geometry.cluster_size();
        let of = |byte: u64| byte.saturating_mul(32).checked_div(size).unwrap_or(0).min(31) as u32;
        let (first, last) = (of(bytes.start), of(bytes.end.saturating_sub(1)));
        let behind = u32::MAX.checked_shl(first).unwrap_or(0);
        let filled = behind & u32::MAX.checked_shr(31u32.saturating_sub(last)).unwrap_or(0);
        let index = self.geometry.l2_index(GuestOffset(cluster.saturating_mul(size)));
        let entry = self.l2.as_ref().and_then(|l2| L2Entry::read(&l2.bytes, index as usize, &self.geometry));
        let entry = entry.ok_or(StreamError::OutOfOrder)?;
        let (alloc, zero) = (entry.bitmap as u32, (entry.bitmap >> 32) as u32);
        self.set(cluster, L2Entry::subclusters(entry.host(&self.geometry), alloc | filled, zero & !filled))
    }

    /// Adds a guest cluster of zeroes, where nothing would show a backing file. Version 2 has them written.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn zero(&mut self, cluster: u64) -> Result<(), StreamError> {
        if self.geometry.version == Version::V2 {
            return self.plain(cluster, &[0]);
        }
        self.begin(cluster)?;
        self.set(cluster, L2Entry::zero_plain(&self.geometry))
    }

    /// Makes the disk smaller. No cluster past its end was added.
    ///
    /// # Errors
    /// [`StreamError::OutOfOrder`]: one was, or the disk would become larger.
    pub fn cut(&mut self, size: u64) -> Result<(), StreamError> {
        let end = size.div_ceil(self.geometry.cluster_size().max(1));
        let entries = self.geometry.l1_entries_for(size).ok_or(StreamError::TooLarge)?;
        if size > self.header.size || self.next > end {
            return Err(StreamError::OutOfOrder);
        }
        if self.front.is_none() {
            self.l1.truncate(usize::try_from(entries).map_err(|_| StreamError::TooLarge)?);
        }
        self.header.size = size;
        Ok(())
    }

    /// Bytes that can be written now, and their offset in the file. They are no part of this any more.
    pub fn take(&mut self) -> (u64, Vec<u8>) {
        let at = self.taken;
        let end = self.slot.map_or(self.end(), |slot| slot.at);
        let len = end.saturating_sub(at).min(self.made.len() as u64) as usize;
        let rest = self.made.split_off(len);
        self.taken = at.saturating_add(len as u64);
        (at, std::mem::replace(&mut self.made, rest))
    }

    /// Tables that can be written now, and their offsets in the file, where the caller writes clusters. They are no part of this any
    /// more.
    pub fn take_tables(&mut self) -> Vec<(u64, Vec<u8>)> {
        let (at, bytes) = self.take();
        if !bytes.is_empty() {
            self.tables.push((at, bytes));
        }
        std::mem::take(&mut self.tables)
    }

    /// Ends the image: the last bytes with their offset, and the first bytes, which make an image of the file: its first cluster, and
    /// behind that the tables in front. Nothing can be added afterwards; [`Self::take_tables`] has the last ones.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn finish(&mut self) -> Result<(u64, Vec<u8>, Vec<u8>), StreamError> {
        self.end_l2()?;
        self.end_slot();
        self.header.l1_size = u32::try_from(self.l1.len()).map_err(|_| StreamError::TooLarge)?;
        let l1: Vec<u8> = self.l1.iter().flat_map(|entry| entry.0.to_be_bytes()).collect();
        let size = self.geometry.cluster_size() as usize;
        if self.front.is_none() {
            self.header.l1_table_offset = HostOffset(self.end());
            // An image of no bytes has a table of one cluster as well, so that there is a place.
            for cluster in l1.chunks(size).chain(l1.is_empty().then_some(&[][..])) {
                self.append_cluster(cluster)?;
            }
        }
        let end = self.geometry.cluster_index(HostOffset(self.end()));
        let Tables { blocks, table, total } = self.refcounts.finish(end, self.front, &self.geometry)?;
        for block in &blocks {
            self.made.extend_from_slice(block);
        }
        let room = match self.front {
            None => self.geometry.host_clusters(table.len() as u64),
            Some(front) => front.refcount_table,
        };
        let len = room.saturating_mul(self.geometry.cluster_size());
        if (table.len() as u64) > len || len > limits::MAX_REFTABLE_SIZE {
            return Err(StreamError::TooLarge);
        }
        self.header.refcount_table_clusters = room as u32;
        let mut behind_header = Vec::new();
        if let Some(front) = self.front {
            let l1_end = front.l1.saturating_add(1).saturating_mul(self.geometry.cluster_size());
            self.header.l1_table_offset = HostOffset(self.geometry.cluster_size());
            self.header.refcount_table_offset = HostOffset(l1_end);
            behind_header = l1;
            behind_header.resize((l1_end as usize).saturating_sub(size), 0);
            behind_header.extend_from_slice(&table);
            behind_header.resize((l1_end.saturating_add(len) as usize).saturating_sub(size), 0);
        } else {
            self.header.refcount_table_offset = HostOffset(self.end());
            self.made.extend_from_slice(&table);
        }
        let whole = total.saturating_mul(self.geometry.cluster_size()).saturating_sub(self.taken);
        self.made.resize(usize::try_from(whole).map_err(|_| StreamError::TooLarge)?, 0);
        let mut first = self.header.encode()?;
        first.resize(size, 0);
        first.append(&mut behind_header);
        Ok((self.taken, std::mem::take(&mut self.made), first))
    }

    fn check(&self, bytes: &[u8]) -> Result<(), StreamError> {
        let fits = !bytes.is_empty() && bytes.len() as u64 <= self.geometry.cluster_size();
        if fits { Ok(()) } else { Err(StreamError::Length { len: bytes.len() }) }
    }

    /// Ends what comes before a guest cluster.
    fn begin(&mut self, cluster: u64) -> Result<(), StreamError> {
        let offset = cluster.checked_mul(self.geometry.cluster_size()).ok_or(StreamError::OutOfOrder)?;
        if cluster < self.next || offset >= self.header.virtual_size() {
            return Err(StreamError::OutOfOrder);
        }
        self.next = cluster.saturating_add(1);
        let number = self.geometry.l1_index(GuestOffset(offset));
        if self.l2.as_ref().is_none_or(|l2| l2.number != number) {
            self.end_l2()?;
            let at = self.front.map(|_| self.reserve_cluster()).transpose()?;
            self.l2 = Some(OpenTable { number, bytes: vec![0; self.geometry.cluster_size() as usize], at });
        }
        while let Some(block) = self.refcounts.next_complete(self.slot_or_end(), &self.geometry) {
            let at = self.append_cluster(&block)?;
            if let Some(place) = self.refcounts.blocks.last_mut() {
                *place = HostOffset(at);
            }
        }
        Ok(())
    }

    /// The place before which no byte is added any more.
    fn slot_or_end(&self) -> u64 {
        self.slot.map_or(self.end(), |slot| slot.at)
    }

    fn set(&mut self, cluster: u64, entry: L2Entry) -> Result<(), StreamError> {
        let index = self.geometry.l2_index(GuestOffset(cluster.saturating_mul(self.geometry.cluster_size())));
        let Some(l2) = &mut self.l2 else { return Err(StreamError::OutOfOrder) };
        entry.write(&mut l2.bytes, index as usize, &self.geometry).map_err(|_| StreamError::OutOfOrder)
    }

    /// Writes the L2 table out.
    fn end_l2(&mut self) -> Result<(), StreamError> {
        let Some(OpenTable { number, bytes, at }) = self.l2.take() else { return Ok(()) };
        let at = match at {
            Some(at) => {
                self.tables.push((at, bytes));
                at
            }
            None => self.append_cluster(&bytes)?,
        };
        let entry = self.l1.get_mut(number as usize).ok_or(StreamError::OutOfOrder)?;
        *entry = L1Entry::new(HostOffset(at), true);
        Ok(())
    }

    /// Leaves a host cluster whose bytes come later, or from the caller; its offset.
    fn reserve_cluster(&mut self) -> Result<u64, StreamError> {
        self.end_slot();
        let (before, bytes) = self.take();
        if !bytes.is_empty() {
            self.tables.push((before, bytes));
        }
        let at = self.taken;
        self.refcounts.add(self.geometry.cluster_index(HostOffset(at)), &self.geometry)?;
        self.taken = at.saturating_add(self.geometry.cluster_size());
        Ok(at)
    }

    /// Appends a host cluster; its offset.
    fn append_cluster(&mut self, bytes: &[u8]) -> Result<u64, StreamError> {
        if self.made.len() >= LOOK_AHEAD {
            self.end_slot();
        }
        let at = self.end();
        self.refcounts.add(self.geometry.cluster_index(HostOffset(at)), &self.geometry)?;
        let len = self.made.len().saturating_add(self.geometry.cluster_size() as usize);
        self.made.extend_from_slice(bytes);
        self.made.resize(len, 0);
        Ok(at)
    }

    /// Appends a packed stream; its offset.
    fn append_stream(&mut self, bytes: &[u8]) -> Result<u64, StreamError> {
        let len = bytes.len() as u64;
        if let Some(slot) = self.slot {
            // It may go on in the next cluster if that is next to this one.
            let fits = slot.at.saturating_add(len) <= slot.end || slot.end == self.end();
            let number = self.geometry.cluster_index(HostOffset(slot.at));
            if !fits || !self.refcounts.has_room(number, &self.geometry) {
                self.end_slot();
            }
        }
        let at = self.slot.map_or(self.end(), |slot| slot.at);
        let end = at.saturating_add(len);
        let whole = self.geometry.round_up_to_cluster(end).ok_or(StreamError::TooLarge)?;
        if whole > self.end() {
            let more = whole.saturating_sub(self.taken);
            self.made.resize(usize::try_from(more).map_err(|_| StreamError::TooLarge)?, 0);
        }
        let start = at.saturating_sub(self.taken) as usize;
        let place =
            self.made.get_mut(start..start.saturating_add(bytes.len())).ok_or(StreamError::TooLarge)?;
        place.copy_from_slice(bytes);
        let last = self.geometry.cluster_index(HostOffset(end.saturating_sub(1)));
        for number in self.geometry.cluster_index(HostOffset(at))..=last {
            self.refcounts.add(number, &self.geometry)?;
        }
        // A full cluster has no room; one that the stream ends in has.
        let slot_end = self.slot.map_or(0, |slot| slot.end).max(whole);
        self.slot = (end < slot_end).then_some(Slot { at: end, end: slot_end });
        Ok(at)
    }

    /// The rest of a host cluster of streams stays zero.
    fn end_slot(&mut self) {
        self.slot = None;
    }
}

#[cfg(test)]
pub(crate) mod tests;
