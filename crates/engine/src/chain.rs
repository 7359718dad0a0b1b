//! Reading through a backing chain: a loop over the images, never a recursion.

use crate::node::{Driver, Node};
use crate::owners::{self, Found};
use crate::qcow2::extents::{Place, PlaceKind};
use crate::qcow2::mapping::Run;
use crate::status::{Extent, ExtentKind};
use crate::{Error, Result};
use futures_util::future::join_all;
use zebu_qcow2::CompressedRange;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBufs, Worker};

/// Parts of one request in flight at once.
const PARTS_AT_ONCE: usize = 32;

/// Where a part of a request comes from.
enum Source<'a> {
    Zero,
    File { node: &'a Node, offset: u64 },
    Compressed { node: &'a Node, stream: CompressedRange, guest: u64 },
}

/// A run of the chain that comes from one place.
struct Part<'a> {
    source: Source<'a>,
    len: u64,
}

/// The first part of `guest..guest + len` of the chain.
async fn resolve<'a>(top: &'a Node, worker: &Worker, guest: u64, len: u64) -> Result<Part<'a>> {
    let (depth, len) = match owners::find(top, worker, guest, len).await {
        Some(Found::At(Place { kind: PlaceKind::Zero, .. }, len)) => {
            return Ok(Part { source: Source::Zero, len });
        }
        Some(Found::At(Place { kind: PlaceKind::Data { host, .. }, depth }, len)) => {
            match top.at_depth(u32::from(depth)) {
                Some(node) => return Ok(Part { source: Source::File { node, offset: host }, len }),
                None => (0, len),
            }
        }
        Some(Found::From(depth, len)) => (depth, len),
        None => (0, len),
    };
    Ok(resolve_by_images(top, u32::from(depth), worker, guest, len).await?.0)
}

/// The same, asking the images one after the other from `depth` on; with the depth of the image it comes from.
async fn resolve_by_images<'a>(
    top: &'a Node,
    mut depth: u32,
    worker: &Worker,
    guest: u64,
    mut len: u64,
) -> Result<(Part<'a>, Run, u32)> {
    let mut node = top.at_depth(depth).unwrap_or(top);
    loop {
        let (run, run_len) = node.map(worker, guest, len).await?;
        len = len.min(run_len);
        let source = match run {
            Run::Unallocated => {
                // What a shorter image does not reach reads as zero, whatever lies below it.
                if let Some(backing) = &node.backing
                    && (guest < node.virtual_size() || sabotage::is(Fault::ShowBelowShortImage))
                {
                    node = backing;
                    depth += 1;
                    continue;
                }
                Source::Zero
            }
            Run::Zero { .. } => Source::Zero,
            Run::Data { host } => Source::File { node, offset: host },
            Run::Compressed { stream } => Source::Compressed { node, stream, guest },
        };
        return Ok((Part { source, len }, run, depth));
    }
}

/// Reads `bufs.len()` bytes at `guest`, which lie on the disk of `top`.
pub(crate) async fn read(top: &Node, worker: &Worker, guest: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
    let total = bufs.len() as u64;
    if total == 0 {
        return (Ok(()), bufs);
    }
    let part = match resolve(top, worker, guest, total).await {
        Ok(found) => found,
        Err(error) => return (Err(error), bufs),
    };
    if part.len == total {
        return read_part(part.source, worker, bufs).await;
    }
    Box::pin(read_in_parts(top, worker, guest, bufs, part)).await
}

/// Reads what comes from several places, beginning with `first`; some parts at once, in batches.
async fn read_in_parts(
    top: &Node,
    worker: &Worker,
    guest: u64,
    mut bufs: IoBufs,
    first: Part<'_>,
) -> (Result<()>, IoBufs) {
    let end = guest + bufs.len() as u64;
    let mut done = IoBufs::new();
    let mut at = guest;
    let mut next = Some(first);
    let mut failed = None;
    while at < end && failed.is_none() {
        let mut batch = Vec::new();
        while at < end && batch.len() < PARTS_AT_ONCE {
            let part = match next.take() {
                Some(part) => part,
                None => match resolve(top, worker, at, end - at).await {
                    Ok(part) => part,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                },
            };
            at += part.len;
            batch.push(read_part(part.source, worker, bufs.split_to(part.len as usize)));
        }
        for (result, part_bufs) in join_all(batch).await {
            done.append(part_bufs);
            if let Err(error) = result {
                failed.get_or_insert(error);
            }
        }
    }
    done.append(bufs);
    (failed.map_or(Ok(()), Err), done)
}

