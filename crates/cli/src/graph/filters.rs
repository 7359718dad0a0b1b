//! Filters above an image, and the breakpoints of all `blkdebug`s.

use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::output::{stderr, stdout};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use zebu::storage::{Engine, File, OpenFlags, Storage, Worker};
use zebu::{Access, Format, Image, OpenOptions, OpenedFile};
use zebu_drivers::{Blkdebug, BlkdebugConfig, Compress, CopyOnRead, ImageDisk};

/// A driver above an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Filter {
    /// Keeps in the image what is read from its backing files.
    CopyOnRead,
    /// Compresses what is written.
    Compress,
    /// Errors on purpose.
    Blkdebug(BlkdebugConfig),
}

/// An image with its filters.
pub(crate) struct Filtered {
    /// What requests go to.
    pub(crate) top: Image,
    /// The image below the filters, which knows what is allocated.
    pub(crate) image: Image,
}

/// All `blkdebug`s that are open.
static BLKDEBUGS: Mutex<Vec<Weak<Blkdebug>>> = Mutex::new(Vec::new());

/// All `blkdebug`s that are open, for breakpoints.
pub(crate) fn breakpoints() -> Vec<Arc<Blkdebug>> {
    let known = BLKDEBUGS.lock().unwrap_or_else(PoisonError::into_inner);
    known.iter().filter_map(Weak::upgrade).collect()
}

/// Has breakpoints find it.
pub(super) fn keep_blkdebug(blkdebug: Blkdebug) -> Arc<Blkdebug> {
    let kept = Arc::new(blkdebug);
    let mut known = BLKDEBUGS.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|weak| weak.strong_count() > 0);
    known.push(Arc::downgrade(&kept));
    kept
}

/// A line about a request that was stopped or resumed. Where standard output is gone, nobody looks.
pub(super) fn tell_line(line: &str) {
    let _ = stdout::print(&format!("{line}\n"));
}

/// Two disks that must be the same are not: nothing of this process can be believed.
pub(super) fn differs(line: &str) {
    stderr::tell(line);
    std::process::exit(1);
}

/// Puts the filters of `spec` above its image.
pub(crate) fn filtered(worker: &Worker, spec: &ImageSpec, image: Image) -> Result<Filtered, Failure> {
    let access = spec.options.access;
    let bottom = Arc::new(ImageDisk::new(image.clone(), access, Engine::Auto)?.closing());
    let mut disk: Arc<dyn Storage> = bottom.clone();
    for filter in spec.filters.iter().rev() {
        disk = match filter {
            Filter::CopyOnRead if access == Access::ReadOnly => {
                return Err(Failure::opening_name(spec.path.as_os_str(), "Block node is read-only"));
            }
            Filter::CopyOnRead => Arc::new(CopyOnRead::new(image.clone(), disk, Engine::Auto)?),
            Filter::Compress => {
                if !Arc::ptr_eq(&disk, &(bottom.clone() as Arc<dyn Storage>)) {
                    let reason = "Driver 'compress' must lie right above the image's format";
                    return Err(Failure::opening_name(spec.path.as_os_str(), reason));
                }
                let compress = Compress::new(bottom.clone());
                Arc::new(compress.map_err(|reason| Failure::opening_name(spec.path.as_os_str(), &reason))?)
            }
            Filter::Blkdebug(config) => {
                keep_blkdebug(Blkdebug::new(disk, config.clone(), tell_line, Engine::Auto)?)
            }
        };
    }
    let flags = OpenFlags::default().access(access);
    let file = File::from_storage(disk, &spec.path.to_string_lossy(), &flags)?;
    let opened = OpenedFile::new(file, Format::Raw);
    let options = OpenOptions::default().access(access).cache(spec.options.cache);
    let top = worker.block_on(Image::open_files(worker, vec![opened], &options))?;
    Ok(Filtered { top, image })
}
