//! Packed sources of a conversion: whether they can be unpacked while they are copied.

use super::{ConvertArgs, existing_target, is_raw_on_server};
use crate::create_opts::CreateOpts;
use crate::failure::Failure;
use crate::named_disks::is_remote;
use crate::packed::{Order, Reader};
use crate::remote_names::new_image_path;
use crate::session::Session;
use crate::store_target::store_name;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use zebu::jobs::SourceEnd;
use zebu::{Access, Format, Preallocation};

/// A run of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// The first one: what can be unpacked while it is read is not unpacked before.
    First,
    /// Another, because a source must be read at any place. The target may be written in part.
    Again,
}

/// The sources of a conversion, as far as they are packed.
#[derive(Debug, Default)]
pub(super) struct PackedSources {
    /// Whether one is read in order, by one thread.
    pub(super) is_stream: bool,
    /// The end of the one source, if that shows when it has been read.
    pub(super) end: Option<SourceEnd>,
}

/// The reader of a packed source.
pub(super) fn reader(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    target: &OsStr,
    pass: Pass,
) -> Result<Reader, Failure> {
    if args.dry_run {
        return Ok(Reader { order: Order::Any, target_size: None });
    }
    let is_stored = store_name(target)?.is_some();
    let exists = !is_stored && (args.no_create || is_raw_on_server(args, opts, target)?);
    let target_size = match opts.size {
        _ if is_stored => opts.size,
        _ if exists => Some(size_of_existing(args, opts, session, target)?),
        Some(size) => Some(size),
        None => size_of_device(Path::new(target)),
    };
    let order = if pass == Pass::Again || args.salvage || args.source_snapshot.is_some() {
        Order::Any
    } else if args.files.len() == 2 && !is_stored && takes_open_end(args, opts, target, exists)? {
        Order::OpenEnded
    } else {
        Order::Once
    };
    Ok(Reader { order, target_size })
}

/// Whether the target can be written before the length of its disk is known.
fn takes_open_end(
    args: &ConvertArgs,
    opts: &CreateOpts,
    target: &OsStr,
    exists: bool,
) -> Result<bool, Failure> {
    if exists {
        return Ok(!args.compress);
    }
    let path = new_image_path(target).map_err(|reason| Failure::creating_name(target, &reason))?;
    let format = args.target_format();
    if is_remote(&path)
        || opts.data_file.is_some()
        || opts.preallocation.is_some_and(|mode| mode != Preallocation::Off)
    {
        return Ok(false);
    }
    // The first table of a qcow2 image is made for the largest disk. In one cluster, it is no larger than that of a small one.
    let cluster = opts.create_options(format).cluster_size;
    let most = cluster.saturating_pow(3) / 128;
    Ok(format == Format::Raw || format == Format::Qcow2 && args.packed.most_of_disk() <= most)
}

fn size_of_existing(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    target: &OsStr,
) -> Result<u64, Failure> {
    let mut spec = existing_target(args, opts, target)?;
    spec.options.access = Access::ReadOnly;
    session.with_image(&spec, |image| Ok(image.virtual_size()))
}

/// Bytes of a block device; `None`: it is none. One that can't be opened is told later.
fn size_of_device(target: &Path) -> Option<u64> {
    std::fs::metadata(target).ok().filter(|found| found.file_type().is_block_device())?;
    File::open(target).ok()?.seek(SeekFrom::End(0)).ok()
}
