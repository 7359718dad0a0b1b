//! Reading tables from an image file.

use crate::Result;
pub(crate) use crate::file_bytes::read_bytes;
use crate::qcow2::cache::resident_table::ResidentTable;
use zebu_storage::{File, Worker};

/// Bytes of a table read at once.
pub(crate) const TABLE_STEP: usize = crate::file_bytes::STEP;

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
