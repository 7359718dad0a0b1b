//! Giving up what was read, for one who knows that it came wrong.

use super::life::open::parse;
use super::map::active_map::L1;
use super::read_tables::read_table;
use super::state::Qcow2;
use crate::Result;
use zebu_storage::Worker;

impl Qcow2 {
    /// Gives up clean tables and inflated clusters.
    pub(crate) fn forget_what_was_read(&self) {
        self.map.slices().forget_all();
        self.inflated.forget_all();
    }

    /// Reads the header and the L1 table again, of an image that nobody writes. The table replaces the one of the opening where
    /// the header has the same geometry; whether it does.
    pub(crate) async fn read_top_again(&self, worker: &Worker) -> Result<bool> {
        let parsed = parse(worker, self.file(), zebu_qcow2::Purpose::ReadOnly).await?;
        let (now, opened) = (parsed.header(), self.header());
        if now.geometry() != *self.geometry() || now.virtual_size() != opened.virtual_size() {
            return Ok(false);
        }
        let old = self.map.l1();
        // That of a snapshot is not named by the header.
        let is_active = old.offset() == opened.l1_table_offset.0;
        let offset = if is_active { now.l1_table_offset.0 } else { old.offset() };
        let table = old.table().emptied();
        read_table(worker, self.file(), offset, &table).await?;
        self.map.replace_l1(L1::new(table, offset));
        self.forget_what_was_read();
        Ok(true)
    }
}
