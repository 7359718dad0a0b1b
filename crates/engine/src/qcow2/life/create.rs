//! Creating a qcow2 file.

use crate::crypt::new_header::{NewEncryption, NewMethod};
use crate::error::format_error;
use crate::options::{CreateOptions, Format, Preallocation};
use crate::progress::{JobControl, Phase, Tracker};
use crate::reservation::Reservation;
use crate::{Error, ErrorKind, Result};
use zebu_qcow2::layout::{self, FreshLayout};
use zebu_qcow2::luks::LuksPointer;
use zebu_qcow2::{Autoclear, Compatible, DataLocation, FormatError, Header, L2Format, NewHeader, Version};
use zebu_storage::{File, FileKind, IoBuf, Worker};

/// The header of a new image, without the places of its tables.
pub(crate) fn new_header(options: &CreateOptions, size: u64) -> Result<Header> {
    let refuse = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, message.to_owned()));
    let version = match options.version {
        2 => Version::V2,
        3 => Version::V3,
        other => return refuse(&format!("Invalid compatibility level: '{other}'")),
    };
    if !options.cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&options.cluster_size) {
        return refuse("Cluster size must be a power of two between 512 and 2048k");
    }
    if !options.refcount_bits.is_power_of_two() || options.refcount_bits > 64 {
        return refuse("Refcount width must be a power of two and may not exceed 64 bits");
    }
    if version == Version::V2 {
        if options.refcount_bits != 16 {
            return refuse(
                "Different refcount widths than 16 bits require compatibility level 1.1 or above (use version=v3 or greater)",
            );
        }
        if options.compression != crate::Compression::Zlib {
            return refuse(
                "Non-zlib compression type is only supported with compatibility level 1.1 and above (use version=v3 or greater)",
            );
        }
        if options.extended_l2 || options.lazy_refcounts || options.data_file.is_some() {
            return refuse(
                "Extended L2 entries, lazy refcounts and external data files require compatibility level 1.1 and above (use version=v3 or greater)",
            );
        }
    }
    if options.extended_l2 && options.cluster_size < 16384 {
        return refuse("Extended L2 entries are only supported with cluster sizes of at least 16384 bytes");
    }
    if options.encryption.is_some() && options.data_file_raw {
        return refuse(
            "data-file-raw and encryption contradict each other: an encrypted data file is not raw",
        );
    }
    if options.data_file_raw && options.data_file.is_none() {
        return refuse("data-file-raw requires data-file");
    }
    if options.data_file_raw && options.backing.is_some() {
        return refuse("Backing file and data-file-raw cannot be used at the same time");
    }
    if options.preallocation != Preallocation::Off && options.backing.is_some() && !options.extended_l2 {
        return refuse(
            "Backing file and preallocation can only be used at the same time if extended_l2 is on",
        );
    }
    let invalid =
        |e: FormatError| Error::new(ErrorKind::InvalidArgument, e.to_string()).with_errno(e.errno());
    let mut compatible = Compatible::empty();
    compatible.set(Compatible::LAZY_REFCOUNTS, options.lazy_refcounts);
    let mut autoclear = Autoclear::empty();
    autoclear.set(Autoclear::RAW_EXTERNAL_DATA, options.data_file_raw);
    let new = NewHeader::default()
        .version(version)
        .cluster_bits(options.cluster_size.trailing_zeros())
        .refcount_order(options.refcount_bits.trailing_zeros())
        .size(size)
        .l2_format(if options.extended_l2 { L2Format::Extended } else { L2Format::Standard })
        .data(if options.data_file.is_some() { DataLocation::External } else { DataLocation::InImage })
        .compression(options.compression)
        .compatible(compatible)
        .autoclear(autoclear);
    let mut header = Header::new(&new).map_err(invalid)?;
    if let Some((name, format)) = &options.backing {
        header.set_backing_file(Some(name.as_bytes())).map_err(invalid)?;
        header.set_backing_format(Some(format.name().as_bytes())).map_err(invalid)?;
    }
    if let Some(name) = &options.data_file {
        header.set_data_file_name(Some(name.as_bytes()));
    }
    Ok(header)
}

/// Whether a new image is one to everybody from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Magic {
    Written,
    /// Zeroes stand in its place.
    Withheld,
}

/// Makes an empty image in `file`; what is in it is lost. `options` has the size.
pub(crate) async fn in_file(
    worker: &Worker,
    file: &File,
    options: &CreateOptions,
    magic: Magic,
) -> Result<()> {
    let size = options.size.and_then(|size| size.checked_next_multiple_of(512)).ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, "Image creation needs a size parameter").on(file.path())
    })?;
    let header = new_header(options, size).map_err(|e| e.on(file.path()))?;
    write_empty(worker, file, header, options.encryption.as_ref(), magic).await
}

/// Bytes of tables that are written at once.
const PIECE: u64 = 1 << 20;

