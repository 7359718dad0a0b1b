//! Images of registries that are stacks: a chain of blobs as one disk.

use crate::notices::{Notice, Notices};
use crate::points_disk::Layers;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use zebu_drivers::ImageDisk;
use zebu_engine::storage::{Access, Engine, IoError, IoErrorKind, Op, Storage, Worker, WorkerConfig};
use zebu_engine::{Format, Image, OpenOptions, RefPolicy, Remote, RemoteRefs};
use zebu_oci::{Digest, LayerFormat, OciName};

/// A blob of a stack, as a disk.
pub(crate) struct StackBlob {
    /// Its digest.
    pub(crate) digest: Digest,
    /// Its format.
    pub(crate) format: LayerFormat,
    /// Its bytes.
    pub(crate) storage: Arc<dyn Storage>,
}

/// Opens the disk that the top of `blobs` shows, the lowest first. Each stands on the one before it, whatever it names itself.
pub(crate) fn open_stack(
    name: &OciName,
    blobs: Vec<StackBlob>,
    notices: &Notices,
) -> Result<ImageDisk, IoError> {
    let mut all = HashMap::new();
    let mut chain = Vec::with_capacity(blobs.len());
    for (number, StackBlob { digest, format, storage }) in blobs.into_iter().enumerate() {
        let format = match format {
            LayerFormat::Qcow2 => Format::Qcow2,
            LayerFormat::Raw => Format::Raw,
        };
        // The same blob may be in it twice.
        let path = PathBuf::from(format!("{name}#{number}-{digest}"));
        all.insert(path.clone(), Some(storage));
        chain.push((path, format));
    }
    let mut below = chain.into_iter().rev();
    let Some((top, format)) = below.next() else {
        return Err(IoError::of_file(Op::Open, IoErrorKind::Os(libc::EINVAL), name.to_string()));
    };
    let mut below: Vec<_> = below.map(|(path, format)| Some((path, Some(format)))).collect();
    let lowest = below.last().and_then(Option::as_ref).map_or(Some(format), |(_, format)| *format);
    if lowest == Some(Format::Qcow2) {
        // Below the lowest there is nothing.
        below.push(Some((PathBuf::new(), None)));
    }
    let mut options = OpenOptions::default()
        .format(format)
        .access(Access::ReadOnly)
        .refs(RefPolicy::None)
        .remote(Remote::new(Arc::new(Layers(all)), RemoteRefs::None));
    let mut below = below.into_iter();
    options.backing = below.next().flatten();
    options.backing_below = below.collect();
    let worker = Worker::new(&WorkerConfig::default())?;
    let opened = worker.block_on(Image::open(&worker, &top, &options));
    let image = opened.map_err(|error| {
        let failed = IoError::of_file(Op::Open, IoErrorKind::Os(error.errno()), name.to_string());
        failed.with_detail(error.to_string())
    })?;
    let notices = notices.clone();
    let disk = ImageDisk::new(image, Access::ReadOnly, Engine::Auto)?;
    Ok(disk.closing(move |error| notices.say(Notice::Fact(&error.to_string()))))
}
