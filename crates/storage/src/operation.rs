//! Single operations of a worker, as the kernel gets them, with what keeps writes apart.

use crate::buf::IoBufs;
use crate::file::{Capability, File};
use crate::request::{OpDone, OpKind, OpRequest};
use crate::syncs::SeenBy;
use crate::worker::Worker;
use crate::write_behind::drop_pages;
use crate::write_table::{Hold, Ticket};
use std::ops::Range;
use std::os::fd::AsFd;

impl Worker {
    /// Reads or writes `bufs`, which keep to the file's alignment. `hold` is released with the operation's end, even
    /// if nobody waits for that.
    pub(crate) async fn transfer(
        &self,
        file: &File,
        kind: OpKind,
        offset: u64,
        bufs: IoBufs,
        hold: Option<Hold>,
    ) -> (Result<(), i32>, IoBufs) {
        let len = bufs.len() as u64;
        let is_read = matches!(kind, OpKind::Read);
        self.count(|stats| {
            if is_read {
                stats.reads += 1;
                stats.read_bytes += len;
            } else {
                stats.writes += 1;
                stats.write_bytes += len;
            }
        });
        let leaves_nothing =
            file.os().is_some() && (file.behind().is_some() || (is_read && self.reads_uncached()));
        let mut request = Box::new(OpRequest::new(file.clone(), kind, offset, len, bufs, hold));
        request.uncached = leaves_nothing && file.can_be_uncached();
        let was_uncached = request.uncached;
        let (mut request, mut result) = self.operate(file, request).await;
        let mut bufs = std::mem::take(&mut request.bufs);
        if was_uncached && result == Err(libc::EOPNOTSUPP) {
            // A file system may take it for some requests only. Without O_DIRECT there is no place to hold.
            file.refuse(Capability::DontCache);
            let again = OpRequest::new(file.clone(), request.kind.clone(), offset, len, bufs, None);
            (request, result) = self.operate(file, Box::new(again)).await;
            bufs = std::mem::take(&mut request.bufs);
        }
        if leaves_nothing && !file.is_direct() && result.is_ok() && !file.can_be_uncached() {
            self.drop_behind(file, offset..offset + len, is_read).await;
        }
        (result.map(drop), bufs)
    }

    /// Drops the pages of a read, or begins to write behind what was written.
    async fn drop_behind(&self, file: &File, range: Range<u64>, is_read: bool) {
        let on = file.clone();
        if is_read {
            let drop = move || on.os().map(|os| drop_pages(os.as_fd(), range.start, range.end - range.start));
            self.run_blocking(drop).await;
        } else if let Some(due) = file.behind().and_then(|behind| behind.note(range)) {
            let work = move || {
                let number = on.syncs().begin(SeenBy::ItsThread);
                if let Some(Err(_)) = on.os().map(|os| due.execute(os.as_fd())) {
                    // The kernel has told of the loss, and will not tell again.
                    on.set_flush_failed();
                }
                on.syncs().end(number);
            };
            self.run_blocking(work).await;
        }
    }

    /// Drops all pages of a file that are durable, if none of them is to stay.
    pub(crate) async fn drop_durable(&self, file: &File) {
        if file.behind().is_some() {
            let on = file.clone();
            self.run_blocking(move || on.os().map(|os| drop_pages(os.as_fd(), 0, 0))).await;
        }
    }

    /// An operation without buffers; the errno if it failed. `hold` is released with its end.
    pub(crate) async fn plain(
        &self,
        file: &File,
        kind: OpKind,
        offset: u64,
        len: u64,
        hold: Option<Hold>,
    ) -> Result<OpDone, i32> {
        let request = OpRequest::new(file.clone(), kind, offset, len, IoBufs::new(), hold);
        self.operate(file, Box::new(request)).await.1
    }

    /// Notes a change of the range, so that read-modify-writes of its blocks keep clear of it; waits for those that
    /// were first. `None` where there are none.
    pub(crate) async fn hold_write(&self, file: &File, offset: u64, len: u64) -> Option<Hold> {
        let table = file.writes()?;
        let range = offset..offset.saturating_add(len);
        if let Some(hold) = table.try_write(self.id(), range.clone()) {
            return Some(hold);
        }
        Claim::take(file, range).await.into_hold()
    }
}

/// A range of a file that nobody else writes.
pub(crate) struct Claim<'a> {
    file: &'a File,
    ticket: Option<Ticket>,
}

impl<'a> Claim<'a> {
    /// Waits until nobody else writes the range. Files without O_DIRECT need no claims.
    pub(crate) async fn take(file: &'a File, range: Range<u64>) -> Claim<'a> {
        let Some(table) = file.writes() else { return Self { file, ticket: None } };
        let ticket = table.claim(range);
        // Made before the waiting, so that one who gives up releases it.
        let claim = Self { file, ticket: Some(ticket) };
        std::future::poll_fn(|cx| table.poll_claim(ticket, cx)).await;
        claim
    }

    /// The claim, for an operation to release.
    pub(crate) fn into_hold(mut self) -> Option<Hold> {
        self.ticket.take().map(Hold::Claim)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let (Some(ticket), Some(table)) = (self.ticket, self.file.writes()) {
            table.release(Hold::Claim(ticket));
        }
    }
}
