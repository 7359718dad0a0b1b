//! A qcow2 file of which each sector may hold one of several contents, read by the rules of the format alone: nothing of
//! the engine takes part.

use zebu_sim::{Content, Possible, SECTOR};

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const SECTOR_BYTES: usize = SECTOR as usize;

/// Where sectors come from: a file at one moment, or a file that is what it is.
pub(crate) enum Source<'a> {
    Uncertain(&'a Possible),
    Certain(&'a Content),
}

impl Source<'_> {
    /// Calls `look` with each content that the sector may have.
    pub(crate) fn each(&self, sector: u64, mut look: impl FnMut(&[u8])) {
        match self {
            Self::Uncertain(possible) => possible.each(sector, look),
            Self::Certain(content) => {
                let mut bytes = [0; SECTOR_BYTES];
                content.read(sector * SECTOR, &mut bytes);
                look(&bytes);
            }
        }
    }

    /// The different contents that the sector may have.
    pub(crate) fn variants(&self, sector: u64) -> Vec<Vec<u8>> {
        let mut all: Vec<Vec<u8>> = Vec::new();
        self.each(sector, |bytes| {
            if !all.iter().any(|known| known == bytes) {
                all.push(bytes.to_vec());
            }
        });
        all
    }
}

/// A number in big-endian order.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The fields of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) cluster_bits: u32,
    /// Bytes of the disk.
    pub(crate) size: u64,
    pub(crate) l1_size: u64,
    pub(crate) l1_offset: u64,
    pub(crate) reftable_offset: u64,
    pub(crate) reftable_clusters: u64,
    pub(crate) snapshots: u32,
    pub(crate) snapshots_offset: u64,
    pub(crate) is_dirty: bool,
    pub(crate) extended_l2: bool,
    pub(crate) version: u32,
    pub(crate) refcount_order: u32,
}

impl Header {
    pub(crate) fn read(sector: &[u8]) -> Result<Self, String> {
        if sector[..4] != *b"QFI\xfb" {
            return Err("the header may be gone".to_owned());
        }
        let version = half(sector, 4);
        let features = if version == 3 { word(sector, 72) } else { 0 };
        Ok(Self {
            version,
            cluster_bits: half(sector, 20),
            size: word(sector, 24),
            l1_size: half(sector, 36).into(),
            l1_offset: word(sector, 40),
            reftable_offset: word(sector, 48),
            reftable_clusters: half(sector, 56).into(),
            snapshots: half(sector, 60),
            snapshots_offset: word(sector, 64),
            is_dirty: features & 1 != 0,
            extended_l2: features & 16 != 0,
            refcount_order: if version == 3 { half(sector, 96) } else { 4 },
        })
    }

    pub(crate) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an entry of an L2 table.
    pub(crate) fn entry_bytes(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    pub(crate) fn entries_per_table(&self) -> u64 {
        self.cluster() / self.entry_bytes()
    }

    /// The offset of the L2 table that an L1 entry names; 0: none.
    pub(crate) fn table(entry: u64) -> u64 {
        entry & OFFSET
    }

    /// The bytes of the file that an L2 entry refers to, and how.
    pub(crate) fn target(&self, entry: u64) -> Target {
        if entry & COMPRESSED != 0 {
            let shift = 62 - (self.cluster_bits - 8);
            let offset = entry & ((1 << shift) - 1);
            let sectors = (entry & !(COPIED | COMPRESSED)) >> shift;
            let end = (offset & !(SECTOR - 1)) + (sectors + 1) * SECTOR;
            return Target::Stream { offset, end };
        }
        match entry & OFFSET {
            0 => Target::None,
            offset => Target::Cluster(offset),
        }
    }

    /// The content of the subcluster `index` of 32 (of one, without subclusters), by the entry and its second word.
    pub(crate) fn reads_as(&self, entry: u64, second: u64, index: u64, has_data_file: bool) -> Reads {
        // In an external data file, offset 0 is a place like any other.
        let has_place = entry & OFFSET != 0 || (has_data_file && entry & COPIED != 0);
        if self.extended_l2 {
            return match (second >> index & 1, second >> (index + 32) & 1) {
                (1, 0) if has_place => Reads::Data,
                (0, 1) => Reads::Zero,
                (0, 0) => Reads::Backing,
                _ => Reads::Nonsense,
            };
        }
        if self.version == 3 && entry & 1 != 0 {
            Reads::Zero
        } else if has_place {
            Reads::Data
        } else {
            Reads::Backing
        }
    }
}

/// The target of an L2 entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    None,
    Cluster(u64),
    /// A compressed stream: from `offset` on, before `end`.
    Stream {
        offset: u64,
        end: u64,
    },
}

/// Where a guest's bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    Data,
    Zero,
    Backing,
    Nonsense,
}
