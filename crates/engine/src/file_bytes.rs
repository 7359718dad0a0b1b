//! Reading a part of a file into memory.

use crate::{Error, Result};
use zebu_storage::{File, Worker};

/// Bytes read at once.
pub(crate) const STEP: usize = 1 << 20;

/// Reads `len` bytes at `offset`; what lies past the end of the file is zero.
pub(crate) async fn read_bytes(worker: &Worker, file: &File, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // In pieces, so that memory follows what is really in the file.
    let mut at = 0;
    while at < len {
        let step = (len - at).min(STEP);
        file.announce("metadata");
        let (result, bufs) = worker.read(file, offset + at as u64, worker.buffer(step).into()).await;
        result.map_err(|e| Error::from(e).on(file.path()))?;
        bytes.resize(at + step, 0);
        bufs.copy_to(0, &mut bytes[at..]);
        at += step;
    }
    Ok(bytes)
}
