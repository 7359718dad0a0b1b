//! Nodes, opened.

use super::node::Node;
use crate::context::Context;
use crate::notices::Notice;
use crate::reference_defaults::allowed_references;
use std::path::Path;
use std::sync::Arc;
use zebu_drivers::{Blkverify, FileDisk, ImageDisk, NullDisk, Part, Preallocate};
use zebu_engine::storage::{
    Access, Background, Engine, File, IoError, IoErrorKind, LockMode, Op, OpenFlags, Storage, Worker,
};
use zebu_engine::{Format, Image, OpenOptions, OpenedFile, Probe, RefPolicy, Sharing};

/// The engine of the I/O below drivers.
const ENGINE: Engine = Engine::Auto;

/// Opens a node as a file of that name.
pub fn open_node(context: &Context, node: &Node, name: &str, flags: &OpenFlags) -> Result<File, IoError> {
    if let Node::File(path) = node {
        return File::open(path, flags);
    }
    File::from_storage(disk(context, node, name, flags)?, name, flags)
}

fn disk(context: &Context, node: &Node, name: &str, flags: &OpenFlags) -> Result<Arc<dyn Storage>, IoError> {
    let invalid = |reason: String| {
        IoError::of_file(Op::Open, IoErrorKind::Os(rustix::io::Errno::INVAL.raw_os_error()), name)
            .with_detail(reason)
    };
    Ok(match node {
        Node::File(path) => Arc::new(FileDisk::new(File::open(path, flags)?, ENGINE)?),
        Node::Remote(remote) => context.disks.remote.open(remote.clone(), flags.access)?,
        Node::ReadOnly(_) if flags.access == Access::ReadWrite => {
            let denied = IoErrorKind::Os(rustix::io::Errno::ACCESS.raw_os_error());
            return Err(IoError::of_file(Op::Open, denied, name).with_detail("Block node is read-only"));
        }
        Node::ReadOnly(node) => disk(context, node, name, flags)?,
        Node::Null { size, reads_zeroes, latency } => {
            Arc::new(NullDisk::new(*size, *reads_zeroes, *latency)?)
        }
        Node::Blkdebug { config, image } => {
            let below = disk(context, image, name, flags)?;
            context.disks.open_blkdebug(below, config)?
        }
        Node::Blkverify { raw, test } => {
            let raw = disk(context, raw, name, flags)?;
            let (test, notices) = (disk(context, test, name, flags)?, context.disks.notices.clone());
            Arc::new(Blkverify::new(raw, test, move |line: &str| notices.say(Notice::Differs(line)), ENGINE)?)
        }
        Node::Preallocate { config, file } => {
            Arc::new(Preallocate::new(disk(context, file, name, flags)?, *config, ENGINE)?)
        }
        Node::Part { offset, size, file } => {
            Arc::new(Part::new(disk(context, file, name, flags)?, *offset, *size).map_err(invalid)?)
        }
        Node::Image { format, file } => {
            let options = OpenOptions::default().access(flags.access);
            let opener = Background::small(ENGINE)?;
            let top = match &**file {
                Node::File(path) => File::open(path, flags)?,
                file => File::from_storage(disk(context, file, name, flags)?, name, flags)?,
            };
            let (path, format) = (file.local_file().map(Path::to_path_buf), *format);
            let probe = context.dialect.probe();
            let refs =
                allowed_references(context.dialect, &[]).map_err(|error| invalid(error.to_string()))?;
            let opened = opener
                .run(move |worker| async move {
                    let files = match path {
                        Some(path) => with_backing(&worker, top, &path, format, probe, refs).await?,
                        None => vec![OpenedFile::new(top, format.unwrap_or(Format::Raw))],
                    };
                    Image::open_files(&worker, files, &options).await
                })
                .wait();
            let image = opened
                .map_err(|_| invalid("a panic ended its opening".to_owned()))?
                .map_err(|error| invalid(error.to_string()))?;
            context.disks.keep_below(ImageDisk::new(image, flags.access, ENGINE)?)
        }
    })
}

/// The file of an image, which is open, and those of its backing files. These are read without locks: another node may have
/// the same file.
async fn with_backing(
    worker: &Worker,
    top: File,
    path: &Path,
    format: Option<Format>,
    probe: Probe,
    refs: RefPolicy,
) -> zebu_engine::Result<Vec<OpenedFile>> {
    let options = OpenOptions::default().format(format).probe(probe).refs(refs).sharing(Sharing::Unlocked);
    let found = Image::open(worker, path, &options).await?;
    let mut files = vec![OpenedFile::new(top, found.format())];
    let mut next = found.backing();
    while let Some(image) = next {
        let path = image.info()?.filename;
        let file = File::open(&path, &OpenFlags::default().lock(LockMode::None))
            .map_err(|error| zebu_engine::Error::from(error).on(&path))?;
        files.push(OpenedFile::new(file, image.format()));
        next = image.backing();
    }
    let _ = found.close(worker).await;
    Ok(files)
}
