//! Findings of a check, one variant for each kind of damage.

use std::fmt;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The image, or a part of it, could not be checked.
    CheckError,
    /// Guest data is lost or in danger.
    Corruption,
    /// Space is lost.
    Leak,
}

/// Whether a finding was mended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It still stands.
    Found,
    /// It was repaired.
    Repaired,
}

/// Which of the tables that list something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableKind {
    /// An L1 table.
    L1,
    /// An L2 table.
    L2,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// The snapshot table.
    SnapshotTable,
    /// The bitmap directory.
    BitmapDirectory,
    /// The table of a bitmap.
    BitmapTable,
}

impl TableKind {
    fn name(self) -> &'static str {
        match self {
            Self::L1 => "L1 table",
            Self::L2 => "L2 table",
            Self::RefcountTable => "refcount table",
            Self::RefcountBlock => "refcount block",
            Self::SnapshotTable => "snapshot table",
            Self::BitmapDirectory => "bitmap directory",
            Self::BitmapTable => "bitmap table",
        }
    }
}

/// A kind of damage and where it is. Offsets are in bytes of the image file, clusters are host cluster indices.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FindingKind {
    /// The refcount is lower than the number of references.
    RefcountTooLow {
        /// Host cluster.
        cluster: u64,
        /// The refcount in the image.
        refcount: u64,
        /// References found.
        references: u64,
    },
    /// The refcount is higher than the number of references.
    Leak {
        /// Host cluster.
        cluster: u64,
        /// The refcount in the image.
        refcount: u64,
        /// References found.
        references: u64,
    },
    /// More references than the refcount width can count.
    RefcountOverflow {
        /// Host cluster.
        cluster: u64,
        /// References found.
        references: u64,
    },
    /// Something refers to bytes that lie a cluster or more past the end of the file.
    PastEnd {
        /// Where the region starts.
        offset: u64,
        /// Bytes of the region.
        size: u64,
    },
    /// The COPIED flag of an active L1 entry does not say whether the refcount is 1.
    CopiedFlagL1 {
        /// Index in the L1 table.
        l1_index: u64,
        /// The entry.
        entry: u64,
        /// The refcount of its L2 table.
        refcount: u64,
    },
    /// The COPIED flag of an active L2 entry does not say whether the refcount is 1.
    CopiedFlagL2 {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// The entry.
        entry: u64,
        /// The refcount of its cluster.
        refcount: u64,
    },
    /// The COPIED flag is set on a compressed cluster. Repaired by clearing it.
    CopiedFlagCompressed {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// The entry.
        entry: u64,
    },
    /// Reserved bits are set in an L1 entry.
    L1ReservedBits {
        /// The entry.
        entry: u64,
    },
    /// An L1 entry has the COPIED flag, but no L2 table.
    L1CopiedWithoutTable {
        /// The entry.
        entry: u64,
    },
    /// An L1 entry points at an L2 table that does not start at a cluster boundary.
    L2TableUnaligned {
        /// The offset.
        offset: u64,
    },
    /// Reserved bits are set in an L2 entry.
    L2ReservedBits {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// The entry.
        entry: u64,
    },
    /// A data cluster does not start at a cluster boundary.
    DataClusterUnaligned {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// Offset of the cluster.
        offset: u64,
    },
    /// A cluster that reads as zero and keeps space does not start at a cluster boundary. Repaired by giving the
    /// space up.
    ZeroClusterUnaligned {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// Offset of the cluster.
        offset: u64,
    },
    /// A subcluster is both allocated and zero.
    SubclustersContradict {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// Offset of the cluster.
        offset: u64,
        /// The subcluster bitmap.
        bitmap: u64,
    },
    /// A subcluster is allocated, but there is no cluster.
    SubclustersWithoutCluster {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// The subcluster bitmap.
        bitmap: u64,
    },
    /// A compressed cluster in an image with an external data file.
    CompressedWithDataFile {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// The entry.
        entry: u64,
    },
    /// A compressed cluster with subclusters. Repaired by clearing their bitmap, which no program looks at.
    CompressedWithSubclusters {
        /// Offset of the L2 table.
        table: u64,
        /// Index in the L2 table.
        index: u64,
        /// The entry.
        entry: u64,
    },
    /// In an image with an external data file, a cluster does not lie at its guest offset.
    DataFileOffset {
        /// Guest offset in bytes.
        guest: u64,
        /// Offset in the data file.
        offset: u64,
    },
    /// Internal snapshots in an image with an external data file.
    SnapshotsWithDataFile {
        /// Their number.
        count: u32,
    },
    /// Reserved bits are set in a refcount table entry.
    ReftableReservedBits {
        /// Index in the refcount table.
        index: u64,
        /// The entry.
        entry: u64,
    },
    /// A refcount block does not start at a cluster boundary.
    RefblockUnaligned {
        /// Index in the refcount table.
        index: u64,
        /// Its offset.
        offset: u64,
    },
    /// A refcount block lies past the end of the file.
    RefblockOutside {
        /// Index in the refcount table.
        index: u64,
        /// Its offset.
        offset: u64,
    },
    /// The cluster of a refcount block is also used by something else.
    RefblockShared {
        /// Index in the refcount table.
        index: u64,
        /// Its offset.
        offset: u64,
        /// References found up to it.
        references: u64,
    },
    /// A snapshot's L1 table does not start at a cluster boundary.
    SnapshotL1Unaligned {
        /// Place in the snapshot table.
        index: u32,
        /// Its offset.
        offset: u64,
    },
    /// A snapshot's L1 table is larger than 32 MiB.
    SnapshotL1TooLarge {
        /// Place in the snapshot table.
        index: u32,
        /// Its entries.
        entries: u32,
    },
    /// A snapshot of a version 3 image lacks fields that the version requires. Repaired by writing them.
    SnapshotIncomplete {
        /// Place in the snapshot table.
        index: u32,
    },
    /// A snapshot has more extra data than programs read. Repaired by dropping what is unknown.
    SnapshotExtraData {
        /// Place in the snapshot table.
        index: u32,
        /// Bytes of extra data.
        bytes: u32,
    },
    /// More snapshots, or a larger table of them, than programs read. Repaired by dropping the last ones.
    SnapshotsOverhanging {
        /// How many are too many.
        count: u32,
    },
    /// An entry of the snapshot table is not one that a program writes: a length in it, or in one before it, is damaged.
    /// The table is left as it is, and nothing that a snapshot may use is freed.
    SnapshotEntryDoubtful {
        /// Place in the snapshot table.
        index: u32,
        /// Its supposed id.
        id: String,
        /// Its supposed name.
        name: String,
    },
    /// The snapshot table cannot be read, so that what its snapshots use is not known.
    SnapshotTableInvalid {
        /// Why.
        reason: String,
    },
    /// The bitmap directory is damaged.
    BitmapDirectoryInvalid {
        /// Why.
        reason: String,
    },
    /// The LUKS header is damaged, or longer than its pointer says, so that its clusters are not known.
    LuksHeaderInvalid {
        /// Its offset.
        offset: u64,
        /// Why.
        reason: String,
    },
    /// An entry of a bitmap's table is invalid.
    BitmapTableEntry {
        /// Where the entry is.
        offset: u64,
        /// The entry.
        entry: u64,
    },
    /// A table could not be read.
    Unreadable {
        /// Which.
        table: TableKind,
        /// Its offset.
        offset: u64,
        /// The error.
        error: String,
    },
    /// The refcounts of a block are not known.
    RefcountUnknown {
        /// Index of the block in the refcount table.
        index: u64,
        /// Host clusters that it concerns.
        clusters: u64,
    },
    /// A table that another table overlaps was left out, because following all such tables has no bound.
    TooManyOverlaps {
        /// Which.
        table: TableKind,
        /// Its offset.
        offset: u64,
    },
    /// A table was not repaired, because something else uses the same cluster. The damage in it counts, not this.
    RepairOverlaps {
        /// Which.
        table: TableKind,
        /// Its offset.
        offset: u64,
    },
}

