//! A call of a disk. Small reads and writes are done by the thread that calls; other work goes to the disk's thread, and its
//! result comes back.
//!
//! The hop to another thread and back costs more than a small request by itself: without it, 32 threads that read 4 KiB each
//! get 1.5 times as much. A call that is done here leaves nothing behind ([`CallingThread`]), and what others wait for, such as
//! commits, runs on the image's own worker as ever. The disk's thread has a ring, on which the parts of a large request go at
//! once.

use super::{Disk, Shared};
use crate::image_worker::{self, vanished};
use crate::options::{Durability, Preallocation, Shrink, ZeroMode};
use crate::progress::JobControl;
use crate::{Error, ErrorKind, Image, Result};
use std::io::{IoSlice, IoSliceMut};
use std::path::Path;
use zebu_storage::{Background, CallingThread, IoBufs, Worker, lend, lend_mut};

/// The largest request, in bytes, that the calling thread does itself: a cluster of the usual size.
const MOST_HERE: usize = 64 << 10;

/// Whether a request changes the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    Reads,
    Changes,
}

/// Has `work` done by a thread and waits for its result.
pub(super) fn wait<T: Send + 'static>(
    own: &Background,
    path: &Path,
    work: impl AsyncFnOnce(Worker) -> Result<T> + Send + 'static,
) -> Result<T> {
    image_worker::wait(own.run(move |worker| async move { work(worker).await }), path)
}

impl Shared {
    fn refuse<T>(&self, kind: ErrorKind, message: &str) -> Result<T> {
        Err(Error::new(kind, message).on(self.image.path()))
    }

    /// Whether this is a thread that the disk's work needs: nothing of the disk's can be waited for here.
    pub(super) fn is_own_thread(&self) -> bool {
        self.own.is_this_thread() || self.image.0.own_worker().get().is_some_and(Background::is_this_thread)
    }

    /// Fails where the disk's thread can't be waited for.
    pub(super) fn check_reachable(&self) -> Result<()> {
        if !self.made_in.is_here() {
            return self.refuse(
                ErrorKind::InvalidArgument,
                "the disk was opened by the parent of this process; open it after fork()",
            );
        }
        if self.is_own_thread() {
            return self.refuse(
                ErrorKind::InvalidArgument,
                "the disk's own threads can't wait for the disk; await the methods of its image there",
            );
        }
        Ok(())
    }

    /// Fails where the image can't be used.
    pub(super) fn check_usable(&self) -> Result<()> {
        self.check_reachable()?;
        self.image.0.check_open()
    }

    /// Has `work` done by the disk's thread and waits for its result.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        work: impl AsyncFnOnce(Image, Worker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let image = self.image.clone();
        wait(&self.own, self.image.path(), async move |worker: Worker| work(image, worker).await)
    }

    /// As [`Shared::wait`], if the image can be used.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl AsyncFnOnce(Image, Worker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check_usable()?;
        self.wait(work)
    }

    /// As [`Shared::run`], on the thread that calls if that is no slower.
    fn request(
        &self,
        len: usize,
        effect: Effect,
        work: impl AsyncFnOnce(Image, Worker) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.check_usable()?;
        // The first change starts the image's own worker, which is to have the engine of the disk's thread.
        let may_be_here =
            len <= MOST_HERE && (effect == Effect::Reads || self.image.0.changes_start_nothing());
        let Some(here) = may_be_here.then(CallingThread::take).flatten() else { return self.wait(work) };
        let image = self.image.clone();
        let done = here.run(async move |worker| work(image, worker).await);
        done.unwrap_or_else(|_| Err(vanished(self.image.path())))
    }
}

