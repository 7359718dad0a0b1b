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

use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::header::Header;
use crate::l1::L1Entry;
use crate::l2::L2Entry;
use crate::limits;
use crate::offsets::{GuestOffset, HostOffset};
use crate::refcount::{self, RefTableEntry};
use crate::version::Version;
use std::collections::VecDeque;
use std::ops::Range;

/// Bytes that are held for the sake of a host cluster of streams that is not full.
pub const LOOK_AHEAD: usize = 4 << 20;

/// Why an image can't be written in the order of its disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Clusters come in descending order, or past the end of the disk.
    #[error("clusters come in another order than that of the disk")]
    OutOfOrder,
    /// The file would be longer than its tables can say.
    #[error("the image file becomes too large for its format")]
    TooLarge,
    /// A cluster's bytes are none, or more than a cluster.
    #[error("a cluster has {len} bytes")]
    Length {
        /// Bytes.
        len: usize,
    },
    /// A cluster was said to be empty before, and has data.
    #[error("guest cluster {cluster} has data now, and had none before")]
    Unexpected {
        /// Its number.
        cluster: u64,
    },
    /// The header can't be written.
    #[error(transparent)]
    Header(#[from] FormatError),
}

/// A host cluster that has room for more packed streams.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Where the next stream goes, as an offset in the file.
    at: u64,
    /// The end of the host cluster.
    end: u64,
}

/// Room behind the header for tables that are known at the end, in clusters.
#[derive(Debug, Clone, Copy)]
struct Front {
    l1: u64,
    refcount_table: u64,
}

impl Front {
    /// For a disk of `size` bytes that is written whole.
    fn new(geometry: &Geometry, size: u64, l1_entries: u64) -> Self {
        let l1 = geometry.host_clusters(l1_entries.saturating_mul(8)).max(1);
        let others =
            geometry.host_clusters(size).saturating_add(l1_entries).saturating_add(l1).saturating_add(1);
        // A block counts its own cluster, too.
        let per_block = geometry.refcount_entries_per_block().saturating_sub(1).max(1);
        let most = (limits::MAX_REFTABLE_SIZE >> geometry.cluster_bits).max(1);
        let mut refcount_table = 1u64;
        loop {
            let blocks = others.saturating_add(refcount_table).div_ceil(per_block);
            let needed = blocks.div_ceil(geometry.reftable_entries_per_cluster().max(1)).min(most);
            if needed <= refcount_table {
                return Self { l1, refcount_table };
            }
            refcount_table = needed;
        }
    }

    /// Clusters with that of the header.
    fn clusters(self) -> u64 {
        self.l1.saturating_add(self.refcount_table).saturating_add(1)
    }
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

/// The references to host clusters, which come nearly in ascending order.
#[derive(Debug)]
struct Refcounts {
    /// Where blocks are that were written.
    blocks: Vec<HostOffset>,
    /// Blocks that follow them, not written yet.
    open: VecDeque<Vec<u8>>,
    /// Bytes of a block, counts of one, and the width of a count.
    size: usize,
    per_block: u64,
    order: u32,
}

/// The refcount structures at the end of a file.
struct Tables {
    blocks: Vec<Vec<u8>>,
    table: Vec<u8>,
    /// Clusters of the file with them.
    total: u64,
}

impl Refcounts {
    fn new(geometry: &Geometry) -> Self {
        Self {
            blocks: Vec::new(),
            open: VecDeque::new(),
            size: geometry.cluster_size() as usize,
            per_block: geometry.refcount_entries_per_block(),
            order: geometry.refcount_order,
        }
    }

    /// The block of a host cluster among those that are open, and its place there.
    fn place(&self, cluster: u64) -> Option<(usize, usize)> {
        let block = cluster.checked_div(self.per_block)?.checked_sub(self.blocks.len() as u64)?;
        Some((usize::try_from(block).ok()?, cluster.checked_rem(self.per_block)? as usize))
    }

