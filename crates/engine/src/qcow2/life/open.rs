//! Opening a qcow2 file: header, tables, the rules that hold before any of it is used.

use crate::Remedy;
use crate::chain::map::ChainMap;
use crate::error::format_error;
use crate::image_worker::ImageWorker;
use crate::options::{Access, OpenOptions, Purpose};
use crate::qcow2::bitmaps::{Bitmaps, FoundRecord};
use crate::qcow2::cache::inflated_clusters::{ClusterCache, InflatedClusters};
use crate::qcow2::cache::resident_table::ResidentTable;
use crate::qcow2::cache::shard::SLOT_OVERHEAD;
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::cache::slice_store::{Class, SliceStore};
use crate::qcow2::commit::queue::CommitQueue;
use crate::qcow2::compressed::clusters::CompressedClusters;
use crate::qcow2::disk::GuestDisk;
use crate::qcow2::encryption::ImageEncryption;
use crate::qcow2::files::{ImageFiles, WriteAccess};
use crate::qcow2::fork_seal::sealed_error;
use crate::qcow2::header::block::ImageHeader;
use crate::qcow2::life::create::Magic;
use crate::qcow2::life::unlock::luks_area;
use crate::qcow2::map::active_map::{ActiveMap, L1};
use crate::qcow2::read_tables::{TABLE_STEP, read_bytes, read_table};
use crate::qcow2::snapshots::SnapshotTable;
use crate::qcow2::space::HostSpace;
use crate::qcow2::space::metadata_map::{MAX_SNAPSHOT_TABLE_CLUSTERS, METADATA_PLACE, Metadata};
use crate::qcow2::state::Qcow2;
use crate::sync::ArcCell;
use crate::{Error, ErrorKind, Result};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use zebu_qcow2::header::MAGIC;
use zebu_qcow2::snapshot::{self, ParsedTable, SnapshotEntry};
use zebu_qcow2::{FormatError, Geometry, Header, bitmap};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, Worker};

/// Bytes of a slice by default, or a cluster if that is smaller.
const DEFAULT_SLICE: u64 = 4096;
/// Bounds of the budget by default, bytes.
const MIN_DEFAULT_CACHE: u64 = 1 << 20;
const MAX_DEFAULT_CACHE: u64 = 32 << 20;
/// Bytes read at once from a snapshot table.
const SNAPSHOT_TABLE_STEP: u64 = 64 << 10;

/// Bytes of the LUKS header of an image that is written, at most. Those of cryptsetup and QEMU have 2 MiB.
const MAX_LUKS_AREA: u64 = 256 << 20;

/// A header and the small tables that hang on it.
#[derive(Debug)]
pub(crate) struct Parsed {
    header: Header,
    first_block: Vec<u8>,
    snapshots: Vec<SnapshotEntry>,
    /// Bytes of the snapshot table on disk.
    snapshots_len: u64,
    bitmaps: Vec<bitmap::BitmapEntry>,
    record: FoundRecord,
}

impl Parsed {
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }
}

/// Reads and checks the header and the small tables.
pub(crate) async fn parse(worker: &Worker, file: &File, purpose: zebu_qcow2::Purpose) -> Result<Parsed> {
    parse_with(worker, file, purpose, Magic::Written).await
}

