//! The channel on which the device notifies its front end (vhost-user, "Back-end communication"): here, that the
//! configuration changed. The crate that speaks the protocol takes the channel's descriptor and has no such message, so
//! the descriptor is looked for before the crate takes the message that brings it.

use crate::export::SizeWatcher;
use rustix::net::sockopt::socket_domain;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send,
};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use zebu_storage::sync::Mutex;

/// Bytes of a message's header: request, flags, bytes that follow; u32 each, in the machine's order.
const HEADER: usize = 12;
/// The request that brings the channel.
const SET_BACKEND_REQ_FD: u32 = 21;
/// The message that the configuration changed, which has nothing but its header.
const CONFIG_CHANGE: u32 = 2;
/// The version in a header's flags.
const VERSION: u32 = 1;

/// The channel to the front end that is connected, if it gave one.
#[derive(Debug, Default)]
pub(crate) struct BackChannel(Mutex<Option<OwnedFd>>);

impl BackChannel {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Waits for the front end's next message, which stays there, and keeps the channel if it brings one.
    pub(crate) fn look_at_next(&self, stream: &UnixStream) {
        let mut header = [0; HEADER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        // What is wrong with the connection is told to who takes the message.
        let Ok(received) = recvmsg(stream, &mut [IoSliceMut::new(&mut header)], &mut ancillary, flags) else {
            return;
        };
        // A descriptor comes twice, here and with the message itself; those of other messages are closed here.
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let [r0, r1, r2, r3, ..] = header;
        if received.bytes == HEADER && u32::from_ne_bytes([r0, r1, r2, r3]) == SET_BACKEND_REQ_FD {
            // Others, such as TCP sockets that linger, may keep whoever closes them waiting.
            let is_channel = |fd: &OwnedFd| socket_domain(fd) == Ok(AddressFamily::UNIX);
            // What is closed is closed without the lock.
            let channel = descriptor.filter(is_channel);
            let earlier = std::mem::replace(&mut *self.0.lock(), channel);
            drop(earlier);
        }
    }
}

impl SizeWatcher for BackChannel {
    fn size_changed(&self) {
        if let Some(channel) = &*self.0.lock() {
            let words = [CONFIG_CHANGE, VERSION, 0];
            let message: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
            // A front end that takes nothing, or is gone, is not told.
            let _ = send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
    use std::io::IoSlice;
    use std::os::fd::AsFd;

    #[test]
    fn a_channel_is_a_unix_socket() {
        let (front_end, device) = UnixStream::pair().unwrap();
        let channel = BackChannel::new();
        let tcp = OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let (unix, _theirs) = UnixStream::pair().unwrap();
        for (descriptor, is_kept) in [(unix.into(), true), (tcp, false)] {
            let words = [SET_BACKEND_REQ_FD, VERSION, 0].map(u32::to_ne_bytes).concat();
            let descriptors = [OwnedFd::as_fd(&descriptor)];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
            sendmsg(&front_end, &[IoSlice::new(&words)], &mut ancillary, SendFlags::empty()).unwrap();
            channel.look_at_next(&device);
            assert_eq!(channel.0.lock().is_some(), is_kept);
            rustix::net::recv(&device, &mut [0u8; HEADER], RecvFlags::empty()).unwrap();
        }
    }
}
