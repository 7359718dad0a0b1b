//! TLS on a connection.

use crate::error::ExportError;
use futures_util::lock::Mutex;
use rustls::server::NoServerSessionStorage;
use rustls::{ServerConfig, ServerConnection};
use std::cell::RefCell;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_storage::{IoBuf, IoBufs, Socket, Worker};
use zebu_tls::psk::{self, PskError};
use zebu_tls::{
    Authorities, Authorization, FileError, Permission, Session, TlsError, own_certificate, private_key,
};

/// Bytes that are received at once: a few records.
const RECEIVED: usize = 64 << 10;
/// Bytes that are encrypted before they are sent.
const ENCRYPTED: usize = 256 << 10;

/// A server's certificate or keys, and whose clients it takes. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TlsConfig {
    credentials: Credentials,
    authorization: Option<Arc<Authorization>>,
}

#[derive(Debug, Clone)]
enum Credentials {
    Certificates(Arc<ServerConfig>),
    PreSharedKeys(psk::ServerConfig),
}

/// PEM files of a server's certificate, and of the authorities that sign those of its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CertificateFiles {
    /// The server's certificate, followed by its chain.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Authorities that sign clients' certificates. Without them, a client needs none.
    pub client_ca: Option<PathBuf>,
    /// Lists of revoked clients' certificates (CRLs of version 2) of these authorities. A list that has expired still counts,
    /// and a certificate of an authority without a list is valid, as in GnuTLS.
    pub client_crl: Option<PathBuf>,
}

impl CertificateFiles {
    /// A certificate and its key, for any client.
    pub fn new(certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self { certificate: certificate.into(), key: key.into(), client_ca: None, client_crl: None }
    }
}

zebu_storage::option_setters!(CertificateFiles {
    client_ca: impl Into<Option<PathBuf>>,
    client_crl: impl Into<Option<PathBuf>>,
});

impl TlsConfig {
    /// Reads a certificate with its chain, its key, and the authorities of clients.
    ///
    /// # Errors
    /// A file can't be read or has not what it should have; key and certificate do not belong together; there are lists of
    /// revoked certificates, and no authorities.
    pub fn from_files(files: &CertificateFiles) -> Result<Self, ExportError> {
        let CertificateFiles { certificate, key, client_ca, client_crl } = files;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| fail(certificate, &error))?;
        let builder = match (client_ca, client_crl) {
            (None, None) => builder.with_no_client_auth(),
            (None, Some(lists)) => {
                return Err(fail(lists, &"revoked certificates are nothing without authorities of clients"));
            }
            (Some(authorities), lists) => {
                let mut authorities = Authorities::from_file(authorities)?;
                if let Some(lists) = lists {
                    authorities = authorities.revoked(lists)?;
                }
                builder.with_client_cert_verifier(authorities.client_verifier(provider)?)
            }
        };
        let mut config = builder
            .with_single_cert(own_certificate(certificate)?, private_key(key)?)
            .map_err(|error| fail(certificate, &error))?;
        // A session that goes on would not be looked at again: its certificate may have expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Credentials::Certificates(Arc::new(config)).into())
    }

    /// Reads pre-shared keys from a file as GnuTLS's `psktool` writes it; a client needs one of them. The system's OpenSSL
    /// is loaded for it.
    ///
    /// # Errors
    /// The file can't be read or has not what it should have; OpenSSL can't be loaded.
    pub fn from_psk_file(path: &Path) -> Result<Self, ExportError> {
        match psk::ServerConfig::from_file(path) {
            Ok(config) => Ok(Credentials::PreSharedKeys(config).into()),
            Err(PskError::File { path, reason }) => Err(ExportError::Tls { path, reason }),
            Err(error) => Err(ExportError::Tls { path: path.to_owned(), reason: error.to_string() }),
        }
    }

    /// Lets in only clients whose certificate's subject these rules allow. A client without a certificate is not let in,
    /// and so is none with a pre-shared key.
    #[must_use]
    pub fn authorization(mut self, rules: Authorization) -> Self {
        self.authorization = Some(Arc::new(rules));
        self
    }

    /// Checks a client whose handshake is over.
    fn authorize(&self, session: &Session) -> Result<(), TlsFailure> {
        let Some(rules) = &self.authorization else { return Ok(()) };
        let Some(name) = session.client_name() else {
            return Err(TlsFailure(
                "TLS: the client's certificate is missing or has no readable subject".to_owned(),
            ));
        };
        match rules.permission(&name) {
            Permission::Allow => Ok(()),
            Permission::Deny => {
                Err(TlsFailure(format!("TLS: the client '{}' is not allowed", name.escape_debug())))
            }
        }
    }

    fn session(&self) -> Result<Session, TlsError> {
        match &self.credentials {
            Credentials::Certificates(config) => {
                let session = ServerConnection::new(Arc::clone(config))?;
                Ok(Session::Certificates(Box::new(session.into())))
            }
            Credentials::PreSharedKeys(config) => Ok(Session::PreSharedKeys(config.connection()?)),
        }
    }
}