/// Requests. Ranges are in bytes, and must lie on the disk ([`ErrorKind::OutOfRange`]).
impl Disk {
    /// Fills `buf` from `offset` on. The buffer is used in place, unless the file needs it aligned (O_DIRECT).
    ///
    /// # Errors
    /// As of [`Image::read`]; what the buffer holds is unspecified then.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        lend_mut([buf], |bufs| self.read_bufs(offset, bufs))
    }

    /// As [`Disk::read`], into several buffers, one after the other.
    ///
    /// # Errors
    /// As of [`Disk::read`].
    pub fn read_vectored(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> Result<()> {
        lend_mut(bufs.iter_mut().map(|buf| &mut **buf), |bufs| self.read_bufs(offset, bufs))
    }

    fn read_bufs(&self, offset: u64, bufs: IoBufs) -> Result<()> {
        let len = bufs.len();
        let read = async move |image: Image, worker: Worker| image.read(&worker, offset, bufs).await.0;
        self.0.request(len, Effect::Reads, read)
    }

    /// Writes `buf` at `offset`. It is durable after the next [`Disk::flush`]. The buffer is used in place, as by
    /// [`Disk::read`].
    ///
    /// # Errors
    /// As of [`Image::write`].
    pub fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        lend([buf], |bufs| self.write_bufs(offset, bufs, Durability::Volatile))
    }

    /// As [`Disk::write`], from several buffers, one after the other, and durable at once if asked for.
    ///
    /// # Errors
    /// As of [`Image::write`].
    pub fn write_vectored(&self, offset: u64, bufs: &[IoSlice<'_>], durability: Durability) -> Result<()> {
        lend(bufs.iter().map(|buf| &**buf), |bufs| self.write_bufs(offset, bufs, durability))
    }

    fn write_bufs(&self, offset: u64, bufs: IoBufs, durability: Durability) -> Result<()> {
        let len = bufs.len();
        let write =
            async move |image: Image, worker: Worker| image.write(&worker, offset, bufs, durability).await.0;
        match durability {
            Durability::Volatile => self.0.request(len, Effect::Changes, write),
            // Its flush is faster on a thread that is always driven.
            Durability::Durable => self.0.run(write),
        }
    }

    /// Writes `buf` at `offset` as compressed clusters.
    ///
    /// # Errors
    /// As of [`Image::write_compressed`].
    pub fn write_compressed(&self, offset: u64, buf: &[u8]) -> Result<()> {
        lend([buf], |bufs| {
            self.0.run(async move |image, worker| {
                image.write_compressed(&worker, offset, bufs, Durability::Volatile).await.0
            })
        })
    }

    /// Makes a range read as zero, down to the byte.
    ///
    /// # Errors
    /// As of [`Image::write_zeroes`].
    pub fn write_zeroes(&self, offset: u64, len: u64, mode: ZeroMode) -> Result<()> {
        self.0.run(async move |image, worker| image.write_zeroes(&worker, offset, len, mode).await)
    }

    /// Gives a range up: whole clusters in it read as zero afterwards, the rest stays as it is.
    ///
    /// # Errors
    /// As of [`Image::discard`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.0.run(async move |image, worker| image.discard(&worker, offset, len).await)
    }

    /// Makes all writes that have returned durable.
    ///
    /// # Errors
    /// As of [`Image::flush`].
    pub fn flush(&self) -> Result<()> {
        self.0.run(async |image, worker| image.flush(&worker).await)
    }

    /// Changes the size of the virtual disk, without setting space aside.
    ///
    /// # Errors
    /// As of [`Image::resize`].
    pub fn resize(&self, new_size: u64, shrink: Shrink) -> Result<()> {
        self.resize_controlled(new_size, shrink, Preallocation::Off, &JobControl::default())
    }

    /// Changes the size of the virtual disk, watched and stopped by `control`.
    ///
    /// # Errors
    /// As of [`Image::resize_controlled`].
    pub fn resize_controlled(
        &self,
        new_size: u64,
        shrink: Shrink,
        preallocation: Preallocation,
        control: &JobControl,
    ) -> Result<()> {
        let control = control.clone();
        self.0.run(async move |image, worker| {
            image.resize_controlled(&worker, new_size, shrink, preallocation, &control).await
        })
    }
}
