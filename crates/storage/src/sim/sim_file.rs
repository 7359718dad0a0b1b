//! What a [`crate::File`] knows of its simulated file.

use super::disk::DiskState;
use super::op::FileNumber;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

thread_local! {
    /// The disks of the worlds of this thread. A `File` may be sent to other threads, a world may not.
    static DISKS: RefCell<BTreeMap<u64, Weak<RefCell<DiskState>>>> = const { RefCell::new(BTreeMap::new()) };
}

/// Which file of which world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SimFile {
    pub(super) world: u64,
    pub(super) number: FileNumber,
}

impl SimFile {
    /// Bytes of simulated disk in use.
    ///
    /// # Errors
    /// `EBADF` on another thread than the world's, or when the world is gone.
    pub(crate) fn disk_usage(self) -> Result<u64, i32> {
        let disk = DISKS.try_with(|disks| disks.borrow().get(&self.world).and_then(Weak::upgrade));
        let disk = disk.ok().flatten().ok_or(libc::EBADF)?;
        let disk = disk.borrow();
        Ok(disk.files.get(self.number.0).ok_or(libc::EBADF)?.volatile.disk_usage())
    }
}

/// Makes the disk of a world known to the files of this thread.
pub(super) fn register(world: u64, disk: &Rc<RefCell<DiskState>>) {
    DISKS.with(|disks| {
        let mut disks = disks.borrow_mut();
        disks.retain(|_, disk| disk.strong_count() > 0);
        disks.insert(world, Rc::downgrade(disk));
    });
}
