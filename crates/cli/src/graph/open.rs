//! Nodes, opened.

use super::debugs::{differs, keep_blkdebug, tell_line};
use super::node::Node;
use crate::remote_disk::remote_disk;
use std::sync::Arc;
use zebu::storage::{Background, Engine, File, IoError, IoErrorKind, Op, OpenFlags, Storage};
use zebu::{Image, OpenOptions, OpenedFile};
use zebu_drivers::{Blkdebug, Blkverify, FileDisk, ImageDisk, NullDisk, Part, Preallocate};

/// The engine of the I/O below drivers.
const ENGINE: Engine = Engine::Auto;

/// Opens a node as a file of that name.
pub(crate) fn open_node(node: &Node, name: &str, flags: &OpenFlags) -> Result<File, IoError> {
    File::from_storage(disk(node, name, flags)?, name, flags)
}

fn disk(node: &Node, name: &str, flags: &OpenFlags) -> Result<Arc<dyn Storage>, IoError> {
    let invalid = |reason: String| {
        IoError::of_file(Op::Open, IoErrorKind::Os(rustix::io::Errno::INVAL.raw_os_error()), name)
            .with_detail(reason)
    };
    Ok(match node {
        Node::File(path) => Arc::new(FileDisk::new(File::open(path, flags)?, ENGINE)?),
        Node::Remote(remote) => remote_disk(remote.clone())?,
        Node::Null { size, reads_zeroes, latency } => {
            Arc::new(NullDisk::new(*size, *reads_zeroes, *latency)?)
        }
        Node::Blkdebug { config, image } => {
            let below = disk(image, name, flags)?;
            keep_blkdebug(Blkdebug::new(below, config.clone(), tell_line, ENGINE)?)
        }
        Node::Blkverify { raw, test } => {
            let raw = disk(raw, name, flags)?;
            Arc::new(Blkverify::new(raw, disk(test, name, flags)?, differs, ENGINE)?)
        }
        Node::Preallocate { config, file } => {
            Arc::new(Preallocate::new(disk(file, name, flags)?, *config, ENGINE)?)
        }
        Node::Part { offset, size, file } => {
            Arc::new(Part::new(disk(file, name, flags)?, *offset, *size).map_err(invalid)?)
        }
        Node::Image { format, file } => {
            let file = File::from_storage(disk(file, name, flags)?, name, flags)?;
            let options = OpenOptions::default().access(flags.access);
            let opened = OpenedFile::new(file, *format);
            let opener = Background::small(ENGINE)?;
            let image = opener
                .run(move |worker| async move { Image::open_files(&worker, vec![opened], &options).await })
                .wait()
                .map_err(|_| invalid("the opening vanished".to_owned()))?
                .map_err(|error| invalid(error.to_string()))?;
            Arc::new(ImageDisk::new(image, flags.access, ENGINE)?.closing())
        }
    })
}
