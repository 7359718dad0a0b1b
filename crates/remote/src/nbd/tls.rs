//! Certificates of a connection over TLS.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where distributions keep the authorities that they trust.
const SYSTEM_AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Where certificates are, and whose certificate the server must have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TlsFiles {
    /// A directory as QEMU and libnbd have it: `ca-cert.pem`, and if the server asks who the client is, `client-cert.pem`
    /// and `client-key.pem`. Without it, the authorities are those of `SSL_CERT_FILE`, or of the system.
    pub directory: Option<PathBuf>,
    /// The name in the server's certificate, if it is not the host's.
    pub server_name: Option<String>,
}

zebu_storage::option_setters!(TlsFiles {
    directory: impl Into<Option<PathBuf>>,
    server_name: impl Into<Option<String>>,
});

/// A client's side of TLS, ready for connections.
#[derive(Clone)]
pub(super) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Reads the files. `host` is whom the certificate must name unless `files` say otherwise.
    pub(super) fn load(files: &TlsFiles, host: &str) -> Result<Self, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let authorities = match &files.directory {
            Some(directory) => directory.join("ca-cert.pem"),
            None => system_authorities()?,
        };
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(certificates(&authorities)?);
        if added == 0 {
            return Err(problem(&authorities, &"there is no certificate in it that can be used"));
        }
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots);
        let own = files.directory.as_ref().map(|directory| directory.join("client-cert.pem"));
        let config = match own.filter(|path| path.exists()) {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let key_path = path.with_file_name("client-key.pem");
                let key = PrivateKeyDer::from_pem_file(&key_path).map_err(|e| problem(&key_path, &e))?;
                builder.with_client_auth_cert(certificates(&path)?, key).map_err(|e| problem(&path, &e))?
            }
        };
        let name = files.server_name.as_deref().unwrap_or(host);
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| format!("'{name}' is no name that a certificate can have; give tls-hostname"))?;
        Ok(Self { config: Arc::new(config), name })
    }

    pub(super) fn connection(&self) -> Result<ClientConnection, rustls::Error> {
        ClientConnection::new(Arc::clone(&self.config), self.name.clone())
    }
}

fn system_authorities() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("SSL_CERT_FILE") {
        return Ok(path.into());
    }
    let found = SYSTEM_AUTHORITIES.iter().map(PathBuf::from).find(|path| path.exists());
    found.ok_or_else(|| {
        "the system has no file of authorities: name one with SSL_CERT_FILE, or a directory with tls-certificates"
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