/// Writes the structures of an empty image into `file`, which is empty.
pub(crate) async fn write_empty(
    worker: &Worker,
    file: &File,
    mut header: Header,
    encryption: Option<&NewEncryption>,
    magic: Magic,
) -> Result<()> {
    let path = file.path();
    let geometry = header.geometry();
    let luks = match encryption {
        Some(encryption) => encryption.make(worker, path).await?.bytes,
        None => Vec::new(),
    };
    let luks_len = luks.len() as u64;
    let layout =
        FreshLayout::plan_with_luks(header.virtual_size(), luks_len, &geometry, layout::Preallocation::Off)
            .map_err(|e| format_error(path, &e))?;
    match encryption.map(|encryption| encryption.method) {
        None => {}
        Some(NewMethod::Luks1) => {
            header.set_luks(LuksPointer { offset: layout.luks_offset, len: luks_len });
        }
        Some(NewMethod::LegacyAes) => header.set_aes(),
    }
    // The last structure is the L1 table or a LUKS header; what is not written of it is a hole.
    let end = layout.l1_offset.0 + u64::from(layout.l1_entries) * 8;
    let end = end.max(layout.total_clusters * geometry.cluster_size());
    if file.kind() == FileKind::BlockDevice {
        worker.write_zero_bytes(file, 0, end).await.map_err(|e| Error::from(e).on(path))?;
    } else {
        worker.set_len(file, end).await.map_err(|e| Error::from(e).on(path))?;
    }
    Pieces::at(worker, file, layout.luks_offset.0).put_last(&luks).await?;
    finish(worker, file, header, &layout, magic).await
}

/// Tells whether the tables of a new image follow from a formula: each cluster has its place, in the disk's order, and what is new in
/// `file` reads as zero.
pub(crate) fn is_preallocated_by_formula(file: &File, options: &CreateOptions) -> bool {
    options.preallocation != Preallocation::Off
        && file.kind() == FileKind::Regular
        && options.data_file.is_none()
        && options.backing.is_none()
        && options.encryption.is_none()
}

/// Writes an image whose clusters all have a place into `file`, which is empty.
pub(crate) async fn write_preallocated(
    worker: &Worker,
    file: &File,
    header: Header,
    mode: Preallocation,
    control: &JobControl,
) -> Result<()> {
    let path = file.path();
    let geometry = header.geometry();
    let layout = FreshLayout::plan(header.virtual_size(), &geometry, layout::Preallocation::All)
        .map_err(|e| format_error(path, &e))?;
    let data = layout.data_offset.0..layout.total_clusters * geometry.cluster_size();
    let tracker = Tracker::catching(control, Phase::Reserving, header.virtual_size());
    worker.set_len(file, data.end).await.map_err(|e| Error::from(e).on(path))?;
    let space = Reservation { worker, file, format: Format::Qcow2, tracker: &tracker };
    match mode {
        Preallocation::Full => space.write_zeroes(data).await?,
        Preallocation::Falloc => space.allocate(data).await?,
        Preallocation::Off | Preallocation::Metadata => {}
    }
    Pieces::at(worker, file, layout.l1_offset.0).put_last(&layout.l1()).await?;
    let mut pieces = Pieces::at(worker, file, layout.l2_offset.0);
    let at_once = u32::try_from(PIECE / geometry.cluster_size()).unwrap_or(1).max(1);
    for first in (0..layout.l2_tables).step_by(at_once as usize) {
        tracker.check()?;
        let tables = first..layout.l2_tables.min(first.saturating_add(at_once));
        pieces.put(&layout.l2(tables.clone())).await?;
        if mode == Preallocation::Metadata {
            tracker.advance(
                u64::from(tables.end - tables.start) * geometry.l2_entries() * geometry.cluster_size(),
            );
        }
    }
    pieces.put_last(&[]).await?;
    finish(worker, file, header, &layout, Magic::Written).await?;
    tracker.finish(None);
    tracker.check_reports()
}

/// Writes the counts of a layout and, once all that it counts is durable, the header.
async fn finish(
    worker: &Worker,
    file: &File,
    mut header: Header,
    layout: &FreshLayout,
    magic: Magic,
) -> Result<()> {
    let path = file.path();
    let geometry = &layout.geometry;
    let mut pieces = Pieces::at(worker, file, layout.reftable_offset.0);
    pieces.put(&layout.reftable()).await?;
    // All but the last are full.
    let full = layout.refblock(0).unwrap_or_default();
    let last = layout.refcounts.blocks.saturating_sub(1);
    for _ in 0..last {
        pieces.put(&full).await?;
    }
    pieces.put_last(&layout.refblock(last).unwrap_or_default()).await?;
    layout.apply_to(&mut header);
    let mut encoded = header.encode().map_err(|e| format_error(path, &e))?;
    if magic == Magic::Withheld {
        encoded[..4].fill(0);
    }
    // A whole block, as everything else is written.
    encoded.resize(encoded.len().next_multiple_of(geometry.cluster_size().min(4096) as usize), 0);
    worker.flush(file).await.map_err(|e| Error::from(e).on(path))?;
    Pieces::at(worker, file, 0).put_last(&encoded).await?;
    worker.flush(file).await.map_err(|e| Error::from(e).on(path))
}

/// Tables that follow each other in a file, written in large pieces.
struct Pieces<'a> {
    worker: &'a Worker,
    file: &'a File,
    at: u64,
    bytes: Vec<u8>,
}

impl<'a> Pieces<'a> {
    fn at(worker: &'a Worker, file: &'a File, at: u64) -> Self {
        Self { worker, file, at, bytes: Vec::new() }
    }

    async fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() as u64 >= PIECE { self.write().await } else { Ok(()) }
    }

    async fn put_last(mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.is_empty() { Ok(()) } else { self.write().await }
    }

    async fn write(&mut self) -> Result<()> {
        let (result, _) = self.worker.write(self.file, self.at, IoBuf::copy_of(&self.bytes).into()).await;
        self.at += self.bytes.len() as u64;
        self.bytes.clear();
        result.map_err(|e| Error::from(e).on(self.file.path()))
    }
}
