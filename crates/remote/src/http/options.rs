//! How an object on a web server is read.

use super::authorizations::Authorizations;
use super::credentials::Credentials;
use crate::network::Network;
use crate::network::deadline::LONGEST;
use std::path::PathBuf;
use std::time::Duration;

/// The least memory of a disk, in bytes.
pub(super) const LEAST_MEMORY: u64 = 4 << 20;

/// How an object is read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpOptions {
    /// The most connections, not 0. They are made when they are needed.
    pub connections: usize,
    /// Bytes that a small read fetches at least; `None`: 16 to 256 KiB, by what turns out to be read. Sequential readers get
    /// more.
    pub readahead: Option<u64>,
    /// The most bytes of memory for the cache, read-ahead, and buffers of connections; at least 4 MiB. Readers' own memory
    /// is not counted.
    pub memory: u64,
    /// How long a read waits for its answer, broken connections included. As long as bytes come, it waits longer: a second
    /// for each 64 KiB that it has. Not 0; a year at most.
    pub timeout: Duration,
    /// How long connecting may take: looking the host up, TCP, TLS and the proxy. Not 0; a year at most.
    pub connect_timeout: Duration,
    /// Whether the server must show a certificate that names it.
    pub verification: Verification,
    /// A PEM file of authorities, in place of those of `SSL_CERT_FILE` or of the system.
    pub authorities: Option<PathBuf>,
    /// The value of the header `Cookie`.
    pub cookie: Option<Cookie>,
    /// User and password, before those of the URL and of the netrc file.
    pub credentials: Option<Credentials>,
    /// Values of the header `Authorization` for the server that was named, in place of all users and passwords.
    pub authorizations: Option<Authorizations>,
    /// The mark of the only version that the object can have, where its name says it: a digest. The server's own marks mean
    /// nothing then.
    pub mark: Option<String>,
    /// Whether the user's netrc file is asked for the user and password of a server: the file that `NETRC` names, or
    /// `~/.netrc`.
    pub netrc: bool,
    /// User and password for the proxy, before those of the proxy's URL.
    pub proxy_credentials: Option<Credentials>,
    /// Redirects that are followed.
    pub redirects: Redirects,
    /// Whether an object may be read from its beginning to its end if the server has no ranges.
    pub without_ranges: ServersWithoutRanges,
    /// The way to the server.
    pub network: Network,
}

zebu_storage::option_setters!(HttpOptions {
    connections: usize,
    readahead: impl Into<Option<u64>>,
    memory: u64,
    timeout: Duration,
    connect_timeout: Duration,
    verification: Verification,
    authorities: impl Into<Option<PathBuf>>,
    cookie: impl Into<Option<Cookie>>,
    credentials: impl Into<Option<Credentials>>,
    authorizations: impl Into<Option<Authorizations>>,
    mark: impl Into<Option<String>>,
    netrc: bool,
    proxy_credentials: impl Into<Option<Credentials>>,
    redirects: Redirects,
    without_ranges: ServersWithoutRanges,
    network: Network,
});

impl HttpOptions {
    /// These, with times that can be added to the present.
    pub(super) fn bounded(self) -> Self {
        let (timeout, connect_timeout) = (self.timeout.min(LONGEST), self.connect_timeout.min(LONGEST));
        self.timeout(timeout).connect_timeout(connect_timeout)
    }
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            connections: 16,
            readahead: None,
            memory: 64 << 20,
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(15),
            verification: Verification::On,
            authorities: None,
            cookie: None,
            credentials: None,
            authorizations: None,
            mark: None,
            netrc: true,
            proxy_credentials: None,
            redirects: Redirects::Safe,
            without_ranges: ServersWithoutRanges::Refuse,
            network: Network::default(),
        }
    }
}

/// Whether a server must show a certificate that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verification {
    /// It must.
    On,
    /// The certificate is not looked at: anybody on the way can be the server.
    Off,
}

/// Redirects that are followed: ten at most, to `http` and `https` only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Redirects {
    /// None from `https` to `http`, and none from a public address to a private one.
    #[default]
    Safe,
    /// These as well.
    Any,
}

/// The treatment of an object whose server has no ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServersWithoutRanges {
    /// It is not opened.
    Refuse,
    /// It is read once, from its beginning on: reads must come nearly in the order of their offsets.
    Stream,
}

/// The value of a header `Cookie`, which nothing shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Cookie(pub(super) String);

impl Cookie {
    /// A value of visible characters and blanks.
    ///
    /// # Errors
    /// It has others.
    pub fn new(value: impl Into<String>) -> Result<Self, String> {
        let value = value.into();
        if value.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            Ok(Self(value))
        } else {
            Err("a cookie has visible characters only".to_owned())
        }
    }
}

impl std::fmt::Debug for Cookie {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cookie")
    }
}
