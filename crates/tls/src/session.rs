//! A session of either kind.

use crate::{client_name, psk};
use std::io::{self, IoSlice, Read, Write};

/// Encrypted bytes that may wait to be sent before [`Session::write_vectored`] takes no more.
pub(crate) const MAX_UNSENT: usize = 64 << 10;

/// Breach of the protocol, or a peer that was not let in.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(pub(crate) String);

impl From<rustls::Error> for TlsError {
    fn from(error: rustls::Error) -> Self {
        use rustls::AlertDescription::{
            BadCertificate, CertificateExpired, CertificateRequired, CertificateUnknown, UnknownCA,
        };
        let text = match &error {
            rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType) => {
                "the other side does not speak TLS here"
            }
            rustls::Error::AlertReceived(CertificateRequired) => {
                "the other side asks for a certificate of this one"
            }
            rustls::Error::AlertReceived(
                UnknownCA | BadCertificate | CertificateExpired | CertificateUnknown,
            ) => "the other side rejects the certificate of this one",
            _ => return Self(error.to_string()),
        };
        Self(format!("{text} ({error})"))
    }
}

impl From<psk::PskError> for TlsError {
    fn from(error: psk::PskError) -> Self {
        Self(error.to_string())
    }
}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// One connection, client's or server's side. Resembles [`rustls::Connection`].
///
/// Bytes that were received go in by [`receive_from`](Self::receive_from) and [`process`](Self::process). Bytes to send
/// come out by [`send_to`](Self::send_to).
#[derive(Debug)]
pub enum Session {
    /// Certificates.
    Certificates(Box<rustls::Connection>),
    /// Pre-shared keys.
    PreSharedKeys(psk::Connection),
}

impl Session {
    /// Whether the handshake is under way.
    pub fn is_handshaking(&self) -> bool {
        match self {
            Self::Certificates(session) => session.is_handshaking(),
            Self::PreSharedKeys(session) => session.is_handshaking(),
        }
    }

    /// The subject of the client's certificate, as QEMU writes it: `C=GB,O=Example,CN=laptop`. `None` without a certificate,
    /// or if its subject can't be read.
    pub fn client_name(&self) -> Option<String> {
        match self {
            Self::Certificates(session) => client_name::subject(session.peer_certificates()?.first()?),
            Self::PreSharedKeys(_) => None,
        }
    }

    /// Takes bytes of the network with one read; 0 at their end.
    ///
    /// # Errors
    /// Those of `source`, and `Other` when what came before has to be processed first.
    pub fn receive_from(&mut self, source: &mut dyn Read) -> io::Result<usize> {
        match self {
            Self::Certificates(session) => session.read_tls(source),
            Self::PreSharedKeys(session) => session.receive_from(source),
        }
    }

    /// Goes on with what was received. After an error, [`send_to`](Self::send_to) has the alert for the peer.
    ///
    /// # Errors
    /// The peer broke the protocol, or was not let in.
    pub fn process(&mut self) -> Result<(), TlsError> {
        match self {
            Self::Certificates(session) => session.process_new_packets().map(drop).map_err(TlsError::from),
            Self::PreSharedKeys(session) => session.process(),
        }
    }

    /// Takes decrypted bytes; 0 after the peer's farewell.
    ///
    /// # Errors
    /// `WouldBlock` when more has to be received, `UnexpectedEof` when the peer is gone without a farewell, and
    /// `InvalidData` when it broke the protocol.
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Certificates(session) => session.reader().read(buf),
            Self::PreSharedKeys(session) => session.read(buf),
        }
    }

    /// Encrypts some of `bufs`, and says how many bytes: none while 64 KiB wait to be sent.
    ///
    /// # Errors
    /// The session has failed before.
    pub fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Certificates(session) => session.writer().write_vectored(bufs),
            Self::PreSharedKeys(session) => session.write_vectored(bufs),
        }
    }

    /// Encrypts all of `bytes`, however many wait to be sent.
    ///
    /// # Errors
    /// The session has failed before.
    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Certificates(session) => {
                session.set_buffer_limit(None);
                let written = session.writer().write_all(bytes);
                session.set_buffer_limit(Some(MAX_UNSENT));
                written
            }
            Self::PreSharedKeys(session) => session.write_all(bytes),
        }
    }

    /// Makes the alert `close_notify` (RFC 8446, section 6.1): nothing follows.
    pub fn send_close_notify(&mut self) {
        match self {
            Self::Certificates(session) => session.send_close_notify(),
            Self::PreSharedKeys(session) => session.send_close_notify(),
        }
    }

    /// Whether there are bytes to send.
    pub fn wants_to_send(&self) -> bool {
        match self {
            Self::Certificates(session) => session.wants_write(),
            Self::PreSharedKeys(session) => session.wants_to_send(),
        }
    }

    /// Sends bytes with one write, and says how many.
    ///
    /// # Errors
    /// Those of `target`.
    pub fn send_to(&mut self, target: &mut dyn Write) -> io::Result<usize> {
        match self {
            Self::Certificates(session) => session.write_tls(target),
            Self::PreSharedKeys(session) => session.send_to(target),
        }
    }
}
