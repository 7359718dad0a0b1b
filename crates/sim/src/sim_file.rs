//! The answers of a world to a [`zebu_storage::File`].

use crate::disk::DiskState;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use zebu_storage::simulated::SimulatedFile;

thread_local! {
    /// The disks of the worlds of this thread. A `File` may be sent to other threads, a world may not.
    static DISKS: RefCell<BTreeMap<u64, Weak<RefCell<DiskState>>>> = const { RefCell::new(BTreeMap::new()) };
}

/// Bytes of simulated disk that `file` takes.
///
/// # Errors
/// `EBADF` on another thread than the world's, or when the world is gone.
pub(crate) fn disk_usage(file: SimulatedFile) -> Result<u64, i32> {
    let disk = DISKS.try_with(|disks| disks.borrow().get(&file.world).and_then(Weak::upgrade));
    let disk = disk.ok().flatten().ok_or(libc::EBADF)?;
    let disk = disk.borrow();
    Ok(disk.files.get(file.number).ok_or(libc::EBADF)?.volatile.disk_usage())
}

/// Makes the disk of a world known to the files of this thread.
pub(crate) fn register(world: u64, disk: &Rc<RefCell<DiskState>>) {
    DISKS.with(|disks| {
        let mut disks = disks.borrow_mut();
        disks.retain(|_, disk| disk.strong_count() > 0);
        disks.insert(world, Rc::downgrade(disk));
    });
}
