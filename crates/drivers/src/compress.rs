//! An image whose writes are compressed.

use crate::call::{answer, take_bufs};
use crate::image_disk::ImageDisk;
use std::sync::Arc;
use zebu_engine::{Durability, Format};
use zebu_storage::{Alignment, Completer, FileId, Storage, StorageAbilities, StorageDone, StorageOp};

/// An image that compresses whatever is written: requests become whole clusters.
pub struct Compress {
    below: Arc<ImageDisk>,
}

impl Compress {
    /// # Errors
    /// The image's format has no compressed clusters.
    pub fn new(below: Arc<ImageDisk>) -> Result<Self, String> {
        if below.image().format() != Format::Qcow2 {
            return Err("Compression is not supported for this image format".to_owned());
        }
        Ok(Self { below })
    }
}

impl Storage for Compress {
    fn len(&self) -> u64 {
        self.below.len()
    }

    fn files(&self) -> Vec<FileId> {
        self.below.files()
    }

    fn identity(&self) -> u64 {
        self.below.identity()
    }

    fn alignment(&self) -> Alignment {
        let cluster = u32::try_from(self.below.image().cluster_size()).unwrap_or(1).max(1);
        Alignment { memory: 1, offset: cluster, length: cluster }
    }

    fn abilities(&self) -> StorageAbilities {
        self.below.abilities()
    }

    fn discard_granularity(&self) -> u64 {
        self.below.discard_granularity()
    }

    fn submit(&self, op: StorageOp, mut done: Completer) {
        let StorageOp::Write { offset, len } = op else { return self.below.submit(op, done) };
        let image = self.below.image().clone();
        drop(self.below.worker().run(move |worker| async move {
            let mut bufs = take_bufs(&mut done);
            // The last cluster of a disk may reach past its end.
            let inside = image.virtual_size().saturating_sub(offset).min(len);
            let head = bufs.split_to(inside as usize);
            let (result, mut head) =
                image.write_compressed(&worker, offset, head, Durability::Volatile).await;
            head.append(bufs);
            answer(done, head, result.map(|()| StorageDone::Moved(len)).map_err(|error| error.errno()));
        }));
    }
}
