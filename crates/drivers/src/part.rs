//! A part of a disk.

use crate::call::{answer, moved, range, take_bufs};
use std::sync::Arc;
use zebu_storage::{Alignment, Completer, FileId, Storage, StorageAbilities, StorageDone, StorageOp};

/// Bytes that a given size is a multiple of.
const SECTOR: u64 = 512;

/// The bytes of another disk from an offset on.
pub struct Part {
    below: Arc<dyn Storage>,
    offset: u64,
    size: u64,
    /// Whether the size was given: then it is fixed.
    is_cut: bool,
}

impl Part {
    /// The bytes from `offset` on, of which there are `size`, or all that there are.
    ///
    /// # Errors
    /// The part lies past the end, or does not end at a sector; in QEMU's words.
    pub fn new(below: Arc<dyn Storage>, offset: u64, size: Option<u64>) -> Result<Self, String> {
        let len = below.len();
        let Some(room) = len.checked_sub(offset) else {
            return Err(format!(
                "Offset ({offset}) cannot be greater than size of the containing file ({len})"
            ));
        };
        if let Some(size) = size
            && room < size
        {
            return Err(format!(
                "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to the actual size of the \
                 containing file ({len})"
            ));
        }
        if let Some(size) = size
            && !size.is_multiple_of(SECTOR)
        {
            return Err(format!("Specified size is not multiple of {SECTOR}"));
        }
        Ok(Self { below, offset, size: size.unwrap_or(room), is_cut: size.is_some() })
    }
}

impl Storage for Part {
    fn len(&self) -> u64 {
        self.size
    }

    fn files(&self) -> Vec<FileId> {
        self.below.files()
    }

    fn identity(&self) -> u64 {
        // Parts of one disk are different disks, which may lie beside each other.
        self.below.identity() ^ self.offset.rotate_left(17) ^ self.size.rotate_left(41)
    }

    fn alignment(&self) -> Alignment {
        let mut alignment = self.below.alignment();
        // An offset that is not aligned itself makes every request unaligned below: the file below takes care of it.
        if !self.offset.is_multiple_of(u64::from(alignment.offset)) {
            alignment = Alignment { memory: 1, offset: 1, length: 1 };
        }
        alignment
    }

    fn abilities(&self) -> StorageAbilities {
        let below = self.below.abilities();
        if self.is_cut { below - StorageAbilities::SET_LEN } else { below }
    }

    fn discard_granularity(&self) -> u64 {
        self.below.discard_granularity()
    }

    fn announce(&self, purpose: &'static str) {
        self.below.announce(purpose);
    }

    fn submit(&self, op: StorageOp, mut done: Completer) {
        let below = match op {
            StorageOp::SetLen { len } => match len.checked_add(self.offset) {
                Some(len) => StorageOp::SetLen { len },
                None => return done.finish(Err(libc::EFBIG)),
            },
            StorageOp::ExtentAt { offset } => StorageOp::ExtentAt { offset: offset + self.offset },
            op => match range(op) {
                None => op,
                Some((offset, _)) => match offset.checked_add(self.offset) {
                    Some(offset) => moved(op, offset),
                    None => return done.finish(Err(libc::EFBIG)),
                },
            },
        };
        let bufs = take_bufs(&mut done);
        let left = match op {
            StorageOp::ExtentAt { offset } => self.size.saturating_sub(offset).max(1),
            _ => u64::MAX,
        };
        let is_cut = self.is_cut;
        let on_end = Completer::new(below, bufs, move |bufs, result| {
            let result = result.map(|done| match done {
                StorageDone::Extent { len, hole } if is_cut => {
                    StorageDone::Extent { len: len.min(left), hole }
                }
                other => other,
            });
            answer(done, bufs, result);
        });
        self.below.submit(below, on_end);
    }

    fn cancel(&self) {
        self.below.cancel();
    }
}
