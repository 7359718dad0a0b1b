//! How large an image file would become.

use super::status::{Layer, Status};
use crate::crypt::NewEncryption;
use crate::progress::{JobControl, Phase, Tracker};
use crate::{CreateOptions, Error, ErrorKind, Format, Image, Preallocation, Qcow2Info, Result};
use zebu_qcow2::geometry::{DataLocation, Geometry, L2Format};
use zebu_qcow2::{FormatError, Version, layout, limits};
use zebu_storage::Worker;

/// Bytes that a new image file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Measurement {
    /// To hold what the source holds now. Tables are counted as if every cluster were allocated, so it may become a little
    /// less, never more: a block device of that size is enough. A file may be longer than that, with holes.
    pub required: u64,
    /// When every cluster of the disk is allocated.
    pub fully_allocated: u64,
    /// For the source's persistent bitmaps, on top; `None` where source or target format has none.
    pub bitmaps: Option<u64>,
}

/// Measures a target made with `create` for the content of `image`, its backing chain included.
/// `create.size` is not looked at: the size is that of the image. With `create.backing`, the worst case is assumed:
/// that the target's backing file has nothing in common with the image.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a target that can't be made, [`ErrorKind::Cancelled`], and what looking up the
/// image's mapping fails with.
pub async fn measure_image(
    worker: &Worker,
    image: &Image,
    create: &CreateOptions,
    control: &JobControl,
) -> Result<Measurement> {
    let size = image.virtual_size();
    let empty = measure_size(size, create)?;
    if matches!(create.format, Format::Raw | Format::Luks) {
        return Ok(empty);
    }
    let data = if create.backing.is_some() || sets_data_aside(create) {
        size.div_ceil(create.cluster_size).saturating_mul(create.cluster_size)
    } else {
        count_data(worker, image, create.cluster_size, control).await?
    };
    let metadata = metadata_of(size, create)?;
    let bitmaps = match image.info()?.qcow2 {
        Some(source) if source.version >= 3 && create.version >= 3 => {
            Some(bitmap_bytes(&source, size, create.cluster_size))
        }
        _ => None,
    };
    Ok(Measurement { required: metadata.saturating_add(data), bitmaps, ..empty })
}

/// Measures a target made with `create` for an empty disk of `size` bytes.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a target that can't be made.
pub fn measure_size(size: u64, create: &CreateOptions) -> Result<Measurement> {
    let size = size
        .checked_next_multiple_of(limits::SECTOR_SIZE)
        .filter(|&size| i64::try_from(size).is_ok())
        .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the image size is too large"))?;
    if create.format == Format::Luks {
        let header = create.encryption.clone().unwrap_or_default().header_len();
        let all = size.saturating_add(header);
        return Ok(Measurement { required: all, fully_allocated: all, bitmaps: None });
    }
    if create.format == Format::Raw {
        // Ranges that are not allocated count towards the length of a raw file.
        return Ok(Measurement { required: size, fully_allocated: size, bitmaps: None });
    }
    let full = full_size(size, create)?;
    let required = if sets_data_aside(create) { full.total() } else { full.metadata };
    Ok(Measurement { required, fully_allocated: full.total(), bitmaps: None })
}

/// Whether the file holds all of its data from the beginning.
fn sets_data_aside(create: &CreateOptions) -> bool {
    matches!(create.preallocation, Preallocation::Falloc | Preallocation::Full)
}

fn metadata_of(size: u64, create: &CreateOptions) -> Result<u64> {
    Ok(full_size(size, create)?.metadata)
}

fn full_size(size: u64, create: &CreateOptions) -> Result<layout::FullSize> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
    let version = match create.version {
        2 => Version::V2,
        3 => Version::V3,
        other => return Err(invalid(format!("qcow2 has no version {other}"))),
    };
    if !create.cluster_size.is_power_of_two() {
        return Err(invalid("the cluster size must be a power of two between 512 and 2048k".into()));
    }
    if !create.refcount_bits.is_power_of_two() {
        return Err(invalid("the refcount width must be a power of two and may not exceed 64 bits".into()));
    }
    if version == Version::V2 && create.refcount_bits != 16 {
        return Err(invalid("refcount widths other than 16 bits need version 3 (compat=1.1)".into()));
    }
    if version == Version::V2 && create.extended_l2 {
        return Err(invalid("extended L2 entries need version 3 (compat=1.1)".into()));
    }
    let l2 = if create.extended_l2 { L2Format::Extended } else { L2Format::Standard };
    // Counted as if an external data file lay in the image, as qemu-img does: what is measured is the space of both.
    let geometry = Geometry::new(
        version,
        create.cluster_size.ilog2(),
        create.refcount_bits.ilog2(),
        l2,
        DataLocation::InImage,
    )
    .map_err(|error| invalid(error.to_string()))?;
    let luks = create.encryption.as_ref().map_or(0, NewEncryption::header_len);
    layout::fully_allocated_size(size, geometry.host_clusters(luks), &geometry).map_err(|error| match error {
        FormatError::SizeTooLarge { .. } => {
            invalid("the image size is too large (try a larger cluster size)".into())
        }
        other => invalid(other.to_string()),
    })
}

/// Bytes of the target's clusters that would hold data.
async fn count_data(worker: &Worker, image: &Image, cluster: u64, control: &JobControl) -> Result<u64> {
    let size = image.virtual_size();
    let chain = Layer::chain(image)?;
    let tracker = Tracker::new(control, Phase::Measuring, size);
    let mut bytes: u64 = 0;
    let mut extents = image.extents(0..size);
    while let Some(extent) = extents.next(worker).await? {
        tracker.check()?;
        let end = extent.end().min(size);
        let next = if Status::of(&extent, &chain).zero {
            end
        } else {
            // The clusters that the extent touches; what follows in the last of them doesn't count again.
            let first = extent.offset / cluster * cluster;
            let behind = end.div_ceil(cluster).saturating_mul(cluster);
            bytes = bytes.saturating_add(behind - first);
            behind.min(size)
        };
        tracker.advance(next - extent.offset);
        extents.skip_to(next);
    }
    tracker.finish(None);
    Ok(bytes)
}

/// Bytes of the bitmaps that can be taken along: their data as if fully allocated, their tables, the directory.
fn bitmap_bytes(source: &Qcow2Info, disk_size: u64, cluster: u64) -> u64 {
    /// Bytes of a directory entry before the name; entries are padded to 8 bytes (format document, "Bitmap directory").
    const ENTRY: u64 = 24;
    let whole_clusters = |bytes: u64| bytes.div_ceil(cluster).saturating_mul(cluster);
    let mut bytes: u64 = 0;
    let mut directory: u64 = 0;
    for bitmap in source.bitmaps.iter().filter(|bitmap| !bitmap.in_use) {
        let bits = disk_size.div_ceil(bitmap.granularity.max(1));
        let data = whole_clusters(bits.div_ceil(8));
        let table = whole_clusters(data / cluster * 8);
        bytes = bytes.saturating_add(data).saturating_add(table);
        directory += (ENTRY + bitmap.name.len() as u64).next_multiple_of(8);
    }
    bytes.saturating_add(whole_clusters(directory))
}
