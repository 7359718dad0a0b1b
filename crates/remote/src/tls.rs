//! Certificates and keys of a connection over TLS.

#[cfg(feature = "nbd")]
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, ConfigBuilder, RootCertStore, WantsVerifier};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
#[cfg(feature = "nbd")]
use zebu_tls::{Authorities, FileError, own_certificate, private_key, psk};
use zebu_tls::{Session, TlsError};

/// Where distributions keep the authorities that they trust.
const SYSTEM_AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Lists of revoked certificates (CRLs) in a directory of certificates.
#[cfg(feature = "nbd")]
const REVOKED: &str = "ca-crl.pem";

/// Where certificates or keys are, and whose certificate the server must have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TlsFiles {
    /// A directory as QEMU and libnbd have it: `ca-cert.pem`, if there are revoked certificates `ca-crl.pem`, and if the
    /// server asks who the client is, `client-cert.pem` and `client-key.pem`. Without it, the authorities are those of
    /// `SSL_CERT_FILE`, or of the system.
    pub directory: Option<PathBuf>,
    /// The name in the server's certificate, if it is not the host's.
    pub server_name: Option<String>,
    /// A pre-shared key in place of certificates.
    pub psk: Option<PskFile>,
}

/// A file of pre-shared keys as GnuTLS's `psktool` writes it, and which of them is the client's.
///
/// The system's OpenSSL is loaded to use it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PskFile {
    /// The file.
    pub path: PathBuf,
    /// The client's identity.
    pub identity: String,
}

impl PskFile {
    /// The key of an identity in a file.
    pub fn new(path: impl Into<PathBuf>, identity: impl Into<String>) -> Self {
        Self { path: path.into(), identity: identity.into() }
    }
}

zebu_storage::option_setters!(TlsFiles {
    directory: impl Into<Option<PathBuf>>,
    server_name: impl Into<Option<String>>,
    psk: impl Into<Option<PskFile>>,
});

/// A client's side of TLS, ready for connections.
#[derive(Clone)]
pub(crate) enum Tls {
    /// The server shows a certificate with this name.
    Certificates(Arc<ClientConfig>, ServerName<'static>),
    /// Both ends have a key.
    #[cfg(feature = "nbd")]
    PreSharedKey(psk::ClientConfig),
}

impl Tls {
    /// Reads the files. `host` is whom the certificate must name unless `files` say otherwise.
    #[cfg(feature = "nbd")]
    pub(crate) fn load(files: &TlsFiles, host: &str) -> Result<Self, String> {
        if let Some(PskFile { path, identity }) = &files.psk {
            return match psk::ClientConfig::from_file(path, identity) {
                Ok(config) => Ok(Self::PreSharedKey(config)),
                Err(error @ psk::PskError::NoKey { .. }) => Err(problem(path, &error)),
                Err(error) => Err(error.to_string()),
            };
        }
        let builder = match &files.directory {
            Some(directory) => builder()?.dangerous().with_custom_certificate_verifier(
                authorities_of(directory).map_err(|error| error.to_string())?,
            ),
            None => builder()?.with_root_certificates(roots(&system_authorities()?)?),
        };
        let own = files.directory.as_ref().map(|directory| directory.join("client-cert.pem"));
        let config = match own.filter(|path| path.exists()) {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let key_path = path.with_file_name("client-key.pem");
                let key = private_key(&key_path).map_err(|error| error.to_string())?;
                let own = own_certificate(&path).map_err(|error| error.to_string())?;
                builder.with_client_auth_cert(own, key).map_err(|e| problem(&path, &e))?
            }
        };
        let name = server_name(files.server_name.as_deref().unwrap_or(host))?;
        Ok(Self::Certificates(Arc::new(config), name))
    }

