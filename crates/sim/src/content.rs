//! The content of a simulated file: sparse, and cheap to copy.

use crate::ranges::RangeSet;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of the smallest piece that is data or hole: the block size of the simulated file system.
pub const BLOCK: u64 = 4096;
/// Blocks that are shared or copied together.
const REGION_BLOCKS: usize = 64;
const REGION: u64 = BLOCK * REGION_BLOCKS as u64;

type Block = [u8; BLOCK as usize];

/// Absent blocks read as zero.
#[derive(Clone)]
struct Region {
    blocks: [Option<Arc<Block>>; REGION_BLOCKS],
}

impl Region {
    fn new() -> Self {
        Self { blocks: [const { None }; REGION_BLOCKS] }
    }
    fn data_blocks(&self) -> usize {
        self.blocks.iter().filter(|b| b.is_some()).count()
    }
}

/// The bytes of a file: data blocks, space that was allocated but never written, and holes.
///
/// A clone shares all data with its origin until one of them changes (256 KiB at a time), so that thousands of
/// crash states of one disk cost little more than their differences. Invariant: past the end there is neither data
/// nor allocated space, and the rest of the last block is zero.
#[derive(Clone, Default)]
pub struct Content {
    len: u64,
    regions: BTreeMap<u64, Arc<Region>>,
    /// Allocated and reading as zero. May cover data blocks, which count as data.
    reserved: RangeSet,
}

/// The state of a range without data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// No disk space behind it.
    Hole,
    /// Disk space is kept for it; it was never written.
    Reserved,
}

fn blocks_within(range: &Range<u64>) -> Range<u64> {
    range.start.div_ceil(BLOCK) * BLOCK..range.end / BLOCK * BLOCK
}

fn blocks_around(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK * BLOCK..range.end.div_ceil(BLOCK) * BLOCK
}

impl Content {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// A file of `len` bytes, all hole.
    pub fn hole(len: u64) -> Self {
        Self { len, ..Self::default() }
    }