/// The same for an image that may have no magic number yet.
pub(crate) async fn parse_with(
    worker: &Worker,
    file: &File,
    purpose: zebu_qcow2::Purpose,
    magic: Magic,
) -> Result<Parsed> {
    let path = file.path();
    let first = read_bytes(worker, file, 0, 4096).await?;
    let first = with_magic(&first, magic);
    let in_file = (file.len().min(4096) as usize).min(first.len());
    let prefix = Header::prefix(&first[..in_file]).map_err(|e| format_error(path, &e))?;
    let cluster = prefix.cluster_size() as usize;
    let first_cluster = read_bytes(worker, file, 0, cluster).await?;
    let (header, _warnings) =
        Header::parse(&with_magic(&first_cluster, magic), purpose).map_err(|e| format_error(path, &e))?;
    if purpose == zebu_qcow2::Purpose::ReadWrite
        && header.seal().is_sealed()
        && !sabotage::is(Fault::WriteSealed)
    {
        return Err(sealed_error(path, &header.seal()));
    }
    // A copy: of a chain, every image's is held until all are open.
    let first_block = first_cluster.get(..4096).unwrap_or(&first_cluster).to_vec();
    drop(first_cluster);
    let (snapshots, snapshots_len) = read_snapshots(worker, file, &header, purpose).await?;
    let bitmaps = match header.bitmaps() {
        Some(ext) => {
            // What the file does not hold costs no memory, whatever the header says. A directory that is cut off is
            // broken, and a broken directory makes the bitmaps unusable, not the disk.
            let in_file = file.len().saturating_sub(ext.directory_offset.0);
            if ext.directory_size > in_file {
                Vec::new()
            } else {
                let offset = ext.directory_offset.0;
                let bytes = read_bytes(worker, file, offset, ext.directory_size as usize).await?;
                bitmap::parse_directory(&bytes, ext.bitmap_count).unwrap_or_default()
            }
        }
        None => Vec::new(),
    };
    // Without it, bitmaps in use are inconsistent, and the disk can be read all the same.
    let record = FoundRecord::find(worker, file, &header, &bitmaps).await.unwrap_or_default();
    Ok(Parsed { header, first_block, snapshots, snapshots_len, bitmaps, record })
}

/// The beginning of a file with the magic number, which may not be there yet.
fn with_magic(bytes: &[u8], magic: Magic) -> Cow<'_, [u8]> {
    let mut bytes = Cow::Borrowed(bytes);
    if magic == Magic::Withheld
        && let Some(place) = bytes.to_mut().get_mut(..4)
    {
        place.copy_from_slice(&MAGIC.to_be_bytes());
    }
    bytes
}

pub(crate) async fn read_snapshots(
    worker: &Worker,
    file: &File,
    header: &Header,
    purpose: zebu_qcow2::Purpose,
) -> Result<(Vec<SnapshotEntry>, u64)> {
    if header.nb_snapshots == 0 {
        return Ok((Vec::new(), 0));
    }
    let mut have = SNAPSHOT_TABLE_STEP;
    loop {
        let bytes = read_bytes(worker, file, header.snapshots_offset.0, have as usize).await?;
        match snapshot::parse_table(&bytes, header.nb_snapshots, purpose)
            .map_err(|e| format_error(file.path(), &e))?
        {
            ParsedTable::Complete { entries, len, .. } => return Ok((entries, len)),
            ParsedTable::NeedsBytes { at_least } => {
                if header.snapshots_offset.0 + have > file.len() + SNAPSHOT_TABLE_STEP {
                    return Err(format_error(file.path(), &FormatError::SnapshotTableUnreadable));
                }
                have = (have * 2).max(at_least);
            }
        }
    }
}

/// The budget that holds the whole mapping of an image in slices of the size that is used by default, all of them
/// loaded: L2 tables, refcounts, the tables above them, and a buffer to load through.
pub(crate) fn full_cache_bytes(header: &Header) -> u64 {
    let geometry = header.geometry();
    let cluster = geometry.cluster_size();
    let slice = cluster.min(DEFAULT_SLICE);
    let slices = |bytes: u64| bytes.div_ceil(slice).saturating_mul(slice + SLOT_OVERHEAD);
    let clusters = header.virtual_size().div_ceil(cluster);
    let l2 = clusters.saturating_mul(u64::from(geometry.l2_entry_size));
    let tables = l2.div_ceil(cluster);
    let refcounts = (clusters.saturating_add(tables) << geometry.refcount_order).div_ceil(8);
    let blocks = refcounts.div_ceil(cluster);
    let above = (tables + blocks).saturating_mul(8 + METADATA_PLACE).next_multiple_of(4096) + 4 * 4096;
    let all = slices(l2).saturating_add(slices(refcounts)).saturating_add(above).saturating_add(2 * slice);
    all.next_multiple_of(4096)
}

