//! The kernel's end of the file: requests are read from `/dev/fuse`, by a task of one worker, and answered by whichever
//! worker did them.

use super::wire::{MAX_HEAD, Request, WRITE_HEAD, answer_header, parse};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use std::cell::Cell;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use zebu_storage::{IoBuf, IoBufs, Socket, Worker};

/// Bytes of one write of the kernel.
pub(super) const MAX_WRITE: u32 = 1 << 20;
/// The data of shorter writes is copied, so that it does not hold memory for the longest.
const COPIED: usize = MAX_WRITE as usize / 8;

/// Requests that come from the kernel.
pub(super) struct Requests {
    device: Socket,
    /// Readable when the device is. What waits in a ring is let go of by the kernel only some time after a process was
    /// killed; were that the device, the helper that unmounts then would find it in use.
    ready: Socket,
    worker: Worker,
    /// Where the data of the next write goes: aligned, as what writes it to the disk needs it.
    data: IoBuf,
}

/// A message from the kernel.
pub(super) enum Arrival {
    /// A request; the data of a write, and the bytes of memory that it takes.
    Request(Request, IoBuf, u64),
    /// Nothing at the moment.
    None,
    /// The file was unmounted: nothing more comes.
    End,
}

impl Requests {
    /// # Errors
    /// The system gives no descriptor to wait on.
    pub(super) fn new(worker: &Worker, device: &Socket) -> io::Result<Self> {
        let ready = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&ready, device, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self {
            device: device.clone(),
            ready: Socket::new(ready)?,
            worker: worker.clone(),
            data: worker.buffer(MAX_WRITE as usize),
        })
    }

    /// Takes the next request, without waiting.
    pub(super) fn take(&mut self) -> Result<Arrival, Errno> {
        let mut head = [0; MAX_HEAD];
        let read = loop {
            let parts =
                &mut [IoSliceMut::new(&mut head[..WRITE_HEAD]), IoSliceMut::new(self.data.as_mut_slice())];
            match rustix::io::readv(&self.device, parts) {
                // What it was about to give was interrupted.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::AGAIN) => return Ok(Arrival::None),
                Err(Errno::NODEV) => return Ok(Arrival::End),
                Err(errno) => return Err(errno),
                Ok(read) => break read,
            }
        };
        let behind = read.saturating_sub(WRITE_HEAD);
        let more = behind.min(MAX_HEAD - WRITE_HEAD);
        head[WRITE_HEAD..WRITE_HEAD + more].copy_from_slice(&self.data.as_slice()[..more]);
        let request = parse(&head[..read.min(WRITE_HEAD + more)]).ok_or(Errno::PROTO)?;
        let (data, memory) = if !request.is_write() {
            (IoBuf::zeroed(0), 0)
        } else if behind < COPIED {
            let mut copy = self.worker.buffer(behind);
            copy.as_mut_slice().copy_from_slice(&self.data.as_slice()[..behind]);
            (copy, behind)
        } else {
            let mut data = std::mem::replace(&mut self.data, self.worker.buffer(MAX_WRITE as usize));
            (data.split_to(behind), MAX_WRITE as usize)
        };
        Ok(Arrival::Request(request, data, memory as u64))
    }

    /// Waits until [`Requests::take`] has something to say.
    pub(super) async fn wait(&self) -> io::Result<()> {
        self.worker.readable(&self.ready).await
    }
}

/// Where a request's answer goes. A request whose program is gone has nobody to be answered: errors are not told. Dropped
/// without one, by a panic, it is answered with an error: its program would wait for ever.
pub(super) struct Answer {
    device: Socket,
    unique: u64,
    is_given: Cell<bool>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.is_given.get() {
            self.give(&answer_header(self.unique, Errno::IO.raw_os_error(), 0), &[]);
        }
    }
}

impl Answer {
    pub(super) fn to(requests: &Requests, request: Request) -> Self {
        Self { device: requests.device.clone(), unique: request.unique, is_given: Cell::new(false) }
    }

    pub(super) fn error(self, errno: Errno) {
        self.give(&answer_header(self.unique, errno.raw_os_error(), 0), &[]);
    }

    pub(super) fn ok(self, bytes: &[u8]) {
        self.give(&answer_header(self.unique, 0, bytes.len()), bytes);
    }

    /// There is none: the kernel waits for nothing.
    pub(super) fn none(self) {
        self.is_given.set(true);
    }

    fn give(&self, header: &[u8], bytes: &[u8]) {
        self.is_given.set(true);
        // The kernel takes an answer in one call, whole.
        let _ = rustix::io::writev(self.device.as_fd(), &[IoSlice::new(header), IoSlice::new(bytes)]);
    }

    /// With what was read.
    pub(super) fn data(self, bufs: &IoBufs) {
        match bufs.parts() {
            [buf] => self.ok(buf.as_slice()),
            parts => {
                let parts: Vec<&[u8]> = parts.iter().map(IoBuf::as_slice).collect();
                self.ok(&parts.concat());
            }
        }
    }
}
