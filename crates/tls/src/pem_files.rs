//! Files of certificates and keys in PEM.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use std::collections::HashSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use x509_cert::certificate::{CertificateInner, Rfc5280};
use x509_cert::crl::CertificateList;
use x509_cert::der::{Decode, Encode};

/// A file of certificates or keys can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", .path.display())]
#[non_exhaustive]
pub struct FileError {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub reason: String,
}

impl FileError {
    pub(crate) fn new(path: &Path, reason: impl Display) -> Self {
        Self { path: path.to_owned(), reason: reason.to_string() }
    }
}

/// Reads one's own certificate, followed by its chain.
///
/// # Errors
/// The file can't be read or has no certificate; the first one is not valid now.
pub fn own_certificate(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let chain = certificates(path)?;
    check_validity(&parsed(path, &chain[0])?, UnixTime::now())
        .map_err(|reason| FileError::new(path, format_args!("the certificate {reason}")))?;
    Ok(chain)
}

/// Reads the key of a certificate.
///
/// # Errors
/// The file can't be read or has no key.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| FileError::new(path, error))
}

/// Reads all certificates of a file: one at least.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    pem_list(path, "certificate")
}

/// Reads lists of revoked certificates: one at least, and one of each issuer, since more would not be looked at.
pub(crate) fn revocation_lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, FileError> {
    let lists: Vec<CertificateRevocationListDer<'static>> = pem_list(path, "list of revoked certificates")?;
    let mut issuers = HashSet::new();
    for list in &lists {
        let issuer =
            CertificateList::<Rfc5280>::from_der(list).and_then(|list| list.tbs_cert_list.issuer.to_der());
        let issuer = issuer.map_err(|error| FileError::new(path, error))?;
        if !issuers.insert(issuer) {
            return Err(FileError::new(path, "there are two lists of one issuer: keep the newer one"));
        }
    }
    Ok(lists)
}

fn pem_list<T: PemObject>(path: &Path, kind: &str) -> Result<Vec<T>, FileError> {
    let list = T::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match list.map_err(|error| FileError::new(path, error)) {
        Ok(list) if list.is_empty() => Err(FileError::new(path, format_args!("there is no {kind} in it"))),
        result => result,
    }
}

/// Parses a certificate of a file.
pub(crate) fn parsed(path: &Path, certificate: &[u8]) -> Result<CertificateInner<Rfc5280>, FileError> {
    CertificateInner::from_der(certificate).map_err(|error| FileError::new(path, error))
}

/// Whether a certificate is valid at a time; else the reason.
pub(crate) fn check_validity(
    certificate: &CertificateInner<Rfc5280>,
    now: UnixTime,
) -> Result<(), &'static str> {
    let validity = certificate.tbs_certificate().validity();
    if now.as_secs() > validity.not_after.to_unix_duration().as_secs() {
        return Err("has expired");
    }
    if now.as_secs() < validity.not_before.to_unix_duration().as_secs() {
        return Err("is not valid yet");
    }
    Ok(())
}
