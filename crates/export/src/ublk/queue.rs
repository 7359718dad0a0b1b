//! Serving one queue, on one worker.

use super::descriptions::Descriptions;
use super::uapi::io_head;
use super::uapi::{Ask, Request, io};
use crate::export::Export;
use crate::log::{Level, Log};
use crate::metrics::RequestKind;
use crate::pool::Seat;
use crate::stop::Stop;
use rustix::io::Errno;
use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use zebu_engine::{Access, Durability, ErrorKind, ZeroMode};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{DeviceCommand, IoBuf, IoBufs, Socket};

/// Everything that is needed to serve a queue.
pub(super) struct QueueSetup {
    pub(super) export: Arc<Export>,
    /// `/dev/ublkcN`.
    pub(super) device: Socket,
    pub(super) descriptions: Descriptions,
    pub(super) number: u16,
    pub(super) depth: u16,
    /// Bytes of the buffer of a request.
    pub(super) buffer: usize,
    pub(super) stop: Stop,
    pub(super) state: Arc<QueueState>,
    pub(super) log: Log,
    /// Dropped when nothing of the queue is under way any more.
    pub(super) _running: Sender<()>,
}

/// The state of all queues, for the device's owner.
#[derive(Default)]
pub(super) struct QueueState {
    /// The kernel takes no requests from a queue.
    pub(super) is_refused: AtomicBool,
    /// The device was removed.
    pub(super) is_gone: AtomicBool,
    /// Its owner is about to stop it.
    pub(super) is_ending: AtomicBool,
}

/// A queue that is being served. Belongs to one thread.
pub(super) struct Queue {
    seat: Seat,
    setup: QueueSetup,
    /// Tags that are waited for or worked on.
    tags: Cell<usize>,
    waker: Cell<Option<Waker>>,
}

/// Counts a tag, whichever way it ends.
struct Tag(Rc<Queue>);

impl Tag {
    fn of(queue: &Rc<Queue>) -> Self {
        queue.tags.set(queue.tags.get() + 1);
        Self(Rc::clone(queue))
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        let queue = &self.0;
        queue.tags.set(queue.tags.get() - 1);
        if let Some(waker) = queue.waker.take() {
            waker.wake();
        }
    }
}

/// A request under way. One that is dropped before it is over has panicked: it fails, and so do all later ones.
struct Pending<'a> {
    queue: &'a Rc<Queue>,
    tag: u16,
    kind: RequestKind,
    len: u64,
    since: Instant,
    is_over: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let queue = self.queue;
        queue.setup.export.close_if_panicking();
        self.count(false);
        queue.spawn(self.tag, io::COMMIT_AND_FETCH, -Errno::IO.raw_os_error());
    }
}

impl Pending<'_> {
    fn count(&self, is_ok: bool) {
        let (metrics, took) = (self.queue.setup.export.metrics(), self.since.elapsed());
        metrics.end(self.queue.seat.thread, self.kind, self.len, is_ok, took);
    }
}

