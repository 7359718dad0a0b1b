//! `qemu-nbd -L`: the exports of an NBD server, by the options of its handshake.

mod error;
mod options;
mod reply;
mod secure;

use crate::failure::Failure;
use crate::output::stdout;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use zebu_disks::{errno_text, printable};
use zebu_remote::nbd::TlsClient;

use error::{ListError, fault};
use options::Options;
use reply::{Listed, OPT_EXTENDED_HEADERS, OPT_STARTTLS, OPT_STRUCTURED_REPLY};
use secure::Secure;

/// Seconds that the server may take for each step.
const PATIENCE: Duration = Duration::from_secs(30);
/// Transmission flag of an export that has any.
const HAS_FLAGS: u16 = 1;
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
    stdout::print(&text.map_err(|error| Failure::new(error.to_string()))?)?;
    Ok(0)
}

fn refused(server: &str, error: &io::Error) -> Failure {
    let reason = error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
    Failure::new(format!("Failed to connect to '{server}': {reason}"))
}

fn list<S: Read + Write>(stream: S, tls: Option<&TlsClient>) -> Result<String, ListError> {
    let mut options = Options::new(stream);
    options.begin()?;
    let Some(tls) = tls else { return list_options(options) };
    if !options.asks(OPT_STARTTLS)? {
        return fault("Server don't support STARTTLS option");
    }
    let secure = Secure::start(options.into_stream(), tls);
    let secure = secure.or_else(|error| fault(format!("TLS handshake failed: {error}")))?;
    list_options(Options::new(secure))
}

fn list_options<S: Read + Write>(mut options: Options<S>) -> Result<String, ListError> {
    let extended = options.asks(OPT_EXTENDED_HEADERS)?;
    let structured = extended || options.asks(OPT_STRUCTURED_REPLY)?;
    let mut exports = options.names()?;
    for export in &mut exports {
        // Whoever does not know the one option knows no contexts, and so for the other exports.
        if !options.describe(export)? {
            break;
        }
        if structured {
            options.contexts(export)?;
        }
    }
    options.end()?;
    let mut text = format!("exports available: {}\n", exports.len());
    for export in &exports {
        push(&mut text, export, extended);
    }
    Ok(text)
}