/// The budget by default: the whole mapping of a chain up to 32 MiB, at least 1 MiB beside the tables that are held in
/// any case. Where the chain is written, what a commit holds beside it: a commit begins when a quarter of the budget is
/// dirty, and should not begin for that alone. Where it is only read, its files will not grow: `in_files` bytes, which
/// hold all tables, are not cached in more than twice as many.
pub(crate) fn default_cache_bytes(full: u64, in_files: u64, tables: u64, access: Access) -> u64 {
    let wanted = match access {
        Access::ReadOnly => full.min(in_files.saturating_mul(2)),
        Access::ReadWrite => full.saturating_mul(4),
    };
    wanted.clamp(MIN_DEFAULT_CACHE, MAX_DEFAULT_CACHE).max(tables + MIN_DEFAULT_CACHE)
}

/// The part of an image that its chain gives it.
pub(crate) struct ChainContext {
    store: Arc<SliceStore>,
    inflated: Arc<InflatedClusters>,
    /// For the top image.
    index: Option<Arc<ChainMap>>,
    has_backing: bool,
    data_file: Option<File>,
    encryption: ImageEncryption,
}

impl ChainContext {
    /// The part of an image with this encryption, in a chain that has this memory.
    pub(crate) fn new(
        store: Arc<SliceStore>,
        inflated: Arc<InflatedClusters>,
        encryption: ImageEncryption,
    ) -> Self {
        Self { store, inflated, index: None, has_backing: false, data_file: None, encryption }
    }

    /// The same for the top image, which has the map of the chain if there is one.
    pub(crate) fn at_top(self, index: Option<Arc<ChainMap>>) -> Self {
        Self { index, ..self }
    }

    /// The same above a backing image.
    pub(crate) fn above_backing(self) -> Self {
        Self { has_backing: true, ..self }
    }

    /// The same with an external data file.
    pub(crate) fn with_data_file(self, data_file: File) -> Self {
        Self { data_file: Some(data_file), ..self }
    }
}

/// Fails if a cache that was asked for would have more slices than can be told apart.
fn check_slices(
    options: &OpenOptions,
    slice: usize,
    geometry: &Geometry,
    size: u64,
    path: &Path,
) -> Result<()> {
    let all = size.div_ceil(geometry.cluster_size()).saturating_mul(geometry.l2_entry_size.into());
    let wanted = options.cache_size.map_or(0, |wanted| wanted.min(all));
    if wanted / slice as u64 > i32::MAX as u64 {
        return Err(Error::new(ErrorKind::InvalidArgument, "L2 cache size too big").on(path));
    }
    Ok(())
}

fn slice_bytes(options: &OpenOptions, cluster: u64, path: &Path) -> Result<usize> {
    let Some(wanted) = options.slice_size else { return Ok(cluster.min(DEFAULT_SLICE) as usize) };
    let wanted = u64::from(wanted);
    if !wanted.is_power_of_two() || wanted < 512 || wanted > cluster {
        let message = format!(
            "L2 cache entry size must be a power of two between 512 and the cluster size ({cluster})"
        );
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(path));
    }
    Ok(wanted as usize)
}

