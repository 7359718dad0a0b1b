//! The client's side of NBD's handshake, after which the kernel takes the connection over. The server is this process.

use crate::nbd::protocol::{HandshakeFlags, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, info, option};
use std::io::{self, Read, Write};

/// Kinds of replies to an option.
const ACK: u32 = 1;
const INFO: u32 = 3;
/// Bytes of a reply that is no error's text, at most.
const MAX_REPLY: u32 = 64 << 10;

/// The server's description of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Agreed {
    /// Bytes of the disk.
    pub(super) size: u64,
    pub(super) flags: u16,
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server's handshake: {what}"))
}

fn array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Chooses the export of this name; requests may follow.
pub(super) fn choose(stream: &mut (impl Read + Write), name: &str) -> io::Result<Agreed> {
    let is_server = u64::from_be_bytes(array(stream)?) == SERVER_MAGIC;
    if !is_server || u64::from_be_bytes(array(stream)?) != OPTION_MAGIC {
        return Err(wrong("it is none"));
    }
    let _: [u8; 2] = array(stream)?;
    let flags = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
    let mut asked = flags.bits().to_be_bytes().to_vec();
    asked.extend(OPTION_MAGIC.to_be_bytes());
    asked.extend(option::GO.to_be_bytes());
    asked.extend((name.len() as u32 + 6).to_be_bytes());
    asked.extend((name.len() as u32).to_be_bytes());
    asked.extend(name.as_bytes());
    asked.extend([0; 2]);
    stream.write_all(&asked)?;
    let mut agreed = None;
    loop {
        if u64::from_be_bytes(array(stream)?) != OPTION_REPLY_MAGIC {
            return Err(wrong("a reply is none"));
        }
        let _: [u8; 4] = array(stream)?;
        let (kind, len) = (u32::from_be_bytes(array(stream)?), u32::from_be_bytes(array(stream)?));
        if len > MAX_REPLY {
            return Err(wrong("a reply is too long"));
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        match (kind, &data[..]) {
            (ACK, _) => return agreed.ok_or_else(|| wrong("the export's size is missing")),
            (INFO, [k0, k1, size @ .., f0, f1]) if u16::from_be_bytes([*k0, *k1]) == info::EXPORT => {
                let size = size.try_into().map_err(|_| wrong("the export's size"))?;
                let flags = u16::from_be_bytes([*f0, *f1]);
                agreed = Some(Agreed { size: u64::from_be_bytes(size), flags });
            }
            (INFO, _) => {}
            (error, text) => {
                return Err(wrong(&format!("error {error:#x}: {}", String::from_utf8_lossy(text))));
            }
        }
    }
}
