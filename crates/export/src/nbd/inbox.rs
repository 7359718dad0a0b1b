//! Receiving: many small things per system call, and large ones straight into their buffers.

use super::peers::Peer;
use super::transport::Transport;
use std::io;
use std::sync::Arc;
use zebu_engine::storage::{IoBuf, IoBufs, Worker};

/// Bytes that are received at once beside a payload.
const STAGING: usize = 128 << 10;

/// Bytes that a client has sent and that were not processed yet.
pub(crate) struct Inbox {
    worker: Worker,
    transport: Transport,
    peer: Arc<Peer>,
    staging: IoBuf,
    /// The part of `staging` that holds something.
    start: usize,
    end: usize,
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the client went away in the middle of something")
}

impl Inbox {
    pub(crate) fn new(worker: &Worker, transport: &Transport, peer: &Arc<Peer>) -> Self {
        Self {
            worker: worker.clone(),
            transport: transport.clone(),
            peer: Arc::clone(peer),
            staging: IoBuf::zeroed(STAGING),
            start: 0,
            end: 0,
        }
    }

    /// Goes on with another transport of the same connection.
    #[cfg(feature = "tls")]
    pub(crate) fn switch(&mut self, transport: &Transport) {
        self.transport = transport.clone();
    }

    /// Whether [`Inbox::peek`] of so many bytes need not wait.
    pub(crate) fn has(&self, len: usize) -> bool {
        self.end - self.start >= len
    }

    /// The next `len` bytes (few), which stay there; `None` at the end of the stream.
    ///
    /// # Errors
    /// The connection broke, or ended after some of them.
    pub(crate) async fn peek(&mut self, len: usize) -> io::Result<Option<&[u8]>> {
        while !self.has(len) {
            if self.fill().await? == 0 {
                return if self.has(1) { Err(ended()) } else { Ok(None) };
            }
        }
        Ok(self.staging.as_slice().get(self.start..self.start + len))
    }

    /// Takes what was peeked.
    pub(crate) fn advance(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// The connection broke or ended.
    pub(crate) async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            if !self.has(1) && self.fill().await? == 0 {
                return Err(ended());
            }
            done += self.drain_into(&mut out[done..]);
        }
        Ok(())
    }

    /// Takes `len` bytes and forgets them.
    ///
    /// # Errors
    /// The connection broke or ended.
    pub(crate) async fn skip(&mut self, mut len: u64) -> io::Result<()> {
        while len > 0 {
            if !self.has(1) && self.fill().await? == 0 {
                return Err(ended());
            }
            let part = ((self.end - self.start) as u64).min(len);
            self.advance(part as usize);
            len -= part;
        }
        Ok(())
    }

    /// Fills a buffer; what is not here yet is received straight into it, together with what follows.
    ///
    /// # Errors
    /// The connection broke or ended.
    pub(crate) async fn read_payload(&mut self, mut payload: IoBuf) -> io::Result<IoBuf> {
        let mut filled = self.drain_into(payload.as_mut_slice());
        while filled < payload.len() {
            let rest = payload.len() - filled;
            let mut head = payload.split_to(filled);
            let mut bufs = IoBufs::from(payload);
            // Everything that was here has been taken.
            bufs.push_part(std::mem::replace(&mut self.staging, IoBuf::zeroed(0)));
            let (received, mut bufs) = self.transport.receive(&self.worker, bufs).await;
            self.staging = bufs.pop_part().unwrap_or_else(|| IoBuf::zeroed(STAGING));
            for part in bufs {
                // Split off above, so that it fits.
                let _ = head.unsplit(part);
            }
            payload = head;
            let received = received?;
            if received == 0 {
                return Err(ended());
            }
            self.peer.touch();
            filled += received.min(rest);
            (self.start, self.end) = (0, received.saturating_sub(rest));
        }
        Ok(payload)
    }

    fn drain_into(&mut self, out: &mut [u8]) -> usize {
        let len = out.len().min(self.end - self.start);
        out[..len].copy_from_slice(&self.staging.as_slice()[self.start..self.start + len]);
        self.start += len;
        len
    }

    /// Receives what there is, at least a byte; 0 at the end.
    async fn fill(&mut self) -> io::Result<usize> {
        // Less than a header is left over, if anything.
        self.staging.as_mut_slice().copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let mut head = std::mem::replace(&mut self.staging, IoBuf::zeroed(0));
        let mut tail = head;
        head = tail.split_to(self.end);
        let (received, bufs) = self.transport.receive(&self.worker, tail.into()).await;
        for part in bufs {
            // Split off above, so that it fits.
            let _ = head.unsplit(part);
        }
        self.staging = head;
        let received = received?;
        self.end += received;
        self.peer.touch();
        Ok(received)
    }
}
