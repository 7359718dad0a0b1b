//! Disks that C holds, and queues on their way to their threads: numbers in the shape of pointers.
//!
//! A number is never given out twice, so that one of a closed disk means nothing. A process has one table of them. A child of
//! fork(2) begins another: locks of its parent's may be held by threads that are not there, and what is behind its parent's
//! numbers is its parent's.

use crate::failure::{Failure, Outcome};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};
use zebu_disks::Context;
use zebu_engine::{DetachedQueue, Disk};
use zebu_storage::ForkMark;
use zebu_storage::sync::{Mutex, MutexGuard};

/// The table of this process, or of the one that it was forked from.
static OPEN: AtomicPtr<Table> = AtomicPtr::new(ptr::null_mut());

struct Table {
    made_in: ForkMark,
    /// The last number that was given out, of a disk or a queue. A child goes on from that of its parent.
    last: AtomicUsize,
    disks: RwLock<HashMap<usize, Named>>,
    queues: Mutex<HashMap<usize, DetachedQueue>>,
}

/// A disk, and what its name led to.
struct Named {
    disk: Disk,
    context: Context,
}

/// All threads use the table.
const _: fn(&Table) -> &(dyn Sync + 'static) = |table| table;

/// A number that nothing had before.
fn new_number() -> usize {
    table().last.fetch_add(1, Ordering::Relaxed) + 1
}

/// A handle for a number.
fn of_number<T>(number: usize) -> *mut T {
    ptr::without_provenance_mut(number)
}

/// The failure of a handle that means nothing here.
pub(crate) fn no_handle(message: &str) -> Failure {
    Failure::new(libc::EBADF, message)
}

fn table() -> &'static Table {
    loop {
        let found = OPEN.load(Ordering::Acquire);
        // SAFETY: NULL, or a table that was put there below, and none is ever freed.
        let present = unsafe { found.as_ref() };
        let last = match present {
            Some(table) if table.made_in.is_here() => return table,
            Some(parents) => parents.last.load(Ordering::Relaxed),
            None => 0,
        };
        let new = Table {
            made_in: ForkMark::here(),
            last: last.into(),
            disks: RwLock::default(),
            queues: Mutex::default(),
        };
        let new = Box::into_raw(Box::new(new));
        if OPEN.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: it is from above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

/// Gives out a number for a disk.
pub(crate) fn add<T>(disk: Disk, context: Context) -> *mut T {
    let number = new_number();
    table().disks.write().unwrap_or_else(PoisonError::into_inner).insert(number, Named { disk, context });
    of_number(number)
}

/// The disk behind a handle.
pub(crate) fn disk<T>(handle: *mut T) -> Outcome<Disk> {
    let disks = table().disks.read().unwrap_or_else(PoisonError::into_inner);
    disks.get(&handle.addr()).map(|named| named.disk.clone()).ok_or_else(|| {
        no_handle(if handle.is_null() {
            "the disk is NULL"
        } else {
            "no open disk: it was closed, or opened before fork(), or is none"
        })
    })
}

/// Takes the number of a disk back, and closes what the disk stands on.
pub(crate) fn remove<T>(handle: *mut T) -> Outcome<()> {
    let removed = table().disks.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.addr());
    // Its end may take long, and is no business of the table's.
    let Some(Named { disk, context }) = removed else { return Ok(()) };
    drop(disk);
    Ok(context.disks.close()?)
}

/// Queues that no thread has used yet.
fn queues() -> MutexGuard<'static, HashMap<usize, DetachedQueue>> {
    table().queues.lock()
}

/// Gives out a number for a queue.
pub(crate) fn add_queue<T>(queue: DetachedQueue) -> *mut T {
    let number = new_number();
    queues().insert(number, queue);
    of_number(number)
}

/// Takes a queue that no thread has used yet.
pub(crate) fn take_queue<T>(handle: *mut T) -> Option<DetachedQueue> {
    queues().remove(&handle.addr())
}

/// The descriptor of a queue that no thread has used yet.
pub(crate) fn waiting_queue_fd<T>(handle: *mut T) -> Option<RawFd> {
    queues().get(&handle.addr()).map(AsRawFd::as_raw_fd)
}
