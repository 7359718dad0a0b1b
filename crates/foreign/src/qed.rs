//! QED, an early successor of qcow2 in QEMU: a header, one table of tables, and tables of clusters.
//!
//! Integers are little endian. Rules: QEMU's `docs/interop/qed_spec.rst`.

use crate::bytes::{le32, le64};
use crate::error::{Error, Result, ensure, require};
use crate::files::{FileIndex, Files, Source};
use crate::limits::MAX_NAME;
use crate::opened::Opened;
use crate::parent::{Parent, ParentFormat};
use crate::run::{Kind, Run};
use crate::units::{Unit, Units};

/// The first bytes of the file.
pub const MAGIC: &[u8; 4] = b"QED\0";
/// Feature bits.
const HAS_BACKING: u64 = 1;
const NEED_CHECK: u64 = 2;
const BACKING_IS_RAW: u64 = 4;

/// The tables of a QED image.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    cluster: Unit,
    /// Bytes and entries of each table.
    table_bytes: u64,
    entries: Unit,
    l1: u64,
}

pub(crate) fn open(files: &dyn Files) -> Result<Opened<Map>> {
    let source = Source::image(files);
    let header: [u8; 64] = source.array(0, "the QED header")?;
    ensure!(header.starts_with(MAGIC), "Image not in QED format");
    let features = le64(&header, 16);
    let unknown = features & !(HAS_BACKING | NEED_CHECK | BACKING_IS_RAW);
    require!(unknown == 0, "Unsupported QED features: {unknown:x}");
    let (cluster, tables, header_clusters) = (le32(&header, 4), le32(&header, 8), le32(&header, 12));
    ensure!(
        cluster.is_power_of_two() && (4096..=64 << 20).contains(&cluster),
        "QED cluster size {cluster} is not a power of two from 4 KiB to 64 MiB"
    );
    ensure!(
        tables.is_power_of_two() && tables <= 16,
        "QED table size of {tables} clusters is not a power of two from 1 to 16"
    );
    let cluster = u64::from(cluster);
    let table_bytes = cluster.saturating_mul(u64::from(tables));
    let empty = || Error::damaged("QED clusters are empty");
    let entries = Unit::new(table_bytes / 8).ok_or_else(empty)?;
    let cluster = Unit::new(cluster).ok_or_else(empty)?;
    let size = le64(&header, 48);
    ensure!(size.is_multiple_of(512), "QED disk size {size} is not a multiple of 512");
    let most = cluster.start(entries.start(entries.bytes()));
    ensure!(size <= most, "QED disk of {size} bytes is larger than its tables allow");
    let l1 = le64(&header, 40);
    ensure!(l1 != 0 && cluster.within(l1) == 0, "QED L1 table at {l1} does not begin at a cluster");
    source.check(l1, table_bytes, "the QED L1 table")?;
    let parent = if features & HAS_BACKING == 0 {
        None
    } else {
        let (at, len) = (u64::from(le32(&header, 56)), u64::from(le32(&header, 60)));
        let in_header = at.saturating_add(len) <= cluster.start(u64::from(header_clusters));
        ensure!(
            in_header && len > 0 && len <= MAX_NAME,
            "the name of the QED backing file does not lie in the header"
        );
        let name =
            String::from_utf8_lossy(&source.vec(at, len, "the name of the QED backing file")?).into_owned();
        let format = if features & BACKING_IS_RAW == 0 { ParentFormat::Unknown } else { ParentFormat::Raw };
        Some(Parent { name, format, identities: Vec::new() })
    };
    let map = Map { cluster, table_bytes, entries, l1 };
    Ok(Opened { size, unit: cluster.bytes(), variant: "qed", parent, identity: None, map })
}

impl Map {
    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        self.cluster.run(guest, max_len, |index| self.cluster(files, index))
    }

    fn cluster(&self, files: &dyn Files, index: u64) -> Result<Units> {
        let source = Source::image(files);
        let table_index = self.entries.index(index);
        let at = self.l1.saturating_add(table_index.saturating_mul(8));
        if table_index >= self.entries.bytes() {
            return Ok(Units::NO_MORE);
        }
        let table = source.le64(at, "the QED L1 table")?;
        if table == 0 {
            return Ok(Units::without_table(index, self.entries));
        }
        self.check(source, table, self.table_bytes).map_err(|e| e.at(FileIndex::IMAGE, at))?;
        let at = table.saturating_add(self.entries.within(index).saturating_mul(8));
        match source.le64(at, "a QED L2 table")? {
            0 => Ok(Kind::Hole.into()),
            1 => Ok(Kind::Zero.into()),
            offset => {
                self.check(source, offset, 0).map_err(|e| e.at(FileIndex::IMAGE, at))?;
                Ok(Kind::Data { file: FileIndex::IMAGE, offset }.into())
            }
        }
    }

    /// Tables and data begin at a cluster behind the header.
    fn check(&self, source: Source<'_>, offset: u64, len: u64) -> Result<()> {
        ensure!(
            self.cluster.within(offset) == 0 && offset >= self.cluster.bytes() && source.holds(offset, len),
            "a QED table entry leads to {offset}, which is no cluster of the file"
        );
        Ok(())
    }
}
