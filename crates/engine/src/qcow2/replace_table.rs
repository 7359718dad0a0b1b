//! Replacing a table that the header names.
//!
//! | step | |
//! |---|---|
//! | 1 | the new table is written, and durable with the counts of its place |
//! | 2 | the header names it, durably; then memory does |
//! | 3 | the old table goes |
//!
//! A crash before step 2 leaves the old table, and what was written is a leak.

use crate::Result;
use crate::qcow2::header::block::{OnFailure, Patch};
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use std::sync::Arc;
use zebu_storage::Worker;

/// A table that is to take the place of another.
pub(crate) struct TableReplacement {
    bytes: Vec<u8>,
    kind: Metadata,
    /// Offset and bytes of the table that goes.
    old: (u64, u64),
    on_failure: OnFailure,
}

impl TableReplacement {
    /// A table with this content, which may be none. `on_failure`: for the change of the header.
    pub(crate) fn new(bytes: Vec<u8>, kind: Metadata, on_failure: OnFailure) -> Self {
        Self { bytes, kind, old: (0, 0), on_failure }
    }

    /// The same in place of `len` bytes at `offset`.
    pub(crate) fn in_place_of(self, offset: u64, len: u64) -> Self {
        Self { old: (offset, len), ..self }
    }
}

/// A new table that is durable, and that the header does not name yet.
pub(crate) struct Unnamed<'a> {
    image: &'a Qcow2,
    worker: &'a Worker,
    offset: Option<u64>,
    on_failure: OnFailure,
}

impl Unnamed<'_> {
    /// Offset of the table; `None` if it is empty.
    pub(crate) fn offset(&self) -> Option<u64> {
        self.offset
    }

    /// Changes fields of the header, durably.
    ///
    /// # Errors
    /// Failures of the file. After one of the barrier, writing stops: the header names either table, and memory the old one.
    pub(crate) async fn change_header(&self, patches: &[Patch]) -> Result<()> {
        self.image.header.change(self.worker, patches, self.on_failure).await?;
        self.image.header.make_durable(self.worker).await
    }
}

impl Qcow2 {
    /// Puts a table in the place of another, in the steps that the module names. `make_durable` makes what is written
    /// durable, `switch` has the header and memory name the new table. An error: what the header names is the old table,
    /// or nothing can be written any more.
    pub(crate) async fn replace_table<T>(
        self: &Arc<Self>,
        worker: &Worker,
        table: TableReplacement,
        make_durable: impl AsyncFnOnce() -> Result<()>,
        switch: impl AsyncFnOnce(Unnamed<'_>) -> Result<T>,
    ) -> Result<T> {
        let TableReplacement { mut bytes, kind, old: (old_offset, old_len), on_failure } = table;
        let (len, bits) = (bytes.len() as u64, self.geometry().cluster_bits);
        let place = match len.div_ceil(self.geometry().cluster_size()) {
            0 => None,
            clusters => Some(self.allocate_metadata(worker, clusters).await?.into_range()),
        };
        let offset = place.as_ref().map(|clusters| clusters.start << bits);
        let give_back = || {
            if let Some(clusters) = place {
                self.space.quarantine().push_unread(clusters, FreeMode::Reuse);
            }
        };
        let durable = async move {
            if let Some(offset) = offset {
                bytes.resize(len.next_multiple_of(self.geometry().cluster_size()) as usize, 0);
                self.files.write_at(worker, offset, &bytes).await?;
            }
            make_durable().await
        }
        .await;
        if let Err(error) = durable {
            give_back();
            return Err(error);
        }
        let switched = match switch(Unnamed { image: self, worker, offset, on_failure }).await {
            Ok(switched) => switched,
            Err(error) => {
                // Else the file may name it.
                if on_failure == OnFailure::Restore || self.check_writable().is_ok() {
                    give_back();
                }
                return Err(error);
            }
        };
        if let Some(offset) = offset {
            self.space.note_metadata(offset, len, kind);
        }
        self.space.free_table(old_offset, old_len);
        Ok(switched)
    }
}
