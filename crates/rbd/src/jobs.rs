//! Work that librbd has for waiting callers only, done one after the other by a disk's thread.

use crate::extents::Window;
use crate::ffi::Call;
use crate::pending::Ticket;
use crate::shared::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use zebu_storage::StorageDone;

/// `RBD_FEATURE_FAST_DIFF`: the image has a map of its objects.
const FAST_DIFF: u64 = 1 << 4;
/// `RBD_FLAG_OBJECT_MAP_INVALID` and `RBD_FLAG_FAST_DIFF_INVALID`.
const MAP_IS_WRONG: u64 = 0b11;
/// Bytes that are looked through for holes at once, by such a map, or by asking for each object.
const BY_MAP: u64 = 1 << 40;
const BY_OBJECTS: u64 = 1 << 30;
/// An image that grows does so by a part of its size, between these.
const LEAST_GROWTH: u64 = 16 << 20;
const MOST_GROWTH: u64 = 1 << 30;
const PART_OF_SIZE: u64 = 8;

/// A piece of work.
pub(crate) enum Job {
    /// A write that ends past the image's size.
    WritePastEnd {
        offset: u64,
        end: u64,
        data: Vec<u8>,
        ticket: Ticket,
    },
    SetLen {
        len: u64,
        ticket: Ticket,
    },
    /// The run of data or hole at an offset.
    Extent {
        offset: u64,
        ticket: Ticket,
    },
}

/// Does the work of a disk until the disk is dropped, and closes the image.
pub(crate) fn run(shared: &Arc<Shared>, jobs: &Receiver<Job>) {
    for job in jobs {
        match job {
            Job::WritePastEnd { offset, end, data, ticket } => match grow(shared, end) {
                Ok(()) => shared.start(Call::Write { offset }, data, ticket),
                Err(errno) => answer(ticket, Err(shared.fail(errno))),
            },
            Job::SetLen { len, ticket } => {
                let result = resize(shared, len).map_err(|errno| shared.fail(errno));
                if result.is_ok() {
                    shared.end.store(len, Ordering::Release);
                }
                answer(ticket, result.map(|()| StorageDone::Done));
            }
            Job::Extent { offset, ticket } => {
                let result = extent_at(shared, offset).map_err(|errno| shared.fail(errno));
                answer(ticket, result.map(|(len, hole)| StorageDone::Extent { len, hole }));
            }
        }
    }
    if !shared.pending.settle() {
        // librbd still has memory of requests, so it goes on until the process ends.
        return;
    }
    let (end, size) = (shared.end.load(Ordering::Acquire), shared.size.load(Ordering::Acquire));
    if size > end && shared.image.size() == Ok(size) {
        // What it has grown too much by is no harm if it stays.
        let _ = resize(shared, end);
    }
    shared.image.close();
}

/// Answers, unless the request was given up.
fn answer(ticket: Ticket, result: Result<StorageDone, i32>) {
    if let Some(done) = ticket.end() {
        done.finish(result);
    }
}

/// Makes the image end at `end` at least.
fn grow(shared: &Shared, end: u64) -> Result<(), i32> {
    let size = shared.size.load(Ordering::Acquire);
    if size >= end {
        return Ok(());
    }
    let step = (size / PART_OF_SIZE).clamp(LEAST_GROWTH, MOST_GROWTH);
    resize(shared, end.saturating_add(step).next_multiple_of(shared.facts.object_size))
}

fn resize(shared: &Shared, size: u64) -> Result<(), i32> {
    shared.runs.change();
    let resized = shared.image.resize(size);
    shared.runs.change();
    // One that failed may have been done in part.
    let now = shared.image.size().unwrap_or(size);
    shared.size.store(if resized.is_ok() { size } else { now }, Ordering::Release);
    resized
}

/// The length of the run at `offset`, and whether it is a hole.
fn extent_at(shared: &Shared, offset: u64) -> Result<(u64, bool), i32> {
    if let Some(found) = shared.extent(offset) {
        return Ok(found);
    }
    let size = shared.size.load(Ordering::Acquire);
    let whole_objects = has_map(shared)?;
    let period = shared.facts.period.max(1);
    // Versions before 17 tell wrong offsets of a range that begins within an object.
    let start = offset - offset % period;
    let step = if whole_objects { BY_MAP } else { BY_OBJECTS };
    let end = start.saturating_add(step.next_multiple_of(period)).min(size);
    let changes = shared.runs.changes();
    let runs = shared.image.runs(start, end.saturating_sub(start), whole_objects)?;
    let window = Window::new(start, end, &runs);
    let (len, hole) = window.at(offset).ok_or(libc::EINVAL)?;
    shared.runs.keep(window, changes);
    Ok((shared.within_disk(offset, len), hole))
}

/// Whether a map tells which objects are there. Of a clone, and of objects that are filled in turn, librbd asks for each one.
fn has_map(shared: &Shared) -> Result<bool, i32> {
    let (features, flags) = shared.image.features()?;
    let is_valid = features & FAST_DIFF != 0 && flags & MAP_IS_WRONG == 0;
    Ok(is_valid && shared.facts.is_in_order && shared.image.overlap()? == 0)
}