    /// A client's side for the server at `host`, whose certificate is to be from `authorities`, or from those of the system.
    #[cfg(feature = "http")]
    pub(crate) fn to_host(authorities: ServerTrust<'_>, host: &str) -> Result<Self, String> {
        let builder = builder()?;
        let builder = match authorities {
            ServerTrust::System => builder.with_root_certificates(roots(&system_authorities()?)?),
            ServerTrust::File(path) => builder.with_root_certificates(roots(path)?),
            ServerTrust::Unchecked => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(unchecked::Unchecked::default())),
        };
        let mut config = builder.with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self::Certificates(Arc::new(config), server_name(host)?))
    }

    /// The same for another server.
    #[cfg(feature = "http")]
    pub(crate) fn and_to(&self, host: &str) -> Result<Self, String> {
        match self {
            Self::Certificates(config, _) => Ok(Self::Certificates(Arc::clone(config), server_name(host)?)),
            #[cfg(feature = "nbd")]
            Self::PreSharedKey(_) => Ok(self.clone()),
        }
    }

    pub(crate) fn session(&self) -> Result<Session, TlsError> {
        match self {
            Self::Certificates(config, name) => {
                let session = ClientConnection::new(Arc::clone(config), name.clone())?;
                Ok(Session::Certificates(Box::new(session.into())))
            }
            #[cfg(feature = "nbd")]
            Self::PreSharedKey(config) => Ok(Session::PreSharedKeys(config.connection()?)),
        }
    }
}

/// A client's side of TLS for a program that speaks NBD itself.
#[cfg(feature = "nbd")]
pub struct TlsClient(Tls);

#[cfg(feature = "nbd")]
impl TlsClient {
    /// Reads the files. `host` is the name that the certificate must have unless `files` say otherwise.
    ///
    /// # Errors
    /// The reason in words, with the file.
    pub fn load(files: &TlsFiles, host: &str) -> Result<Self, String> {
        Tls::load(files, host).map(Self)
    }

    /// The side of one connection.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn session(&self) -> Result<Session, TlsError> {
        self.0.session()
    }
}

/// The signers of a server's certificate that are trusted.
#[cfg(feature = "http")]
#[derive(Debug, Clone, Copy)]
pub(crate) enum ServerTrust<'a> {
    /// ServerTrust of `SSL_CERT_FILE`, or of the system.
    System,
    /// ServerTrust of a file.
    File(&'a Path),
    /// Anybody: the server may be another.
    Unchecked,
}

fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, String> {
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())
}

fn roots(authorities: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates(authorities)?);
    if added == 0 {
        return Err(problem(authorities, &"there is no certificate in it that can be used"));
    }
    Ok(roots)
}

/// Rules on servers by the authorities of a directory, and what they have revoked.
#[cfg(feature = "nbd")]
fn authorities_of(directory: &Path) -> Result<Arc<dyn ServerCertVerifier>, FileError> {
    let mut authorities = Authorities::from_file(&directory.join("ca-cert.pem"))?;
    let lists = directory.join(REVOKED);
    // What can't be looked at is an error of reading it.
    if lists.try_exists().unwrap_or(true) {
        authorities = authorities.revoked(&lists)?;
    }
    authorities.server_verifier(Arc::new(rustls::crypto::ring::default_provider()))
}

fn server_name(name: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(name.to_owned())
        .map_err(|_| format!("'{name}' is no name that a certificate can have; give tls-hostname"))
}

/// The file of authorities that the user has chosen in place of the system's.
pub(crate) fn chosen_authorities() -> Option<PathBuf> {
    std::env::var_os("SSL_CERT_FILE").map(PathBuf::from)
}

fn system_authorities() -> Result<PathBuf, String> {
    if let Some(path) = chosen_authorities() {
        return Ok(path);
    }
    let found = SYSTEM_AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
    found.ok_or_else(|| {
        "the system has no file of authorities: name one, or a directory of certificates, or set SSL_CERT_FILE"
            .to_owned()
    })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| problem(path, &error))
}

fn problem(path: &Path, error: &dyn Display) -> String {
    format!("{}: {error}", path.display())
}

/// `sslverify=off`.
#[cfg(feature = "http")]
mod unchecked {
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::crypto::{self, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::{DigitallySignedStruct, Error, SignatureScheme};

    /// Takes any certificate whose owner has its key.
    #[derive(Debug)]
    pub(super) struct Unchecked(WebPkiSupportedAlgorithms);

    impl Default for Unchecked {
        fn default() -> Self {
            Self(crypto::ring::default_provider().signature_verification_algorithms)
        }
    }

    impl ServerCertVerifier for Unchecked {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls12_signature(message, cert, signed, &self.0)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, cert, signed, &self.0)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.0.supported_schemes()
        }
    }
}
