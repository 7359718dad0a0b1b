//! Messages to the kernel's NBD client, over generic netlink (<linux/nbd-netlink.h>).

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The family of who knows the families, and what it is asked.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// A message that says how a request has ended.
const ERROR: u16 = 2;
/// A request that wants such a message.
const REQUEST_AND_ANSWER: u16 = 1 | 4;
/// Bytes of a message's header, and of the one behind it.
const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
/// Bytes of an attribute's header.
const ATTRIBUTE: usize = 4;
/// An attribute that consists of others.
const NESTED: u16 = 1 << 15;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;

const INDEX: u16 = 1;
const SIZE: u16 = 2;
const BLOCK_SIZE: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const CLIENT_FLAGS: u16 = 6;
const SOCKETS: u16 = 7;
const DEAD_CONNECTION_TIMEOUT: u16 = 8;
const BACKEND: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_DESCRIPTOR: u16 = 1;

/// A device as the kernel is to have it.
pub(super) struct Device<'a> {
    /// Bytes of the disk.
    pub(super) size: u64,
    pub(super) block: u32,
    /// The flags of the server's side.
    pub(super) flags: u16,
    /// How long a request may take before its connection counts as broken, in seconds.
    pub(super) timeout: u64,
    /// How long requests wait for another connection when all are broken, in seconds.
    pub(super) patience: u64,
    /// Which image it is of.
    pub(super) backend: &'a str,
}

/// Attributes of a message.
#[derive(Default)]
struct Attributes(Vec<u8>);