    fn count(&self, cluster: u64) -> u64 {
        let found = self.place(cluster).and_then(|(block, index)| {
            self.open.get(block).and_then(|block| refcount::get(block, index, self.order))
        });
        found.unwrap_or(0)
    }

    fn has_room(&self, cluster: u64, geometry: &Geometry) -> bool {
        self.count(cluster) < geometry.refcount_max()
    }

    /// One more reference.
    fn add(&mut self, cluster: u64, geometry: &Geometry) -> Result<(), StreamError> {
        let count = self.count(cluster).saturating_add(1);
        let (block, index) = self.place(cluster).ok_or(StreamError::TooLarge)?;
        if geometry.cluster_offset(cluster).is_none_or(|at| at.0 >= limits::HOST_OFFSET_END) {
            return Err(StreamError::TooLarge);
        }
        while self.open.len() <= block {
            self.open.push_back(vec![0; self.size]);
        }
        let bytes = self.open.get_mut(block).ok_or(StreamError::TooLarge)?;
        refcount::set(bytes, index, self.order, count).map_err(|_| StreamError::TooLarge)
    }

    /// The next block, if all that it counts lies before `end`. It counts as written; its place is to be noted.
    fn next_complete(&mut self, end: u64, geometry: &Geometry) -> Option<Vec<u8>> {
        let clusters = (self.blocks.len() as u64).saturating_add(1).checked_mul(self.per_block)?;
        let whole = geometry.cluster_offset(clusters)?;
        if end < whole.0 {
            return None;
        }
        let block = self.open.pop_front()?;
        // Its own cluster is counted in a later one.
        self.blocks.push(HostOffset(0));
        Some(block)
    }

