//! Reading tables from an image file.

use crate::qcow2::cache::resident_table::ResidentTable;
use crate::{Error, Result};
use zebu_storage::{File, Worker};

/// Bytes of a table read at once.
pub(crate) const TABLE_STEP: usize = 1 << 20;

/// Reads `len` bytes at `offset`; what lies past the end of the file is zero.
pub(crate) async fn read_bytes(worker: &Worker, file: &File, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // In pieces, so that memory follows what is really in the file.
    let mut at = 0;
    while at < len {
        let step = (len - at).min(TABLE_STEP);
        file.announce("metadata");
        let (result, bufs) = worker.read(file, offset + at as u64, worker.buffer(step).into()).await;
        result.map_err(|e| Error::from(e).on(file.path()))?;
        bytes.resize(at + step, 0);
        bufs.copy_to(0, &mut bytes[at..]);
        at += step;
    }
    Ok(bytes)
}

/// Fills `table` from the file. What lies past the end of the file is zero: nothing is read for it.
pub(crate) async fn read_table(
    worker: &Worker,
    file: &File,
    offset: u64,
    table: &ResidentTable,
) -> Result<()> {
    let present = file.len().saturating_sub(offset).min(table.len() as u64 * 8) as usize;
    let len = present.next_multiple_of(8);
    for at in (0..len).step_by(TABLE_STEP) {
        let bytes = read_bytes(worker, file, offset + at as u64, (len - at).min(TABLE_STEP)).await?;
        table.fill(at / 8, &bytes);
    }
    Ok(())
}