/// An export, in the lines of qemu-nbd.
fn push(text: &mut String, export: &Listed, extended: bool) {
    let _ = writeln!(text, " export: '{}'", printable(&String::from_utf8_lossy(&export.name)));
    if !export.description.is_empty() {
        let _ = writeln!(text, "  description: {}", printable(&export.description));
    }
    if let Some((size, flags)) = export.size.filter(|(_, flags)| flags & HAS_FLAGS != 0) {
        let names = (1..).zip(FLAGS).filter(|(bit, _)| flags & (1 << bit) != 0);
        let names: Vec<&str> = names.map(|(_, name)| name).chain([")"]).collect();
        let _ = writeln!(text, "  size:  {size}\n  flags: {flags:#x} ( {}", names.join(" "));
    }
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

    const MAGIC: u64 = 0x0003_e889_0455_65a9;

    fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
        let words = [option, kind, payload.len() as u32].map(u32::to_be_bytes).concat();
        [&MAGIC.to_be_bytes()[..], &words, payload].concat()
    }

    /// List of a server that answers so, behind its greeting and its refusal of the first two options.
    fn listed(replies: &[Vec<u8>]) -> Result<String, String> {
        let unsupported = 1 << 31 | 1;
        let answers = [
            b"NBDMAGICIHAVEOPT\x00\x03".to_vec(),
            reply(OPT_EXTENDED_HEADERS, unsupported, &[]),
            reply(OPT_STRUCTURED_REPLY, unsupported, &[]),
            replies.concat(),
        ];
        list(Recorded(answers.concat().into()), None).map_err(|error| error.to_string())
    }

    const EXPORT: &[u8] = b"\0\0\0\x01a";
    const FIGURES: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1];

    #[test]
    fn exports_are_told_in_the_lines_of_qemu_nbd() {
        let names = [reply(3, 2, EXPORT), reply(3, 1, &[])];
        let figures = [reply(6, 3, FIGURES), reply(6, 1, &[])];
        let text = listed(&[names.clone(), figures].concat()).unwrap();
        assert_eq!(
            text,
            "exports available: 1\n export: 'a'\n  size:  256\n  flags: 0x1 ( )\n  transaction size: 32-bit\n"
        );
        let without = [&names[..], &[reply(6, 1 << 31 | 1, &[])]].concat();
        let text = listed(&without).unwrap();
        assert_eq!(text, "exports available: 1\n export: 'a'\n  transaction size: 32-bit\n");
    }

    /// Each message is QEMU's.
    #[test]
    fn a_server_that_lies_is_told_of() {
        let names = [reply(3, 2, EXPORT), reply(3, 1, &[])].concat();
        for (replies, told) in [
            (vec![vec![0; 20]], "Unexpected option reply magic"),
            (vec![reply(77, 1, &[])], "Unexpected option type 77 (<unknown>), expected 3 (list)"),
            (vec![reply(3, 1, b"abc")], "length too long for option end"),
            (vec![reply(3, 4, b"aaaa")], "Unexpected reply type 4 (meta context), expected 2 (server)"),
            (vec![reply(3, 2, b"a")], "incorrect option length 1"),
            (
                vec![reply(3, 1 << 31 | 5, &[])],
                "TLS negotiation required before option 3 (list) (Did you forget a valid tls-creds?)",
            ),
            (
                vec![reply(3, 1 << 31 | 2, b"policy")],
                "Denied by server for option 3 (list); server reported: policy",
            ),
            (vec![reply(3, 1 << 31 | 1, &[])], "Server does not support export lists"),
            (vec![names.clone(), reply(6, 1, &[])], "broken server omitted NBD_INFO_EXPORT"),
            (
                vec![names.clone(), reply(6, 3, &[0; 12]), reply(6, 1, &[])],
                "broken server omitted NBD_INFO_EXPORT",
            ),
            (
                vec![names.clone(), reply(6, 1 << 31 | 6, b"nope")],
                "Requested export not available; server reported: nope",
            ),
        ] {
            assert_eq!(listed(&replies), Err(told.to_owned()));
        }
        let huge = [&MAGIC.to_be_bytes()[..], &[0, 0, 0, 3, 0, 0, 0, 2, 255, 255, 255, 255]].concat();
        assert!(listed(&[huge]).unwrap_err().contains("too long"));
        let greeting = b"NBDMAGIXIHAVEOPT\x00\x03".to_vec();
        let error = list(Recorded(greeting.into()), None).unwrap_err();
        assert!(error.to_string().contains("does not speak NBD"));
    }

    #[test]
    fn a_list_that_never_ends_takes_bounded_memory() {
        let export = [&[0, 0, 0, 1, b'a'][..], &[b'd'; 4000]].concat();
        let error = listed(&[reply(3, 2, &export).repeat(5000)]).unwrap_err();
        assert!(error.contains("replies are too many"), "{error}");
    }

    #[test]
    fn only_an_empty_acknowledgement_starts_tls() {
        let answer = |kind: u32, payload: &[u8]| {
            let reply = reply::Reply { kind, payload: payload.to_vec() };
            reply.allows(OPT_STARTTLS).map_err(|error| error.to_string())
        };
        assert_eq!(answer(1, &[]), Ok(true));
        assert_eq!(answer(1 << 31 | 1, &[]), Ok(false));
        for (kind, payload, told) in [
            (1, &b"abc"[..], "Option 5 ('starttls') response length is 3 (it should be zero)"),
            (2, &[0; 4], "Server answered option 5 (starttls) with unexpected reply 2 (server)"),
            (1 << 31 | 2, b"nope", "Denied by server for option 5 (starttls); server reported: nope"),
        ] {
            assert_eq!(answer(kind, payload), Err(told.to_owned()));
        }
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
