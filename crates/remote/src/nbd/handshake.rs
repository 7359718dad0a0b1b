//! Agreement of client and server before the first request.

use super::address::{Endpoint, NbdAddress};
use super::protocol::{
    BASE_ALLOCATION, FIXED_NEWSTYLE, NO_ZEROES, OLD_STYLE_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    SERVER_MAGIC, info, option, option_reply,
};
use super::wire::Style;
use crate::network::{Network, Reach};
use crate::stream::Stream;
use crate::tls::Tls;
use std::io;
use std::time::Instant;

/// The longest reply to an option that is taken.
const LONGEST_REPLY: u32 = 64 << 10;
/// The most replies to one option.
const MOST_REPLIES: usize = 256;
/// The most bytes of a read or write that a server takes which says nothing about it.
const USUAL_MOST: u32 = 32 << 20;

/// The export, and how one speaks of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Export {
    /// Bytes.
    pub(super) size: u64,
    /// Capabilities, as in [`super::protocol::export`].
    pub(super) flags: u16,
    pub(super) style: Style,
    /// Bytes; a power of two.
    pub(super) smallest_block: u32,
    /// The most bytes of a read or write.
    pub(super) most_payload: u32,
    /// Number of each metadata context that the server has.
    pub(super) contexts: Vec<(String, u32)>,
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) errno: i32,
    pub(super) reason: String,
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(match error.kind() {
            io::ErrorKind::TimedOut => libc::ETIMEDOUT,
            io::ErrorKind::NotFound => libc::ENOENT,
            _ => libc::EIO,
        });
        let text = error.to_string();
        let reason = text.rfind(" (os error ").map_or(text.as_str(), |end| &text[..end]).to_owned();
        Self { errno, reason }
    }
}

fn breach(reason: impl Into<String>) -> Refused {
    Refused { errno: libc::EPROTO, reason: reason.into() }
}

/// Connects and agrees with the server. `contexts` are asked for beside `base:allocation`.
pub(super) fn connect(
    network: &Network,
    address: &NbdAddress,
    tls: Option<&Tls>,
    contexts: &[String],
    until: Instant,
) -> Result<(Stream, Export), Refused> {
    let mut stream = match &address.endpoint {
        Endpoint::Tcp { host, port } => Stream::of_tcp(network.tcp(host, *port, Reach::Any, until)?, until),
        Endpoint::Unix(path) => Stream::of_unix(network.unix(path, until)?, until),
    };
    let export = Handshake { stream: &mut stream, export: &address.export }.run(tls, contexts)?;
    stream.set_nonblocking()?;
    Ok((stream, export))
}

struct Handshake<'a> {
    stream: &'a mut Stream,
    export: &'a str,
}

/// A reply to an option.
struct Reply {
    kind: u32,
    data: Vec<u8>,
}

impl Reply {
    fn is_error(&self) -> bool {
        self.kind & option_reply::ERROR != 0
    }

    /// The error, in the server's words if it has any.
    fn refused(&self, what: &str) -> Refused {
        let (errno, why) = match self.kind {
            option_reply::UNSUPPORTED => (libc::EOPNOTSUPP, "the server has no such option"),
            option_reply::POLICY => (libc::EPERM, "its policy forbids it"),
            option_reply::TLS_REQUIRED => (libc::EPERM, "TLS is required: use nbds://"),
            option_reply::UNKNOWN => (libc::ENOENT, "there is no such export"),
            option_reply::BLOCK_SIZE_REQUIRED => (libc::EINVAL, "it needs larger blocks"),
            _ => (libc::EIO, "it says no"),
        };
        let text: String =
            String::from_utf8_lossy(&self.data).chars().filter(|c| !c.is_control()).take(200).collect();
        let reason =
            if text.is_empty() { format!("{what}: {why}") } else { format!("{what}: {why} ({text})") };
        Refused { errno, reason }
    }
}