impl Attributes {
    fn add(&mut self, kind: u16, content: &[u8]) {
        let len = (ATTRIBUTE + content.len()) as u16;
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn text(&mut self, kind: u16, text: &str) {
        self.add(kind, &[text.as_bytes(), &[0]].concat());
    }

    fn nested(&mut self, kind: u16, content: &Attributes) {
        self.add(kind | NESTED, &content.0);
    }

    fn sockets(&mut self, sockets: &[BorrowedFd<'_>]) {
        let mut list = Attributes::default();
        for socket in sockets {
            let mut item = Attributes::default();
            item.add(SOCKET_DESCRIPTOR, &(socket.as_raw_fd() as u32).to_ne_bytes());
            list.nested(SOCKET_ITEM, &item);
        }
        self.nested(SOCKETS, &list);
    }
}

/// The attribute of a kind, in what the kernel has sent.
fn find(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    while let [l0, l1, k0, k1, ..] = *bytes {
        let len = usize::from(u16::from_ne_bytes([l0, l1]));
        let content = bytes.get(ATTRIBUTE..len)?;
        if u16::from_ne_bytes([k0, k1]) & !NESTED == wanted {
            return Some(content);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
    }
    None
}

/// A message with a generic header.
fn message(family: u16, number: u32, command: u8, attributes: &Attributes) -> Vec<u8> {
    let len = HEADER + GENERIC_HEADER + attributes.0.len();
    let mut bytes = Vec::with_capacity(len);
    bytes.extend((len as u32).to_ne_bytes());
    bytes.extend(family.to_ne_bytes());
    bytes.extend(REQUEST_AND_ANSWER.to_ne_bytes());
    bytes.extend(number.to_ne_bytes());
    bytes.extend([0; 4]);
    // Version 1.
    bytes.extend([command, 1, 0, 0]);
    bytes.extend(&attributes.0);
    bytes
}

/// A part of an answer.
enum Part<'a> {
    /// Its attributes.
    Told(&'a [u8]),
    /// Its end.
    Ended(Result<(), Errno>),
}

/// The first message of `bytes` and the rest; `None` if there is none.
fn next_part(bytes: &[u8]) -> Option<(Part<'_>, &[u8])> {
    let [l0, l1, l2, l3, k0, k1, ..] = *bytes else { return None };
    let len = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
    let body = bytes.get(HEADER..len)?;
    let rest = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    let part = if u16::from_ne_bytes([k0, k1]) == ERROR {
        let [e0, e1, e2, e3, ..] = *body else { return None };
        let error = i32::from_ne_bytes([e0, e1, e2, e3]);
        Part::Ended(if error == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(error.wrapping_neg())) })
    } else {
        Part::Told(body.get(GENERIC_HEADER..)?)
    };
    Some((part, rest))
}

/// A socket to the kernel's NBD client.
pub(super) struct Netlink {
    socket: OwnedFd,
    family: u16,
    number: u32,
}

impl Netlink {
    /// # Errors
    /// The kernel has no NBD client; the message says what to do.
    pub(super) fn open() -> io::Result<Self> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, Some(netlink::GENERIC))?;
        let mut opened = Self { socket, family: CONTROL, number: 0 };
        let mut name = Attributes::default();
        name.text(FAMILY_NAME, "nbd");
        let told = opened.ask(GET_FAMILY, &name).map_err(|errno| match errno {
            Errno::NOENT => io::Error::new(
                io::ErrorKind::NotFound,
                "the kernel has no NBD client: load its module (modprobe nbd)",
            ),
            errno => errno.into(),
        })?;
        let id =
            find(&told, FAMILY_ID).and_then(|id| id.try_into().ok()).ok_or(io::ErrorKind::InvalidData)?;
        opened.family = u16::from_ne_bytes(id);
        Ok(opened)
    }

    /// Connects a device that is free to these sockets, whose handshakes are over.
    pub(super) fn connect(
        &mut self,
        index: u32,
        device: &Device<'_>,
        sockets: &[BorrowedFd<'_>],
    ) -> Result<(), Errno> {
        let mut attributes = Attributes::default();
        attributes.add(INDEX, &index.to_ne_bytes());
        attributes.add(SIZE, &device.size.to_ne_bytes());
        attributes.add(BLOCK_SIZE, &u64::from(device.block).to_ne_bytes());
        attributes.add(TIMEOUT, &device.timeout.to_ne_bytes());
        attributes.add(SERVER_FLAGS, &u64::from(device.flags).to_ne_bytes());
        attributes.add(CLIENT_FLAGS, &0u64.to_ne_bytes());
        attributes.add(DEAD_CONNECTION_TIMEOUT, &device.patience.to_ne_bytes());
        attributes.text(BACKEND, device.backend);
        attributes.sockets(sockets);
        self.ask(CONNECT, &attributes).map(drop)
    }

    /// Gives a device whose connections are broken these in their place.
    pub(super) fn reconnect(
        &mut self,
        index: u32,
        backend: &str,
        sockets: &[BorrowedFd<'_>],
    ) -> Result<(), Errno> {
        let mut attributes = Attributes::default();
        attributes.add(INDEX, &index.to_ne_bytes());
        attributes.text(BACKEND, backend);
        attributes.sockets(sockets);
        self.ask(RECONFIGURE, &attributes).map(drop)
    }

    pub(super) fn set_size(&mut self, index: u32, backend: &str, size: u64) -> Result<(), Errno> {
        let mut attributes = Attributes::default();
        attributes.add(INDEX, &index.to_ne_bytes());
        attributes.text(BACKEND, backend);
        attributes.add(SIZE, &size.to_ne_bytes());
        self.ask(RECONFIGURE, &attributes).map(drop)
    }

    pub(super) fn disconnect(&mut self, index: u32) -> Result<(), Errno> {
        let mut attributes = Attributes::default();
        attributes.add(INDEX, &index.to_ne_bytes());
        self.ask(DISCONNECT, &attributes).map(drop)
    }

    /// Sends a request and waits for its end; the attributes of the answer.
    fn ask(&mut self, command: u8, attributes: &Attributes) -> Result<Vec<u8>, Errno> {
        self.number += 1;
        send(&self.socket, &message(self.family, self.number, command, attributes), SendFlags::empty())?;
        let (mut bytes, mut told) = ([0; 8192], Vec::new());
        loop {
            let len = match recv(&self.socket, &mut bytes, RecvFlags::empty()) {
                Err(Errno::INTR) => continue,
                received => received?.0,
            };
            let mut rest = &bytes[..len];
            while let Some((part, behind)) = next_part(rest) {
                match part {
                    Part::Told(attributes) => told = attributes.to_vec(),
                    Part::Ended(result) => return result.map(|()| told),
                }
                rest = behind;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn messages_have_their_attributes_in_place() {
        let mut attributes = Attributes::default();
        attributes.text(FAMILY_NAME, "nbd");
        let bytes = message(CONTROL, 7, GET_FAMILY, &attributes);
        assert_eq!(bytes[..8], [28, 0, 0, 0, 0x10, 0, 5, 0]);
        assert_eq!(bytes[8..20], [7, 0, 0, 0, 0, 0, 0, 0, 3, 1, 0, 0]);
        assert_eq!(bytes[20..], [8, 0, 2, 0, b'n', b'b', b'd', 0]);
        let mut attributes = Attributes::default();
        attributes.sockets(&[io::stdin().as_fd()]);
        assert_eq!(attributes.0[..12], [16, 0, 7, 0x80, 12, 0, 1, 0x80, 8, 0, 1, 0]);
    }

    #[test]
    fn every_answer_is_read_or_refused() {
        let mut attributes = Attributes::default();
        attributes.add(FAMILY_ID, &[5, 1]);
        attributes.add(9, &[1; 5]);
        let told = message(CONTROL, 1, 1, &attributes);
        let Some((Part::Told(found), [])) = next_part(&told) else { panic!("it has attributes") };
        assert_eq!(find(found, FAMILY_ID), Some(&[5, 1][..]));
        assert_eq!(find(found, 9), Some(&[1; 5][..]));
        assert_eq!(find(found, 3), None);
        let mut ended = [20, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xf0, 0xff, 0xff, 0xff];
        assert!(matches!(next_part(&ended), Some((Part::Ended(Err(Errno::BUSY)), []))));
        ended[16..].fill(0);
        assert!(matches!(next_part(&ended), Some((Part::Ended(Ok(())), []))));
        for len in 0..told.len() {
            assert!(next_part(&told[..len]).is_none());
        }
        for wrong in [&[3, 0, 1, 0][..], &[0, 0, 1, 0], &[9, 0, 1, 0, 1]] {
            assert_eq!(find(wrong, 1), None, "{wrong:?}");
        }
    }
}