impl Qcow2 {
    /// Sets the state up from a parsed header.
    pub(crate) async fn open(
        worker: &Worker,
        file: File,
        parsed: &Parsed,
        options: &OpenOptions,
        context: ChainContext,
    ) -> Result<Arc<Self>> {
        let path = file.path().to_owned();
        let header = parsed.header.clone();
        let geometry = header.geometry();
        let cluster = geometry.cluster_size();
        let writable = options.access == Access::ReadWrite;

        let (l1_offset, l1_size, size) = match &options.snapshot {
            None => (header.l1_table_offset, header.l1_size, header.virtual_size()),
            Some(name) => {
                let entry = snapshot::find(&parsed.snapshots, name.as_bytes()).ok_or_else(|| {
                    let message = format!("there is no snapshot '{name}' (zebu info lists them)");
                    Error::new(ErrorKind::InvalidArgument, message).on(&path)
                })?;
                if writable {
                    let message = "a snapshot can be opened for reading only";
                    return Err(Error::new(ErrorKind::ReadOnly, message).on(&path));
                }
                entry.check_l1(&geometry).map_err(|e| format_error(&path, &e))?;
                let size = entry.disk_size().unwrap_or(header.virtual_size());
                (entry.l1_table_offset, entry.l1_size, size)
            }
        };
        let slice = slice_bytes(options, cluster, &path)?;
        check_slices(options, slice, &geometry, size, &path)?;
        let block = slice.clamp(512, 4096);
        let l1 = if options.purpose == Purpose::Inspect {
            ResidentTable::new(0, block, &context.store)
        } else {
            if l1_offset.0 > file.len() && l1_size > 0 {
                let message = "the L1 table lies outside the file; the image is truncated";
                return Err(Error::new(ErrorKind::Corrupt, message).on(&path).at_host(l1_offset.0));
            }
            let l1 = ResidentTable::new(l1_size as usize, block, &context.store);
            read_table(worker, &file, l1_offset.0, &l1).await?;
            l1
        };
        if writable {
            options.compress.check(header.compression()).map_err(|e| e.on(&path))?;
        }
        let access = if writable { WriteAccess::ReadWrite } else { WriteAccess::ReadOnly };
        let files = ImageFiles::new(file, context.data_file, access);
        let qcow2 = Arc::new(Self {
            files: files.clone(),
            space: HostSpace::new(files.clone(), &header, &context.store, slice, block),
            snapshots: ArcCell::new(SnapshotTable::new(
                parsed.snapshots.clone(),
                header.snapshots_offset.0,
                parsed.snapshots_len,
            )),
            bitmaps: Bitmaps::found(
                header.bitmaps(),
                &parsed.bitmaps,
                parsed.record,
                &geometry,
                header.virtual_size(),
                &parsed.first_block,
            ),
            disk: GuestDisk::new(size, context.has_backing, options.cache, options.zero_policy),
            map: ActiveMap::new(
                geometry,
                L1::new(l1, l1_offset.0),
                SliceCache::new(context.store.clone(), Class::Table, slice),
                context.index,
            ),
            compressed: CompressedClusters::new(options.compress.clone()),
            inflated: ClusterCache::new(context.inflated),
            encryption: context.encryption,
            commit: CommitQueue::default(),
            own_worker: ImageWorker::default(),
            header: ImageHeader::new(files, header, parsed.first_block.clone(), options.damage),
        });
        if writable {
            qcow2.check_refcount_table(worker).await?;
            qcow2.prepare_space(parsed)?;
        }
        Ok(qcow2)
    }

    /// Notes where metadata lies, and how far the file reaches.
    ///
    /// # Errors
    /// There is more metadata than is noted.
    fn prepare_space(&self, parsed: &Parsed) -> Result<()> {
        let header = self.header.opened();
        let cluster = self.geometry().cluster_size();
        let l1 = self.map.l1();
        self.space.note_metadata(0, cluster, Metadata::Header);
        self.space.note_metadata(l1.offset(), l1.table().len() as u64 * 8, Metadata::ActiveL1);
        let reftable_bytes = u64::from(header.refcount_table_clusters) * cluster;
        self.space.note_metadata(header.refcount_table_offset.0, reftable_bytes, Metadata::RefcountTable);
        self.space.note_metadata(header.snapshots_offset.0, parsed.snapshots_len, Metadata::SnapshotTable);
        if let Some(area) = luks_area(header) {
            if area.end - area.start > MAX_LUKS_AREA {
                return Err(self.too_much_metadata("the LUKS header", area.end - area.start, MAX_LUKS_AREA));
            }
            let end = area.end.min(self.file().len().next_multiple_of(cluster));
            self.space.note_metadata(area.start, end.saturating_sub(area.start), Metadata::LuksHeader);
        }
        self.note_snapshot_tables(&parsed.snapshots)?;
        if let Some(ext) = header.bitmaps() {
            self.space.note_metadata(ext.directory_offset.0, ext.directory_size, Metadata::BitmapDirectory);
        }
        self.space.note_file_end();
        Ok(())
    }

