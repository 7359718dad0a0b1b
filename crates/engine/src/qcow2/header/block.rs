//! The header of an open image, and the fields of it that change meanwhile.
//!
//! The first block of the file is kept as it was read and patched in place: one block is written, nothing is encoded
//! anew, so that unknown fields, extensions and names stay byte for byte what they were. Invariant I5: a header
//! change touches one block.

use crate::options::DamageMark;
use crate::qcow2::files::ImageFiles;
use crate::qcow2::header::preparation::Preparation;
use crate::sync::{AsyncMutex, Mutex, MutexGuard};
use crate::{Error, Result};
use zebu_qcow2::header_edit::{backup_mark, seal};
use zebu_qcow2::{BackupMark, FormatError, Geometry, Header, SealState};
use zebu_storage::{IoBuf, Worker};

/// Offsets of the fields (qcow2 specification, "Header").
pub(crate) mod field {
    pub(crate) const SIZE: usize = 24;
    pub(crate) const L1_SIZE: usize = 36;
    pub(crate) const L1_OFFSET: usize = 40;
    pub(crate) const REFTABLE_OFFSET: usize = 48;
    pub(crate) const REFTABLE_CLUSTERS: usize = 56;
    pub(crate) const NB_SNAPSHOTS: usize = 60;
    pub(crate) const SNAPSHOTS_OFFSET: usize = 64;
    pub(crate) const INCOMPATIBLE: usize = 72;
    pub(crate) const AUTOCLEAR: usize = 88;
}

/// A change of one field.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patch {
    U32(usize, u32),
    U64(usize, u64),
    /// Sets bits of a field of 64, and leaves the others.
    Bits(usize, u64),
}

/// The state of the disk after a change of the header that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnFailure {
    /// The old block is written again, so that disk and memory agree after the next barrier. If that fails too, the
    /// header on disk is unknown, and writing stops.
    Restore,
    /// The header on disk is unknown, and more hangs on it than the block: writing stops.
    Poison,
}

/// The header. See the module.
#[derive(Debug)]
pub(crate) struct ImageHeader {
    files: ImageFiles,
    opened: Header,
    geometry: Geometry,
    damage: DamageMark,
    block: Mutex<Vec<u8>>,
    /// Held while the block is written.
    mutex: AsyncMutex,
    preparation: Preparation,
}

impl ImageHeader {
    /// `block`: the first min(4096, cluster) bytes of the file, padded with zeroes past its end.
    pub(crate) fn new(files: ImageFiles, opened: Header, block: Vec<u8>, damage: DamageMark) -> Self {
        let (block, mutex) = (Mutex::new(block), AsyncMutex::default());
        let (geometry, preparation) = (opened.geometry(), Preparation::default());
        Self { files, opened, geometry, damage, block, mutex, preparation }
    }

    /// The header as it was when the image was opened.
    pub(crate) fn opened(&self) -> &Header {
        &self.opened
    }

    /// Sizes and shifts of the image. They never change.
    #[inline]
    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Work before the first write.
    pub(crate) fn preparation(&self) -> &Preparation {
        &self.preparation
    }

    /// Treatment of damage.
    pub(super) fn damage(&self) -> DamageMark {
        self.damage
    }

    pub(super) fn files(&self) -> &ImageFiles {
        &self.files
    }

    fn block(&self) -> MutexGuard<'_, Vec<u8>> {
        self.block.lock()
    }

    /// Applies `patches` in one write. Not durable until the file is flushed.
    pub(crate) async fn change(
        &self,
        worker: &Worker,
        patches: &[Patch],
        on_failure: OnFailure,
    ) -> Result<()> {
        let _turn = self.mutex.lock().await;
        let mut new = self.block().clone();
        for patch in patches {
            match *patch {
                Patch::U32(at, value) => set(&mut new, at, |_: [u8; 4]| value.to_be_bytes()),
                Patch::U64(at, value) => set(&mut new, at, |_: [u8; 8]| value.to_be_bytes()),
                Patch::Bits(at, bits) => {
                    set(&mut new, at, |old| (u64::from_be_bytes(old) | bits).to_be_bytes());
                }
            }
        }
        self.write(worker, new, on_failure).await
    }

    /// Changes the block in the steps that `steps` makes of it, each durable before the next.
    pub(crate) async fn change_in_steps(
        &self,
        worker: &Worker,
        on_failure: OnFailure,
        steps: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
    ) -> Result<()> {
        let _turn = self.mutex.lock().await;
        let before = self.block().clone();
        for step in steps(&before)? {
            self.write(worker, step, on_failure).await?;
            self.make_durable(worker).await?;
        }
        Ok(())
    }

    /// The same in one write, which is not durable: only under a deliberate fault.
    pub(crate) async fn change_in_one_write(
        &self,
        worker: &Worker,
        on_failure: OnFailure,
        steps: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
    ) -> Result<()> {
        let _turn = self.mutex.lock().await;
        let before = self.block().clone();
        match steps(&before)?.pop() {
            Some(last) => self.write(worker, last, on_failure).await,
            None => Ok(()),
        }
    }

    /// Makes what was written durable. It waits as long as the disk takes.
    ///
    /// # Errors
    /// Failures of the file. Writing has stopped: a crash leaves the old header or the new one, and nothing may be written that
    /// suits one of them only.
    pub(crate) async fn make_durable(&self, worker: &Worker) -> Result<()> {
        self.files.barrier(worker, self.files.file()).await
    }

    /// The mark of the backup that the image is, as the header says now.
    pub(crate) fn backup_mark(&self) -> Option<BackupMark> {
        backup_mark(&self.block())
    }

    /// The seal of the image, as the header says now.
    pub(crate) fn seal(&self) -> SealState {
        seal(&self.block())
    }

    /// Whether the block could be changed in these steps.
    pub(crate) fn try_steps(
        &self,
        steps: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, FormatError>,
    ) -> Result<(), FormatError> {
        steps(&self.block()).map(drop)
    }

    /// Writes `new`, as long as the block, in its place. The mutex is held.
    async fn write(&self, worker: &Worker, new: Vec<u8>, on_failure: OnFailure) -> Result<()> {
        let file = self.files.file();
        file.announce("metadata");
        let (written, _) = worker.write(file, 0, IoBuf::copy_of(&new).into()).await;
        let Err(error) = written else {
            *self.block() = new;
            return Ok(());
        };
        let error = Error::from(error).on(self.files.path());
        let is_known = match on_failure {
            OnFailure::Poison => false,
            OnFailure::Restore => {
                let old = IoBuf::copy_of(&self.block());
                worker.write(file, 0, old.into()).await.0.is_ok()
            }
        };
        if !is_known {
            self.files.poison(&error);
        }
        Err(error)
    }
}

/// Changes the field of `N` bytes at `at`, if the block reaches that far.
fn set<const N: usize>(block: &mut [u8], at: usize, change: impl FnOnce([u8; N]) -> [u8; N]) {
    if let Some(field) = block.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<N>()) {
        *field = change(*field);
    }
}
