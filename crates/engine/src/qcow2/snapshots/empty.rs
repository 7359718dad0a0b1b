//! Giving up everything that the disk holds, so that the backing image shows everywhere.

use crate::node::Node;
use crate::qcow2::state::Qcow2;
use crate::{Error, Result};
use std::sync::Arc;
use zebu_storage::{IoErrorKind, Worker};

impl Qcow2 {
    /// Makes the active L1 table an empty one, then lowers the counts of all that the old one refers to. Snapshots
    /// stay. A crash shows the disk as it was or empty, and leaks space at most. `node` was opened without a backing
    /// image: what is given up would have to stay zero otherwise while it is. The caller is alone.
    pub(crate) async fn make_empty(self: &Arc<Self>, node: &Node, worker: &Worker) -> Result<()> {
        self.prepare_write(worker).await?;
        self.settle_first(worker).await?;
        if let Some(data_file) = self.data_file() {
            // Nothing counts references into the data file: the entries are all there is.
            self.drop_mapping(node, worker, 0..self.virtual_size()).await?;
            self.settle(worker).await?;
            return match worker.punch_hole(data_file, 0, data_file.len()).await {
                Err(e) if e.kind != IoErrorKind::Unsupported => Err(Error::from(e).on(data_file.path())),
                _ => Ok(()),
            };
        }
        let entries = vec![0; self.map.l1().table().len()];
        let before = self.switch_to(worker, &entries, self.virtual_size()).await?;
        self.lower_all(worker, &before).await?;
        self.settle(worker).await
    }
}