async fn read_part(source: Source<'_>, worker: &Worker, mut bufs: IoBufs) -> (Result<()>, IoBufs) {
    match source {
        Source::Zero => {
            let len = bufs.len();
            bufs.fill(0, len, 0);
            (Ok(()), bufs)
        }
        Source::File { node, offset } => {
            let (result, bufs) = worker.read(node.data_file(), offset, bufs).await;
            (result.map_err(|e| Error::from(e).on(&node.path)), bufs)
        }
        Source::Compressed { node, stream, guest } => {
            let Driver::Qcow2(qcow2) = &node.driver else { return (Ok(()), bufs) };
            match qcow2.read_compressed(worker, stream, guest).await {
                Ok(cluster) => {
                    let start = (guest & (qcow2.geometry.cluster_size() - 1)) as usize;
                    if let Some(bytes) = cluster.get(start..start + bufs.len()) {
                        bufs.copy_from(0, bytes);
                    }
                    (Ok(()), bufs)
                }
                Err(error) => (Err(error), bufs),
            }
        }
    }
}

/// The run of one kind at `guest`, at most `len` bytes, which lie on the disk of `top`; data is looked up in its file
/// for holes.
pub(crate) async fn extent(top: &Node, worker: &Worker, guest: u64, len: u64) -> Result<Extent> {
    let (part, run, depth) = resolve_by_images(top, 0, worker, guest, len).await?;
    let mut extent = Extent {
        offset: guest,
        len: part.len,
        depth,
        kind: match run {
            Run::Unallocated => ExtentKind::Unallocated,
            Run::Zero { host } => ExtentKind::Zero { host },
            Run::Data { host } => ExtentKind::Data { host },
            Run::Compressed { .. } => ExtentKind::Compressed,
        },
        hole: false,
    };
    if let Source::File { node, offset } = &part.source {
        let found =
            worker.extent_at(node.data_file(), *offset).await.map_err(|e| Error::from(e).on(&node.path))?;
        extent.len = extent.len.min(found.len);
        extent.hole = found.hole;
    }
    Ok(extent)
}

/// Whether `guest..guest + len` is known to read as zero without reading it; what lies past the end of the disk does.
/// Of data, only that of a raw image is looked up in its file for holes: a file system may walk over every extent of a
/// fragmented file to answer, and what an image has allocated holds something as a rule.
pub(crate) async fn is_zero(top: &Node, worker: &Worker, guest: u64, len: u64) -> Result<bool> {
    let end = (guest + len).min(top.virtual_size());
    let mut at = guest;
    while at < end {
        match owners::find(top, worker, at, end - at).await {
            Some(Found::At(Place { kind: PlaceKind::Zero, .. }, len)) => {
                at += len;
                continue;
            }
            Some(Found::At(Place { kind: PlaceKind::Data { .. }, depth }, _))
                if top
                    .at_depth(u32::from(depth))
                    .is_some_and(|node| matches!(node.driver, Driver::Qcow2(_))) =>
            {
                return Ok(false);
            }
            _ => {}
        }
        let (part, ..) = resolve_by_images(top, 0, worker, at, end - at).await?;
        at += match part.source {
            Source::Zero => part.len,
            Source::File { node, offset } if matches!(node.driver, Driver::Raw(_)) => {
                let found = worker.extent_at(node.data_file(), offset).await;
                let found = found.map_err(|e| Error::from(e).on(&node.path))?;
                if !found.hole {
                    return Ok(false);
                }
                part.len.min(found.len)
            }
            Source::File { .. } | Source::Compressed { .. } => return Ok(false),
        };
    }
    Ok(true)
}
