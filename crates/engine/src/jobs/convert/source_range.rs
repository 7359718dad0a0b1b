//! A range of a source that the kernel moves, file to file.
//!
//! A source that is open for writing may be written meanwhile: its bytes move to other places, and other bytes to theirs. So
//! they are looked up once more, under the source's readers, which are left when the kernel is done.

use crate::new_foreign::{FilePlace, GrowingFile};
use crate::node::Driver;
use crate::qcow2::map::mapping::Run;
use crate::transfer::{FileRange, Transfer};
use crate::{Error, Image, Result};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// A range of a source's disk, and its place in a file.
#[derive(Debug, Clone)]
pub(super) struct SourceRange {
    /// The source, if the place is one of its own clusters. Images below the source are not written.
    owner: Option<Image>,
    /// Offset in bytes on the source's disk.
    offset: u64,
    place: FileRange,
}

/// Where a range is moved to.
#[derive(Debug, Clone)]
pub(super) enum Destination {
    /// An offset of an image's disk, whole clusters.
    Image(Image, u64),
    /// Places in a file.
    Places(GrowingFile, Vec<FilePlace>),
}

impl Destination {
    /// Moves a range of a file here: how many bytes were moved, from its start on, and if not all, why not.
    async fn fill(&self, worker: &Worker, how: Transfer, source: FileRange) -> Result<(u64, Option<Error>)> {
        match self {
            Self::Image(image, offset) => image.transfer_from(worker, how, source, *offset).await,
            Self::Places(file, places) => Ok(file.transfer(worker, how, &source, places).await),
        }
    }
}

/// The end of an attempt to move a range.
#[derive(Debug)]
pub(super) enum Moved {
    /// So many bytes were moved, from the start on, and if not all, why not.
    Bytes(u64, Option<Error>),
    /// Nothing was: the source was written meanwhile, and its bytes lie elsewhere.
    Elsewhere,
}

impl SourceRange {
    /// The range of the source's disk at `offset`, which lies at `place` in the file of the image at `depth`.
    pub(super) fn new(source: &Image, depth: u32, offset: u64, place: FileRange) -> Self {
        let moves = depth == 0 && source.0.is_writable() && matches!(source.0.driver, Driver::Qcow2(_));
        Self { owner: moves.then(|| source.clone()), offset, place }
    }

    /// Its place in the file.
    pub(super) fn place(&self) -> &FileRange {
        &self.place
    }

    /// The rest behind the first `skip` bytes.
    pub(super) fn from(&self, skip: u64) -> Self {
        Self { owner: self.owner.clone(), offset: self.offset + skip, place: self.place.from(skip) }
    }

    /// The first `len` bytes.
    pub(super) fn first(&self, len: u64) -> Self {
        Self { place: self.place.first(len), ..self.clone() }
    }

    /// Moves it to its destination.
    pub(super) async fn move_to(&self, worker: &Worker, how: Transfer, to: &Destination) -> Result<Moved> {
        let Some(source) = self.owner.as_ref().filter(|_| !sabotage::is(Fault::MoveFromOldPlace)) else {
            let (len, refusal) = to.fill(worker, how, self.place.clone()).await?;
            return Ok(Moved::Bytes(len, refusal));
        };
        let (source, to, on) = (source.clone(), to.clone(), worker.uncounted());
        let (from, place) = (self.offset, self.place.clone());
        worker
            .spawn(async move {
                let _inside = match &source.0.driver {
                    Driver::Qcow2(qcow2) => Some(qcow2.readers().begin(&on).await),
                    Driver::Raw(_) | Driver::Foreign(_) => None,
                };
                if !is_in_place(&source, &on, from, &place).await? {
                    return Ok(Moved::Elsewhere);
                }
                let (len, refusal) = to.fill(&on, how, place).await?;
                Ok(Moved::Bytes(len, refusal))
            })
            .await
    }
}

/// Whether what lies at `offset` of the disk still lies at `place`. The caller is a reader of the source.
async fn is_in_place(source: &Image, worker: &Worker, offset: u64, place: &FileRange) -> Result<bool> {
    let mut done = 0;
    while done < place.len {
        let (run, len) = source.0.map(worker, offset + done, place.len - done).await?;
        if run != (Run::Data { host: place.offset + done }) {
            return Ok(false);
        }
        done += len;
    }
    Ok(true)
}
