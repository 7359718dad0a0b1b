//! `qemu-nbd -L`: the exports of an NBD server, by the options of its handshake.

use crate::failure::{Failure, errno_text};
use crate::output::printable::printable;
use crate::output::stdout;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use zebu_remote::nbd::TlsClient;
use zebu_tls::Session;

/// Seconds that the server may take for each step.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a reply at most.
const MAX_REPLY: u32 = 64 << 10;
/// Replies to one option at most.
const MAX_REPLIES: usize = 10_000;

const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

const OPT_ABORT: u32 = 2;
const OPT_LIST: u32 = 3;
const OPT_STARTTLS: u32 = 5;
const OPT_INFO: u32 = 6;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_LIST_META_CONTEXT: u32 = 9;
const OPT_EXTENDED_HEADERS: u32 = 11;

const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
/// Set in the types of replies that refuse.
const REP_ERROR: u32 = 1 << 31;
const REP_MAGIC: u64 = 0x0003_e889_0455_65a9;

const INFO_EXPORT: u16 = 0;
const INFO_DESCRIPTION: u16 = 2;
const INFO_BLOCK_SIZE: u16 = 3;

/// Names of the transmission flags from bit 1 on.
const FLAGS: [&str; 12] = [
    "readonly",
    "flush",
    "fua",
    "rotational",
    "trim",
    "zeroes",
    "df",
    "multi",
    "resize",
    "cache",
    "fast-zero",
    "block-status-payload",
];

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Server {
    /// A Unix socket.
    Unix(PathBuf),
    /// Host and port.
    Tcp(String, u16),
}

/// Everything that a server tells of an export.
#[derive(Debug, Default)]
struct Listed {
    name: String,
    description: String,
    size: u64,
    flags: u16,
    blocks: Option<[u32; 3]>,
    contexts: Vec<String>,
}

/// Prints the list.
pub(crate) fn run(server: &Server, tls: Option<&TlsClient>) -> Result<u8, Failure> {
    let text = match server {
        Server::Unix(path) => {
            let connected = UnixStream::connect(path).and_then(|stream| {
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Ok(stream)
            });
            list(connected.map_err(|error| refused(&path.display().to_string(), &error))?, tls)
        }
        Server::Tcp(host, port) => {
            let connected = TcpStream::connect((host.as_str(), *port)).and_then(|stream| {
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Ok(stream)
            });
            list(connected.map_err(|error| refused(&format!("{host}:{port}"), &error))?, tls)
        }
    };
    stdout::print(&text.map_err(|error| Failure::new(format!("Failed to list exports: {error}")))?)?;
    Ok(0)
}

fn refused(server: &str, error: &io::Error) -> Failure {
    let reason = error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
    Failure::new(format!("Failed to connect to '{server}': {reason}"))
}

/// A reply: its type and its payload.
type Reply = (u32, Vec<u8>);

/// The options of a connection.
struct Options<S>(S);

fn lies(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server does not speak NBD: {what}"))
}

fn list<S: Read + Write>(stream: S, tls: Option<&TlsClient>) -> io::Result<String> {
    let mut options = Options(stream);
    options.begin()?;
    let Some(tls) = tls else { return list_options(options) };
    if !options.asks(OPT_STARTTLS)? {
        return Err(io::Error::other("the server does not use TLS"));
    }
    list_options(Options(Secure::start(options.0, tls)?))
}

/// A connection under TLS.
struct Secure<S> {
    socket: S,
    session: Session,
}

impl<S: Read + Write> Secure<S> {
    fn start(socket: S, tls: &TlsClient) -> io::Result<Self> {
        let mut secure = Self { socket, session: tls.session()? };
        while secure.session.is_handshaking() || secure.session.wants_to_send() {
            secure.flush()?;
            if secure.session.is_handshaking() {
                secure.receive()?;
            }
        }
        Ok(secure)
    }

    fn receive(&mut self) -> io::Result<()> {
        if self.session.receive_from(&mut self.socket)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let processed = self.session.process();
        // The alert, which says to the server why.
        let sent = self.flush();
        processed?;
        sent
    }
}

impl<S: Read + Write> Read for Secure<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.receive()?,
                result => return result,
            }
        }
    }
}

impl<S: Read + Write> Write for Secure<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.session.write_all(bytes)?;
        self.flush()?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.session.wants_to_send() {
            self.session.send_to(&mut self.socket)?;
        }
        Ok(())
    }
}

fn list_options<S: Read + Write>(mut options: Options<S>) -> io::Result<String> {
    let extended = options.asks(OPT_EXTENDED_HEADERS)?;
    let structured = extended || options.asks(OPT_STRUCTURED_REPLY)?;
    let mut exports = options.names()?;
    for export in &mut exports {
        options.describe(export, structured)?;
    }
    options.send(OPT_ABORT, &[])?;
    let mut text = format!("exports available: {}\n", exports.len());
    for export in &exports {
        push(&mut text, export, extended);
    }
    Ok(text)
}

impl<S: Read + Write> Options<S> {
    fn read<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn begin(&mut self) -> io::Result<()> {
        if &self.read::<16>()? != b"NBDMAGICIHAVEOPT" {
            return Err(lies("its greeting is another one"));
        }
        let flags = u16::from_be_bytes(self.read()?);
        if flags & FIXED_NEWSTYLE == 0 {
            return Err(lies("it has no fixed newstyle"));
        }
        self.0.write_all(&u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes())
    }

    fn send(&mut self, option: u32, payload: &[u8]) -> io::Result<()> {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        self.0.write_all(&bytes)
    }