impl Queue {
    /// Serves a queue until it is told to stop, or the device is gone; nothing of it is in flight then.
    pub(super) async fn run(seat: Seat, setup: QueueSetup) {
        let queue = Rc::new(Self { seat, setup, tags: Cell::new(0), waker: Cell::new(None) });
        queue.setup.export.metrics().client_comes();
        for tag in 0..queue.setup.depth {
            queue.spawn(tag, io::FETCH, 0);
        }
        poll_fn(|cx| {
            if queue.tags.get() == 0 {
                return Poll::Ready(());
            }
            queue.waker.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
        queue.setup.export.metrics().client_goes();
    }

    /// Takes requests of a tag from now on, after giving the driver `result` for the one that it has.
    fn spawn(self: &Rc<Self>, tag: u16, code: u32, result: i32) {
        let (queue, counted) = (Rc::clone(self), Tag::of(self));
        drop(self.seat.worker.spawn(async move {
            let _counted = counted;
            queue.serve(tag, code, result).await;
        }));
    }

    async fn serve(self: &Rc<Self>, tag: u16, mut code: u32, mut result: i32) {
        let mut buf = self.buffer();
        loop {
            let command = DeviceCommand { code, head: io_head(self.setup.number, tag, result) };
            // SAFETY: the driver was told how many bytes the buffer of a request has, and copies to and from the one whose address
            // is in the command until it hands over a request.
            let fetched = unsafe { self.seat.worker.command(&self.setup.device, command, buf) };
            // The command is with the driver already: what it says of the request before counts, whether it is waited for or not.
            let Some((answer, bufs)) = self.setup.stop.or(fetched).await else { return };
            if let Err(error) = answer {
                self.ended(&error);
                return;
            }
            let request = self.setup.descriptions.get(tag);
            (result, buf) = self.answer(tag, request, self.whole(bufs)).await;
            code = io::COMMIT_AND_FETCH;
        }
    }

    fn buffer(&self) -> IoBuf {
        let mut buf = IoBuf::zeroed(self.setup.buffer);
        // Its pages are there from now on: none is looked for when memory is short, perhaps for this very device.
        buf.as_mut_slice().fill(0);
        buf
    }

    /// The buffer of a tag in one piece again.
    fn whole(&self, mut bufs: IoBufs) -> IoBuf {
        let first = bufs.pop_part().filter(|buf| bufs.is_empty() && buf.len() == self.setup.buffer);
        first.unwrap_or_else(|| self.buffer())
    }

    fn ended(&self, error: &std::io::Error) {
        let setup = &self.setup;
        let is_expected = setup.state.is_ending.load(Ordering::SeqCst);
        let is_gone = error.raw_os_error() == Some(Errno::NODEV.raw_os_error());
        if is_gone {
            setup.state.is_gone.store(true, Ordering::SeqCst);
        }
        let is_first = !setup.state.is_refused.swap(true, Ordering::SeqCst);
        if is_first && !is_expected {
            let name = setup.export.name();
            let what = if is_gone {
                "was removed by somebody else: its image is no longer served there, but stays open".to_owned()
            } else {
                format!("can't be served: {error}")
            };
            setup.log.write(Level::Warning, format_args!("the device of '{name}' {what}"));
        }
    }

    /// Does what is asked for. The result for the driver: bytes, or an errno below 0.
    async fn answer(self: &Rc<Self>, tag: u16, request: Request, mut buf: IoBuf) -> (i32, IoBuf) {
        let Request { ask, is_durable, offset, len } = request;
        let (export, worker) = (&self.setup.export, &self.seat.worker);
        let kind = match ask {
            Ask::Read => RequestKind::Read,
            Ask::Write => RequestKind::Write,
            Ask::Flush => RequestKind::Flush,
            Ask::Discard => RequestKind::Discard,
            Ask::WriteZeroes { .. } => RequestKind::WriteZeroes,
            Ask::Unknown => RequestKind::Other,
        };
        export.metrics().start(self.seat.thread);
        let mut pending = Pending { queue: self, tag, kind, len, since: Instant::now(), is_over: false };
        let moves = matches!(ask, Ask::Read | Ask::Write);
        let changes = matches!(ask, Ask::Write | Ask::Discard | Ask::WriteZeroes { .. });
        let refused = if export.is_closed() || moves && len > buf.len() as u64 {
            Some(Errno::IO)
        } else if changes && export.access() == Access::ReadOnly {
            Some(Errno::ROFS)
        } else if ask == Ask::Unknown {
            Some(Errno::OPNOTSUPP)
        } else {
            None
        };
        let durability = if is_durable { Durability::Durable } else { Durability::Volatile };
        let mut outcome = Ok(());
        if refused.is_none() {
            // A server that ends answers what it has taken at once.
            let _ = self.setup.stop.or(export.admit(worker, kind, len)).await;
            outcome = match ask {
                Ask::Read => {
                    let data = buf.split_to(len as usize);
                    let (result, bufs) = export.read(worker, offset, data.into()).await;
                    buf = self.joined(bufs, buf);
                    result
                }
                Ask::Write if sabotage::is(Fault::AnswerBeforeData) => {
                    let data = IoBuf::copy_of(&buf.as_slice()[..len as usize]);
                    let (export, own) = (Arc::clone(export), worker.clone());
                    drop(worker.spawn(async move {
                        own.sleep(Duration::from_millis(50)).await;
                        let _ = export.image().write(&own, offset, data.into(), Durability::Volatile).await;
                    }));
                    Ok(())
                }
                Ask::Write => {
                    let data = buf.split_to(len as usize);
                    let (result, bufs) = export.image().write(worker, offset, data.into(), durability).await;
                    buf = self.joined(bufs, buf);
                    result
                }
                Ask::Flush => export.flush(worker).await,
                Ask::Discard => export.image().discard(worker, offset, len).await,
                Ask::WriteZeroes { unmap } => {
                    let mode = if unmap { ZeroMode::Unmap } else { ZeroMode::Keep };
                    export.image().write_zeroes(worker, offset, len, mode).await
                }
                Ask::Unknown => Ok(()),
            };
            // A durable write has done more already.
            if outcome.is_ok() && changes && !(is_durable && ask == Ask::Write) {
                outcome = export.settle(worker, durability).await;
            }
        }
        let errno = refused.or_else(|| outcome.err().map(|error| self.errno(&error)));
        pending.is_over = true;
        pending.count(errno.is_none());
        let bytes = if moves { len as i32 } else { 0 };
        (errno.map_or(bytes, |errno| -errno.raw_os_error()), buf)
    }

    /// The buffer of a tag, of which the engine had the first bytes.
    fn joined(&self, bufs: IoBufs, tail: IoBuf) -> IoBuf {
        let mut all = bufs;
        all.push(tail);
        self.whole(all)
    }

    /// An error in the words of block devices.
    fn errno(&self, error: &zebu_engine::Error) -> Errno {
        self.setup.log.write(Level::Debug, format_args!("{error}"));
        match (error.kind(), Errno::from_raw_os_error(error.errno())) {
            (ErrorKind::NoSpace, _) | (_, Errno::NOSPC | Errno::DQUOT) => Errno::NOSPC,
            (ErrorKind::Unsupported, _) => Errno::OPNOTSUPP,
            _ => Errno::IO,
        }
    }
}