impl FindingKind {
    /// How much it matters.
    pub fn severity(&self) -> Severity {
        match self {
            Self::Leak { .. } => Severity::Leak,
            Self::Unreadable { .. }
            | Self::RefcountUnknown { .. }
            | Self::SnapshotTableInvalid { .. }
            | Self::TooManyOverlaps { .. } => Severity::CheckError,
            _ => Severity::Corruption,
        }
    }
}

/// Damage that was found, with the number of times it counts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The kind of damage, and its place.
    pub kind: FindingKind,
    /// How often it was met (a table that several snapshots share is met once for each).
    pub times: u64,
    /// Whether it was mended.
    pub outcome: Outcome,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.outcome {
            Outcome::Found => "ERROR",
            Outcome::Repaired => "Repairing",
        };
        match &self.kind {
            FindingKind::Leak { cluster, refcount, references } => {
                let word = if self.outcome == Outcome::Found { "Leaked" } else { word };
                write!(f, "{word} cluster {cluster} refcount={refcount} reference={references}")?;
            }
            kind => {
                write!(f, "{word} {kind}")?;
            }
        }
        if self.times > 1 {
            write!(f, " ({} times)", self.times)?;
        }
        Ok(())
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RefcountTooLow { cluster, refcount, references }
            | Self::Leak { cluster, refcount, references } => {
                write!(f, "cluster {cluster} refcount={refcount} reference={references}")
            }
            Self::RefcountOverflow { cluster, references } => write!(
                f,
                "cluster {cluster}: {references} references do not fit the refcount width (amend the image to \
                 wider refcounts, or convert it)"
            ),
            Self::PastEnd { offset, size } => write!(
                f,
                "counting reference for region exceeding the end of the file by one cluster or more: offset \
                 {offset:#x} size {size:#x}"
            ),
            Self::CopiedFlagL1 { l1_index, entry, refcount } => {
                write!(
                    f,
                    "OFLAG_COPIED L2 cluster: l1_index={l1_index} l1_entry={entry:x} refcount={refcount}"
                )
            }
            Self::CopiedFlagL2 { entry, refcount, .. } => {
                write!(f, "OFLAG_COPIED data cluster: l2_entry={entry:x} refcount={refcount}")
            }
            Self::CopiedFlagCompressed { table, index, entry } => write!(
                f,
                "copied flag must never be set for compressed clusters: l2_entry={entry:x} (l2_offset={table:#x} \
                 l2_index={index})"
            ),
            Self::L1ReservedBits { entry } => write!(f, "found L1 entry with reserved bits set: {entry:x}"),
            Self::L1CopiedWithoutTable { entry } => {
                write!(f, "found L1 entry with the copied flag and no table: {entry:x}")
            }
            Self::L2TableUnaligned { offset } => {
                write!(f, "l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted")
            }
            Self::L2ReservedBits { table, index, entry } => write!(
                f,
                "found l2 entry with reserved bits set: {entry:x} (l2_offset={table:#x} l2_index={index})"
            ),
            Self::DataClusterUnaligned { table, index, offset } => write!(
                f,
                "offset={offset:x}: Data cluster is not properly aligned; L2 entry corrupted. \
                 (l2_offset={table:#x} l2_index={index})"
            ),
            Self::ZeroClusterUnaligned { table, index, offset } => write!(
                f,
                "offset={offset:x}: Preallocated cluster is not properly aligned; L2 entry corrupted. \
                 (l2_offset={table:#x} l2_index={index})"
            ),
            Self::SubclustersContradict { table, index, offset, bitmap } => write!(
                f,
                "offset={offset:x}: Allocated cluster has corrupted subcluster allocation bitmap {bitmap:#x} \
                 (l2_offset={table:#x} l2_index={index})"
            ),
            Self::SubclustersWithoutCluster { table, index, bitmap } => write!(
                f,
                "Unallocated cluster has non-zero subcluster allocation map {bitmap:#x} (l2_offset={table:#x} \
                 l2_index={index})"
            ),
            Self::CompressedWithDataFile { table, index, entry } => write!(
                f,
                "compressed cluster with data file, entry={entry:#x} (l2_offset={table:#x} l2_index={index})"
            ),
            Self::CompressedWithSubclusters { table, index, entry } => write!(
                f,
                "compressed cluster with non-zero subcluster allocation bitmap, entry={entry:#x} \
                 (l2_offset={table:#x} l2_index={index})"
            ),
            Self::DataFileOffset { guest, offset } => write!(
                f,
                "external data file host cluster offset {offset:#x} does not match guest cluster offset {guest:#x}"
            ),
            Self::SnapshotsWithDataFile { count } => write!(f, "{count} snapshots in image with data file"),
            Self::ReftableReservedBits { index, entry } => {
                write!(f, "refcount table entry {index} has reserved bits set: {entry:x}")
            }
            Self::RefblockUnaligned { index, offset } => write!(
                f,
                "refcount block {index} is not cluster aligned; refcount table entry corrupted (offset={offset:#x})"
            ),
            Self::RefblockOutside { index, offset } => {
                write!(f, "refcount block {index} is outside image (offset={offset:#x})")
            }
            Self::RefblockShared { index, offset, references } => {
                write!(f, "refcount block {index} refcount={references} (offset={offset:#x})")
            }
            Self::SnapshotL1Unaligned { index, offset } => write!(
                f,
                "snapshot table entry {index} l1_offset={offset:#x}: L1 table is not cluster aligned; snapshot \
                 table entry corrupted"
            ),
            Self::SnapshotL1TooLarge { index, entries } => write!(
                f,
                "snapshot table entry {index} l1_size={entries:#x}: L1 table is too large; snapshot table entry \
                 corrupted"
            ),
            Self::SnapshotIncomplete { index } => write!(f, "snapshot table entry {index} is incomplete"),
            Self::SnapshotExtraData { index, bytes } => {
                write!(f, "snapshot table entry {index} has unknown extra metadata ({bytes} bytes)")
            }
            Self::SnapshotsOverhanging { count } => {
                write!(f, "{count} overhanging snapshots (the snapshot table is too big)")
            }
            Self::SnapshotEntryDoubtful { index, id, name } => write!(
                f,
                "snapshot table entry {index} (ID '{id}', name '{name}') is damaged, and with it where the entries behind \
                 it begin; the snapshots are left alone, and nothing is freed (zebu convert copies the active disk)"
            ),
            Self::SnapshotTableInvalid { reason } => write!(f, "failed to read the snapshot table: {reason}"),
            Self::BitmapDirectoryInvalid { reason } => write!(f, "broken bitmap directory: {reason}"),
            Self::LuksHeaderInvalid { offset, reason } => {
                write!(f, "LUKS header at offset {offset:#x}: {reason}")
            }
            Self::BitmapTableEntry { offset, entry } => {
                write!(f, "bitmap table entry at {offset:#x} is invalid: {entry:x}")
            }
            Self::Unreadable { table, offset, error } => {
                write!(f, "could not read the {} at {offset:#x}: {error}", table.name())
            }
            Self::RefcountUnknown { index, clusters } => {
                write!(f, "can't get refcounts of block {index} ({clusters} clusters)")
            }
            Self::TooManyOverlaps { table, offset } => {
                write!(f, "too many overlapping tables: left out the {} at {offset:#x}", table.name())
            }
            Self::RepairOverlaps { table, offset } => write!(
                f,
                "could not write the {} at {offset:#x}: something else uses the same cluster",
                table.name()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(kind: FindingKind, times: u64, outcome: Outcome) -> String {
        Finding { kind, times, outcome }.to_string()
    }

    #[test]
    fn scripts_find_the_words_that_they_know() {
        let leak = FindingKind::Leak { cluster: 7, refcount: 2, references: 1 };
        assert_eq!(text(leak.clone(), 1, Outcome::Found), "Leaked cluster 7 refcount=2 reference=1");
        assert_eq!(text(leak, 1, Outcome::Repaired), "Repairing cluster 7 refcount=2 reference=1");
        let low = FindingKind::RefcountTooLow { cluster: 9, refcount: 1, references: 2 };
        assert_eq!(text(low.clone(), 1, Outcome::Found), "ERROR cluster 9 refcount=1 reference=2");
        assert_eq!(text(low, 1, Outcome::Repaired), "Repairing cluster 9 refcount=1 reference=2");
        let past = FindingKind::PastEnd { offset: 0xa0000, size: 0x10000 };
        assert!(text(past, 3, Outcome::Found).ends_with("offset 0xa0000 size 0x10000 (3 times)"));
    }

    #[test]
    fn only_lost_space_is_a_leak() {
        assert_eq!(FindingKind::Leak { cluster: 0, refcount: 1, references: 0 }.severity(), Severity::Leak);
        assert_eq!(FindingKind::SnapshotIncomplete { index: 0 }.severity(), Severity::Corruption);
        assert_eq!(FindingKind::RefcountUnknown { index: 0, clusters: 3 }.severity(), Severity::CheckError);
    }
}
