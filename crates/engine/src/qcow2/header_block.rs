//! The fields of the header that change while the image is open.
//!
//! The first block of the file is kept as it was read and patched in place: one block is written, nothing is encoded
//! anew, so that unknown fields, extensions and names stay byte for byte what they were. Invariant I5: a header
//! change touches one block.

use crate::gate::Gate;
use crate::qcow2::state::Qcow2;
use crate::{Error, Result};
use std::sync::{Mutex, PoisonError};
use zebu_storage::{File, IoBuf, IoError, Worker};

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

/// The first block of the image file. See the module.
#[derive(Debug)]
pub(crate) struct HeaderBlock {
    bytes: Mutex<Vec<u8>>,
    gate: Gate,
}

/// A change of one field.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patch {
    U32(usize, u32),
    U64(usize, u64),
}

impl HeaderBlock {
    /// `bytes`: the first min(4096, cluster) bytes of the file, padded with zeroes past its end.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Mutex::new(bytes), gate: Gate::default() }
    }

    fn bytes(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies `patches` in one write. Not durable until the file is flushed. If the write fails, what is on disk is
    /// either the old or the new block, and the block in memory is the old one.
    pub(crate) async fn write(&self, worker: &Worker, file: &File, patches: &[Patch]) -> Result<()> {
        let _turn = self.gate.enter().await;
        let mut new = self.bytes().clone();
        for patch in patches {
            let (at, value): (usize, &[u8]) = match patch {
                Patch::U32(at, value) => (*at, &value.to_be_bytes()),
                Patch::U64(at, value) => (*at, &value.to_be_bytes()),
            };
            if let Some(field) = new.get_mut(at..at + value.len()) {
                field.copy_from_slice(value);
            }
        }
        let (result, _) = worker.write(file, 0, IoBuf::copy_of(&new).into()).await;
        result.map_err(|e: IoError| Error::from(e).on(file.path()))?;
        *self.bytes() = new;
        Ok(())
    }

    /// The block as it was written last.
    pub(crate) fn copy(&self) -> Vec<u8> {
        self.bytes().clone()
    }

    /// Writes `new`, as long as the block, in its place. Fails as [`Self::write`] does.
    pub(crate) async fn replace(&self, worker: &Worker, file: &File, new: Vec<u8>) -> Result<()> {
        let _turn = self.gate.enter().await;
        let (result, _) = worker.write(file, 0, IoBuf::copy_of(&new).into()).await;
        result.map_err(|e: IoError| Error::from(e).on(file.path()))?;
        *self.bytes() = new;
        Ok(())
    }
}

impl HeaderBlock {
    /// Changes the block in steps that `edit` makes of it, each durable before the next.
    async fn edit(
        &self,
        qcow2: &Qcow2,
        worker: &Worker,
        edit: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
    ) -> Result<()> {
        let _turn = self.gate.enter().await;
        let before = self.bytes().clone();
        for step in edit(&before)? {
            let (result, _) = worker.write(&qcow2.file, 0, IoBuf::copy_of(&step).into()).await;
            if let Err(error) = result {
                // Which of the steps is on disk is not known.
                let error = Error::from(error).on(&qcow2.path);
                qcow2.poison(&error);
                return Err(error);
            }
            qcow2.barrier(worker, &qcow2.file).await?;
            *self.bytes() = step;
        }
        Ok(())
    }
}

impl Qcow2 {
    /// Changes the first block of the image in steps that `edit` makes of it, each durable before the next. An error
    /// of the disk: nothing can be written any more.
    pub(crate) async fn edit_header(
        &self,
        worker: &Worker,
        edit: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
    ) -> Result<()> {
        self.header_block.edit(self, worker, edit).await
    }

    /// Changes fields of the header. If that fails, the old block is put back, so that disk and memory agree after
    /// the next barrier; if that fails too, what the header says is unknown, and nothing can be written any more.
    pub(crate) async fn write_header(&self, worker: &Worker, patches: &[Patch]) -> Result<()> {
        let written = self.header_block.write(worker, &self.file, patches).await;
        if let Err(error) = &written
            && self.header_block.write(worker, &self.file, &[]).await.is_err()
        {
            self.poison(error);
        }
        written
    }
}
