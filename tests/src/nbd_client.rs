//! A small NBD client that says whatever a test wants it to, right or wrong. Written from the protocol's description.

use crate::patience::LONGEST;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Options.
pub mod option {
    #![allow(missing_docs)]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Commands.
pub mod command {
    #![allow(missing_docs)]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// The reply to an option: an acknowledgement.
pub const ACK: u32 = 1;
/// The reply to an option: a context.
pub const META_CONTEXT: u32 = 4;
/// The replies to an option that are errors have this bit.
pub const ERROR: u32 = 1 << 31;

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    extended: bool,
}

/// A chunk of a reply, or a simple reply (of type 0).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The request that it answers.
    pub cookie: u64,
    /// Type of the chunk.
    pub kind: u16,
    /// Whether it is the last of its reply.
    pub done: bool,
    /// The error, or 0.
    pub error: u32,
    /// The data that follows.
    pub data: Vec<u8>,
}

impl Client {
    /// Connects, and takes the server's greeting.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LONGEST))?;
        let mut client = Self { stream, extended: false };
        let hello = client.take(18)?;
        assert_eq!(&hello[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(hello[17] & 3, 3, "fixed newstyle, no zeroes");
        Ok(client)
    }

    /// Connects and says the usual flags.
    pub fn start(socket: &Path) -> io::Result<Self> {
        let mut client = Self::connect(socket)?;
        client.say(&3u32.to_be_bytes())?;
        Ok(client)
    }

    /// Connects and uses an export, with structured replies.
    pub fn open(socket: &Path, export: &str) -> io::Result<Self> {
        in_time(|| {
            let mut client = Self::start(socket)?;
            assert_eq!(client.ask(option::STRUCTURED_REPLY, b"")?.0, ACK);
            client.go(export)?;
            Ok(client)
        })
    }

    /// Connects and uses an export, with extended headers.
    pub fn open_extended(socket: &Path, export: &str) -> io::Result<Self> {
        in_time(|| {
            let mut client = Self::start(socket)?;
            assert_eq!(client.ask(option::EXTENDED_HEADERS, b"")?.0, ACK);
            client.go_extended(export)?;
            Ok(client)
        })
    }

    /// As [`Client::go`], after extended headers were agreed on.
    pub fn go_extended(&mut self, export: &str) -> io::Result<(u64, u16)> {
        self.extended = true;
        self.go(export)
    }

    /// Uses an export; its size and flags.
    pub fn go(&mut self, export: &str) -> io::Result<(u64, u16)> {
        let data = [&(export.len() as u32).to_be_bytes()[..], export.as_bytes(), &[0, 0]].concat();
        self.option(option::GO, &data)?;
        let mut found = None;
        loop {
            let (kind, data) = self.option_reply(option::GO)?;
            match kind {
                ACK => return found.ok_or_else(|| io::Error::other("no information")),
                3 if data.starts_with(&[0, 0]) => {
                    let size = u64::from_be_bytes(data[2..10].try_into().expect("8 bytes"));
                    found = Some((size, u16::from_be_bytes(data[10..12].try_into().expect("2 bytes"))));
                }
                3 => {}
                kind => return Err(io::Error::other(format!("reply {kind:#x}"))),
            }
        }
    }

    /// Chooses contexts of an export; their numbers.
    pub fn contexts(&mut self, export: &str, names: &[&str]) -> io::Result<Vec<u32>> {
        let counted = |name: &str| [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat();
        let mut data = counted(export);
        data.extend((names.len() as u32).to_be_bytes());
        for name in names {
            data.extend(counted(name));
        }
        self.option(option::SET_META_CONTEXT, &data)?;
        let mut ids = Vec::new();
        loop {
            match self.option_reply(option::SET_META_CONTEXT)? {
                (ACK, _) => return Ok(ids),
                (META_CONTEXT, data) => {
                    ids.push(u32::from_be_bytes(data[..4].try_into().expect("4 bytes")));
                }
                (kind, _) => return Err(io::Error::other(format!("reply {kind:#x}"))),
            }
        }
    }

    /// Says an option.
    pub fn option(&mut self, code: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.say(&bytes)
    }

    /// One reply to an option: its type and data.
    pub fn option_reply(&mut self, code: u32) -> io::Result<(u32, Vec<u8>)> {
        let head = self.take(20)?;
        assert_eq!(head[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
        assert_eq!(head[8..12], code.to_be_bytes());
        let len = u32::from_be_bytes(head[16..20].try_into().expect("4 bytes"));
        let data = self.take(len as usize)?;
        Ok((u32::from_be_bytes(head[12..16].try_into().expect("4 bytes")), data))
    }

    /// Says an option and takes one reply.
    pub fn ask(&mut self, code: u32, data: &[u8]) -> io::Result<(u32, Vec<u8>)> {
        self.option(code, data)?;
        self.option_reply(code)
    }

    /// Sends a request; whatever payload there is follows with [`Client::say`].
    pub fn request(
        &mut self,
        flags: u16,
        command: u16,
        cookie: u64,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let bytes = self.header(flags, command, cookie, offset, len);
        self.say(&bytes)
    }

    /// The header of a request.
    pub fn header(&self, flags: u16, command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
        let magic: u32 = if self.extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if self.extended {
            bytes.extend(len.to_be_bytes());
        } else {
            bytes.extend((len as u32).to_be_bytes());
        }
        bytes
    }

    /// The next reply; that of a read without structured replies must not be taken with this.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let magic = self.number(4)?;
        match magic {
            0x6744_6698 => {
                let error = self.number(4)? as u32;
                let cookie = self.number(8)?;
                Ok(Reply { cookie, kind: 0, done: true, error, data: Vec::new() })
            }
            0x668e_33ef | 0x6e8a_278c => {
                let (flags, kind) = (self.number(2)?, self.number(2)? as u16);
                let cookie = self.number(8)?;
                let len = if magic == 0x6e8a_278c {
                    self.number(8)?;
                    self.number(8)?
                } else {
                    self.number(4)?
                };
                let data = self.take(len as usize)?;
                let is_error = kind & (1 << 15) != 0;
                let error =
                    if is_error { u32::from_be_bytes(data[..4].try_into().expect("4 bytes")) } else { 0 };
                Ok(Reply { cookie, kind, done: flags & 1 != 0, error, data })
            }
            magic => Err(io::Error::other(format!("{magic:#x} is no reply"))),
        }
    }

    /// Writes and waits for the reply; the error, or 0.
    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> io::Result<u32> {
        let mut bytes = self.header(flags, command::WRITE, 1, offset, data.len() as u64);
        bytes.extend(data);
        self.say(&bytes)?;
        Ok(self.reply()?.error)
    }

    /// Sends a request without payload and waits for a reply of one chunk.
    pub fn call(&mut self, flags: u16, command: u16, offset: u64, len: u64) -> io::Result<Reply> {
        self.request(flags, command, 2, offset, len)?;
        let reply = self.reply()?;
        assert_eq!(reply.cookie, 2);
        Ok(reply)
    }

    /// Reads.
    pub fn read(&mut self, offset: u64, len: u64) -> io::Result<Vec<u8>> {
        let reply = self.call(0, command::READ, offset, len)?;
        if reply.error != 0 || !reply.done {
            return Err(io::Error::other(format!("error {}", reply.error)));
        }
        assert_eq!(reply.data[..8], offset.to_be_bytes());
        Ok(reply.data[8..].to_vec())
    }

    /// Sends bytes.
    pub fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Receives bytes.
    pub fn take(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn number(&mut self, len: usize) -> io::Result<u64> {
        Ok(self.take(len)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Whether the server has closed the connection, or does within a minute.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    /// The connection itself.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }
}

/// A client that comes again if a busy machine took more time for its handshake than servers give.
fn in_time(comes: impl Fn() -> io::Result<Client>) -> io::Result<Client> {
    /// Time that a server gives for a handshake if it is not told otherwise.
    const HANDSHAKE: Duration = Duration::from_secs(10);
    loop {
        let began = Instant::now();
        match comes() {
            Err(error) if is_end(&error) && began.elapsed() >= HANDSHAKE => {}
            found => return found,
        }
    }
}

/// Tells whether the other side has closed the connection.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}
