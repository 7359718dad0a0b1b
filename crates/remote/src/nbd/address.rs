//! Names of exports: the URLs of the NBD URI specification, and QEMU's own.

use crate::percent;
use crate::tls::{PskFile, TlsFiles};
use std::fmt;
use std::path::PathBuf;

/// The port of NBD.
const PORT: u16 = 10809;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Endpoint {
    /// A host's name or address, and a port.
    Tcp {
        /// Without brackets.
        host: String,
        /// Not 0.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdAddress {
    /// Where the server listens.
    pub endpoint: Endpoint,
    /// The export; empty for the server's default.
    pub export: String,
    /// Whether, and how, the connection is encrypted.
    pub tls: Option<TlsFiles>,
}

impl NbdAddress {
    /// An export of the server at this endpoint, without TLS.
    pub fn new(endpoint: Endpoint, export: impl Into<String>) -> Self {
        Self { endpoint, export: export.into(), tls: None }
    }

    /// Whether `name` is of a kind that [`NbdAddress::parse`] reads.
    pub fn is_name(name: &str) -> bool {
        ["nbd:", "nbds:", "nbd+unix:", "nbds+unix:"].iter().any(|scheme| name.starts_with(scheme))
    }

    /// Reads a name.
    ///
    /// # Errors
    /// The reason in words: another kind of name, a missing part, or a parameter that is not known.
    pub fn parse(name: &str) -> Result<Self, String> {
        let (scheme, rest) = name.split_once(':').ok_or("a name of NBD begins with nbd:")?;
        let (is_unix, is_tls) = match scheme {
            "nbd" if !rest.starts_with("//") => return parse_old(rest),
            "nbd" => (false, false),
            "nbds" => (false, true),
            "nbd+unix" => (true, false),
            "nbds+unix" => (true, true),
            _ => return Err(format!("'{scheme}' is no scheme of NBD")),
        };
        let rest = rest.strip_prefix("//").ok_or_else(|| format!("after '{scheme}:' comes //"))?;
        if rest.contains('#') {
            return Err("a fragment (#) means nothing here: write %23 for the character".to_owned());
        }
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let mut socket = None;
        let mut files = TlsFiles::default();
        let mut psk = None;
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let value = percent::decode(value)?;
            match key {
                "socket" => socket = Some(PathBuf::from(value)),
                "tls-certificates" if is_tls => files.directory = Some(value.into()),
                "tls-hostname" if is_tls => files.server_name = Some(value),
                "tls-psk-file" if is_tls => psk = Some(PathBuf::from(value)),
                _ => return Err(format!("the parameter '{key}' is not supported")),
            }
        }
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, authority)) if is_tls => (Some(percent::decode(user)?), authority),
            _ => (None, authority),
        };
        if let Some(path) = psk {
            files.psk = Some(psk_file(path, user, &files)?);
        } else if user.is_some() {
            return Err("what stands before @ is the identity of a key: it goes with tls-psk-file".to_owned());
        }
        let endpoint = if is_unix {
            if is_tls && !authority.is_empty() {
                // As libnbd has it: whose certificate the server shows.
                files.server_name.get_or_insert(percent::decode(authority)?);
            } else if !authority.is_empty() {
                return Err(format!(
                    "the name of a Unix socket has no host ('{authority}'): write {scheme}:///"
                ));
            }
            Endpoint::Unix(socket.ok_or("the Unix socket is missing: add ?socket=PATH")?)
        } else if socket.is_some() {
            return Err(format!("'socket' goes with {scheme}+unix: only"));
        } else {
            parse_authority(authority)?
        };
        Ok(Self { endpoint, export: percent::decode(path)?, tls: is_tls.then_some(files) })
    }
}

/// The key of `user`, or of the user who is logged in, as libnbd has it.
fn psk_file(path: PathBuf, user: Option<String>, files: &TlsFiles) -> Result<PskFile, String> {
    if files.directory.is_some() || files.server_name.is_some() {
        return Err("'tls-psk-file' goes with neither tls-certificates nor tls-hostname".to_owned());
    }
    let logged_in = || ["LOGNAME", "USER"].iter().find_map(|name| std::env::var(name).ok());
    let identity = user.filter(|user| !user.is_empty()).or_else(logged_in);
    let identity = identity.ok_or("'tls-psk-file' needs the identity of the key: nbds://IDENTITY@HOST/")?;
    Ok(PskFile::new(path, identity))
}

/// `HOST[:PORT]`, with brackets around an IPv6 address.
fn parse_authority(authority: &str) -> Result<Endpoint, String> {
    if authority.contains('@') {
        return Err("NBD knows no users: leave out what stands before @".to_owned());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("the bracket of the address is not closed")?;
            (host, port)
        }
        None => match authority.find(':') {
            Some(colon) => authority.split_at(colon),
            None => (authority, ""),
        },
    };
    let host = percent::decode(host)?;
    if host.is_empty() {
        return Err("the host is missing".to_owned());
    }
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => PORT,
        Some("") => PORT,
        Some(port) => parse_port(port)?,
        None => return Err(format!("'{port}' is no port")),
    };
    Ok(Endpoint::Tcp { host, port })
}

