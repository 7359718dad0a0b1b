//! Socket operations in a ring. A bit of their user data distinguishes them from file operations. They do not count
//! against the ring's limit: most of them wait for a peer, for hours perhaps. (A completion queue that overflows for
//! that is kept by the kernel.)
//!
//! A *lazy* send goes along with the call that waits and makes no completion where it succeeds, or it would end the wait.
//! It must not wait itself (`MSG_DONTWAIT`) and must take all (`MSG_WAITALL`): so it is over when the kernel took it from
//! the queue, and a completion in that moment says that it failed or was cut short; then it goes on as an ordinary one.
//!
//! A *command* belongs to a device's driver, which can't be asked to give it back. The end of the ring does not wait for it.

use crate::socket::{DeviceCommand, SocketCompletion, SocketOp, SocketRequest};
use io_uring::squeue::{Entry, Flags};
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use std::os::fd::{AsFd, AsRawFd};

/// Marks the user data of socket operations.
pub(crate) const SOCKET: u64 = 1 << 62;
/// The user data of cancellations, whose completions say nothing.
pub(crate) const CANCELLATION: u64 = u64::MAX - 1;

/// An operation in the ring, and what the kernel reads its addresses from.
struct Slot {
    request: Option<SocketRequest>,
    /// Whether it is in the ring as a lazy send.
    is_lazy: bool,
    /// Whether the ring waits for the descriptor in its place: an operation that was woken for nothing ends with EAGAIN,
    /// since the descriptor is non-blocking.
    is_polled: bool,
    vectors: Vec<libc::iovec>,
    header: libc::msghdr,
}

// SAFETY: the pointers are to the buffers of `request`, which may be sent along, and to `vectors`.
unsafe impl Send for Slot {}

/// The socket operations of a ring.
#[derive(Default)]
pub(crate) struct UringSockets {
    /// Boxed: the kernel may look at a slot until its completion.
    slots: Vec<Option<Box<Slot>>>,
    in_ring: usize,
    done: Vec<SocketCompletion>,
    /// The kernel can leave out the completions of what succeeds (since 5.17).
    can_be_lazy: bool,
    /// Lazy sends that may not be over.
    lazy: Vec<usize>,
    is_hurried: bool,
}

impl UringSockets {
    pub(crate) fn new(can_be_lazy: bool) -> Self {
        Self { can_be_lazy, ..Self::default() }
    }

    /// Whether the operation, a lazy send, can be one: the kernel takes all its buffers in one call.
    pub(crate) fn can_be_lazy(&self, request: &SocketRequest) -> bool {
        self.can_be_lazy && request.bufs.0.len() <= crate::blocking::MAX_VECTORS
    }

    /// Puts the operation into the ring.
    pub(crate) fn submit(&mut self, ring: &mut IoUring, id: usize, request: SocketRequest) {
        let is_lazy = request.op == SocketOp::SendLazily && self.can_be_lazy(&request);
        if self.slots.len() <= id {
            self.slots.resize_with(id + 1, || None);
        }
        let slot = self.slots[id].get_or_insert_with(|| {
            // SAFETY: all zero is a valid msghdr: no name, no vectors, no control data.
            let header = unsafe { std::mem::zeroed() };
            Box::new(Slot { request: None, is_lazy: false, is_polled: false, vectors: Vec::new(), header })
        });
        slot.is_lazy = is_lazy;
        slot.request = Some(request);
        self.place(ring, id);
    }

