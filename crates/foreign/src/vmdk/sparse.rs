//! Sparse extents: a directory of tables, and tables of grains. Those of ESX 3 ("COWD") have another header.

use crate::bytes::{le16, le32, le64};
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::limits::MAX_PACKED_UNIT;
use crate::run::{Kind, Packed, Packing, Run};
use crate::units::{Unit, Units};

/// The first bytes of a sparse extent.
pub const SPARSE_MAGIC: &[u8; 4] = b"KDMV";
/// The first bytes of a sparse extent of ESX 3.
pub const COWD_MAGIC: &[u8; 4] = b"COWD";
/// Flags of the header.
const ZERO_GRAINS: u32 = 1 << 2;
pub(crate) const COMPRESSED: u32 = 1 << 16;
pub(crate) const MARKERS: u32 = 1 << 17;
/// The directory's offset where the true header is a footer at the end of the file.
pub(crate) const AT_END: u64 = u64::MAX;
/// The type of the marker before the footer.
pub(crate) const FOOTER_MARKER: u32 = 3;
/// Sectors of a grain at most.
const MOST_GRAIN_SECTORS: u64 = 0x20_0000;
/// Bytes before the stream of a grain: its first sector on the disk, and the length of the stream.
pub(crate) const GRAIN_MARKER: u64 = 12;

/// The header of a sparse extent.
#[derive(Debug, Clone)]
pub(super) struct Header {
    flags: u32,
    /// Sectors of the extent.
    pub(super) capacity: u64,
    grain_sectors: u64,
    /// Offset and length of the descriptor in bytes, if there is one.
    pub(super) descriptor: Option<(u64, u64)>,
    table_entries: u32,
    /// Sector of the directory.
    directory: u64,
}

impl Header {
    pub(super) fn read(source: Source<'_>) -> Result<Self> {
        let first: [u8; 512] = source.array(0, "the VMDK header")?;
        let header = Self::parse(&first)?;
        if header.directory != AT_END {
            return Ok(header);
        }
        // The marker of the footer, the footer, and the marker of the end.
        let at = source.len().saturating_sub(1536);
        let last: [u8; 1536] = source.array(at, "the VMDK footer")?;
        let end = last.get(1024..).unwrap_or_default();
        let marked = le32(&last, 8) == 0
            && le32(&last, 12) == FOOTER_MARKER
            && le64(end, 0) == 0
            && le32(end, 8) == 0
            && le32(end, 12) == 0;
        ensure!(marked, "the footer of the VMDK is missing: the file is cut off");
        let footer = Self::parse(last.get(512..1024).unwrap_or_default())?;
        ensure!(
            footer.directory != AT_END,
            "the footer of the VMDK does not tell where the grain directory is"
        );
        Ok(Self { descriptor: header.descriptor, ..footer })
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        ensure!(bytes.starts_with(SPARSE_MAGIC), "the VMDK header has the wrong magic number");
        let version = le32(bytes, 4);
        require!((1..=3).contains(&version), "Unsupported VMDK version {version}");
        let flags = le32(bytes, 8);
        if flags & COMPRESSED != 0 {
            let algorithm = le16(bytes, 77);
            require!(algorithm == 1, "VMDK compression algorithm {algorithm} is not deflate");
        }
        let (sector, sectors) = (le64(bytes, 28), le64(bytes, 36));
        let descriptor =
            sector.checked_mul(512).zip(sectors.checked_mul(512)).filter(|_| sector > 0 && sectors > 0);
        Ok(Self {
            flags,
            capacity: le64(bytes, 12),
            grain_sectors: le64(bytes, 20),
            descriptor,
            table_entries: le32(bytes, 44),
            directory: le64(bytes, 56),
        })
    }

    pub(super) fn is_compressed(&self) -> bool {
        self.flags & COMPRESSED != 0
    }
}

/// How the grains of an extent are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grains {
    Plain,
    Compressed,
    /// Compressed, each behind a marker.
    Marked,
}

/// The tables of a sparse extent.
#[derive(Debug, Clone)]
pub(super) struct Tables {
    file: FileIndex,
    size: u64,
    grain: Unit,
    /// Grains of a table.
    table: Unit,
    directory: u64,
    grains: Grains,
    zero_grains: bool,
}

impl Tables {
    pub(super) fn open(files: &dyn Files, file: FileIndex, header: &Header) -> Result<Self> {
        let entries = header.table_entries;
        ensure!((1..=512).contains(&entries), "VMDK grain tables of {entries} entries");
        let grains = match (header.flags & COMPRESSED != 0, header.flags & MARKERS != 0) {
            (false, _) => Grains::Plain,
            (true, false) => Grains::Compressed,
            (true, true) => Grains::Marked,
        };
        let zero_grains = header.flags & ZERO_GRAINS != 0;
        let (sectors, grain) = (header.capacity, header.grain_sectors);
        Self::new(files, file, sectors, grain, entries, header.directory, grains, zero_grains)
    }