    /// A file with the given bytes. Blocks of zeroes become holes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut content = Self::hole(bytes.len() as u64);
        for (index, block) in bytes.chunks(BLOCK as usize).enumerate() {
            if block.iter().any(|&b| b != 0) {
                content.write(index as u64 * BLOCK, block);
            }
        }
        content
    }

    /// Takes a copy of a real file, for example one that another program made. Blocks of zeroes become holes.
    ///
    /// # Errors
    /// As of reading `file`.
    pub fn load(file: &mut std::fs::File) -> std::io::Result<Self> {
        let len = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(0))?;
        let mut content = Self::hole(len);
        let mut buffer = vec![0; REGION as usize];
        let mut offset = 0;
        while offset < len {
            let part = (len - offset).min(REGION) as usize;
            file.read_exact(&mut buffer[..part])?;
            for (index, block) in buffer[..part].chunks(BLOCK as usize).enumerate() {
                if block.iter().any(|&b| b != 0) {
                    content.write(offset + index as u64 * BLOCK, block);
                }
            }
            offset += part as u64;
        }
        Ok(content)
    }

    /// Writes the content into a real file, which is cut to 0 bytes first; holes stay holes. For programs that
    /// judge a crash state from outside, such as `qemu-img check`.
    ///
    /// # Errors
    /// As of writing `file`.
    pub fn store(&self, file: &mut std::fs::File) -> std::io::Result<()> {
        file.set_len(0)?;
        file.set_len(self.len)?;
        for (offset, block) in self.data_blocks(0..self.len) {
            file.seek(SeekFrom::Start(offset))?;
            let in_file = (self.len - offset).min(BLOCK) as usize;
            file.write_all(&block[..in_file])?;
        }
        Ok(())
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of disk that the file takes: blocks of data or reserved space.
    pub fn disk_usage(&self) -> u64 {
        let mut bytes = self.reserved.bytes();
        for (offset, _) in self.data_blocks(0..self.len) {
            bytes += BLOCK - self.reserved.bytes_within(offset..offset + BLOCK);
        }
        bytes
    }

    /// Bytes of disk that a write of this range would newly take.
    pub(crate) fn space_needed(&self, range: Range<u64>) -> u64 {
        let around = blocks_around(&range);
        let mut taken = self.reserved.bytes_within(around.clone());
        for (offset, _) in self.data_blocks(around.clone()) {
            taken += BLOCK - self.reserved.bytes_within(offset..offset + BLOCK);
        }
        around.end - around.start - taken
    }

    /// Fills `buffer` with the bytes at `offset`; past the end they are zero.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) {
        buffer.fill(0);
        let end = (offset + buffer.len() as u64).min(self.len);
        if offset >= end {
            return;
        }
        for (at, block) in self.data_blocks(offset / BLOCK * BLOCK..end) {
            let from = at.max(offset);
            let to = (at + BLOCK).min(end);
            buffer[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&block[(from - at) as usize..(to - at) as usize]);
        }
    }

    /// The bytes of a range, past the end zero.
    pub fn bytes(&self, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.read(range.start, &mut bytes);
        bytes
    }

    /// Writes `bytes` at `offset`; the file grows as needed.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = offset + bytes.len() as u64;
        self.len = self.len.max(end);
        let mut at = offset;
        while at < end {
            let inside = (at % BLOCK) as usize;
            let part = (BLOCK as usize - inside).min((end - at) as usize);
            let source = &bytes[(at - offset) as usize..][..part];
            let slot = self.slot_mut(at);
            match slot {
                // The whole block is replaced: there is no point in copying a shared one first.
                _ if part == BLOCK as usize => {
                    let mut block = [0; BLOCK as usize];
                    block.copy_from_slice(source);
                    *slot = Some(Arc::new(block));
                }
                Some(block) => Arc::make_mut(block)[inside..inside + part].copy_from_slice(source),
                None => {
                    let mut block = [0; BLOCK as usize];
                    block[inside..inside + part].copy_from_slice(source);
                    *slot = Some(Arc::new(block));
                }
            }
            at += part as u64;
        }
    }

    /// Makes the part of a range that lies before the end read as zero. Whole blocks lose their data and become
    /// what `space` says, the last block of the file too if the range reaches the end; partial blocks are
    /// overwritten.
    pub fn clear(&mut self, range: Range<u64>, space: Space) {
        let end = range.end.min(self.len);
        if range.start >= end {
            return;
        }
        let limit = if end == self.len { end.div_ceil(BLOCK) * BLOCK } else { end };
        let whole = blocks_within(&(range.start..limit));
        if whole.start < whole.end {
            self.drop_blocks(&whole);
            match space {
                Space::Hole => self.reserved.remove(whole.clone()),
                Space::Reserved => self.reserved.insert(whole.clone()),
            }
            self.zero_bytes(range.start..whole.start);
            if whole.end < end {
                self.zero_bytes(whole.end..end);
            }
        } else {
            self.zero_bytes(range.start..end);
        }
        if space == Space::Reserved {
            self.reserved.insert(blocks_around(&(range.start..end)));
        }
    }

    /// Reserves space for a range; bytes do not change. The file grows to its end.
    pub fn allocate(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.len = self.len.max(range.end);
        self.reserved.insert(blocks_around(&range));
    }

    /// Cuts or extends the file; what is new is a hole.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.clear(len..self.len, Space::Hole);
            let first_gone = len.div_ceil(BLOCK) * BLOCK;
            self.drop_blocks(&(first_gone..u64::MAX / REGION * REGION));
            self.reserved.remove(first_gone..u64::MAX);
        }
        self.len = len;
    }

    /// The run of data or hole that begins at `offset`: its length in bytes and whether it is a hole. Reserved
    /// space counts as a hole, as with `SEEK_HOLE` on ext4 and XFS (lseek(2)). A run ends with the file; none
    /// begins at or past the end.
    pub fn run_at(&self, offset: u64) -> Option<(u64, bool)> {
        if offset >= self.len {
            return None;
        }
        let block = offset / BLOCK * BLOCK;
        let mut data = self.data_blocks(block..self.len).map(|(at, _)| at).peekable();
        if data.peek() == Some(&block) {
            let mut end = block;
            while data.next_if_eq(&end).is_some() {
                end += BLOCK;
            }
            Some((end.min(self.len) - offset, false))
        } else {
            Some((data.next().unwrap_or(self.len) - offset, true))
        }
    }

    /// Offsets of the data blocks that begin in `range`, and their bytes.
    pub(crate) fn data_blocks(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &Block)> + '_ {
        let first = range.start / REGION;
        let last = range.end.div_ceil(REGION);
        self.regions
            .range(first..last.max(first))
            .flat_map(|(&region, blocks)| {
                let base = region * REGION;
                blocks
                    .blocks
                    .iter()
                    .enumerate()
                    .filter_map(move |(i, b)| b.as_deref().map(|b| (base + i as u64 * BLOCK, b)))
            })
            .filter(move |(at, _)| range.contains(at))
    }

    /// Whether both read the same: equal lengths, equal bytes.
    pub fn same_bytes(&self, other: &Self) -> bool {
        self.first_difference(other).is_none()
    }

    /// The first offset at which the two read differently, or the shorter one's length.
    pub fn first_difference(&self, other: &Self) -> Option<u64> {
        let zero: Block = [0; BLOCK as usize];
        let mut offsets: Vec<u64> = self.data_blocks(0..self.len).map(|(at, _)| at).collect();
        offsets.extend(other.data_blocks(0..other.len).map(|(at, _)| at));
        offsets.sort_unstable();
        offsets.dedup();
        for at in offsets {
            let mine = self.block(at).unwrap_or(&zero);
            let theirs = other.block(at).unwrap_or(&zero);
            if !std::ptr::eq(mine, theirs)
                && let Some(inside) = mine.iter().zip(theirs).position(|(a, b)| a != b)
            {
                return Some((at + inside as u64).min(self.len.min(other.len)));
            }
        }
        (self.len != other.len).then_some(self.len.min(other.len))
    }

    fn block(&self, offset: u64) -> Option<&Block> {
        self.regions.get(&(offset / REGION))?.blocks[(offset % REGION / BLOCK) as usize].as_deref()
    }

    fn slot_mut(&mut self, offset: u64) -> &mut Option<Arc<Block>> {
        let region = self.regions.entry(offset / REGION).or_insert_with(|| Arc::new(Region::new()));
        &mut Arc::make_mut(region).blocks[(offset % REGION / BLOCK) as usize]
    }

    /// Drops the data of whole blocks.
    fn drop_blocks(&mut self, range: &Range<u64>) {
        let first = range.start / REGION;
        let touched: Vec<u64> = self
            .regions
            .range(first..range.end.div_ceil(REGION).max(first))
            .map(|(&region, _)| region)
            .collect();
        for region in touched {
            let base = region * REGION;
            if range.start <= base && base + REGION <= range.end {
                self.regions.remove(&region);
                continue;
            }
            let Some(shared) = self.regions.get_mut(&region) else { continue };
            let blocks = Arc::make_mut(shared);
            for (index, slot) in blocks.blocks.iter_mut().enumerate() {
                if range.contains(&(base + index as u64 * BLOCK)) {
                    *slot = None;
                }
            }
            if blocks.data_blocks() == 0 {
                self.regions.remove(&region);
            }
        }
    }

    /// Overwrites bytes with zeroes where there is data.
    fn zero_bytes(&mut self, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let inside = (at % BLOCK) as usize;
            let part = (BLOCK as usize - inside).min((range.end - at) as usize);
            if self.block(at / BLOCK * BLOCK).is_some()
                && let Some(block) = self.slot_mut(at)
            {
                Arc::make_mut(block)[inside..inside + part].fill(0);
            }
            at += part as u64;
        }
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.regions.values().map(|r| r.data_blocks()).sum::<usize>();
        write!(f, "Content {{ len: {}, data blocks: {blocks} }}", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SimRng;

    /// The oracle: a plain vector, and per block whether something was written since it was last cleared.
    struct Plain {
        bytes: Vec<u8>,
        data: Vec<bool>,
    }

    impl Plain {
        fn resize(&mut self, len: usize) {
            let blocks = len.div_ceil(BLOCK as usize);
            if len < self.bytes.len() {
                self.bytes.truncate(len);
                self.data.truncate(blocks);
            }
            self.bytes.resize(len, 0);
            self.data.resize(blocks, false);
        }
    }

    #[test]
    fn agrees_with_a_plain_vector() {
        for seed in 0..30 {
            let mut rng = SimRng::new(seed);
            let mut content = Content::new();
            let mut plain = Plain { bytes: Vec::new(), data: Vec::new() };
            let mut snapshots = Vec::new();
            for _ in 0..80 {
                let unit = *rng.pick(&[1, 512, 4096]);
                let start = rng.below(600_000 / unit) * unit;
                let len = rng.below(70_000 / unit + 1) * unit;
                let range = start..start + len;
                let (s, e) = (start as usize, (start + len) as usize);
                match rng.below(6) {
                    0 | 1 if len > 0 => {
                        let fill = rng.next_u64() as u8;
                        content.write(start, &vec![fill; len as usize]);
                        if plain.bytes.len() < e {
                            plain.resize(e);
                        }
                        plain.bytes[s..e].fill(fill);
                        plain.data[s / 4096..e.div_ceil(4096)].fill(true);
                    }
                    2 | 3 => {
                        let space = *rng.pick(&[Space::Hole, Space::Reserved]);
                        content.clear(range, space);
                        let e = e.min(plain.bytes.len());
                        if s < e {
                            plain.bytes[s..e].fill(0);
                            let whole_end = if e == plain.bytes.len() { e.div_ceil(4096) } else { e / 4096 };
                            for block in s.div_ceil(4096)..whole_end {
                                plain.data[block] = false;
                            }
                        }
                    }
                    4 => {
                        content.set_len(start);
                        plain.resize(s);
                    }
                    5 => {
                        content.allocate(range.clone());
                        if plain.bytes.len() < e && len > 0 {
                            plain.resize(e);
                        }
                        let before = content.disk_usage();
                        content.allocate(range);
                        assert_eq!(content.disk_usage(), before);
                    }
                    _ => snapshots.push((content.clone(), plain.bytes.clone())),
                }
                assert_eq!(content.len(), plain.bytes.len() as u64);
                assert!(content.bytes(0..content.len()) == plain.bytes, "seed {seed}");
                let mut at = 0;
                while let Some((run, hole)) = content.run_at(at) {
                    for block in at / 4096..(at + run).div_ceil(4096) {
                        assert_eq!(plain.data[block as usize], !hole, "seed {seed}, block {block}");
                    }
                    at += run;
                }
                assert_eq!(at, content.len());
            }
            for (snapshot, bytes) in snapshots {
                assert!(snapshot.bytes(0..snapshot.len()) == bytes, "a clone changed with its origin");
            }
        }
    }

    #[test]
    fn huge_files_cost_what_they_hold() {
        let mut content = Content::hole(16 << 40);
        content.write((16 << 40) - 3, b"end");
        content.write(8 << 40, b"middle");
        content.allocate(0..4 << 40);
        assert_eq!(content.disk_usage(), (4 << 40) + 2 * BLOCK);
        assert_eq!(content.run_at(0), Some((8 << 40, true)));
        content.clear(0..16 << 40, Space::Hole);
        assert_eq!(content.disk_usage(), 0);
        assert_eq!(content.len(), 16 << 40);
        content.set_len(0);
        assert!(content.same_bytes(&Content::new()));
    }

    #[test]
    fn space_is_counted_once() {
        let mut content = Content::new();
        assert_eq!(content.space_needed(0..1), BLOCK);
        content.write(0, &[1; 5000]);
        assert_eq!(content.disk_usage(), 2 * BLOCK);
        assert_eq!(content.space_needed(0..8192), 0);
        content.allocate(4096..16384);
        assert_eq!(content.disk_usage(), 4 * BLOCK);
        content.clear(0..4096, Space::Hole);
        assert_eq!(content.disk_usage(), 3 * BLOCK);
        assert_eq!(content.space_needed(0..16385), 2 * BLOCK);
    }

    #[test]
    fn a_real_file_takes_it_over_and_gives_it_back() {
        let mut content = Content::hole(3_000_001);
        content.write(1_000_000, b"hello");
        content.write(3_000_000, b"!");
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(9_000_000).unwrap();
        content.store(&mut file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3_000_001);
        let back = Content::load(&mut file).unwrap();
        assert_eq!(back.first_difference(&content), None);
        assert_eq!(back.bytes(999_999..1_000_006), b"\0hello\0");
        let mut changed = content.clone();
        changed.write(1_000_004, b"p");
        assert_eq!(content.first_difference(&changed), Some(1_000_004));
        assert_eq!(content.first_difference(&Content::hole(5)), Some(5));
    }
}
