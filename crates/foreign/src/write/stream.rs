//! A streamOptimized VMDK: compressed grains in the order of the disk, each table behind its grains, the directory and a
//! footer at the end. Such a file can be written into a pipe, and read from one.

use super::bytes::{pad, put, put_le32, put_le64};
use super::options::{Birth, NewVmdk};
use super::vmdk::{
    DESCRIPTOR_AT, DESCRIPTOR_SECTORS, GRAIN, Header, NEWLINES, SECTOR, TABLE_ENTRIES, TABLE_SECTORS,
    descriptor, tables_of,
};
use crate::error::{Error, Result, ensure, require};
use crate::vmdk::sparse::{AT_END, COMPRESSED, FOOTER_MARKER, GRAIN_MARKER, MARKERS};

/// Sectors before the first grain.
const OVERHEAD: u64 = 128;
/// The version in which grains may be compressed.
const VERSION: u32 = 3;
/// Deflate.
const DEFLATE: u16 = 1;
/// Types of markers.
const TABLE_MARKER: u32 = 1;
const DIRECTORY_MARKER: u32 = 2;

/// An image that is being made. All its bytes come in order: those of [`Stream::start`], of each grain, and of
/// [`Stream::end`].
#[derive(Debug, Clone)]
pub struct Stream {
    size: u64,
    descriptor: Vec<u8>,
    /// Bytes so far.
    len: u64,
    /// Sectors of the tables so far; 0 for those without a grain.
    directory: Vec<u32>,
    /// Sectors of the grains of the table that is being filled.
    table: Vec<u32>,
    /// The first grain that may come next.
    next: u64,
}

impl Stream {
    /// Bytes of a grain.
    pub const GRAIN: u64 = GRAIN;

    /// An image for a disk of `size` bytes. `name` is the last part of the file's name.
    ///
    /// # Errors
    /// The disk or the name is too large.
    pub fn new(new: &NewVmdk, size: u64, name: &str, birth: &Birth) -> Result<Self> {
        require!(!new.zeroed_grain, "a streamOptimized VMDK has no zeroed grains");
        let size = super::options::whole_sectors(size)?;
        tables_of(size)?;
        Ok(Self {
            size,
            descriptor: descriptor(new, size, name, birth)?,
            len: 0,
            directory: Vec::new(),
            table: Vec::new(),
            next: 0,
        })
    }

    /// Bytes of the disk.
    pub fn virtual_size(&self) -> u64 {
        self.size
    }

    /// Appends what comes before the grains.
    pub fn start(&mut self, out: &mut Vec<u8>) {
        let before = out.len();
        out.extend(self.header(AT_END).encode());
        out.extend(&self.descriptor);
        debug_assert_eq!(
            out.len().saturating_sub(before) as u64,
            (DESCRIPTOR_AT + DESCRIPTOR_SECTORS) * SECTOR
        );
        out.resize(before.saturating_add((OVERHEAD * SECTOR) as usize), 0);
        self.len = OVERHEAD * SECTOR;
    }

    /// Appends a grain, packed as a zlib stream. Grains come in ascending order; those that are left out are zero.
    ///
    /// # Errors
    /// The file would be longer than its tables can say.
    pub fn grain(&mut self, index: u64, packed: &[u8], out: &mut Vec<u8>) -> Result<()> {
        ensure!(index >= self.next, "grain {index} of the VMDK comes after its successor");
        let before = out.len();
        while self.current_table() < index / TABLE_ENTRIES {
            self.end_table(before, out)?;
        }
        let sector = self.sector(before, out)?;
        self.table.resize((index % TABLE_ENTRIES) as usize, 0);
        self.table.push(sector);
        let mut marker = [0; GRAIN_MARKER as usize];
        put_le64(&mut marker, 0, index.saturating_mul(GRAIN / SECTOR));
        put_le32(&mut marker, 8, packed.len() as u32);
        let start = out.len();
        out.extend(marker);
        out.extend(packed);
        let padded = out.len().saturating_sub(start).next_multiple_of(SECTOR as usize);
        out.resize(start.saturating_add(padded), 0);
        self.next = index.saturating_add(1);
        self.count(before, out);
        Ok(())
    }

    /// Appends what comes behind the grains.
    ///
    /// # Errors
    /// As [`Stream::grain`].
    pub fn end(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let before = out.len();
        while self.current_table() < tables_of(self.size)? {
            self.end_table(before, out)?;
        }
        let entries: Vec<u8> = self.directory.iter().flat_map(|sector| sector.to_le_bytes()).collect();
        marker(out, (entries.len() as u64).div_ceil(SECTOR), DIRECTORY_MARKER);
        let directory = u64::from(self.sector(before, out)?);
        out.extend(entries);
        pad_from(out, before);
        marker(out, 1, FOOTER_MARKER);
        out.extend(self.header(directory).encode());
        marker(out, 0, 0);
        self.count(before, out);
        Ok(())
    }

    /// The number of the table that is being filled.
    fn current_table(&self) -> u64 {
        self.directory.len() as u64
    }

    fn end_table(&mut self, before: usize, out: &mut Vec<u8>) -> Result<()> {
        if self.table.is_empty() {
            self.directory.push(0);
            return Ok(());
        }
        marker(out, TABLE_SECTORS, TABLE_MARKER);
        let sector = self.sector(before, out)?;
        self.table.resize(TABLE_ENTRIES as usize, 0);
        out.extend(self.table.drain(..).flat_map(u32::to_le_bytes));
        self.directory.push(sector);
        Ok(())
    }

    /// The sector that the next byte of `out` gets, where `before` bytes of it are counted already.
    fn sector(&self, before: usize, out: &[u8]) -> Result<u32> {
        let at = self.len.saturating_add(out.len().saturating_sub(before) as u64);
        u32::try_from(at / SECTOR).map_err(|_| {
            Error::unsupported("a VMDK file has at most 2 TiB: choose another format for so much data")
        })
    }

    fn count(&mut self, before: usize, out: &[u8]) {
        self.len = self.len.saturating_add(out.len().saturating_sub(before) as u64);
    }

    fn header(&self, directory: u64) -> Header {
        Header {
            version: VERSION,
            flags: NEWLINES | COMPRESSED | MARKERS,
            size: self.size,
            second_directory: 0,
            directory,
            overhead: OVERHEAD,
            compression: DEFLATE,
        }
    }
}

/// Appends a marker of `kind` before so many sectors.
fn marker(out: &mut Vec<u8>, sectors: u64, kind: u32) {
    let mut marker = [0; SECTOR as usize];
    put_le64(&mut marker, 0, sectors);
    put(&mut marker, 12, &kind.to_le_bytes());
    out.extend(marker);
}

/// Appends zeroes up to a whole number of sectors from `before` on.
fn pad_from(out: &mut Vec<u8>, before: usize) {
    let mut new = out.split_off(before);
    pad(&mut new, SECTOR as usize);
    out.append(&mut new);
}