    fn place(&mut self, ring: &mut IoUring, id: usize) {
        let Some(slot) = self.slots[id].as_deref_mut() else { return };
        let Some(request) = slot.request.as_mut() else { return };
        request.fill_vectors(&mut slot.vectors);
        let fd = Fd(request.socket.as_fd().as_raw_fd());
        let (base, count) = (slot.vectors.as_ptr(), slot.vectors.len());
        let entry = match request.op {
            op if slot.is_polled => {
                let events = if op.sends() { libc::POLLOUT } else { libc::POLLIN };
                opcode::PollAdd::new(fd, events as u32).build()
            }
            SocketOp::Readable => opcode::PollAdd::new(fd, libc::POLLIN as u32).build(),
            // As for sockets, `read` does for pipes and eventfds.
            SocketOp::Receive => match slot.vectors.first() {
                Some(only) if count == 1 => {
                    opcode::Read::new(fd, only.iov_base.cast(), only.iov_len.min(1 << 30) as u32)
                        .offset(u64::MAX)
                        .build()
                }
                _ => opcode::Readv::new(fd, base, count as u32).offset(u64::MAX).build(),
            },
            SocketOp::Command(DeviceCommand { code, head }) => {
                let address = slot.vectors.first().map_or(0, |only| only.iov_base as u64);
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&head);
                bytes[8..].copy_from_slice(&address.to_ne_bytes());
                opcode::UringCmd16::new(fd, code).cmd(bytes).build()
            }
            SocketOp::Send | SocketOp::SendLazily => {
                slot.header.msg_iov = base.cast_mut();
                slot.header.msg_iovlen = count as _;
                let lazy = if slot.is_lazy { libc::MSG_DONTWAIT | libc::MSG_WAITALL } else { 0 };
                let send = opcode::SendMsg::new(fd, &raw const slot.header);
                let entry = send.flags((libc::MSG_NOSIGNAL | lazy) as u32).build();
                if slot.is_lazy { entry.flags(Flags::SKIP_SUCCESS) } else { entry }
            }
        };
        if push(ring, &entry.user_data(SOCKET | id as u64)) {
            if slot.is_lazy {
                self.lazy.push(id);
            } else if !is_command(slot) {
                self.in_ring += 1;
            }
        } else if let Some(request) = slot.request.take() {
            self.done.push(SocketCompletion { id, request, result: Err(libc::EAGAIN) });
        }
    }

    /// Asks the kernel to end an operation; its completion comes in any case.
    pub(crate) fn cancel(&mut self, ring: &mut IoUring, id: usize) {
        if let Some(slot) = self.slots.get(id).and_then(Option::as_deref)
            && slot.request.is_some()
            && !is_command(slot)
        {
            let entry = opcode::AsyncCancel::new(SOCKET | id as u64).build().user_data(CANCELLATION);
            // If the ring takes nothing any more, the operation ends with the socket.
            let _ = push(ring, &entry);
        }
    }

    /// Notes a completion of the kernel.
    pub(crate) fn complete(&mut self, ring: &mut IoUring, user_data: u64, result: i32) {
        let id = (user_data & !SOCKET) as usize;
        let Some(slot) = self.slots.get_mut(id).and_then(Option::as_mut) else { return };
        let was_lazy = std::mem::take(&mut slot.is_lazy);
        let was_polled = std::mem::take(&mut slot.is_polled);
        if was_lazy {
            self.lazy.retain(|&other| other != id);
        } else if !is_command(slot) {
            self.in_ring -= 1;
        }
        let Some(request) = slot.request.as_mut() else { return };
        let outcome = match usize::try_from(result) {
            _ if is_a_command(request.op) => Some(usize::try_from(result).map_err(|_| -result)),
            // The operation itself says what is wrong, if anything.
            Ok(_) if was_polled => None,
            Ok(_) if request.op == SocketOp::Readable => Some(Ok(0)),
            // Nothing was sent: not the end, but no room.
            Ok(0) if was_lazy => None,
            Ok(moved) => request.after(moved),
            Err(_) if result == -libc::EINTR || was_lazy && result == -libc::EAGAIN => None,
            Err(_) if result == -libc::EAGAIN => {
                slot.is_polled = true;
                None
            }
            Err(_) => Some(Err(-result)),
        };
        match outcome {
            None => self.place(ring, id),
            Some(result) => {
                if let Some(request) = slot.request.take() {
                    self.done.push(SocketCompletion { id, request, result });
                }
            }
        }
    }

    /// Whether a lazy send may not be over.
    pub(crate) fn has_lazy(&self) -> bool {
        !self.lazy.is_empty()
    }

    /// The kernel has taken all that was queued, and all its completions were noted: ends the lazy sends, which
    /// succeeded.
    pub(crate) fn confirm(&mut self) {
        for id in self.lazy.drain(..) {
            let Some(slot) = self.slots.get_mut(id).and_then(Option::as_mut) else { continue };
            slot.is_lazy = false;
            if let Some(request) = slot.request.take() {
                let len = request.bufs.len();
                self.done.push(SocketCompletion { id, request, result: Ok(len) });
            }
        }
    }

    /// Somebody waits for a lazy send.
    pub(crate) fn hurry(&mut self) {
        self.is_hurried = true;
    }

    /// Whether somebody waits for a lazy send that is not over; said once.
    pub(crate) fn take_hurry(&mut self) -> bool {
        std::mem::take(&mut self.is_hurried) && !self.lazy.is_empty()
    }

    /// Operations that the kernel has.
    pub(crate) fn in_ring(&self) -> usize {
        self.in_ring
    }

    /// Cancels all.
    pub(crate) fn cancel_all(&mut self, ring: &mut IoUring) {
        for id in 0..self.slots.len() {
            self.cancel(ring, id);
        }
    }

    /// The ring ends: what drivers may still write to is never freed.
    pub(crate) fn leave_commands(&mut self) {
        self.slots.drain(..).flatten().filter(|slot| is_command(slot)).for_each(std::mem::forget);
    }

    /// Whether [`UringSockets::reap`] would find something.
    pub(crate) fn has_completions(&self) -> bool {
        !self.done.is_empty() || !self.lazy.is_empty()
    }

    /// Appends what is over.
    pub(crate) fn reap(&mut self, done: &mut Vec<SocketCompletion>) {
        done.append(&mut self.done);
    }
}

fn is_a_command(op: SocketOp) -> bool {
    matches!(op, SocketOp::Command(_))
}

/// Whether a driver has the operation.
fn is_command(slot: &Slot) -> bool {
    slot.request.as_ref().is_some_and(|request| is_a_command(request.op))
}

/// Queues an entry, making room for it if there is none.
fn push(ring: &mut IoUring, entry: &Entry) -> bool {
    // SAFETY: the entry's addresses are of a boxed slot and of buffers that it owns, which stay as they are until the
    // completion arrives; the descriptor is kept open by the slot's request.
    if unsafe { ring.submission().push(entry) }.is_ok() {
        return true;
    }
    // The kernel takes all that is queued; what it completes meanwhile waits for the next look.
    let _ = ring.submit();
    // SAFETY: as above.
    unsafe { ring.submission().push(entry) }.is_ok()
}