    /// An extent of ESX 3, by its header.
    pub(super) fn cowd(files: &dyn Files, file: FileIndex) -> Result<Self> {
        let header: [u8; 44] = Source::new(files, file).array(0, "the COWD header")?;
        ensure!(header.starts_with(COWD_MAGIC), "the COWD header has the wrong magic number");
        let version = le32(&header, 4);
        require!(version == 1, "Unsupported COWD version {version}");
        let field = |at| u64::from(le32(&header, at));
        Self::new(files, file, field(12), field(16), 4096, field(20), Grains::Plain, false)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of two headers")]
    fn new(
        files: &dyn Files,
        file: FileIndex,
        sectors: u64,
        grain_sectors: u64,
        table_entries: u32,
        directory: u64,
        grains: Grains,
        zero_grains: bool,
    ) -> Result<Self> {
        ensure!(
            (1..=MOST_GRAIN_SECTORS).contains(&grain_sectors),
            "Invalid granularity {grain_sectors} of the VMDK, image may be corrupt"
        );
        let bytes = grain_sectors.saturating_mul(512);
        require!(
            grains == Grains::Plain || bytes <= MAX_PACKED_UNIT,
            "compressed VMDK grains of {bytes} bytes are too large"
        );
        let too_large = || Error::damaged("the VMDK extent is larger than 2^64 bytes");
        let size = sectors.checked_mul(512).ok_or_else(too_large)?;
        let directory = directory.checked_mul(512).ok_or_else(too_large)?;
        let empty = || Error::damaged("VMDK grains are empty");
        let grain = Unit::new(bytes).ok_or_else(empty)?;
        let table = Unit::new(u64::from(table_entries)).ok_or_else(empty)?;
        let tables = table.count(grain.count(size));
        Source::new(files, file).check(
            directory,
            tables.saturating_mul(4),
            "the grain directory of the VMDK",
        )?;
        Ok(Self { file, size, grain, table, directory, grains, zero_grains })
    }

    /// Bytes of the extent.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a grain.
    pub(super) fn grain(&self) -> u64 {
        self.grain.bytes()
    }

    pub(super) fn run(&self, files: &dyn Files, within: u64, max_len: u64) -> Result<Run> {
        self.grain.run(within, max_len, |index| self.grain_at(files, index))
    }

    fn grain_at(&self, files: &dyn Files, index: u64) -> Result<Units> {
        let start = self.grain.start(index);
        if start >= self.size {
            return Ok(Units::NO_MORE);
        }
        let source = Source::new(files, self.file);
        let at = self.directory.saturating_add(self.table.index(index).saturating_mul(4));
        let table = u64::from(source.le32(at, "the grain directory of the VMDK")?).saturating_mul(512);
        if table == 0 {
            return Ok(Units::without_table(index, self.table));
        }
        let at = table.saturating_add(self.table.within(index).saturating_mul(4));
        let entry = source.le32(at, "a grain table of the VMDK")?;
        match entry {
            0 => return Ok(Kind::Hole.into()),
            1 if self.zero_grains => return Ok(Kind::Zero.into()),
            _ => {}
        }
        let offset = u64::from(entry).saturating_mul(512);
        let (offset, len) = match self.grains {
            Grains::Plain => return Ok(Kind::Data { file: self.file, offset }.into()),
            Grains::Compressed => {
                let most = self.grain.bytes().saturating_mul(2).min(source.len().saturating_sub(offset));
                (offset, most)
            }
            Grains::Marked => {
                let marker: [u8; GRAIN_MARKER as usize] = source.array(offset, "a grain of the VMDK")?;
                let (sector, len) = (le64(&marker, 0), u64::from(le32(&marker, 8)));
                if sector.checked_mul(512) != Some(start) {
                    let message =
                        format!("the grain of the VMDK is marked as sector {sector}, not {}", start / 512);
                    return Err(Error::damaged(message).at(self.file, offset));
                }
                (offset.saturating_add(GRAIN_MARKER), len)
            }
        };
        if len == 0 || len > self.grain.bytes().saturating_mul(2) || !source.holds(offset, len) {
            let message =
                format!("a compressed grain of the VMDK has {len} bytes; the file is cut off or damaged");
            return Err(Error::damaged(message).at(self.file, offset));
        }
        Ok(Kind::Packed(Packed {
            file: self.file,
            offset,
            len,
            packing: Packing::Zlib,
            start,
            unit: self.grain.bytes(),
        })
        .into())
    }
}
