//! Raw images: the bytes of the disk.

use crate::Remedy;
use crate::crypt::sectors::SectorOffsets;
use crate::node::Raw;
use crate::options::{Format, Preallocation, Shrink, ZeroMode};
use crate::progress::{JobControl, Phase, Tracker};
use crate::reservation::{Reservation, check_mode};
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_storage::{File, FileKind, IoBuf, IoBufs, IoErrorKind, Worker};

/// Bytes of zeroes that are encrypted and written at once.
const ZEROES_AT_ONCE: u64 = 1 << 20;

/// Bytes by which images are found out.
const FIRST_SECTOR: u64 = 512;

/// Sets an empty file up as a disk of `size` bytes.
pub(crate) async fn create(
    worker: &Worker,
    file: &File,
    size: u64,
    preallocation: Preallocation,
    control: &JobControl,
) -> Result<()> {
    let on = |e: zebu_storage::IoError| Error::from(e).on(file.path());
    if file.kind() == FileKind::BlockDevice {
        if file.len() < size {
            let message = format!("the device holds {} bytes, {size} are needed", file.len());
            return Err(Error::new(ErrorKind::NoSpace, message).on(file.path()));
        }
        check_mode(file, Format::Raw, preallocation)?;
        // What was an image there would be found again by who probes.
        worker.write_zero_bytes(file, 0, file.len().min(FIRST_SECTOR)).await.map_err(on)?;
        return reserve(worker, file, 0..size, preallocation, control).await;
    }
    worker.set_len(file, size).await.map_err(on)?;
    reserve(worker, file, 0..size, preallocation, control).await
}

async fn reserve(
    worker: &Worker,
    file: &File,
    range: Range<u64>,
    preallocation: Preallocation,
    control: &JobControl,
) -> Result<()> {
    if range.is_empty() || preallocation == Preallocation::Off {
        return Ok(());
    }
    let tracker = Tracker::new(control, Phase::Reserving, range.end - range.start);
    let space = Reservation { worker, file, format: Format::Raw, tracker: &tracker };
    match preallocation {
        Preallocation::Off => {}
        Preallocation::Metadata => {
            let message = "raw images have no metadata to preallocate; use preallocation=falloc or full";
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()));
        }
        Preallocation::Falloc => space.allocate(range).await?,
        Preallocation::Full => {
            space.write_zeroes(range).await?;
            worker.flush(file).await.map_err(|e| Error::from(e).on(file.path()))?;
        }
    }
    tracker.finish(None);
    Ok(())
}

fn check_writable(raw: &Raw) -> Result<()> {
    if raw.file.is_writable() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::ReadOnly, "the image was opened for reading only").on(raw.file.path()))
}

/// Writes `bufs` at `offset`.
pub(crate) async fn write(raw: &Raw, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
    if let Err(error) = check_writable(raw) {
        return (Err(error), bufs);
    }
    if raw.luks.is_some() {
        let place = SectorOffsets { host: raw.host_of(offset), guest: offset };
        let (result, bufs) = Box::pin(raw.protection().write(worker, &raw.file, place, bufs)).await;
        return (result.map_err(|e| e.on(raw.file.path()).at_guest(offset)), bufs);
    }
    let (result, bufs) = worker.write(&raw.file, offset, bufs).await;
    (result.map_err(|e| Error::from(e).on(raw.file.path()).at_guest(offset)), bufs)
}

/// Makes a range read as zero.
pub(crate) async fn write_zeroes(
    raw: &Raw,
    worker: &Worker,
    offset: u64,
    len: u64,
    mode: ZeroMode,
) -> Result<()> {
    check_writable(raw)?;
    let on = |e: zebu_storage::IoError| Error::from(e).on(raw.file.path()).at_guest(offset);
    if len == 0 {
        return Ok(());
    }
    if raw.luks.is_some() {
        // A hole would be decrypted to noise.
        let mut at = offset;
        while at < offset + len {
            let step = (offset + len - at).min(ZEROES_AT_ONCE);
            let (result, _) = write(raw, worker, at, IoBuf::zeroed(step as usize).into()).await;
            result?;
            at += step;
        }
        return Ok(());
    }
    if mode == ZeroMode::Unmap {
        match worker.punch_hole(&raw.file, offset, len).await {
            Err(e) if e.kind == IoErrorKind::Unsupported => {}
            other => return other.map_err(on),
        }
    }
    match worker.zero_range(&raw.file, offset, len).await {
        Err(e) if e.kind == IoErrorKind::Unsupported => {}
        other => return other.map_err(on),
    }
    worker.write_zero_bytes(&raw.file, offset, len).await.map_err(on)
}

/// Gives a range back where the file can.
pub(crate) async fn discard(raw: &Raw, worker: &Worker, offset: u64, len: u64) -> Result<()> {
    check_writable(raw)?;
    // What is given up of an encrypted disk would read as noise: it stays.
    let granularity = raw.file.discard_granularity();
    let (start, end) = (offset.next_multiple_of(granularity), (offset + len) / granularity * granularity);
    if start >= end || raw.luks.is_some() {
        return Ok(());
    }
    match worker.punch_hole(&raw.file, start, end - start).await {
        Err(e) if e.kind == IoErrorKind::Unsupported => Ok(()),
        other => other.map_err(|e| Error::from(e).on(raw.file.path()).at_guest(offset)),
    }
}

/// Changes the length of the file.
pub(crate) async fn resize(
    raw: &Raw,
    worker: &Worker,
    new_size: u64,
    shrink: Shrink,
    preallocation: Preallocation,
    control: &JobControl,
) -> Result<()> {
    check_writable(raw)?;
    let refuse = |kind, message: &str| Err(Error::new(kind, message.to_owned()).on(raw.file.path()));
    if let Some(luks) = &raw.luks {
        luks.check_size(new_size, raw.file.path())?;
    }
    let old = raw.file.len();
    let new_size = raw.host_of(new_size);
    if raw.file.kind() == FileKind::BlockDevice && new_size != old {
        return refuse(ErrorKind::Unsupported, "Cannot resize device files");
    }
    if new_size <= old && preallocation != Preallocation::Off {
        return refuse(ErrorKind::InvalidArgument, "Preallocation can only be used for growing images");
    }
    if new_size == old {
        return Ok(());
    }
    if new_size < old && shrink == Shrink::Refuse {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "the new size is smaller: what lies past it would be lost, and shrinking is not allowed",
        )
        .with_remedy(Remedy::AllowShrinking));
    }
    worker.set_len(&raw.file, new_size).await.map_err(|e| Error::from(e).on(raw.file.path()))?;
    let reserved = reserve(worker, &raw.file, old..new_size, preallocation, control).await;
    if reserved.is_err() {
        // The disk keeps its size; should this fail too, the first error tells more.
        let _ = worker.set_len(&raw.file, old).await;
    }
    reserved
}

/// Makes everything durable.
pub(crate) async fn close(raw: &Raw, worker: &Worker) -> Result<()> {
    if raw.file.is_writable() {
        worker.flush(&raw.file).await.map_err(|e| Error::from(e).on(raw.file.path()))?;
    }
    Ok(())
}
