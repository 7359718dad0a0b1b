//! Reading again, for one who knows that what was read came wrong.

use crate::node::Driver;
use crate::{Image, Result};
use zebu_storage::Worker;

impl Image {
    /// Gives up what this image and its backing images keep in memory of tables and packed data: reads that begin now get it
    /// from the files. For callers that know that what was read is wrong. Does nothing to an image that is open for writing.
    ///
    /// Headers and L1 tables stay as they were at the opening: [`Image::read_tops_again`] reads them.
    pub fn forget_what_was_read(&self) {
        let mut next = Some(&self.0);
        while let Some(node) = next.filter(|node| !node.is_writable()) {
            match &node.driver {
                Driver::Qcow2(qcow2) => qcow2.forget_what_was_read(),
                Driver::Foreign(foreign) => foreign.forget_what_was_read(),
                Driver::Raw(_) => {}
            }
            next = node.backing.as_ref();
        }
    }

    /// Reads headers and L1 tables of this image and its backing images again, as far as they are qcow2 images that nobody
    /// writes. For callers that know that what was read is wrong. An L1 table replaces the one of the opening, unless the header
    /// tells of a disk of another size or of other clusters: then the image must be opened again. Whether any was replaced.
    ///
    /// # Errors
    /// A file can't be read, or its header is none.
    pub async fn read_tops_again(&self, worker: &Worker) -> Result<bool> {
        let mut replaced = false;
        let mut next = Some(&self.0);
        while let Some(node) = next.filter(|node| !node.is_writable()) {
            if let Driver::Qcow2(qcow2) = &node.driver {
                replaced |= Box::pin(qcow2.read_top_again(worker)).await?;
            }
            next = node.backing.as_ref();
        }
        Ok(replaced)
    }
}
