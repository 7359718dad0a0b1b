//! The seam between a worker and its backends: one operation, and its completion.
//!
//! A worker hands a backend `submit(id, request)` and, at its next turn, `submit_queued()`. The backend owns the
//! request, with its buffers, until the operation is over, and then returns the same box in a [`Completion`]:
//! whatever the caller dropped meanwhile, memory that the kernel (or a simulated disk) may still touch stays alive.
//! Every request gets exactly one completion. Completions may come in any order.
//!
//! What a backend does for each [`OpKind`] (`offset` and `len` in bytes; failures are errno values):
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
use crate::write_table::Hold;

/// Names an operation of one worker while it is in flight. Ids are small and reused: a backend may use them as an
/// index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct OpId(pub(crate) usize);

/// What is to be done; see the table in the module's documentation.
#[derive(Clone)]
pub(crate) enum OpKind {
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
pub(crate) struct OpRequest {
    pub(crate) file: File,
    pub(crate) kind: OpKind,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Empty for all but `Read` and `Write`.
    pub(crate) bufs: IoBufs,
    /// The place in the file's table of writes, to be released at the operation's end.
    hold: Option<Hold>,
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
            hold,
            #[cfg(debug_assertions)]
            grows,
        }
    }

    /// Others may write the range again.
    pub(crate) fn settle(&mut self) {
        #[cfg(debug_assertions)]
        if let Some(check) = self.file.growth_check().filter(|_| std::mem::take(&mut self.grows)) {
            check.end();
        }
        if let (Some(hold), Some(table)) = (self.hold.take(), self.file.writes()) {
            table.release(hold);
        }
    }
}

impl Drop for OpRequest {
    fn drop(&mut self) {
        self.settle();
    }
}

/// What a successful operation yields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpDone {
    Done,
    Copied(u64),
    Extent(FileExtent),
}

/// The end of an operation.
pub(crate) struct Completion {
    pub(crate) id: OpId,
    pub(crate) request: Box<OpRequest>,
    /// What came of it, or the errno.
    pub(crate) result: Result<OpDone, i32>,
}
