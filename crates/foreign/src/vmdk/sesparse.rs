//! seSparse extents, which ESX uses for snapshots. VMware does not document them; the rules are those of QEMU's
//! `block/vmdk.c`.

use crate::bytes::le64;
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::run::{Kind, Run};
use crate::units::{Unit, Units};

/// The first bytes of the file.
pub(super) const FIRST_BYTES: &[u8; 4] = b"\xbe\xba\xfe\xca";
/// Magic numbers of the two headers, and the version.
const CONSTANT_MAGIC: u64 = 0xcafe_babe;
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const VERSION: u64 = 0x2_0000_0001;
/// Bytes of a grain: the only size that is in use.
pub(super) const GRAIN: u64 = 4096;
/// Sectors and entries of a table of grains.
const TABLE_SECTORS: u64 = 64;
const TABLE_ENTRIES: u64 = 4096;
/// An entry's kind, in its highest four bits.
const KIND: u64 = 0xf << 60;
const ALLOCATED_TABLE: u64 = 0x1000_0000_0000_0000;

/// The tables of a seSparse extent.
#[derive(Debug, Clone)]
pub(super) struct Tables {
    file: FileIndex,
    size: u64,
    grain: Unit,
    /// Grains of a table.
    table: Unit,
    directory: u64,
    directory_entries: u64,
    tables: u64,
    grains: u64,
}

impl Tables {
    pub(super) fn open(files: &dyn Files, file: FileIndex) -> Result<Self> {
        let source = Source::new(files, file);
        let header: [u8; 208] = source.array(0, "the seSparse header")?;
        let field = |index: usize| le64(&header, index.saturating_mul(8));
        let bytes = |index| {
            field(index)
                .checked_mul(512)
                .ok_or_else(|| Error::damaged("a field of the seSparse header is too large"))
        };
        ensure!(field(0) == CONSTANT_MAGIC, "the seSparse header has the wrong magic number");
        require!(field(1) == VERSION, "Unsupported seSparse version {:#x}", field(1));
        require!(field(3) == GRAIN / 512, "Unsupported seSparse grain size {}", field(3));
        require!(field(4) == TABLE_SECTORS, "Unsupported seSparse grain table size {}", field(4));
        require!((5..10).all(|index| field(index) == 0), "Unsupported seSparse flags or reserved fields");
        let volatile: [u8; 32] = source.array(bytes(10)?, "the volatile seSparse header")?;
        ensure!(le64(&volatile, 0) == VOLATILE_MAGIC, "the volatile seSparse header is damaged");
        require!(le64(&volatile, 24) == 0, "Image is marked to be replayed; open it in ESX once");
        let (directory, directory_bytes) = (bytes(16)?, bytes(17)?);
        source.check(directory, directory_bytes, "the seSparse grain directory")?;
        let empty = || Error::damaged("seSparse grains are empty");
        let grain = Unit::new(GRAIN).ok_or_else(empty)?;
        let table = Unit::new(TABLE_ENTRIES).ok_or_else(empty)?;
        Ok(Self {
            file,
            size: bytes(2)?,
            grain,
            table,
            directory,
            directory_entries: directory_bytes / 8,
            tables: bytes(18)?,
            grains: bytes(24)?,
        })
    }

    /// Bytes of the extent.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn run(&self, files: &dyn Files, within: u64, max_len: u64) -> Result<Run> {
        self.grain.run(within, max_len, |index| self.grain_at(files, index))
    }

    fn grain_at(&self, files: &dyn Files, index: u64) -> Result<Units> {
        let start = self.grain.start(index);
        let source = Source::new(files, self.file);
        let damaged = |what: &str, entry: u64, at| {
            Err(Error::damaged(format!("the entry {entry:#x} of the seSparse {what} is damaged"))
                .at(self.file, at))
        };
        let table_index = self.table.index(index);
        if table_index >= self.directory_entries || start >= self.size {
            return Ok(Units::NO_MORE);
        }
        let at = self.directory.saturating_add(table_index.saturating_mul(8));
        let entry = source.le64(at, "the seSparse grain directory")?;
        if entry == 0 {
            return Ok(Units::without_table(index, self.table));
        }
        if entry >> 32 != ALLOCATED_TABLE >> 32 {
            return damaged("grain directory", entry, at);
        }
        let number = entry & u64::from(u32::MAX);
        let table = self.tables.saturating_add(number.saturating_mul(TABLE_SECTORS * 512));
        let at = table.saturating_add(self.table.within(index).saturating_mul(8));
        let entry = source.le64(at, "a seSparse grain table")?;
        match (entry & KIND) >> 60 {
            0 if entry == 0 => Ok(Kind::Hole.into()),
            1 | 2 => Ok(Kind::Zero.into()),
            3 => {
                // The low bits of the grain's number come first.
                let number = (entry & 0x0fff_0000_0000_0000) >> 48 | (entry & 0x0000_ffff_ffff_ffff) << 12;
                let offset = self.grains.saturating_add(number.saturating_mul(GRAIN));
                Ok(Kind::Data { file: self.file, offset }.into())
            }
            _ => damaged("grain table", entry, at),
        }
    }
}
