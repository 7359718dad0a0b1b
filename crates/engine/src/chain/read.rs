//! Reading through a backing chain: a loop over the images, never a recursion.

use crate::chain::lookup;
use crate::chain::place::{ClusterPlace, Lookup, PlaceKind};
use crate::crypt::sectors::SectorOffsets;
use crate::node::{Driver, Node};
use crate::qcow2::map::mapping::Run;
use crate::status::{Extent, ExtentKind};
use crate::{Error, ErrorKind, Result};
use futures_util::future::join_all;
use zebu_storage::sabotage::{self, Fault, Limit};
use zebu_storage::{File, IoBufs, Worker};

/// Parts of one request in flight at once.
const PARTS_AT_ONCE: usize = 32;
/// Bytes of a sector.
const SECTOR: u64 = 512;

/// Treatment of data that an image has past the end of its file, which has lost its last part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CutOff {
    /// Zeroes, as for QEMU: for a guest that still runs.
    ReadsAsZero,
    /// An error: for work on whole images, which would pass the zeroes on as content.
    Fails,
}

/// A run of guest bytes with the image that owns it.
struct Owned<'a> {
    node: &'a Node,
    /// Of the image in the chain: 0 is the top.
    depth: u32,
    run: Run,
    len: u64,
}

/// The first run of `guest..guest + len` of the chain.
async fn resolve<'a>(top: &'a Node, worker: &Worker, guest: u64, len: u64) -> Result<Owned<'a>> {
    let (depth, len) = match lookup::find(top, worker, guest, len).await {
        (Lookup::Hit(ClusterPlace { kind, depth }), len) => {
            let run = match kind {
                PlaceKind::Zero => Run::Zero { host: None },
                PlaceKind::Data { host, .. } => Run::Data { host },
            };
            let depth = u32::from(depth);
            match top.at_depth(depth) {
                Some(node) => return Ok(Owned { node, depth, run, len }),
                None => (0, len),
            }
        }
        (Lookup::Below(depth), len) => (u32::from(depth), len),
        (Lookup::Miss, _) => (0, len),
    };
    resolve_by_images(top, depth, worker, guest, len).await
}

/// The same, asking the images one after the other from `depth` on.
async fn resolve_by_images<'a>(
    top: &'a Node,
    mut depth: u32,
    worker: &Worker,
    guest: u64,
    mut len: u64,
) -> Result<Owned<'a>> {
    let mut node = top.at_depth(depth).unwrap_or(top);
    loop {
        let (run, run_len) = node.map(worker, guest, len).await?;
        len = len.min(run_len);
        // What a shorter image does not reach reads as zero, whatever lies below it.
        if run == Run::Unallocated
            && let Some(backing) = &node.backing
            && (guest < node.virtual_size() || sabotage::is(Fault::ShowBelowShortImage))
        {
            node = backing;
            depth += 1;
            continue;
        }
        return Ok(Owned { node, depth, run, len });
    }
}

/// The length of a file that reaches to `end`; otherwise it is looked up again: another program may write an image that is read
/// without a lock.
fn len_beyond(file: &File, end: u64) -> u64 {
    if file.len() < end {
        file.look_up_len();
    }
    file.len()
}

impl Owned<'_> {
    /// Bytes from the beginning on that the file reaches to, in whole clusters: the last one of a file may be short. The end of a raw
    /// image is that of its disk, whatever it once was.
    fn stored(&self) -> u64 {
        let (file, host, unit) = match (&self.node.driver, self.run) {
            (Driver::Qcow2(qcow2), Run::Data { host }) => {
                (self.node.data_file(), host, qcow2.geometry().cluster_size())
            }
            (Driver::Foreign(foreign), Run::Data { host }) => (foreign.file(0), host, SECTOR),
            (Driver::Foreign(foreign), Run::Elsewhere { file, host }) => (foreign.file(file), host, SECTOR),
            (Driver::Qcow2(qcow2), Run::Compressed { stream }) => {
                let end = stream.offset.0.saturating_add(stream.len);
                // Streams are counted in sectors, the last of which may be short.
                let is_whole = end <= len_beyond(qcow2.file(), end).next_multiple_of(SECTOR);
                return if is_whole { self.len } else { 0 };
            }
            _ => return self.len,
        };
        let len = len_beyond(file, host.saturating_add(self.len));
        let left = len.checked_next_multiple_of(unit).unwrap_or(u64::MAX).saturating_sub(host);
        left.min(self.len)
    }

    /// The error of bytes at `guest` that are past the end of the file.
    fn cut_off(&self, guest: u64) -> Error {
        let path = match (&self.node.driver, self.run) {
            (Driver::Foreign(foreign), Run::Elsewhere { file, .. }) => foreign.file(file).path(),
            (Driver::Qcow2(_), Run::Data { .. }) => self.node.data_file().path(),
            _ => &self.node.path,
        };
        let message = "the file was cut short: it ends before this part of its data";
        Error::new(ErrorKind::Corrupt, message).on(path).at_guest(guest)
    }

    /// The error of a range at `guest` that the file does not hold all of.
    fn check_stored(&self, guest: u64, cut_off: CutOff) -> Result<()> {
        match cut_off {
            CutOff::ReadsAsZero => Ok(()),
            CutOff::Fails => match self.stored() {
                stored if stored < self.len => Err(self.cut_off(guest + stored)),
                _ => Ok(()),
            },
        }
    }
}

