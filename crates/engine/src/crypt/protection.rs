//! Whether the data of an image is encrypted, and whether its key is known.

use super::sectors::{EncryptedSectors, SectorOffsets};
use crate::{Error, ErrorKind, Result};
use zebu_storage::{File, IoBufs, Worker};

/// The protection of the guest data of an image.
#[derive(Debug)]
pub(crate) enum Protection {
    /// There is none: the file has the guest's bytes.
    None,
    /// It is encrypted.
    Encrypted(Box<EncryptedSectors>),
    /// It is encrypted, and the image was opened without a key: nothing is read or written.
    Locked,
}

impl Protection {
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Reads guest data at its place in `file`.
    pub(crate) async fn read(
        &self,
        worker: &Worker,
        file: &File,
        place: SectorOffsets,
        bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        let (result, bufs) = match self {
            Self::None => worker.read(file, place.host, bufs).await,
            Self::Encrypted(sectors) => sectors.read(worker, file, place, bufs).await,
            Self::Locked => return (Err(locked()), bufs),
        };
        (result.map_err(Error::from), bufs)
    }

    /// Writes guest data at its place in `file`.
    pub(crate) async fn write(
        &self,
        worker: &Worker,
        file: &File,
        place: SectorOffsets,
        bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        let (result, bufs) = match self {
            Self::None => worker.write(file, place.host, bufs).await,
            Self::Encrypted(sectors) => sectors.write(worker, file, place, bufs).await,
            Self::Locked => return (Err(locked()), bufs),
        };
        (result.map_err(Error::from), bufs)
    }
}

fn locked() -> Error {
    Error::new(ErrorKind::KeyMissing, "the image is encrypted, and was opened without a key")
}