fn parse_port(text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|port| *port != 0 && text.bytes().all(|byte| byte.is_ascii_digit()));
    port.ok_or_else(|| format!("'{text}' is no port"))
}

/// QEMU's `HOST:PORT[:exportname=NAME]` and `unix:PATH[:exportname=NAME]`.
fn parse_old(rest: &str) -> Result<NbdAddress, String> {
    let (place, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
    let endpoint = match place.strip_prefix("unix:") {
        Some("") => return Err("the path of the Unix socket is missing".to_owned()),
        Some(path) => Endpoint::Unix(path.into()),
        None => {
            let endpoint = parse_authority(place)?;
            let has_port = place.rsplit_once(':').is_some_and(|(_, port)| parse_port(port).is_ok());
            if !has_port {
                return Err("the port is missing: nbd:HOST:PORT".to_owned());
            }
            endpoint
        }
    };
    Ok(NbdAddress { endpoint, export: export.to_owned(), tls: None })
}

/// The URL.
impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls.is_some() { "nbds" } else { "nbd" };
        match &self.endpoint {
            Endpoint::Tcp { host, port } => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                write!(f, "{scheme}://{host}")?;
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{}", Escaped(&self.export))
            }
            Endpoint::Unix(path) => {
                let path = path.to_string_lossy();
                write!(f, "{scheme}+unix:///{}?socket={}", Escaped(&self.export), Escaped(&path))
            }
        }
    }
}

/// A text as a part of a URL.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
                    write!(f, "{}", byte as char)?;
                }
                _ => write!(f, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16, export: &str) -> NbdAddress {
        let endpoint = Endpoint::Tcp { host: host.to_owned(), port };
        NbdAddress { endpoint, export: export.to_owned(), tls: None }
    }
    fn unix(path: &str, export: &str) -> NbdAddress {
        NbdAddress { endpoint: Endpoint::Unix(path.into()), export: export.to_owned(), tls: None }
    }

    #[test]
    fn all_spellings_are_read() {
        for (name, address) in [
            ("nbd://host", tcp("host", PORT, "")),
            ("nbd://host/", tcp("host", PORT, "")),
            ("nbd://host:1/a/b%20c", tcp("host", 1, "a/b c")),
            ("nbd://[::1]:77/x", tcp("::1", 77, "x")),
            ("nbd://host//x", tcp("host", PORT, "/x")),
            ("nbd+unix:///?socket=/tmp/s", unix("/tmp/s", "")),
            ("nbd+unix:///e?socket=a%26b", unix("a&b", "e")),
            ("nbd:host:10809", tcp("host", 10809, "")),
            ("nbd:[::1]:10809:exportname=x:y", tcp("::1", 10809, "x:y")),
            ("nbd:unix:/tmp/s", unix("/tmp/s", "")),
            ("nbd:unix:/tmp/s:exportname=e", unix("/tmp/s", "e")),
        ] {
            assert_eq!(NbdAddress::parse(name).as_ref(), Ok(&address), "{name}");
            assert_eq!(NbdAddress::parse(&address.to_string()), Ok(address), "{name}");
        }
        let secure = NbdAddress::parse("nbds://h/x?tls-certificates=/pki&tls-hostname=other").unwrap();
        let files = TlsFiles::default().directory(PathBuf::from("/pki")).server_name("other".to_owned());
        assert_eq!(secure.tls, Some(files));
    }

    #[test]
    fn wrong_names_say_what_is_wrong() {
        for (name, word) in [
            ("nbd://", "host"),
            ("nbd:///x", "host"),
            ("nbd://h:0/x", "port"),
            ("nbd://h:+1/x", "port"),
            ("nbd://h:99999/x", "port"),
            ("nbd://u@h/x", "@"),
            ("nbd://h/x?socket=s", "socket"),
            ("nbd://h/x?foo=1", "foo"),
            ("nbd://h/x?tls-certificates=d", "tls-certificates"),
            ("nbds://u@h/x?tls-psk-file=f&tls-hostname=n", "neither"),
            ("nbds://u@h/x", "tls-psk-file"),
            ("nbd://u@h/x", "no users"),
            ("nbd://h/x?tls-psk-file=f", "tls-psk-file"),
            ("nbd+unix:///x", "socket"),
            ("nbd+unix://h/x?socket=s", "host"),
            ("nbd:host", "port"),
            ("nbd:unix:", "path"),
            ("nbd://[::1/x", "bracket"),
            ("nbd://h/%zz", "%"),
            ("nbd+ssh://h/x", "scheme"),
            ("nbd://h/x#y", "fragment"),
        ] {
            let error = NbdAddress::parse(name).unwrap_err();
            assert!(error.contains(word), "{name}: {error}");
        }
    }
}