impl Handshake<'_> {
    fn run(&mut self, tls: Option<&Tls>, contexts: &[String]) -> Result<Export, Refused> {
        let flags = self.greet()?;
        if let Some(tls) = tls {
            self.send(option::STARTTLS, &[])?;
            let reply = self.reply(option::STARTTLS)?;
            if reply.kind != option_reply::ACK {
                return Err(reply.refused("the server does not start TLS"));
            }
            self.stream.start_tls(tls)?;
        }
        let style = if self.agree(option::EXTENDED_HEADERS)? {
            Style::Extended
        } else if self.agree(option::STRUCTURED_REPLY)? {
            Style::Structured
        } else {
            Style::Simple
        };
        let contexts = if style == Style::Simple { Vec::new() } else { self.choose_contexts(contexts)? };
        let mut export =
            Export { size: 0, flags: 0, style, smallest_block: 1, most_payload: USUAL_MOST, contexts };
        if !self.go(&mut export)? {
            self.export_name(flags & NO_ZEROES != 0, &mut export)?;
        }
        if export.size > i64::MAX as u64 {
            return Err(breach(format!("an export of {} bytes can't be", export.size)));
        }
        Ok(export)
    }

    /// The first words of both sides; the server's flags.
    fn greet(&mut self) -> Result<u16, Refused> {
        let mut words = [0; 18];
        self.stream.read_exact(&mut words[..16])?;
        let (first, second) = (word64(&words[..8]), word64(&words[8..16]));
        if first != SERVER_MAGIC {
            return Err(breach("this is no NBD server"));
        }
        if second == OLD_STYLE_MAGIC {
            return Err(Refused {
                errno: libc::EOPNOTSUPP,
                reason: "the server speaks the old style of NBD, which has no exports: newstyle is needed"
                    .to_owned(),
            });
        }
        if second != OPTION_MAGIC {
            return Err(breach("this is no NBD server"));
        }
        self.stream.read_exact(&mut words[16..])?;
        let flags = u16::from_be_bytes([words[16], words[17]]);
        if flags & FIXED_NEWSTYLE == 0 {
            return Err(Refused {
                errno: libc::EOPNOTSUPP,
                reason: "the server's options can't fail: one with fixed newstyle is needed".to_owned(),
            });
        }
        let ours = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
        self.stream.write_all(&ours.to_be_bytes())?;
        Ok(flags)
    }

    fn send(&mut self, option: u32, data: &[u8]) -> Result<(), Refused> {
        let mut bytes = Vec::with_capacity(16 + data.len());
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        Ok(self.stream.write_all(&bytes)?)
    }

    fn reply(&mut self, option: u32) -> Result<Reply, Refused> {
        let mut head = [0; 20];
        self.stream.read_exact(&mut head)?;
        let (magic, to) = (word64(&head[..8]), word32(&head[8..12]));
        if magic != OPTION_REPLY_MAGIC || to != option {
            return Err(breach("the server answers an option that it was not sent"));
        }
        let (kind, len) = (word32(&head[12..16]), word32(&head[16..20]));
        if len > LONGEST_REPLY {
            return Err(breach(format!("the server's answer to an option has {len} bytes")));
        }
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data)?;
        Ok(Reply { kind, data })
    }

    /// Whether the server takes an option without data.
    fn agree(&mut self, option: u32) -> Result<bool, Refused> {
        self.send(option, &[])?;
        let reply = self.reply(option)?;
        if reply.kind == option_reply::TLS_REQUIRED {
            return Err(reply.refused("the server refuses"));
        }
        Ok(reply.kind == option_reply::ACK)
    }

    fn choose_contexts(&mut self, more: &[String]) -> Result<Vec<(String, u32)>, Refused> {
        let mut data = Vec::new();
        put_text(&mut data, self.export);
        data.extend((1 + more.len() as u32).to_be_bytes());
        for context in [BASE_ALLOCATION].into_iter().chain(more.iter().map(String::as_str)) {
            put_text(&mut data, context);
        }
        self.send(option::SET_META_CONTEXT, &data)?;
        let mut chosen = Vec::new();
        for _ in 0..MOST_REPLIES {
            let reply = self.reply(option::SET_META_CONTEXT)?;
            match reply.kind {
                option_reply::ACK => return Ok(chosen),
                option_reply::META_CONTEXT if reply.data.len() > 4 => {
                    let name = String::from_utf8_lossy(&reply.data[4..]).into_owned();
                    chosen.push((name, word32(&reply.data[..4])));
                }
                // Whether there is such an export shows at the next option.
                _ if reply.is_error() => return Ok(Vec::new()),
                _ => return Err(breach("the server's answer about contexts makes no sense")),
            }
        }
        Err(breach("the server's answers to an option have no end"))
    }

    /// Asks for the export; false if the server does not know the option.
    fn go(&mut self, export: &mut Export) -> Result<bool, Refused> {
        let mut data = Vec::new();
        put_text(&mut data, self.export);
        data.extend(1u16.to_be_bytes());
        data.extend(info::BLOCK_SIZE.to_be_bytes());
        self.send(option::GO, &data)?;
        let mut has_size = false;
        for _ in 0..MOST_REPLIES {
            let reply = self.reply(option::GO)?;
            match reply.kind {
                option_reply::ACK if has_size => return Ok(true),
                option_reply::ACK => return Err(breach("the server says nothing of the export's size")),
                option_reply::INFO => has_size |= take_info(&reply.data, export)?,
                option_reply::UNSUPPORTED => return Ok(false),
                _ if reply.is_error() => {
                    return Err(reply.refused(&format!("the server refuses the export '{}'", self.export)));
                }
                _ => return Err(breach("the server's answer about the export makes no sense")),
            }
        }
        Err(breach("the server's answers to an option have no end"))
    }

    /// The older way to ask for the export. A server that has it not closes the connection.
    fn export_name(&mut self, is_short: bool, export: &mut Export) -> Result<(), Refused> {
        self.send(option::EXPORT_NAME, self.export.as_bytes())?;
        let mut facts = [0; 10];
        self.stream.read_exact(&mut facts)?;
        export.size = word64(&facts[..8]);
        export.flags = u16::from_be_bytes([facts[8], facts[9]]);
        if !is_short {
            self.stream.read_exact(&mut [0; 124])?;
        }
        Ok(())
    }
}

/// Takes one piece of information; true if it was the size.
fn take_info(data: &[u8], export: &mut Export) -> Result<bool, Refused> {
    let kind = data.get(..2).map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
    match (kind, data.len()) {
        (Some(info::EXPORT), 12) => {
            export.size = word64(&data[2..10]);
            export.flags = u16::from_be_bytes([data[10], data[11]]);
            Ok(true)
        }
        (Some(info::BLOCK_SIZE), 14) => {
            let (smallest, most) = (word32(&data[2..6]), word32(&data[10..14]));
            if !smallest.is_power_of_two() || smallest > 64 << 10 || most < smallest {
                return Err(breach(format!("block sizes from {smallest} to {most} bytes can't be")));
            }
            export.smallest_block = smallest;
            // Blocks are whole in every part.
            export.most_payload = most.min(USUAL_MOST) / smallest * smallest;
            Ok(false)
        }
        (Some(info::EXPORT | info::BLOCK_SIZE) | None, _) => {
            Err(breach("the server's words about the export are of a wrong length"))
        }
        _ => Ok(false),
    }
}

fn put_text(data: &mut Vec<u8>, text: &str) {
    data.extend((text.len() as u32).to_be_bytes());
    data.extend(text.as_bytes());
}

fn word64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn word32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
}