    /// The blocks that are left and the table, for a file whose other clusters are the first `clusters`. The table follows the blocks,
    /// unless there is room in front.
    fn finish(
        &mut self,
        clusters: u64,
        front: Option<Front>,
        geometry: &Geometry,
    ) -> Result<Tables, StreamError> {
        let written = self.blocks.len() as u64;
        let per_table = geometry.reftable_entries_per_cluster();
        let (mut blocks, mut table) = (0u64, 0u64);
        // Each round counts what the last one added, which is less every time.
        let total = loop {
            let total = clusters.saturating_add(blocks).saturating_add(table);
            let all = total.div_ceil(self.per_block);
            let behind = if front.is_none() { all.div_ceil(per_table) } else { 0 };
            let next = (all.saturating_sub(written), behind);
            if next == (blocks, table) {
                break total;
            }
            (blocks, table) = next;
        };
        for cluster in clusters..total {
            self.add(cluster, geometry)?;
        }
        for block in 0..blocks {
            let at = geometry.cluster_offset(clusters.saturating_add(block)).ok_or(StreamError::TooLarge)?;
            self.blocks.push(at);
        }
        let entries =
            self.blocks.iter().flat_map(|block| RefTableEntry::new(*block).0.to_be_bytes()).collect();
        Ok(Tables { blocks: self.open.drain(..).collect(), table: entries, total })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::features::Compression;
    use crate::header::{NewHeader, Purpose};
    use crate::l2::Mapping;
    use proptest::prelude::*;

    /// A file that takes each byte once.
    #[derive(Default)]
    struct File {
        bytes: Vec<u8>,
        written: Vec<bool>,
    }

    impl File {
        fn write(&mut self, at: u64, bytes: &[u8]) {
            let range = at as usize..at as usize + bytes.len();
            if self.bytes.len() < range.end {
                self.bytes.resize(range.end, 0);
                self.written.resize(range.end, false);
            }
            assert!(self.written[range.clone()].iter().all(|written| !written), "a byte is written twice");
            self.written[range.clone()].fill(true);
            self.bytes[range].copy_from_slice(bytes);
        }
    }

    pub(crate) fn header(size: u64, cluster_bits: u32, order: u32) -> Header {
        let new = NewHeader::default().size(size).cluster_bits(cluster_bits).refcount_order(order);
        Header::new(&new.compression(Compression::Zlib)).unwrap()
    }

    /// Makes an image of clusters with these lengths: 0 for a hole, all of a cluster for a plain one. Then reads it with the
    /// format's own parsers, counts all references, and compares the bytes.
    fn check(cluster_bits: u32, order: u32, lens: &[usize]) {
        let size = 1usize << cluster_bits;
        let mut stream = ImageStream::new(header((lens.len() * size) as u64, cluster_bits, order)).unwrap();
        let mut file = File::default();
        let content = |index: usize, len: usize| vec![(index % 251 + 1) as u8; len];
        for (index, len) in lens.iter().enumerate() {
            match *len {
                0 => continue,
                len if len >= size => stream.plain(index as u64, &content(index, size)).unwrap(),
                len => stream.packed(index as u64, &content(index, len)).unwrap(),
            }
            if index % 3 == 0 {
                let (at, bytes) = stream.take();
                file.write(at, &bytes);
            }
        }
        let (at, bytes, first) = stream.finish().unwrap();
        file.write(at, &bytes);
        file.write(0, &first);
        assert!(file.written.iter().all(|written| *written), "a hole in the file");

        let bytes = file.bytes;
        let (header, warnings) = Header::parse(&bytes, Purpose::ReadWrite).unwrap();
        assert!(warnings.is_empty());
        let geometry = header.geometry();
        let mut counts = vec![0u64; bytes.len().div_ceil(size)];
        assert_eq!(bytes.len() % size, 0);
        counts[0] += 1;
        let l1 = &bytes[header.l1_table_offset.0 as usize..];
        let l1_clusters = (header.l1_size as usize * 8).div_ceil(size).max(1);
        for cluster in 0..l1_clusters {
            counts[header.l1_table_offset.0 as usize / size + cluster] += 1;
        }
        let mut seen = std::collections::HashSet::new();
        for (index, len) in lens.iter().enumerate() {
            let guest = GuestOffset((index * size) as u64);
            let table = L1Entry::read(l1, geometry.l1_index(guest) as usize).unwrap();
            let Some(table) = table.checked_table(&geometry).unwrap() else {
                assert_eq!(*len, 0);
                continue;
            };
            let place = geometry.l2_index(guest) as usize;
            if seen.insert(table.0) {
                counts[table.0 as usize / size] += 1;
            }
            let entry = L2Entry::read(&bytes[table.0 as usize..], place, &geometry).unwrap();
            match entry.decode(&geometry).unwrap() {
                Mapping::Compressed(range) => {
                    let at = range.offset.0 as usize;
                    assert_eq!(bytes[at..at + len], content(index, *len)[..]);
                    for cluster in range.host_clusters(&geometry) {
                        counts[cluster as usize] += 1;
                    }
                }
                _ if *len == 0 => assert_eq!(entry.host(&geometry), None),
                _ => {
                    let at = entry.host(&geometry).unwrap().0 as usize;
                    assert_eq!(bytes[at..at + size], content(index, size)[..]);
                    assert!(entry.copied());
                    counts[at / size] += 1;
                }
            }
        }
        let table_at = header.refcount_table_offset.0 as usize;
        for cluster in 0..header.refcount_table_clusters as usize {
            counts[table_at / size + cluster] += 1;
        }
        let per_block = geometry.refcount_entries_per_block() as usize;
        let mut stored = Vec::new();
        for block in 0..counts.len().div_ceil(per_block) {
            let entry = RefTableEntry::read(&bytes[table_at..], block).unwrap();
            let at = entry.checked_block(&geometry).unwrap().unwrap().0 as usize;
            counts[at / size] += 1;
            stored.extend(
                (0..per_block).map(|index| refcount::get(&bytes[at..at + size], index, order).unwrap()),
            );
        }
        assert_eq!(stored[..counts.len()], counts);
        assert!(stored[counts.len()..].iter().all(|count| *count == 0));
    }

    #[test]
    fn an_image_of_nothing_and_one_of_everything() {
        check(9, 4, &[]);
        check(9, 4, &[0; 100]);
        check(9, 4, &vec![512; 3000]);
        check(9, 6, &vec![7; 3000]);
        check(9, 0, &[7; 300]);
        check(16, 4, &[100, 65536, 65535, 0, 1]);
    }

    #[test]
    fn what_is_out_of_order_or_does_not_fit_is_refused() {
        let mut stream = ImageStream::new(header(2048, 9, 4)).unwrap();
        stream.plain(1, &[1; 512]).unwrap();
        assert_eq!(stream.plain(1, &[1; 512]), Err(StreamError::OutOfOrder));
        assert_eq!(stream.packed(4, &[1]), Err(StreamError::OutOfOrder));
        assert_eq!(stream.packed(2, &[]), Err(StreamError::Length { len: 0 }));
        assert_eq!(stream.plain(2, &[1; 513]), Err(StreamError::Length { len: 513 }));
        assert!(ImageStream::new(header(1 << 60, 9, 4)).is_err());
    }

    /// A disk of which the caller writes each cluster that `has` it is read by the format's own parsers; each byte before
    /// the first data is a table's.
    fn check_placed(cluster_bits: u32, clusters: u64, has: impl Fn(u64) -> bool) {
        let size = 1u64 << cluster_bits;
        let mut file = File::default();
        let mut stream = ImageStream::placed(header(clusters * size, cluster_bits, 4)).unwrap();
        let content = |cluster: u64| vec![(cluster % 251 + 1) as u8; size as usize];
        for cluster in (0..clusters).filter(|cluster| has(*cluster)) {
            let host = stream.place(cluster).unwrap();
            file.write(host, &content(cluster));
            for (at, bytes) in stream.take_tables() {
                file.write(at, &bytes);
            }
        }
        let (at, bytes, first) = stream.finish().unwrap();
        file.write(at, &bytes);
        for (at, bytes) in stream.take_tables() {
            file.write(at, &bytes);
        }
        file.write(0, &first);
        assert!(file.written.iter().all(|written| *written), "a hole in the file");
        verify(&file.bytes, clusters, has, content);
    }

    /// Reads an image of plain clusters, whose tables lie before what they map, with the format's own parsers, and counts all
    /// references.
    pub(crate) fn verify(
        bytes: &[u8],
        clusters: u64,
        has: impl Fn(u64) -> bool,
        content: impl Fn(u64) -> Vec<u8>,
    ) {
        let (header, warnings) = Header::parse(bytes, Purpose::ReadWrite).unwrap();
        assert!(warnings.is_empty());
        let geometry = header.geometry();
        let size = geometry.cluster_size();
        assert_eq!((header.l1_table_offset.0, bytes.len() as u64 % size), (size, 0));
        let mut counts = vec![0u64; bytes.len() / size as usize];
        let mut count = |at: u64| counts[(at / size) as usize] += 1;
        let front = header.refcount_table_offset.0 + u64::from(header.refcount_table_clusters) * size;
        (0..front / size).for_each(|cluster| count(cluster * size));
        let mut last = None;
        for cluster in 0..clusters {
            let guest = GuestOffset(cluster * size);
            let l1 = L1Entry::read(&bytes[size as usize..], geometry.l1_index(guest) as usize).unwrap();
            let Some(table) = l1.checked_table(&geometry).unwrap() else {
                assert!(!has(cluster), "cluster {cluster}");
                continue;
            };
            if last.replace(table) != Some(table) {
                count(table.0);
            }
            let entry =
                L2Entry::read(&bytes[table.0 as usize..], geometry.l2_index(guest) as usize, &geometry);
            let host = entry.unwrap().host(&geometry);
            assert_eq!(host.is_some(), has(cluster), "cluster {cluster}");
            if let Some(HostOffset(host)) = host {
                assert!(table.0 < host, "an L2 table lies before what it maps");
                assert_eq!(bytes[host as usize..(host + size) as usize], content(cluster)[..]);
                count(host);
            }
        }
        let per_block = geometry.refcount_entries_per_block() as usize;
        let table = &bytes[header.refcount_table_offset.0 as usize..];
        let blocks: Vec<u64> = (0..counts.len().div_ceil(per_block))
            .map(|block| {
                RefTableEntry::read(table, block).unwrap().checked_block(&geometry).unwrap().unwrap().0
            })
            .collect();
        for block in &blocks {
            counts[(block / size) as usize] += 1;
        }
        let order = geometry.refcount_order;
        for (cluster, expected) in counts.iter().enumerate() {
            let block = &bytes[blocks[cluster / per_block] as usize..][..size as usize];
            let stored = refcount::get(block, cluster % per_block, order);
            assert_eq!(stored, Some(*expected), "cluster {cluster}");
        }
    }

    #[test]
    fn placed_clusters_lie_behind_their_tables() {
        for (bits, clusters) in [(9, 1), (9, 2000), (9, 20_000), (12, 3000), (16, 100)] {
            check_placed(bits, clusters, |cluster| cluster % 7 != 3);
            check_placed(bits, clusters, |cluster| cluster % 700 == 0);
            check_placed(bits, clusters, |_| true);
            check_placed(bits, clusters, |_| false);
        }
    }

    #[test]
    fn subclusters_that_are_not_filled_read_as_zero() {
        let new = NewHeader::default().size(1 << 20).cluster_bits(16).l2_format(crate::L2Format::Extended);
        let mut overlay = Header::new(&new).unwrap();
        overlay.set_backing_file(Some(b"base")).unwrap();
        for (header, rest) in [(Header::new(&new).unwrap(), 0), (overlay, !0b1110u32)] {
            let geometry = header.geometry();
            let mut stream = ImageStream::placed(header).unwrap();
            let host = stream.place(3).unwrap();
            stream.fill(3, 2048..4096).unwrap();
            stream.fill(3, 4096..6145).unwrap();
            assert_eq!(stream.fill(2, 0..1), Err(StreamError::OutOfOrder));
            let table = &stream.l2.as_ref().unwrap().bytes;
            let found = L2Entry::read(table, 3, &geometry).unwrap().decode(&geometry).unwrap();
            let expected = Mapping::Subclusters {
                host: Some(HostOffset(host)),
                copied: true,
                alloc: 0b1110,
                zero: rest,
            };
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_disk_is_cut_behind_its_last_cluster() {
        let mut stream = ImageStream::new(header(1 << 40, 16, 4)).unwrap();
        stream.plain(5, &vec![1; 65536]).unwrap();
        assert_eq!(stream.cut(5 << 16), Err(StreamError::OutOfOrder));
        assert_eq!(stream.cut(1 << 41), Err(StreamError::OutOfOrder));
        stream.cut((5 << 16) + 512).unwrap();
        let (_, _, first) = stream.finish().unwrap();
        let (header, _) = Header::parse(&first, Purpose::ReadWrite).unwrap();
        assert_eq!((header.virtual_size(), header.l1_size), ((5 << 16) + 512, 1));
    }

    #[test]
    fn zeroes_hide_a_backing_file_in_every_version() {
        for version in [Version::V2, Version::V3] {
            let new = NewHeader::default().size(1 << 20).cluster_bits(16).version(version);
            let header = Header::new(&new).unwrap();
            let geometry = header.geometry();
            let mut stream = ImageStream::new(header).unwrap();
            stream.zero(2).unwrap();
            let table = &stream.l2.as_ref().unwrap().bytes;
            let found = L2Entry::read(table, 2, &geometry).unwrap().decode(&geometry).unwrap();
            match version {
                Version::V2 => assert!(matches!(found, Mapping::Data { .. }), "{found:?}"),
                Version::V3 => assert_eq!(found, Mapping::Zero { host: None, copied: false }),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_mixture_has_right_tables_and_counts(
            lens in prop::collection::vec(prop_oneof![Just(0usize), Just(512), 1usize..512], 0..1500),
            order in 2u32..7,
        ) {
            check(9, order, &lens);
        }
    }
}