fn fail(path: &Path, error: &dyn Display) -> ExportError {
    ExportError::Tls { path: path.to_owned(), reason: error.to_string() }
}

impl From<FileError> for ExportError {
    fn from(error: FileError) -> Self {
        Self::Tls { path: error.path, reason: error.reason }
    }
}

impl From<Credentials> for TlsConfig {
    fn from(credentials: Credentials) -> Self {
        Self { credentials, authorization: None }
    }
}

/// An encrypted connection. Belongs to one thread; one task may receive while another sends.
pub(crate) struct TlsStream {
    socket: Socket,
    /// Never borrowed across an await.
    state: RefCell<Session>,
    /// Held by the task that sends: records go in their order.
    sending: Mutex<()>,
    /// Bytes that were received and not decrypted yet: the decrypted has to be taken first.
    records: RefCell<Records>,
}

/// A part of a buffer.
struct Records {
    buf: IoBuf,
    start: usize,
    end: usize,
}

/// Why a client was not let in, or what it did wrong later.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct TlsFailure(String);

fn violation(error: TlsError) -> io::Error {
    let mut text = format!("TLS: {error}");
    // The library keeps the kind of the error to itself, but for its name.
    if text.contains("UnsupportedCertVersion") {
        "TLS: its certificate is X.509 version 1, and version 3 is needed (openssl x509 -req makes version 3 with -extfile)"
            .clone_into(&mut text);
    }
    io::Error::new(io::ErrorKind::InvalidData, TlsFailure(text))
}

