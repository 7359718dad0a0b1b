//! A worker's request to a storage that a program brought, and its way back as a completion.

use crate::completions::Completions;
use crate::file_types::FileExtent;
use crate::request::{Completion, OpDone, OpId, OpKind, OpRequest};
use crate::storage::{Completer, Storage, StorageAbilities, StorageDone, StorageOp};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Hands a request to its storage; the completion comes to `to`. `cancelled` is the worker's word that it ends.
pub(crate) fn submit(
    storage: &dyn Storage,
    id: OpId,
    mut request: Box<OpRequest>,
    to: &Arc<Completions>,
    cancelled: &Arc<AtomicBool>,
) {
    let op = match as_storage_op(storage.abilities(), &mut request) {
        Ok(op) => op,
        Err(result) => {
            to.push(Completion { id, request, result });
            return;
        }
    };
    let mut bufs = std::mem::take(&mut request.bufs);
    // A file reads as zero past its end; a storage is not asked for that part.
    let tail = match op {
        StorageOp::Read { len, .. } if len < request.len => {
            let head = bufs.split_to(len as usize);
            let mut tail = std::mem::replace(&mut bufs, head);
            tail.fill(0, tail.len(), 0);
            Some(tail)
        }
        _ => None,
    };
    let to = Arc::clone(to);
    let done = Completer::new(op, bufs, move |mut bufs, result| {
        if let Some(tail) = tail {
            bufs.append(tail);
        }
        request.bufs = bufs;
        let result = result.map(|done| match done {
            StorageDone::Extent { len, hole } => {
                OpDone::Extent(FileExtent { offset: request.offset, len, hole })
            }
            StorageDone::Moved(_) | StorageDone::Done => OpDone::Done,
        });
        to.push(Completion { id, request, result });
    });
    storage.submit(op, done.cancelled_by(Arc::clone(cancelled)));
}

/// The operation, within the storage's length; or the result, where the storage need not be asked.
fn as_storage_op(
    abilities: StorageAbilities,
    request: &mut OpRequest,
) -> Result<StorageOp, Result<OpDone, i32>> {
    let (offset, len, end) = (request.offset, request.len, request.file.len());
    let needs = |ability: StorageAbilities| {
        if abilities.contains(ability) { Ok(()) } else { Err(Err(libc::EOPNOTSUPP)) }
    };
    let within = offset.checked_add(len).is_some_and(|last| last <= end);
    let has_room = || {
        let grows = abilities.contains(StorageAbilities::SET_LEN);
        if within || grows { Ok(()) } else { Err(Err(libc::ENOSPC)) }
    };
    match &request.kind {
        OpKind::Read => {
            let len = len.min(end.saturating_sub(offset));
            if len == 0 {
                let all = request.bufs.len();
                request.bufs.fill(0, all, 0);
                return Err(Ok(OpDone::Done));
            }
            Ok(StorageOp::Read { offset, len })
        }
        OpKind::Write => {
            if !(abilities.contains(StorageAbilities::WRITE) && request.file.is_writable()) {
                return Err(Err(libc::EBADF));
            }
            has_room()?;
            Ok(StorageOp::Write { offset, len })
        }
        OpKind::Flush => Ok(StorageOp::Flush),
        OpKind::Punch => {
            needs(StorageAbilities::PUNCH)?;
            let len = len.min(end.saturating_sub(offset));
            if len == 0 { Err(Ok(OpDone::Done)) } else { Ok(StorageOp::Punch { offset, len }) }
        }
        OpKind::ZeroRange => {
            needs(StorageAbilities::ZERO_RANGE)?;
            has_room()?;
            Ok(StorageOp::ZeroRange { offset, len })
        }
        OpKind::Allocate => {
            needs(StorageAbilities::ALLOCATE)?;
            has_room()?;
            Ok(StorageOp::Allocate { offset, len })
        }
        OpKind::SetLen => {
            needs(StorageAbilities::SET_LEN)?;
            Ok(StorageOp::SetLen { len: offset })
        }
        // The worker takes the rest of the file for data.
        OpKind::ExtentAt if !abilities.contains(StorageAbilities::EXTENTS) => Err(Ok(OpDone::Done)),
        OpKind::ExtentAt => Ok(StorageOp::ExtentAt { offset }),
        OpKind::CopyRange { .. } | OpKind::CloneRange { .. } => Err(Err(libc::EOPNOTSUPP)),
    }
}
