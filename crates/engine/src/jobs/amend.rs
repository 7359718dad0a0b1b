//! Changes of an image's properties in place: version, refcount width, flags, the name of its data file.
//!
//! Each property changes with one sector of the header, when everything that the new one needs is durable; a crash
//! leaves the image as it was before one of the steps.

use crate::Remedy;
use crate::check::{CheckOptions, change_refcount_width};
use crate::open::flags;
use crate::progress::{JobControl, Phase, Tracker};
use crate::qcow2::state::Qcow2;
use crate::{
    Access, Durability, Error, ErrorKind, ExtentKind, Format, Image, OpenOptions, Preallocation, Result,
    Shrink,
};
use std::path::Path;
use std::sync::Arc;
use zebu_qcow2::{Autoclear, Compatible, FormatError, Header, Incompatible, Version};
use zebu_storage::{File, IoBuf, Worker};

/// The properties to change; `None` stays as it is.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct AmendOptions {
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: Option<u32>,
    /// Bytes of the virtual disk, not less than now; a multiple of 512.
    pub size: Option<u64>,
    /// Bits of a refcount: 1, 2, 4, ... 64; 16 in version 2.
    pub refcount_bits: Option<u32>,
    /// The lazy-refcounts flag (kept for other programs; zebu never enters that mode). Version 3.
    pub lazy_refcounts: Option<bool>,
    /// The name of the external data file, of an image that has one. The file itself is the caller's to move.
    pub data_file: Option<String>,
    /// Whether the data file is a valid raw image by itself: this can only be given up.
    pub data_file_raw: Option<bool>,
    /// Watching and stopping. Default: nobody watches.
    pub control: JobControl,
}

zebu_storage::option_setters!(AmendOptions {
    version: impl Into<Option<u32>>,
    size: impl Into<Option<u64>>,
    refcount_bits: impl Into<Option<u32>>,
    lazy_refcounts: impl Into<Option<bool>>,
    data_file: impl Into<Option<String>>,
    data_file_raw: impl Into<Option<bool>>,
    control: JobControl,
});

/// Most bytes of zeroes written at once.
const ZEROES: u64 = 1 << 20;

/// Changes the image at `path`, which is opened as `open` says.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for properties that contradict each other or the image; [`ErrorKind::Unsupported`]
/// for what version 2 can't hold, or what is not implemented; no space; damage. Properties that come before the one
/// that failed may have changed: version 3, refcount width, flags and names, size, version 2.
pub async fn amend(worker: &Worker, path: &Path, open: &OpenOptions, options: &AmendOptions) -> Result<()> {
    let open = OpenOptions { access: Access::ReadWrite, ..open.clone() };
    let version = match options.version {
        None => None,
        Some(2) => Some(Version::V2),
        Some(3) => Some(Version::V3),
        Some(other) => {
            let message = format!("Invalid compatibility level: '{other}'");
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(path));
        }
    };
    let now = with_image(worker, path, &open, async |image| {
        let qcow2 = image.qcow2("properties to be changed")?;
        check(qcow2, options, version)?;
        if options.size.is_some_and(|size| size < image.virtual_size()) {
            let message = "amend can't make a disk smaller: resize it, which may lose data";
            return Err(Error::new(ErrorKind::Unsupported, message)
                .on(path)
                .with_remedy(Remedy::AllowShrinking));
        }
        Ok(*qcow2.geometry())
    })
    .await?;
    if version == Some(Version::V3) && now.version == Version::V2 {
        rewrite(worker, path, &open, |header| header.set_version(Version::V3)).await?;
    }
    if let Some(bits) = options.refcount_bits {
        change_width(worker, path, &open, bits.trailing_zeros(), &options.control).await?;
    }
    if options.lazy_refcounts.is_some() || options.data_file.is_some() || options.data_file_raw.is_some() {
        rewrite(worker, path, &open, |header| {
            if let Some(lazy) = options.lazy_refcounts {
                header.compatible.set(Compatible::LAZY_REFCOUNTS, lazy);
            }
            if let Some(name) = &options.data_file {
                header.set_data_file_name(Some(name.as_bytes()));
            }
            if options.data_file_raw == Some(false) {
                header.autoclear.remove(Autoclear::RAW_EXTERNAL_DATA);
            }
            Ok(())
        })
        .await?;
    }
    if let Some(size) = options.size {
        with_image(worker, path, &open, async |image| {
            image.resize(worker, size, Shrink::Refuse, Preallocation::Off).await
        })
        .await?;
    }
    if version == Some(Version::V2) && now.version == Version::V3 {
        with_image(worker, path, &open, async |image| {
            write_zeroes_out(worker, image, &options.control).await?;
            image.flush(worker).await
        })
        .await?;
        rewrite(worker, path, &open, |header| {
            // What version 2 can't say and need not: that the counts are exact, and flags for other programs.
            header.set_incompatible(header.incompatible() - Incompatible::DIRTY)?;
            header.set_version(Version::V2)
        })
        .await?;
    }
    Ok(())
}

