//! The end of an open image: nothing of it is under way when its locks go.

use crate::forked::end_with;
use crate::node::Driver;
use crate::{Error, ErrorKind, Image, Result, raw};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl Image {
    /// Whether [`Image::close`] has ended, with or without an error.
    pub fn is_closed(&self) -> bool {
        self.0.closed().is_some()
    }

    /// Commits, returns what the windows did not use, releases the locks. Requests that change the image and have begun end
    /// first; later ones fail, and so do reads. A second close has the result of the first, and the locks are released when it returns, too.
    ///
    /// # Errors
    /// As [`Image::flush`]. [`ErrorKind::Busy`]: another request does not end, and nothing is closed. If it comes too late for
    /// that, nothing more is changed, and the locks stay until the last handle is dropped. So they do after a request vanished while
    /// it wrote, because a storage panicked.
    pub async fn close(&self, worker: &Worker) -> Result<()> {
        let (mut latest, on) = (self.current(), worker.uncounted());
        let closed = async move {
            while latest.close_by(&on).await?.is_none() {
                latest = latest.current();
            }
            Ok::<(), Error>(())
        };
        worker.spawn(closed).await
    }

    /// `None`: nothing was closed, since the disk went on in another image meanwhile.
    async fn close_by(&self, worker: &Worker) -> Result<Option<()>> {
        self.0.check_here()?;
        let own = self.0.own_worker();
        // Others wait for one who is alone, so that must not be at the mercy of the caller's worker. An image that can't be
        // written has nobody to wait.
        let is_apart =
            self.0.is_writable() && own.start(worker).is_ok() && !sabotage::is(Fault::CloseOnCaller);
        let result = if is_apart {
            own.run(worker, &self.0.path, {
                let me = self.clone();
                move |on| async move { me.close_alone(&on).await }
            })
            .await?
        } else {
            self.close_alone(worker).await?
        };
        let Some(result) = result else { return Ok(None) };
        if result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy) {
            // A request is under way that may write yet: another program must not have the image beside it.
            return result.map(Some);
        }
        if let Driver::Qcow2(qcow2) = &self.0.driver
            && !sabotage::is(Fault::UnlockBesideCommit)
        {
            // If the close failed, another's commit that began before that may write yet, and its release after it.
            qcow2.running_commit().await;
        }
        own.idle().await;
        end_with(&self.0, &result);
        if self.0.has_abandoned_changes() && !sabotage::is(Fault::UnlockBesideAbandoned) {
            // They may land after somebody else has the image. Each holds its file open.
            return result.map(Some);
        }
        let mut node = Some(&self.0);
        while let Some(this) = node {
            if let Driver::Qcow2(qcow2) = &this.driver {
                let _ = qcow2.file().unlock();
            }
            let _ = this.data_file().unlock();
            for file in this.other_files() {
                let _ = file.unlock();
            }
            node = this.backing.as_ref();
        }
        result.map(Some)
    }

    /// Ends all changes of the image, and returns the result of that. An error: nothing was ended. `None`: neither, since the
    /// disk went on in another image.
    async fn close_alone(&self, worker: &Worker) -> Result<Option<Result<()>>> {
        let alone =
            if sabotage::is(Fault::CloseBesideRequests) {
                None
            } else {
                // What it gives back can't be given back before those have ended who read now.
                let reads = async || match &self.0.driver {
                    Driver::Qcow2(qcow2) if qcow2.is_writable() && !sabotage::is(Fault::CloseBesideReads) => {
                        qcow2.readers().wait(worker).await;
                    }
                    _ => {}
                };
                let alone = self.0.changes.alone(worker, || self.0.reads_awaited(), reads);
                let alone =
                    worker.shown(self.0.data_file(), "requests that have to end before a close", alone).await;
                Some(alone.ok_or_else(|| {
                    Error::undriven("the image can't be closed", "a request").on(&self.0.path)
                })?)
            };
        if self.moved_to().is_some() {
            return Ok(None);
        }
        if let Some(earlier) = self.0.closed() {
            return Ok(Some(earlier.clone()));
        }
        // A read that began now could hold back what is given back.
        let reads =
            match &self.0.driver {
                Driver::Qcow2(qcow2) if qcow2.is_writable() && !sabotage::is(Fault::CloseBesideReads) => {
                    let stopped = qcow2.readers().stop(worker).await;
                    Some(stopped.ok_or_else(|| {
                        Error::undriven("the image can't be closed", "a read").on(&self.0.path)
                    })?)
                }
                _ => None,
            };
        let result = match &self.0.driver {
            Driver::Qcow2(qcow2) => {
                qcow2.running_commit().await;
                qcow2.close(worker).await
            }
            Driver::Raw(raw) => raw::close(raw, worker).await,
            Driver::Foreign(_) => Ok(()),
        };
        self.0.note_closed(result.clone());
        drop(reads);
        if sabotage::is(Fault::IdleWhileAlone) {
            std::mem::forget(alone);
        }
        Ok(Some(result))
    }
}
