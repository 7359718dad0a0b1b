//! Authorities that sign certificates of peers, and the rules on what they sign.

use crate::path_rules::{Anchor, PathRules};
use crate::pem_files::{FileError, certificates, check_validity, parsed, revocation_lists};
use crate::verifiers::{ClientVerifier, ServerVerifier};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateRevocationListDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use x509_cert::certificate::{CertificateInner, Rfc5280};
use x509_cert::der::Encode;
use x509_cert::ext::pkix::{BasicConstraints, KeyUsage};

/// Authorities of a file, and the certificates that they have revoked.
#[derive(Debug)]
pub struct Authorities {
    path: PathBuf,
    roots: RootCertStore,
    anchors: Vec<Anchor>,
    revoked: Vec<CertificateRevocationListDer<'static>>,
}

impl Authorities {
    /// Reads certificates of authorities from a PEM file.
    ///
    /// # Errors
    /// The file can't be read, has no certificate, or has one that is not valid now, is of no authority (RFC 5280, section
    /// 4.2.1.9), or may not sign others (4.2.1.3).
    pub fn from_file(path: &Path) -> Result<Self, FileError> {
        let mut roots = RootCertStore::empty();
        let mut anchors = Vec::new();
        for certificate in certificates(path)? {
            anchors.push(
                anchor(&parsed(path, &certificate)?)
                    .map_err(|reason| FileError::new(path, format_args!("a certificate in it {reason}")))?,
            );
            roots.add(certificate).map_err(|error| FileError::new(path, error))?;
        }
        Ok(Self { path: path.to_owned(), roots, anchors, revoked: Vec::new() })
    }

    /// Reads lists of revoked certificates (CRLs of version 2) from a PEM file. A list that has expired still counts, and a
    /// certificate of an authority without a list is valid, as in GnuTLS.
    ///
    /// # Errors
    /// The file can't be read, has no list, has two of one issuer, or one of another version.
    pub fn revoked(mut self, path: &Path) -> Result<Self, FileError> {
        self.revoked = revocation_lists(path)?;
        path.clone_into(&mut self.path);
        Ok(self)
    }

    /// Rules on clients of a server.
    ///
    /// # Errors
    /// A list of revoked certificates can't be used.
    pub fn client_verifier(
        self,
        provider: Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, FileError> {
        let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots), provider);
        if !self.revoked.is_empty() {
            builder = builder.with_crls(self.revoked).allow_unknown_revocation_status();
        }
        let inner = builder.build().map_err(|error| FileError::new(&self.path, error))?;
        Ok(Arc::new(ClientVerifier::new(inner, PathRules::new(self.anchors))))
    }

    /// Rules on servers of a client.
    ///
    /// # Errors
    /// A list of revoked certificates can't be used.
    pub fn server_verifier(
        self,
        provider: Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ServerCertVerifier>, FileError> {
        let mut builder = WebPkiServerVerifier::builder_with_provider(Arc::new(self.roots), provider);
        if !self.revoked.is_empty() {
            builder = builder.with_crls(self.revoked).allow_unknown_revocation_status();
        }
        let inner = builder.build().map_err(|error| FileError::new(&self.path, error))?;
        Ok(Arc::new(ServerVerifier::new(inner, PathRules::new(self.anchors))))
    }
}

/// The rules that an authority's certificate sets; the reason why it is none.
fn anchor(certificate: &CertificateInner<Rfc5280>) -> Result<Anchor, String> {
    check_validity(certificate, UnixTime::now())?;
    let tbs = certificate.tbs_certificate();
    let constraints = tbs.get_extension::<BasicConstraints>().map_err(|error| error.to_string())?;
    let Some((_, BasicConstraints { ca: true, path_len_constraint })) = constraints else {
        return Err("is not an authority's (basic constraints)".to_owned());
    };
    let usage = tbs.get_extension::<KeyUsage>().map_err(|error| error.to_string())?;
    if usage.is_some_and(|(_, usage)| !usage.key_cert_sign()) {
        return Err("may not sign certificates (key usage)".to_owned());
    }
    let subject = tbs.subject().to_der().map_err(|error| error.to_string())?;
    Ok(Anchor { subject, most_intermediates: path_len_constraint })
}
