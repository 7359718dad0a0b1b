//! Setting space in a file aside, in steps between which the job is watched and can be stopped.

use crate::options::{Format, Preallocation};
use crate::progress::Tracker;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_storage::{File, FileKind, FsKind, IoError, IoErrorKind, Worker};

/// Bytes that one fallocate reserves. It writes nothing, so even many are done soon.
const ALLOCATE_STEP: u64 = 256 << 20;
/// Bytes of zeroes written between two looks at the switch.
const WRITE_STEP: u64 = 4 << 20;

/// A reservation of space in a file, and its progress.
pub(crate) struct Reservation<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) file: &'a File,
    /// Of the image, which decides what its user can ask for instead.
    pub(crate) format: Format,
    pub(crate) tracker: &'a Tracker,
}

impl Reservation<'_> {
    /// Reserves `range` of the file without writing it.
    pub(crate) async fn allocate(&self, range: Range<u64>) -> Result<()> {
        for step in steps(range, ALLOCATE_STEP) {
            self.tracker.check()?;
            let len = step.end - step.start;
            self.worker.allocate(self.file, step.start, len).await.map_err(|e| self.refused(e))?;
            self.tracker.advance(len);
        }
        Ok(())
    }

    /// Writes zeroes to `range` of the file.
    pub(crate) async fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        for step in steps(range, WRITE_STEP) {
            let len = step.end - step.start;
            self.tracker.keep_to_rate(self.worker, len).await?;
            self.tracker.check()?;
            let written = self.worker.write_zero_bytes(self.file, step.start, len).await;
            written.map_err(|e| Error::from(e).on(self.file.path()))?;
            self.tracker.advance(len);
        }
        Ok(())
    }

    fn refused(&self, e: IoError) -> Error {
        if e.kind != IoErrorKind::Unsupported {
            return Error::from(e).on(self.file.path());
        }
        cannot_reserve(self.file, self.format)
    }
}

/// Refuses a mode that the file can never have, before anything of it is changed.
pub(crate) fn check_mode(file: &File, format: Format, mode: Preallocation) -> Result<()> {
    match (mode, file.kind()) {
        (Preallocation::Falloc, FileKind::BlockDevice) => Err(cannot_reserve(file, format)),
        _ => Ok(()),
    }
}

/// The words that QEMU has for it come first: programs look for them to try another mode.
fn cannot_reserve(file: &File, format: Format) -> Error {
    let what = match (file.kind(), file.fs()) {
        (FileKind::BlockDevice, _) => "a block device",
        (_, FsKind::Tmpfs) => "tmpfs",
        (_, FsKind::Btrfs) => "btrfs",
        _ => "this file system",
    };
    let instead = match format {
        Format::Raw | Format::Luks | Format::Foreign(_) => "full",
        Format::Qcow2 => "full or metadata",
    };
    let message = format!(
        "Unsupported preallocation mode 'falloc': {what} can't reserve space (fallocate); use preallocation={instead}"
    );
    Error::new(ErrorKind::Unsupported, message).on(file.path())
}

/// `range` in pieces that end at multiples of `step`, so that only its own edges can be unaligned.
fn steps(range: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let piece = at..range.end.min((at / step + 1).saturating_mul(step));
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// A failure to set space aside, told to whoever asked for it: where the disk below is full, with what to do instead.
pub(crate) fn no_room(error: Error, preallocation: Preallocation, format: Format) -> Error {
    let instead = match (preallocation, format) {
        (Preallocation::Off, _) => return error,
        (Preallocation::Metadata, _) | (_, Format::Raw | Format::Luks | Format::Foreign(_)) => "off",
        (Preallocation::Falloc | Preallocation::Full, Format::Qcow2) => "off or metadata",
    };
    error.when_out_of_space(|what| format!("{what}; free some space, or use preallocation={instead}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_the_range_and_end_at_multiples() {
        let pieces: Vec<_> = steps(5..25, 10).collect();
        assert_eq!(pieces, [5..10, 10..20, 20..25]);
        assert_eq!(steps(10..30, 10).collect::<Vec<_>>(), [10..20, 20..30]);
        assert_eq!(steps(7..7, 10).count(), 0);
        assert_eq!(steps(u64::MAX - 1..u64::MAX, 1 << 20).count(), 1);
    }
}
