//! Changes that outlive the process without a flush.

use crate::node::Driver;
use crate::{Image, Result};
use zebu_storage::Worker;

impl Image {
    /// Has all changes that completed before the call outlive this process, as writes to a raw file do: whoever opens the image after
    /// a kill finds them. A power failure may take them until a flush. It costs a commit where the mapping was changed, and else
    /// nothing.
    ///
    /// # Errors
    /// As of [`Image::flush`].
    pub async fn write_back(&self, worker: &Worker) -> Result<()> {
        let worker = &worker.uncounted();
        let me = self.current();
        match &me.0.driver {
            Driver::Qcow2(qcow2) if qcow2.is_writable() => {
                me.answer_of_flush(Box::pin(qcow2.write_back(worker)).await)
            }
            Driver::Qcow2(_) | Driver::Raw(_) | Driver::Foreign(_) => Ok(()),
        }
    }
}