    fn too_much_metadata(&self, what: &str, bytes: u64, most: u64) -> Error {
        let message = format!(
            "{what} would take up {bytes} bytes; an image is opened for writing with at most {most} \
             (it can be read, and converted to another)"
        );
        Error::new(ErrorKind::Unsupported, message).on(self.path())
    }

    /// Notes where the L1 tables of snapshots lie. Nobody has checked what the snapshot table says of them: what is past
    /// the end of the file is left out, and what many of them share is noted once, so that neither memory nor time is
    /// out of proportion to the file.
    ///
    /// # Errors
    /// The tables take up too many clusters: a sparse file may be of any size.
    fn note_snapshot_tables(&self, snapshots: &[SnapshotEntry]) -> Result<()> {
        let (bits, file_end) = (self.geometry().cluster_bits, self.file().len());
        let mut tables: Vec<_> = snapshots
            .iter()
            .map(|entry| {
                let start = entry.l1_table_offset.0;
                start..start.saturating_add(u64::from(entry.l1_size) * 8).min(file_end)
            })
            .filter(|bytes| !bytes.is_empty())
            .map(|bytes| bytes.start >> bits..((bytes.end - 1) >> bits) + 1)
            .collect();
        tables.sort_unstable_by_key(|clusters| clusters.start);
        let (mut noted, mut count) = (0, 0);
        for clusters in &mut tables {
            clusters.start = clusters.start.max(noted);
            noted = noted.max(clusters.end);
            count += clusters.end.saturating_sub(clusters.start);
        }
        if count > MAX_SNAPSHOT_TABLE_CLUSTERS {
            let most = MAX_SNAPSHOT_TABLE_CLUSTERS << bits;
            return Err(self.too_much_metadata("the L1 tables of snapshots", count << bits, most));
        }
        for clusters in tables {
            // What is known to lie there stays known.
            let _ = self.space.metadata().insert_tables(clusters, Metadata::InactiveL1);
        }
        Ok(())
    }

    /// Refuses an image without refcounts. Reads no more of the table than up to its first entry.
    async fn check_refcount_table(&self, worker: &Worker) -> Result<()> {
        let offset = self.header.opened().refcount_table_offset.0;
        let len = u64::from(self.header.opened().refcount_table_clusters) << self.geometry().cluster_bits;
        let len = self.file().len().saturating_sub(offset).min(len);
        let (mut at, mut step) = (0, 4096);
        while at < len {
            let bytes = read_bytes(worker, self.file(), offset + at, (len - at).min(step) as usize).await?;
            let entries = bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry));
            if entries.into_iter().any(|entry| zebu_qcow2::RefTableEntry(entry).block().is_some()) {
                return Ok(());
            }
            (at, step) = (at + step, TABLE_STEP as u64);
        }
        let message = "There are no references in the refcount table; repair the image";
        Err(Error::new(ErrorKind::Corrupt, message).on(self.path()).with_remedy(Remedy::Repair))
    }

    /// Bytes of the budget that the image needs before any slice: the tables that it holds, and those that its first
    /// write adds.
    pub(crate) fn tables_for_writing(&self) -> u64 {
        if !self.is_writable() || self.header.preparation().is_done() {
            return 0;
        }
        let tables = self.map.l1().table().iter_set().count() as u64;
        self.space.bytes_for_writing(self.header.opened(), tables)
    }
}
