//! HDD, the format of Parallels: a header, and a table with an entry for each block of the disk.
//!
//! Integers are little endian. Rules: QEMU's `docs/interop/parallels.rst`.

use crate::bytes::{le32, le64};
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::opened::Opened;
use crate::run::{Kind, Run};
use crate::units::{Unit, Units};

/// The first bytes of the older variant: entries count sectors, and the disk is smaller than 2 TiB.
pub const MAGIC: &[u8; 16] = b"WithoutFreeSpace";
/// The first bytes of the newer variant: entries count blocks.
pub const EXTENDED_MAGIC: &[u8; 16] = b"WithouFreSpacExt";
/// Bytes before the table.
const HEADER: u64 = 64;

/// The table of a Parallels image.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    block: Unit,
    entries: u32,
    /// Bytes that an entry counts.
    entry_unit: u64,
}

pub(crate) fn open(files: &dyn Files) -> Result<Opened<Map>> {
    let source = Source::image(files);
    let header: [u8; HEADER as usize] = source.array(0, "the Parallels header")?;
    let extended = header.starts_with(EXTENDED_MAGIC);
    ensure!(extended || header.starts_with(MAGIC), "Image not in Parallels format");
    let version = le32(&header, 16);
    require!(version == 2, "unsupported Parallels image (version {version})");
    let sectors = le64(&header, 36);
    let sectors = if extended { sectors } else { sectors & u64::from(u32::MAX) };
    let size = sectors.checked_mul(512).ok_or_else(|| Error::damaged("the Parallels disk is too large"))?;
    let tracks = le32(&header, 28);
    ensure!(tracks > 0, "Invalid image: Zero sectors per track");
    require!(tracks <= (256 << 20) / 512, "Parallels blocks of {tracks} sectors are too large");
    let block =
        Unit::new(u64::from(tracks).saturating_mul(512)).ok_or_else(|| Error::damaged("empty blocks"))?;
    let entries = le32(&header, 32);
    source.check(HEADER, u64::from(entries).saturating_mul(4), "the Parallels block table")?;
    let entry_unit = if extended { block.bytes() } else { 512 };
    let map = Map { block, entries, entry_unit };
    Ok(Opened { size, unit: block.bytes(), variant: "dynamic", parent: None, identity: None, map })
}

impl Map {
    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        self.block.run(guest, max_len, |index| self.block(files, index))
    }

    fn block(&self, files: &dyn Files, index: u64) -> Result<Units> {
        if index >= u64::from(self.entries) {
            return Ok(Units::NO_MORE);
        }
        let at = HEADER.saturating_add(index.saturating_mul(4));
        let entry = Source::image(files).le32(at, "the Parallels block table")?;
        if entry == 0 {
            return Ok(Kind::Hole.into());
        }
        let offset = u64::from(entry).saturating_mul(self.entry_unit);
        if offset < HEADER.saturating_add(u64::from(self.entries).saturating_mul(4)) {
            let message = format!("the Parallels block table leads to {offset}, where the table is");
            return Err(Error::damaged(message).at(FileIndex::IMAGE, at));
        }
        Ok(Kind::Data { file: FileIndex::IMAGE, offset }.into())
    }
}
