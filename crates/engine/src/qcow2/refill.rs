//! Refilling windows: growth, a commit, the end of quarantine, other windows; only then is there no space.

use crate::qcow2::space::alloc::WindowFor;
use crate::qcow2::space::free::Allocated;
use crate::qcow2::state::Qcow2;
use crate::sync::while_driven;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl Qcow2 {
    /// `count` clusters that follow each other, for a table.
    pub(crate) async fn allocate_metadata(
        self: &Arc<Self>,
        worker: &Worker,
        count: u64,
    ) -> Result<Allocated> {
        if self.space.is_large_table(count) {
            return self
                .on_own_worker(worker, move |me, on| async move { me.space.claim_large(&on, count).await })
                .await;
        }
        loop {
            if let Some(allocated) = self.space.try_allocate_tables(count) {
                return Ok(allocated);
            }
            self.refill(worker, WindowFor::Metadata, count).await?;
        }
    }

    /// Sets up a window. The caller holds no lock but `StreamPacker::room_mutex`, and no epoch guard. Gives
    /// out-of-space only when nothing is free, nothing is on its way back, and no window has anything left.
    pub(crate) async fn refill(
        self: &Arc<Self>,
        worker: &Worker,
        wanted: WindowFor,
        count: u64,
    ) -> Result<()> {
        let quarantine = self.space.quarantine();
        loop {
            // Read first: what comes back while we look elsewhere is a reason to look again.
            let released = quarantine.released();
            let error = match self.refill_once(worker, wanted, count).await {
                Err(error) if error.kind() == ErrorKind::NoSpace => error,
                other => return other,
            };
            if quarantine.has_any()
                && !self.commit_and_wait(worker, quarantine.some_are_released(released)).await?
            {
                if self.space.refill_from_windows(wanted, count).await {
                    return Ok(());
                }
                let message = "no space is left but what was given back, and a read of that does not end: its worker is not \
                               driven; poll or drop it";
                return Err(Error::new(ErrorKind::NoSpace, message).on(self.path()));
            }
            if quarantine.released() != released {
                continue;
            }
            if self.space.refill_from_windows(wanted, count).await {
                return Ok(());
            }
            // Another may have taken it from the windows, and given back what it did not need.
            if quarantine.released() == released && !quarantine.has_any() {
                return Err(error);
            }
        }
    }

    /// Commits what was given back, and waits until `some` of it came out. `false`: given up, since a read of it is on a worker
    /// that nobody drives.
    async fn commit_and_wait(
        self: &Arc<Self>,
        worker: &Worker,
        some: impl Future<Output = ()>,
    ) -> Result<bool> {
        self.commit(worker).await?;
        let some = while_driven(worker, || self.readers().awaited(), some);
        Ok(worker.shown(self.file(), "space that is given back", some).await.is_some())
    }

    /// Whether a write may try again that found its place to be a hole of a full file system: the file system got space back
    /// meanwhile. The caller holds no epoch guard. (What a failed write gives back is used again and not punched, so that
    /// writes have no others try again.)
    pub(crate) async fn has_space_returned(self: &Arc<Self>, worker: &Worker) -> Result<bool> {
        let quarantine = self.space.quarantine();
        let punched = quarantine.punched();
        if !quarantine.has_any_to_punch() || sabotage::is(Fault::FailBesideReads) {
            return Ok(false);
        }
        self.commit_and_wait(worker, quarantine.some_are_punched(punched)).await?;
        Ok(quarantine.punched() != punched)
    }

    async fn refill_once(self: &Arc<Self>, worker: &Worker, wanted: WindowFor, count: u64) -> Result<()> {
        let before = self.space.window_for(wanted, count);
        self.on_own_worker(worker, move |me, on| async move {
            me.space.refill_unless_done(&on, wanted, count, before).await
        })
        .await
    }

    /// Makes the file reach to the end of `len` host bytes at `host`, where an entry says that data of `guest` is. (A copy
    /// of a file may have been cut short.) Where nothing is allocated, it is refused: the space would be given to somebody
    /// else as well.
    pub(crate) async fn ensure_file_covers(
        self: &Arc<Self>,
        worker: &Worker,
        host: u64,
        len: u64,
        guest: u64,
    ) -> Result<()> {
        if self.space.is_in_file(host, len) {
            return Ok(());
        }
        self.on_own_worker(
            worker,
            move |me, on| async move { me.space.extend_to(&on, host, len, guest).await },
        )
        .await
    }
}
