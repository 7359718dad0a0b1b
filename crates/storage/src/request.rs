//! The seam between a worker and its backends: one operation, and its completion.
//!
//! A worker hands a backend `submit(id, request)` and, at its next turn, `submit_queued()`. The backend owns the
//! request, with its buffers, until the operation is over, and then returns the same box in a [`Completion`]:
//! whatever the caller dropped meanwhile, memory that the kernel (or a simulated disk) may still touch stays alive.
//! Every request gets exactly one completion. Completions may come in any order.
//!
//! The work of a backend for each [`OpKind`] (`offset` and `len` in bytes; failures are errno values):
//!
//! | kind | work | success |
//! |---|---|---|
//! | `Read` | fills all `len` bytes of `bufs` (`bufs.len() == len`); bytes past the end of the file are set to 0; short transfers are continued by the backend | [`OpDone::Done`] |
//! | `Write` | writes all `len` bytes of `bufs`, or fails (a part may have been written then) | `Done` |
//! | `Flush` | makes all writes that completed before it was submitted durable (fdatasync) | `Done` |
//! | `Punch` | the range reads as zero and gives its space back; the length of the file stays | `Done` |
//! | `ZeroRange` | the range reads as zero, space kept; grows the file to the range's end | `Done` |
//! | `Allocate` | the range has space, holes in it read as zero; grows the file to the range's end | `Done` |
//! | `SetLen` | the file's length becomes `offset`; `len` is 0 | `Done` |
//! | `ExtentAt` | finds the run of data or hole that begins at `offset`, which lies before the end of the file | [`OpDone::Extent`] |
//! | `CopyRange` | copies up to `len` bytes from `src` at `src_offset` | [`OpDone::Copied`] |
//! | `CloneRange` | shares the blocks of the range, all or nothing | `Done` |
//!
//! Alignment, read-modify-write, the sticky flush error, the known length and the fallback flags are the worker's
//! (and the [`File`]'s) business and done before and after; a backend sees only what goes to the disk.

use crate::buf::IoBufs;
use crate::file::File;
use crate::file_types::FileExtent;
use crate::syncs::SyncNumber;
use crate::write_table::Hold;

/// A piece of computation for another thread.
pub type Job = Box<dyn FnOnce() + Send>;

/// Names an operation of one worker while it is in flight. Ids are small and reused: a backend may use them as an
/// index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub usize);

/// The kind of work; see the table in the module's documentation.
#[derive(Clone)]
#[allow(missing_docs)] // the table has them
pub enum OpKind {
    Read,
    Write,
    Flush,
    Punch,
    ZeroRange,
    Allocate,
    SetLen,
    ExtentAt,
    CopyRange { src: File, src_offset: u64 },
    CloneRange { src: File, src_offset: u64 },
}

/// One operation on one file.
pub struct OpRequest {
    /// The file, whose bytes the backend knows where to find.
    pub file: File,
    /// The work.
    pub kind: OpKind,
    /// Bytes from the beginning of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Empty for all but `Read` and `Write`.
    pub bufs: IoBufs,
    /// Whether the page cache is not to keep it (`RWF_DONTCACHE`); of `Read` and `Write`.
    pub(crate) uncached: bool,
    /// The place in the file's table of writes, to be released at the operation's end.
    hold: Option<Hold>,
    /// The number among the file's syncs, to be ended with the operation; of `Flush`.
    pub(crate) sync: Option<SyncNumber>,
    /// Whether the file's growth check knows of it.
    #[cfg(debug_assertions)]
    grows: bool,
}

impl OpRequest {
    pub(crate) fn new(
        file: File,
        kind: OpKind,
        offset: u64,
        len: u64,
        bufs: IoBufs,
        hold: Option<Hold>,
    ) -> Self {
        #[cfg(debug_assertions)]
        let grows = {
            let end = match kind {
                OpKind::SetLen => offset,
                OpKind::Read | OpKind::Flush | OpKind::Punch | OpKind::ExtentAt => 0,
                _ => offset.saturating_add(len),
            };
            let check = file.growth_check().filter(|_| end > file.len());
            if let Some(check) = check {
                check.begin(file.len()..end);
            }
            check.is_some()
        };
        Self {
            file,
            kind,
            offset,
            len,
            bufs,
            uncached: false,
            hold,
            sync: None,
            #[cfg(debug_assertions)]
            grows,
        }
    }

    /// The flags of preadv2(2) for a transfer.
    pub(crate) fn transfer_flags(&self) -> i32 {
        if self.uncached { libc::RWF_DONTCACHE } else { 0 }
    }

    /// Others may write the range again, and need not wait for a sync any longer.
    pub(crate) fn settle(&mut self) {
        #[cfg(debug_assertions)]
        if let Some(check) = self.file.growth_check().filter(|_| std::mem::take(&mut self.grows)) {
            check.end();
        }
        if let (Some(hold), Some(table)) = (self.hold.take(), self.file.writes()) {
            table.release(hold);
        }
        if let Some(number) = self.sync.take() {
            self.file.syncs().end(number);
        }
    }
}

impl Drop for OpRequest {
    fn drop(&mut self) {
        self.settle();
    }
}

/// The result of a successful operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpDone {
    /// Nothing but success.
    Done,
    /// Bytes copied.
    Copied(u64),
    /// The run that was asked for.
    Extent(FileExtent),
}

/// The end of an operation.
pub struct Completion {
    /// The operation.
    pub id: OpId,
    /// The same box that was submitted.
    pub request: Box<OpRequest>,
    /// The result, or the errno.
    pub result: Result<OpDone, i32>,
}

impl Completion {
    /// Notes what the operation's end means for its file, also when nobody waits for it any more.
    pub(crate) fn note_in_file(&self) {
        let Self { request, result, .. } = self;
        let file = &request.file;
        match (&request.kind, result) {
            (OpKind::Write | OpKind::ZeroRange | OpKind::Allocate | OpKind::CloneRange { .. }, Ok(_)) => {
                file.raise_len(request.offset.saturating_add(request.len));
            }
            (OpKind::CopyRange { .. }, Ok(OpDone::Copied(copied))) if *copied > 0 => {
                file.raise_len(request.offset.saturating_add(*copied));
            }
            (OpKind::SetLen, Ok(_)) => file.store_len(request.offset),
            (OpKind::Flush, Err(_)) => file.set_flush_failed(),
            _ => {}
        }
    }
}