    /// A reply to `option`: its type and payload.
    fn reply(&mut self, option: u32) -> io::Result<Reply> {
        let magic = u64::from_be_bytes(self.read()?);
        let of = u32::from_be_bytes(self.read()?);
        let kind = u32::from_be_bytes(self.read()?);
        let length = u32::from_be_bytes(self.read()?);
        if magic != REP_MAGIC || of != option || length > MAX_REPLY {
            return Err(lies("a reply is malformed"));
        }
        let mut payload = vec![0; length as usize];
        self.0.read_exact(&mut payload)?;
        Ok((kind, payload))
    }

    /// All replies to an option up to the last; `None` if the server refuses it.
    fn ask(&mut self, option: u32, payload: &[u8]) -> io::Result<Option<Vec<Reply>>> {
        self.send(option, payload)?;
        let mut replies = Vec::new();
        loop {
            match self.reply(option)? {
                (REP_ACK, _) => return Ok(Some(replies)),
                (kind, _) if kind & REP_ERROR != 0 => return Ok(None),
                reply if replies.len() < MAX_REPLIES => replies.push(reply),
                _ => return Err(lies("it never ends a list")),
            }
        }
    }

    fn asks(&mut self, option: u32) -> io::Result<bool> {
        Ok(self.ask(option, &[])?.is_some())
    }

    fn names(&mut self) -> io::Result<Vec<Listed>> {
        let Some(replies) = self.ask(OPT_LIST, &[])? else {
            return Err(io::Error::other("the server does not list its exports"));
        };
        let listed = replies.iter().filter(|(kind, _)| *kind == REP_SERVER).map(|(_, payload)| {
            let (length, rest) = payload.split_first_chunk().ok_or_else(|| lies("a name is cut off"))?;
            let length = u32::from_be_bytes(*length) as usize;
            let (name, description) =
                rest.split_at_checked(length).ok_or_else(|| lies("a name is cut off"))?;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            Ok(Listed { name: text(name), description: text(description), ..Listed::default() })
        });
        listed.collect()
    }

    fn describe(&mut self, export: &mut Listed, structured: bool) -> io::Result<()> {
        let mut payload = (export.name.len() as u32).to_be_bytes().to_vec();
        payload.extend(export.name.as_bytes());
        let mut query = payload.clone();
        query.extend(2_u16.to_be_bytes());
        query.extend(INFO_DESCRIPTION.to_be_bytes());
        query.extend(INFO_BLOCK_SIZE.to_be_bytes());
        for (_, info) in
            self.ask(OPT_INFO, &query)?.unwrap_or_default().iter().filter(|(k, _)| *k == REP_INFO)
        {
            let Some((kind, rest)) = info.split_first_chunk() else { continue };
            match (u16::from_be_bytes(*kind), rest) {
                (INFO_EXPORT, [size @ .., a, b]) if size.len() == 8 => {
                    export.size = size.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                    export.flags = u16::from_be_bytes([*a, *b]);
                }
                (INFO_BLOCK_SIZE, sizes) if sizes.len() == 12 => {
                    let size =
                        |at: usize| sizes[at..at + 4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
                    export.blocks = Some([size(0), size(4), size(8)]);
                }
                (INFO_DESCRIPTION, text) => export.description = String::from_utf8_lossy(text).into_owned(),
                _ => {}
            }
        }
        if structured {
            payload.extend(0_u32.to_be_bytes());
            let found = self.ask(OPT_LIST_META_CONTEXT, &payload)?.unwrap_or_default();
            let contexts = found.iter().filter(|(kind, _)| *kind == REP_META_CONTEXT);
            let names = contexts.filter_map(|(_, context)| context.get(4..));
            export.contexts = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        }
        Ok(())
    }
}

/// An export, in the lines of qemu-nbd.
fn push(text: &mut String, export: &Listed, extended: bool) {
    let _ = writeln!(text, " export: '{}'", printable(&export.name));
    if !export.description.is_empty() {
        let _ = writeln!(text, "  description: {}", printable(&export.description));
    }
    let _ = writeln!(text, "  size:  {}", export.size);
    let names = (1..).zip(FLAGS).filter(|(bit, _)| export.flags & (1 << bit) != 0);
    let names: Vec<&str> = names.map(|(_, name)| name).collect();
    let _ = writeln!(text, "  flags: {:#x} ( {} )", export.flags, names.join(" "));
    if let Some([smallest, preferred, largest]) = export.blocks {
        let _ = writeln!(text, "  min block: {smallest}\n  opt block: {preferred}\n  max block: {largest}");
    }
    let _ = writeln!(text, "  transaction size: {}-bit", if extended { 64 } else { 32 });
    if !export.contexts.is_empty() {
        let _ = writeln!(text, "  available meta contexts: {}", export.contexts.len());
        for context in &export.contexts {
            let _ = writeln!(text, "   {}", printable(context));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_lies_is_told_of() {
        let mut greeting = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
        for (reply, told) in [
            (vec![0; 20], "a reply is malformed"),
            (
                [&REP_MAGIC.to_be_bytes()[..], &[0, 0, 0, 11, 0, 0, 0, 1, 255, 255, 255, 255]].concat(),
                "malformed",
            ),
        ] {
            let mut answers = greeting.clone();
            answers.extend(reply);
            let error = list(Recorded(answers.into()), None).unwrap_err();
            assert!(error.to_string().contains(told), "{error}");
        }
        greeting[0] = b'X';
        assert!(
            list(Recorded(greeting.into()), None).unwrap_err().to_string().contains("does not speak NBD")
        );
    }

    /// A server whose answers are known.
    struct Recorded(std::collections::VecDeque<u8>);

    impl Read for Recorded {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.0.read(bytes)
        }
    }

    impl Write for Recorded {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
