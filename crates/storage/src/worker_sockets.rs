//! The worker's operations on sockets.

use crate::buf::{IoBuf, IoBufs};
use crate::socket::{DeviceCommand, Socket, SocketCompletion, SocketOp, SocketRequest};
use crate::socket_ops::State;
use crate::worker::Worker;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

impl Worker {
    /// Waits until there is something to receive from (or to accept at) `socket`, or its end.
    ///
    /// # Errors
    /// The answer of `poll` for the descriptor, or that this worker is a simulated one.
    pub async fn readable(&self, socket: &Socket) -> io::Result<()> {
        self.socket_operation(socket, SocketOp::Readable, IoBufs::new()).await.0.map(drop)
    }

    /// Receives at least one byte into `bufs`, from the first byte on, and says how many; 0 at the end of the stream.
    /// Dropping the future may lose what was received.
    ///
    /// # Errors
    /// The connection is broken.
    pub async fn receive(&self, socket: &Socket, bufs: IoBufs) -> (io::Result<usize>, IoBufs) {
        self.socket_operation(socket, SocketOp::Receive, bufs).await
    }

    /// Sends all of `bufs`. Only one at a time of a socket, or the parts mix. No SIGPIPE is raised.
    ///
    /// # Errors
    /// The connection is broken; a part may have been sent.
    pub async fn send(&self, socket: &Socket, bufs: IoBufs) -> (io::Result<()>, IoBufs) {
        if bufs.is_empty() {
            return (Ok(()), bufs);
        }
        let (result, bufs) = self.socket_operation(socket, SocketOp::Send, bufs).await;
        (result.map(drop), bufs)
    }

    /// As [`Worker::send`], for a few bytes after which the worker is likely to wait for something: they go out with
    /// the system call that waits, or a later one. Whoever awaits the result makes that happen soon; it is there without
    /// waiting after the worker's next turn, as a rule.
    pub fn send_lazily(
        &self,
        socket: &Socket,
        bufs: IoBufs,
    ) -> impl Future<Output = (io::Result<usize>, IoBufs)> + Unpin + '_ {
        self.socket_operation(socket, SocketOp::SendLazily, bufs)
    }

    /// Gives a command to the driver of `device`, which may wait for as long as it likes, and says what the driver answered. The
    /// command is under way from this call on. One whose future is dropped stays with the driver, and so does its buffer, which is
    /// never freed if the worker ends first. Takes a worker on a ring that may ([`WorkerConfig::commands`](crate::WorkerConfig)).
    ///
    /// # Safety
    /// For this command, the driver reads and writes no memory but that of `buf`, and that only until the command ends.
    ///
    /// # Errors
    /// The driver's, or that the worker has no ring that takes commands.
    pub unsafe fn command(
        &self,
        device: &Socket,
        command: DeviceCommand,
        buf: IoBuf,
    ) -> impl Future<Output = (io::Result<usize>, IoBufs)> + Unpin + '_ {
        self.socket_operation(device, SocketOp::Command(command), buf.into())
    }

    fn socket_operation(&self, socket: &Socket, op: SocketOp, bufs: IoBufs) -> SocketOperation<'_> {
        let is_lazy = op == SocketOp::SendLazily;
        let id = self.socket_ops().0.borrow_mut().insert(State::Waiting(None));
        self.submit_socket(id, SocketRequest { socket: socket.clone(), op, bufs, sent: 0 });
        SocketOperation { worker: self, id: Some(id), is_lazy }
    }
}

/// An operation under way. Dropping it cancels it; its buffers are kept until the kernel is done with them.
struct SocketOperation<'a> {
    worker: &'a Worker,
    /// `None` when its value was taken.
    id: Option<usize>,
    is_lazy: bool,
}

impl Future for SocketOperation<'_> {
    type Output = (io::Result<usize>, IoBufs);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(id) = self.id else { return Poll::Pending };
        let mut ops = self.worker.socket_ops().0.borrow_mut();
        if let Some(State::Waiting(waker)) = ops.get_mut(id) {
            if waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
            drop(ops);
            if self.is_lazy {
                self.worker.hurry_sockets();
            }
            return Poll::Pending;
        }
        let state = ops.try_remove(id);
        drop(ops);
        self.id = None;
        match state {
            Some(State::Over(SocketCompletion { request, result, .. })) => {
                Poll::Ready((result.map_err(io::Error::from_raw_os_error), request.bufs))
            }
            _ => unreachable!("the slot of an operation belongs to its future"),
        }
    }
}

impl Drop for SocketOperation<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let mut ops = self.worker.socket_ops().0.borrow_mut();
        let (old, cancel) = match ops.get_mut(id) {
            Some(state @ State::Waiting(_)) => (Some(std::mem::replace(state, State::Abandoned)), true),
            _ => (ops.try_remove(id), false),
        };
        drop(ops);
        if cancel {
            self.worker.cancel_socket(id);
        }
        // A waker or buffers, whose destructors may come back here.
        drop(old);
    }
}
