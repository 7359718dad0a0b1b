//! Rules of RFC 5280 on a peer's certificates that webpki leaves out, and GnuTLS does not.

use crate::pem_files::check_validity;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{CertificateError, Error};
use x509_cert::certificate::{CertificateInner, Rfc5280, TbsCertificateInner};
use x509_cert::der::{Decode, Encode};
use x509_cert::ext::pkix::KeyUsage;

/// Intermediate certificates of a peer at most.
const MAX_INTERMEDIATES: usize = 16;

/// An authority that is trusted.
#[derive(Debug)]
pub(crate) struct Anchor {
    /// Its name in DER.
    pub(crate) subject: Vec<u8>,
    /// Intermediate certificates that may follow it (RFC 5280, section 4.2.1.9).
    pub(crate) most_intermediates: Option<u8>,
}

/// Rules on the certificates that a peer sends, beside those of webpki: validity of all of them, key usage, and how many
/// may follow an anchor.
#[derive(Debug)]
pub(crate) struct PathRules {
    anchors: Vec<Anchor>,
}

impl PathRules {
    pub(crate) fn new(anchors: Vec<Anchor>) -> Self {
        Self { anchors }
    }

    /// Checks what a peer sent.
    pub(crate) fn check(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        if intermediates.len() > MAX_INTERMEDIATES {
            return Err(Error::General(format!("more than {MAX_INTERMEDIATES} intermediate certificates")));
        }
        let end_entity = parsed(end_entity)?;
        let intermediates = intermediates.iter().map(parsed).collect::<Result<Vec<_>, _>>()?;
        if !may(end_entity.tbs_certificate(), KeyUsage::digital_signature)? {
            return Err(Error::General("the certificate's key may not sign (key usage)".to_owned()));
        }
        for intermediate in &intermediates {
            check_validity(intermediate, now)
                .map_err(|reason| Error::General(format!("an intermediate certificate {reason}")))?;
        }
        self.check_path(&end_entity, &intermediates)
    }

    /// Looks for a path from the peer's certificate to an anchor: by one certificate more in each turn, along all of them at
    /// once, since an issuer may have several certificates.
    fn check_path(
        &self,
        end_entity: &CertificateInner<Rfc5280>,
        intermediates: &[CertificateInner<Rfc5280>],
    ) -> Result<(), Error> {
        let mut issuers = vec![end_entity.tbs_certificate().issuer()];
        let mut reason = Error::from(CertificateError::UnknownIssuer);
        for count in 0..=intermediates.len() {
            for issuer in &issuers {
                let name = issuer.to_der().map_err(|_| CertificateError::BadEncoding)?;
                for anchor in self.anchors.iter().filter(|anchor| anchor.subject == name) {
                    if anchor.most_intermediates.is_none_or(|most| count <= usize::from(most)) {
                        return Ok(());
                    }
                    let long =
                        "there are more intermediate certificates than the authority allows (path length)";
                    reason = Error::General(long.to_owned());
                }
            }
            let mut next = Vec::new();
            for one in intermediates.iter().map(CertificateInner::tbs_certificate) {
                if !issuers.contains(&one.subject()) || next.contains(&one.issuer()) {
                    continue;
                }
                if may(one, KeyUsage::key_cert_sign)? {
                    next.push(one.issuer());
                } else {
                    let usage = "an intermediate certificate may not sign others (key usage)";
                    reason = Error::General(usage.to_owned());
                }
            }
            issuers = next;
        }
        Err(reason)
    }
}

/// Whether a certificate's key usage allows something; all is allowed if it says nothing.
fn may(
    certificate: &TbsCertificateInner<Rfc5280>,
    usage: impl Fn(&KeyUsage) -> bool,
) -> Result<bool, CertificateError> {
    let said = certificate.get_extension::<KeyUsage>();
    let said = said.map_err(|_| CertificateError::BadEncoding)?;
    Ok(said.is_none_or(|(_, said)| usage(&said)))
}

fn parsed(certificate: &CertificateDer<'_>) -> Result<CertificateInner<Rfc5280>, CertificateError> {
    CertificateInner::from_der(certificate).map_err(|_| CertificateError::BadEncoding)
}