/// Reads `bufs.len()` bytes at `guest`, which lie on the disk of `top`.
pub(crate) async fn read(
    top: &Node,
    worker: &Worker,
    guest: u64,
    bufs: IoBufs,
    cut_off: CutOff,
) -> (Result<()>, IoBufs) {
    let total = bufs.len() as u64;
    if total == 0 {
        return (Ok(()), bufs);
    }
    let first = match resolve(top, worker, guest, total).await {
        Ok(found) => found,
        Err(error) => return (Err(error), bufs),
    };
    if first.len == total {
        if let Err(error) = first.check_stored(guest, cut_off) {
            return (Err(error), bufs);
        }
        return read_owned(first, worker, guest, bufs).await;
    }
    Box::pin(read_in_parts(top, worker, guest, bufs, first, cut_off)).await
}

/// Reads what comes from several places, beginning with `first`; some parts at once, in batches.
async fn read_in_parts(
    top: &Node,
    worker: &Worker,
    guest: u64,
    mut bufs: IoBufs,
    first: Owned<'_>,
    cut_off: CutOff,
) -> (Result<()>, IoBufs) {
    let end = guest + bufs.len() as u64;
    let mut done = IoBufs::new();
    let mut at = guest;
    let mut next = Some(first);
    let mut failed = None;
    while at < end && failed.is_none() {
        let mut batch = Vec::new();
        while at < end && batch.len() < sabotage::at_most(Limit::PartsAtOnce, PARTS_AT_ONCE as u64) as usize {
            let part = match next.take() {
                Some(part) => Ok(part),
                None => resolve(top, worker, at, end - at).await,
            };
            let part = match part.and_then(|part| part.check_stored(at, cut_off).map(|()| part)) {
                Ok(part) => part,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            let (start, len) = (at, part.len);
            at += len;
            batch.push(read_owned(part, worker, start, bufs.split_to(len as usize)));
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

/// The error of a run that the format of its image does not have.
fn of_other_format(node: &Node) -> Error {
    Error::new(ErrorKind::Corrupt, "the image's format has no such data").on(&node.path)
}

/// Copies a part of what was decompressed. Buffers hold what was read before, of any image: none is left as it is without an error.
fn copy_unit(node: &Node, guest: u64, unit: &[u8], start: usize, bufs: &mut IoBufs) -> Result<()> {
    let Some(bytes) = unit.get(start..start + bufs.len()) else {
        let message = "compressed data holds fewer bytes than the disk has there";
        return Err(Error::new(ErrorKind::Corrupt, message).on(&node.path).at_guest(guest));
    };
    bufs.copy_from(0, bytes);
    Ok(())
}

/// Reads the run at `guest`.
async fn read_owned(owned: Owned<'_>, worker: &Worker, guest: u64, mut bufs: IoBufs) -> (Result<()>, IoBufs) {
    let node = owned.node;
    match owned.run {
        Run::Unallocated | Run::Zero { .. } => {
            let len = bufs.len();
            bufs.fill(0, len, 0);
            (Ok(()), bufs)
        }
        Run::Data { host } if node.protection().is_none() => {
            let (result, bufs) = worker.read(node.data_file(), host, bufs).await;
            (result.map_err(|e| Error::from(e).on(&node.path)), bufs)
        }
        // Boxed: the task of a read that is not encrypted stays small.
        Run::Data { host } => {
            let read = node.protection().read(worker, node.data_file(), SectorOffsets { host, guest }, bufs);
            let (result, bufs) = Box::pin(read).await;
            (result.map_err(|e| e.on(&node.path)), bufs)
        }
        Run::Compressed { stream } => {
            let Driver::Qcow2(qcow2) = &node.driver else { return (Err(of_other_format(node)), bufs) };
            match qcow2.read_compressed(worker, stream, guest).await {
                Ok(cluster) => {
                    let start = (guest & (qcow2.geometry().cluster_size() - 1)) as usize;
                    (copy_unit(node, guest, &cluster, start, &mut bufs), bufs)
                }
                Err(error) => (Err(error), bufs),
            }
        }
        Run::Elsewhere { file, host } => {
            let Driver::Foreign(foreign) = &node.driver else { return (Err(of_other_format(node)), bufs) };
            let (result, bufs) = worker.read(foreign.file(file), host, bufs).await;
            (result.map_err(|e| Error::from(e).on(foreign.file(file).path())), bufs)
        }
        Run::Packed(packed) => {
            let Driver::Foreign(foreign) = &node.driver else { return (Err(of_other_format(node)), bufs) };
            match foreign.read_packed(worker, packed).await {
                Ok(unit) => {
                    let start = (guest - packed.start) as usize;
                    (copy_unit(node, guest, &unit, start, &mut bufs), bufs)
                }
                Err(error) => (Err(error.at_guest(guest)), bufs),
            }
        }
    }
}

/// The run of one kind at `guest`, at most `len` bytes, which lie on the disk of `top`; data is looked up in its file
/// for holes. The images are asked: the chain's map does not tell space that is kept for zeroes, nor zeroes from
/// nothing.
pub(crate) async fn extent(
    top: &Node,
    worker: &Worker,
    guest: u64,
    len: u64,
    cut_off: CutOff,
) -> Result<Extent> {
    let mut owned = resolve_by_images(top, 0, worker, guest, len).await?;
    if cut_off == CutOff::Fails {
        match owned.stored() {
            0 => return Err(owned.cut_off(guest)),
            stored => owned.len = stored,
        }
    }
    let Owned { node, depth, run, len } = owned;
    let kind = match run {
        Run::Unallocated => ExtentKind::Unallocated,
        Run::Zero { host } => ExtentKind::Zero { host },
        Run::Data { .. } if !node.protection().is_none() => ExtentKind::Encrypted,
        Run::Data { host } => ExtentKind::Data { host },
        Run::Compressed { .. } | Run::Packed(_) => ExtentKind::Compressed,
        Run::Elsewhere { file, host } => ExtentKind::Elsewhere { file, host },
    };
    let mut extent = Extent { offset: guest, len, depth, kind, hole: false };
    let place = match run {
        // A hole in encrypted data is no zeroes.
        Run::Data { host } if node.protection().is_none() => Some((node.data_file(), host)),
        Run::Elsewhere { file, host } => node.file(file).map(|file| (file, host)),
        _ => None,
    };
    if let Some((file, host)) = place {
        let found = worker.extent_at(file, host).await.map_err(|e| Error::from(e).on(file.path()))?;
        extent.len = extent.len.min(found.len);
        extent.hole = found.hole;
    }
    Ok(extent)
}

/// Whether `guest..guest + len` is known to read as zero without reading it. What lies past the end of the disk does.
/// Of data, only that of a raw image is looked up in its file for holes: a file system may walk over every extent of a
/// fragmented file to answer, and what an image has allocated holds something as a rule.
pub(crate) async fn is_zero(top: &Node, worker: &Worker, guest: u64, len: u64) -> Result<bool> {
    let end = (guest + len).min(top.virtual_size());
    let mut at = guest;
    while at < end {
        let Owned { node, run, len, .. } = resolve(top, worker, at, end - at).await?;
        at += match run {
            Run::Unallocated | Run::Zero { .. } => len,
            Run::Data { host } if matches!(node.driver, Driver::Raw(_)) && node.protection().is_none() => {
                let found = worker.extent_at(node.data_file(), host).await;
                let found = found.map_err(|e| Error::from(e).on(&node.path))?;
                if !found.hole {
                    return Ok(false);
                }
                len.min(found.len)
            }
            Run::Data { .. } | Run::Compressed { .. } | Run::Elsewhere { .. } | Run::Packed(_) => {
                return Ok(false);
            }
        };
    }
    Ok(true)
}