impl TlsStream {
    pub(super) async fn accept(worker: &Worker, socket: &Socket, config: &TlsConfig) -> io::Result<Self> {
        let session = config.session().map_err(violation)?;
        let records = RefCell::new(Records { buf: IoBuf::zeroed(0), start: 0, end: 0 });
        let stream =
            Self { socket: socket.clone(), state: RefCell::new(session), sending: Mutex::new(()), records };
        while stream.state.borrow().is_handshaking() {
            let received = stream.advance(worker).await;
            // An answer, or an alert that says why there is none, if anybody listens.
            let said = stream.send_pending(worker).await;
            if received? == 0 {
                let left = "the client left during the handshake";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, left));
            }
            said?;
        }
        let allowed = config.authorize(&stream.state.borrow());
        allowed.map_err(|failure| io::Error::new(io::ErrorKind::PermissionDenied, failure))?;
        Ok(stream)
    }

    pub(super) async fn receive(&self, worker: &Worker, mut bufs: IoBufs) -> (io::Result<usize>, IoBufs) {
        loop {
            match self.read_plain(&mut bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // A client that ends without saying so in TLS ends as well.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return (Ok(0), bufs),
                result => return (result, bufs),
            }
            // Answers to changes of keys. A client that takes none gets nothing else done.
            let has_answers = { self.state.borrow().wants_to_send() };
            if has_answers {
                let _turn = self.sending.lock().await;
                if let Err(error) = self.send_pending(worker).await {
                    return (Err(error), bufs);
                }
            }
            // The end shows at the next look.
            if let Err(error) = self.advance(worker).await {
                return (Err(error), bufs);
            }
        }
    }

    /// Takes what is decrypted.
    fn read_plain(&self, bufs: &mut IoBufs) -> io::Result<usize> {
        let mut state = self.state.borrow_mut();
        let mut done = 0;
        for buf in bufs.parts_mut() {
            let mut part = buf.as_mut_slice();
            while !part.is_empty() {
                match state.read(part) {
                    Ok(0) => return Ok(done),
                    Ok(count) => {
                        done += count;
                        part = &mut part[count..];
                    }
                    Err(_) if done > 0 => return Ok(done),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(done)
    }

    /// Decrypts some of what was received, or receives more; 0 at the end.
    async fn advance(&self, worker: &Worker) -> io::Result<usize> {
        let is_empty = { self.records.borrow().start == self.records.borrow().end };
        if is_empty {
            let (count, mut bufs) = worker.receive(&self.socket, worker.buffer(RECEIVED).into()).await;
            let buf = bufs.pop_part().unwrap_or_else(|| IoBuf::zeroed(0));
            *self.records.borrow_mut() = Records { buf, start: 0, end: count? };
        }
        let Records { buf, start, end } = &mut *self.records.borrow_mut();
        let mut rest = &buf.as_slice()[*start..*end];
        let len = rest.len();
        let mut state = self.state.borrow_mut();
        // Of no bytes, it learns that there will be none.
        state.receive_from(&mut rest)?;
        *start = *end - rest.len();
        state.process().map_err(violation)?;
        Ok(len)
    }

    pub(super) async fn send(&self, worker: &Worker, bufs: IoBufs) -> (io::Result<()>, IoBufs) {
        let _turn = self.sending.lock().await;
        let mut encrypted = 0;
        for buf in bufs.parts() {
            for part in buf.as_slice().chunks(ENCRYPTED) {
                let written = self.state.borrow_mut().write_all(part);
                if let Err(error) = written {
                    return (Err(error), bufs);
                }
                encrypted += part.len();
                if encrypted >= ENCRYPTED {
                    encrypted = 0;
                    if let Err(error) = self.send_pending(worker).await {
                        return (Err(error), bufs);
                    }
                }
            }
        }
        (self.send_pending(worker).await, bufs)
    }

    /// Sends what is encrypted.
    async fn send_pending(&self, worker: &Worker) -> io::Result<()> {
        let mut bytes = Vec::new();
        {
            let mut state = self.state.borrow_mut();
            while state.wants_to_send() {
                state.send_to(&mut bytes)?;
            }
        }
        if bytes.is_empty() {
            return Ok(());
        }
        worker.send(&self.socket, IoBuf::copy_of(&bytes).into()).await.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, HandshakeKind, RootCertStore};
    use std::process::Command;

    /// The kind of the handshake of a client.
    fn shake_hands(server: &TlsConfig, client: &Arc<ClientConfig>) -> HandshakeKind {
        let Credentials::Certificates(config) = &server.credentials else { panic!("no certificate") };
        let mut server = ServerConnection::new(Arc::clone(config)).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(Arc::clone(client), name).unwrap();
        for _ in 0..10 {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            server.read_tls(&mut bytes.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            client.read_tls(&mut bytes.as_slice()).unwrap();
            client.process_new_packets().unwrap();
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        server.handshake_kind().unwrap()
    }

    /// A client's certificate may have expired or been revoked since the session began.
    #[test]
    fn no_session_is_resumed() {
        let directory = tempfile::tempdir().unwrap();
        let line = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
                    -addext basicConstraints=critical,CA:FALSE -keyout key.pem -out cert.pem";
        let mut openssl = Command::new("openssl");
        let made = openssl.args(line.split_whitespace()).current_dir(&directory).output();
        assert!(made.expect("openssl is missing: `cargo xtask setup` installs it").status.success());
        let file = |name: &str| directory.path().join(name);
        let server =
            TlsConfig::from_files(&CertificateFiles::new(file("cert.pem"), file("key.pem"))).unwrap();
        let mut roots = RootCertStore::empty();
        for certificate in own_certificate(&file("cert.pem")).unwrap() {
            roots.add(certificate).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        for versions in [&[&rustls::version::TLS13], &[&rustls::version::TLS12]] {
            let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(versions)
                .unwrap()
                .with_root_certificates(roots.clone())
                .with_no_client_auth();
            // It keeps what it gets for the next time.
            let client = Arc::new(client);
            for _ in 0..2 {
                assert_eq!(shake_hands(&server, &client), HandshakeKind::Full);
            }
        }
    }
}