/// Refuses changes that can be refused before anything is changed.
fn check(qcow2: &Arc<Qcow2>, options: &AmendOptions, version: Option<Version>) -> Result<()> {
    let refuse = |kind, message: &str| Err(Error::new(kind, message.to_owned()).on(qcow2.path()));
    let (invalid, unsupported) = (ErrorKind::InvalidArgument, ErrorKind::Unsupported);
    qcow2.check_writable()?;
    let geometry = *qcow2.geometry();
    let end = version.unwrap_or(geometry.version);
    let bits = options.refcount_bits.unwrap_or(1 << geometry.refcount_order);
    if !bits.is_power_of_two() || bits > 64 {
        return refuse(invalid, "Refcount width must be a power of two and may not exceed 64 bits");
    }
    if end == Version::V2 && bits != 16 {
        return refuse(
            invalid,
            match version {
                Some(_) => "compat=0.10 requires refcount_bits=16",
                None => {
                    "Refcount widths other than 16 bits require compatibility level 1.1 or above (use compat=1.1 or greater)"
                }
            },
        );
    }
    if end == Version::V2 && options.lazy_refcounts == Some(true) {
        return refuse(
            invalid,
            "Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 or greater)",
        );
    }
    if options.data_file.is_some() && !geometry.external_data {
        return refuse(invalid, "data-file can only be set for images that use an external data file");
    }
    if options.data_file.as_deref() == Some("") {
        return refuse(invalid, "an external data file must have a name");
    }
    if options.data_file_raw == Some(true) && !qcow2.is_raw_external() {
        return refuse(invalid, "data-file-raw cannot be set on existing images");
    }
    if end == Version::V2 && geometry.version == Version::V3 {
        if geometry.external_data {
            return refuse(unsupported, "Cannot downgrade an image with a data file");
        }
        if geometry.extended_l2 {
            return refuse(unsupported, "Cannot downgrade an image with extended L2 entries");
        }
        if qcow2.header().compression() != zebu_qcow2::Compression::Zlib {
            return refuse(unsupported, "Cannot downgrade an image with a compression type other than zlib");
        }
        if !qcow2.snapshots().entries().is_empty() {
            return refuse(
                unsupported,
                "Cannot downgrade an image with internal snapshots (zebu does not look for zero clusters in them): \
                 delete them first",
            );
        }
        if qcow2.header().bitmaps().is_some() {
            return refuse(unsupported, "Cannot downgrade an image with bitmaps: remove them first");
        }
    }
    Ok(())
}

/// Makes clusters that are zero by a flag, which version 2 does not have, zero in another way.
async fn write_zeroes_out(worker: &Worker, image: &Image, control: &JobControl) -> Result<()> {
    let size = image.virtual_size();
    let tracker = Tracker::new(control, Phase::Copying, size);
    let cluster = image.cluster_size();
    let mut extents = image.extents(0..size);
    while let Some(extent) = extents.next(worker).await? {
        tracker.check()?;
        let is_flagged = extent.depth == 0 && matches!(extent.kind, ExtentKind::Zero { .. });
        if is_flagged && image.backing().is_none() {
            // Where nothing shows from below, what is not allocated is zero too.
            let qcow2 = image.qcow2("zero clusters")?;
            let drop_them = async || {
                qcow2.prepare_write(worker).await?;
                qcow2.drop_mapping(&image.0, worker, extent.offset..extent.end()).await
            };
            image.0.while_alone(worker, drop_them).await?;
        } else if is_flagged {
            let mut from = extent.offset;
            while from < extent.end() {
                tracker.check()?;
                let len = (extent.end() - from).min(ZEROES.next_multiple_of(cluster));
                let zeroes = IoBuf::zeroed(len as usize).into();
                image.write(worker, from, zeroes, Durability::Volatile).await.0?;
                from += len;
            }
        }
        tracker.advance(extent.len);
    }
    tracker.finish(Some(Phase::Finishing));
    Ok(())
}

async fn change_width(
    worker: &Worker,
    path: &Path,
    open: &OpenOptions,
    order: u32,
    control: &JobControl,
) -> Result<()> {
    let file = File::open(path, &flags(open)).map_err(|e| Error::from(e).on(path))?;
    let options = CheckOptions { control: control.clone(), ..CheckOptions::default() };
    let done = change_refcount_width(worker, &file, order, &options).await;
    let unlocked = file.unlock().map_err(|e| Error::from(e).on(path));
    done.and(unlocked)
}

async fn rewrite(
    worker: &Worker,
    path: &Path,
    open: &OpenOptions,
    change: impl FnOnce(&mut Header) -> Result<(), FormatError>,
) -> Result<()> {
    with_image(worker, path, open, async |image| {
        let qcow2 = image.qcow2("properties to be changed")?;
        let wrong = |e: FormatError| Error::new(ErrorKind::Unsupported, e.to_string()).on(path);
        let rewrite = async || qcow2.rewrite_header(worker, |header| change(header).map_err(wrong)).await;
        image.0.while_alone(worker, rewrite).await
    })
    .await
}

/// Opens the image for one step: what an opening knows of the header is of no use after it has changed.
async fn with_image<T>(
    worker: &Worker,
    path: &Path,
    open: &OpenOptions,
    work: impl AsyncFnOnce(&Image) -> Result<T>,
) -> Result<T> {
    let image = Image::open(worker, path, open).await?;
    if image.format() != Format::Qcow2 {
        let message = "Format driver 'raw' does not support option amendment";
        return Err(Error::new(ErrorKind::Unsupported, message).on(path));
    }
    let done = work(&image).await;
    let closed = image.close(worker).await;
    let value = done?;
    closed.map(|()| value)
}
