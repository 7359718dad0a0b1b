//! Filters above an image, opened.

use super::filter::Filter;
use crate::disks::Disks;
use crate::error::DiskError;
use crate::image_spec::ImageSpec;
use std::sync::Arc;
use zebu_drivers::{Compress, CopyOnRead, ImageDisk};
use zebu_engine::storage::{Engine, File, OpenFlags, Storage, Worker};
use zebu_engine::{Access, Format, Image, OpenOptions, OpenedFile};

/// An image with its filters.
pub struct Filtered {
    /// The image or driver that requests go to.
    pub top: Image,
    /// The image below the filters, which knows what is allocated.
    pub image: Image,
}

/// Puts the filters of `spec` above its image.
pub fn filtered(
    disks: &Disks,
    worker: &Worker,
    spec: &ImageSpec,
    image: Image,
) -> Result<Filtered, DiskError> {
    let access = spec.options.access;
    let bottom = disks.keep_below(ImageDisk::new(image.clone(), access, Engine::Auto)?);
    let mut disk: Arc<dyn Storage> = bottom.clone();
    for filter in spec.filters.iter().rev() {
        disk = match filter {
            Filter::CopyOnRead if access == Access::ReadOnly => {
                return Err(DiskError::of_name(&spec.path, "Block node is read-only"));
            }
            Filter::CopyOnRead => Arc::new(CopyOnRead::new(image.clone(), disk, Engine::Auto)?),
            Filter::Compress => {
                if !Arc::ptr_eq(&disk, &(bottom.clone() as Arc<dyn Storage>)) {
                    let reason = "Driver 'compress' must lie right above the image's format";
                    return Err(DiskError::of_name(&spec.path, reason));
                }
                let compress = Compress::new(bottom.clone());
                Arc::new(compress.map_err(|reason| DiskError::of_name(&spec.path, reason))?)
            }
            Filter::Blkdebug(config) => disks.open_blkdebug(disk, config)?,
        };
    }
    let flags = OpenFlags::default().access(access);
    let file = File::from_storage(disk, &spec.path.to_string_lossy(), &flags)?;
    let opened = OpenedFile::new(file, Format::Raw);
    let options = OpenOptions::default().access(access).cache(spec.options.cache);
    let top = worker.block_on(Image::open_files(worker, vec![opened], &options))?;
    Ok(Filtered { top, image })
}
