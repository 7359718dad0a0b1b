//! Version 1 of qcow: a header, one table of tables, and tables of clusters, some of which are compressed.
//!
//! Integers are big endian. The rules are those of QEMU's `block/qcow.c`.

use crate::bytes::{be32, be64};
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::limits::MAX_NAME;
use crate::opened::Opened;
use crate::parent::{Parent, ParentFormat};
use crate::run::{Kind, Packed, Packing, Run};
use crate::units::{Unit, Units};

/// The first bytes of the file, version included.
pub const MAGIC: &[u8; 8] = b"QFI\xfb\0\0\0\x01";
/// The mark of a compressed cluster in a table entry.
const COMPRESSED: u64 = 1 << 63;

/// The tables of a qcow image.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    size: u64,
    cluster_bits: u32,
    cluster: Unit,
    /// Entries of a table of clusters.
    entries: Unit,
    l1: u64,
}

pub(crate) fn open(files: &dyn Files) -> Result<Opened<Map>> {
    let source = Source::image(files);
    let header: [u8; 48] = source.array(0, "the qcow header")?;
    ensure!(header.starts_with(MAGIC), "Image not in qcow format");
    let size = be64(&header, 24);
    ensure!(size > 1, "qcow disk size is too small (must be at least 2 bytes)");
    let [cluster_bits, l2_bits] = crate::bytes::array(&header, 32);
    ensure!((9..=16).contains(&cluster_bits), "qcow cluster size must be between 512 and 64k");
    ensure!((6..=13).contains(&l2_bits), "qcow L2 table size must be between 512 and 64k");
    match be32(&header, 36) {
        0 => {}
        1 => return Err(Error::unsupported("the qcow image is encrypted with AES, which is not supported")),
        other => return Err(Error::damaged(format!("invalid encryption method {other} in qcow header"))),
    }
    let cluster_bits = u32::from(cluster_bits);
    let empty = || Error::damaged("qcow clusters are empty");
    let cluster = Unit::new(1 << cluster_bits).ok_or_else(empty)?;
    let entries = Unit::new(1 << l2_bits).ok_or_else(empty)?;
    let l1 = be64(&header, 40);
    let tables = entries.count(cluster.count(size));
    source.check(l1, tables.saturating_mul(8), "the qcow L1 table")?;
    let (at, len) = (be64(&header, 8), u64::from(be32(&header, 16)));
    let parent = if at == 0 {
        None
    } else {
        require!(len <= MAX_NAME, "the name of the qcow backing file is too long ({len} bytes)");
        let name =
            String::from_utf8_lossy(&source.vec(at, len, "the name of the qcow backing file")?).into_owned();
        Some(Parent { name, format: ParentFormat::Unknown, identities: Vec::new() })
    };
    let size =
        size.checked_next_multiple_of(512).ok_or_else(|| Error::damaged("the qcow disk is too large"))?;
    let map = Map { size, cluster_bits, cluster, entries, l1 };
    Ok(Opened { size, unit: cluster.bytes(), variant: "qcow", parent, identity: None, map })
}

impl Map {
    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        self.cluster.run(guest, max_len, |index| self.cluster(files, index))
    }

    fn cluster(&self, files: &dyn Files, index: u64) -> Result<Units> {
        let source = Source::image(files);
        let start = self.cluster.start(index);
        if start >= self.size {
            return Ok(Units::NO_MORE);
        }
        let at = self.l1.saturating_add(self.entries.index(index).saturating_mul(8));
        let table = source.be64(at, "the qcow L1 table")?;
        if table == 0 {
            return Ok(Units::without_table(index, self.entries));
        }
        let at = table.saturating_add(self.entries.within(index).saturating_mul(8));
        let entry = source.be64(at, "a qcow L2 table")?;
        if entry == 0 {
            return Ok(Kind::Hole.into());
        }
        if entry & COMPRESSED == 0 {
            return Ok(Kind::Data { file: FileIndex::IMAGE, offset: entry }.into());
        }
        // The offset, and above it the length.
        let offset_bits = 63u32.saturating_sub(self.cluster_bits);
        let offset = entry & (1u64.wrapping_shl(offset_bits)).wrapping_sub(1);
        let len = entry.wrapping_shr(offset_bits) & self.cluster.bytes().saturating_sub(1);
        if len == 0 || !source.holds(offset, len) {
            let message =
                format!("a compressed qcow cluster of {len} bytes at {offset} does not lie in the file");
            return Err(Error::damaged(message).at(FileIndex::IMAGE, at));
        }
        Ok(Kind::Packed(Packed {
            file: FileIndex::IMAGE,
            offset,
            len,
            packing: Packing::Deflate,
            start,
            unit: self.cluster.bytes(),
        })
        .into())
    }
}
