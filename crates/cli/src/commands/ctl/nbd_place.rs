//! The place at which a server's NBD exports are found.

use super::server::Server;
use crate::failure::Failure;
use crate::serve::address::Address;
use crate::serve::control_request::Command;
use std::fmt::Write as _;
use std::path::Path;
use zebu_remote::nbd::NbdAddress;

/// A server's NBD socket: the URL of an export, before and behind its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NbdPlace {
    before: String,
    behind: String,
}

impl NbdPlace {
    /// Reads a URL of a server, or an address as `zebu serve --nbd` has it.
    ///
    /// # Errors
    /// It is neither, or it names an export.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if NbdAddress::is_name(text) {
            if !NbdAddress::parse(text)?.export.is_empty() {
                return Err("the server is meant: leave the name of the export out".to_owned());
            }
            let (place, query) = text.split_once('?').map_or((text, None), |(a, b)| (a, Some(b)));
            let (scheme, authority) =
                place.split_once("://").ok_or("a URL is needed, such as nbd://HOST:PORT")?;
            let authority = authority.trim_end_matches('/');
            let behind = query.map_or_else(String::new, |query| format!("?{query}"));
            return Ok(Self { before: format!("{scheme}://{authority}/"), behind });
        }
        match text.parse::<Address>()? {
            Address::Unix(path) => {
                let path = path.to_str().ok_or("the path of a socket in a URL is UTF-8")?;
                Ok(Self { before: "nbd+unix:///".to_owned(), behind: format!("?socket={}", escaped(path)) })
            }
            Address::Tcp(place) => Ok(Self { before: format!("nbd://{place}/"), behind: String::new() }),
            Address::Passed => Err("expected a URL, unix:PATH or HOST:PORT".to_owned()),
        }
    }

    /// The place that the server tells of: a Unix socket that is here, or else a TCP socket.
    pub(super) fn told(server: &mut Server) -> Result<Self, Failure> {
        let version = server.ask(Command::Version)?;
        let told = version["nbd"].as_array();
        if told.is_some_and(Vec::is_empty) {
            return Err(Failure::new(
                "nothing listens for NBD clients, and disks are read so: start the server with --nbd",
            ));
        }
        let all = told.map(Vec::as_slice).unwrap_or_default();
        let mut addresses: Vec<&str> = all.iter().filter_map(|address| address.as_str()).collect();
        addresses.sort_by_key(|address| !is_here(address));
        let mut places = addresses.iter().filter_map(|address| Self::parse(address).ok());
        places.next().ok_or_else(|| {
            Failure::new(
                "the server does not say where its NBD socket is, by which disks are read: give --nbd ADDRESS",
            )
        })
    }

    /// The URL of an export.
    pub(super) fn url(&self, export: &str) -> String {
        format!("{}{}{}", self.before, escaped(export), self.behind)
    }
}

fn is_here(address: &str) -> bool {
    address.strip_prefix("unix:").is_some_and(|path| Path::new(path).exists())
}

/// A text as a part of a URL.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_leads_to_its_exports() {
        for (place, url) in [
            ("unix:/run/a b.sock", "nbd+unix:///x.a%20%25?socket=/run/a%20b.sock"),
            ("nbd+unix:///?socket=/s", "nbd+unix:///x.a%20%25?socket=/s"),
            ("localhost:7", "nbd://localhost:7/x.a%20%25"),
            ("[::]:7", "nbd://[::]:7/x.a%20%25"),
            ("nbd://h", "nbd://h/x.a%20%25"),
            ("nbds://h:7/?tls-certificates=/pki", "nbds://h:7/x.a%20%25?tls-certificates=/pki"),
        ] {
            let made = NbdPlace::parse(place).unwrap().url("x.a %");
            assert_eq!(made, url);
            assert_eq!(NbdAddress::parse(&made).unwrap().export, "x.a %");
        }
    }

    #[test]
    fn what_is_no_place_is_refused() {
        for wrong in ["", "systemd", "unix:", "nbd://h/export", "nbd:h:7", "nbd+unix:///", "h", "h:x"] {
            assert!(NbdPlace::parse(wrong).is_err(), "{wrong}");
        }
    }
}
