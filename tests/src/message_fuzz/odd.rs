//! Numbers, descriptors and bytes that programs have trouble with.

use crate::random::Random;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Descriptors that go with a message, at most.
pub(super) const MOST_DESCRIPTORS: usize = 8;

/// A number that is small, large, or at a limit.
pub(super) fn number(random: &mut Random) -> u64 {
    match random.below(6) {
        0 => random.below(5),
        1 => random.below(1 << 16),
        2 => (1u64 << random.below(64)).wrapping_add(random.below(3)).wrapping_sub(1),
        3 => u64::MAX - random.below(4096),
        4 => random.below(64 << 20) & !511,
        _ => random.bits(),
    }
}

/// Changes some bytes, cuts or adds some.
pub(super) fn spoil(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..random.between(1, 3) {
        match random.below(4) {
            0 if !bytes.is_empty() => {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.bits() as u8;
            }
            1 if bytes.len() >= 8 => {
                let at = random.below(bytes.len() as u64 - 7) as usize;
                let value = number(random);
                bytes[at..at + 8].copy_from_slice(&value.to_ne_bytes());
            }
            2 => bytes.truncate(random.below(bytes.len() as u64 + 1) as usize),
            _ => bytes.extend((0..random.below(40)).map(|_| random.bits() as u8)),
        }
    }
}

/// A descriptor of some kind.
pub(super) fn descriptor(random: &mut Random) -> OwnedFd {
    let made: io::Result<OwnedFd> = (|| {
        Ok(match random.below(7) {
            0 => eventfd(0, EventfdFlags::CLOEXEC)?,
            1 => {
                let full = eventfd(0, EventfdFlags::CLOEXEC)?;
                rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes())?;
                full
            }
            2 => io::pipe()?.0.into(),
            3 => io::pipe()?.1.into(),
            4 => std::fs::File::open("/dev/zero")?.into(),
            5 => UnixStream::pair()?.0.into(),
            _ => {
                let file = memfd_create("odd", MemfdFlags::CLOEXEC)?;
                ftruncate(&file, random.below(1 << 20))?;
                file
            }
        })
    })();
    made.expect("a descriptor")
}

/// Sends bytes with descriptors; false if the other side takes no more.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) -> bool {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().take(MOST_DESCRIPTORS).map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let sent =
        sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    sent.is_ok_and(|count| count == bytes.len())
}

/// Takes what has come; false at the end.
pub(super) fn drain(mut stream: &UnixStream) -> bool {
    let mut bytes = [0; 16384];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => {
                return matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            }
        }
    }
}
