//! Distinguished names of clients' certificates, as GnuTLS and thus QEMU write them.

use der::asn1::ObjectIdentifier;
use der::{Decode, Encode, Tag, Tagged};
use std::fmt::Write as _;
use x509_cert::attr::AttributeTypeAndValue;
use x509_cert::certificate::{CertificateInner, Rfc5280};

/// Names of attributes (RFC 4514, section 3, and GnuTLS's for an address of mail).
const NAMES: [(&str, &str); 9] = [
    ("2.5.4.3", "CN"),
    ("2.5.4.6", "C"),
    ("2.5.4.7", "L"),
    ("2.5.4.8", "ST"),
    ("2.5.4.10", "O"),
    ("2.5.4.11", "OU"),
    ("1.2.840.113549.1.9.1", "EMAIL"),
    ("0.9.2342.19200300.100.1.1", "UID"),
    ("0.9.2342.19200300.100.1.25", "DC"),
];

/// The subject of a certificate in DER: its attributes in their order, `C=GB,O=Example,CN=laptop`.
///
/// Special characters have a backslash before them, and other attributes are written as `OID=#HEX` (RFC 4514).
/// `None` if it can't be read.
pub(crate) fn subject(certificate: &[u8]) -> Option<String> {
    let certificate = CertificateInner::<Rfc5280>::from_der(certificate).ok()?;
    let parts = certificate.tbs_certificate().subject().iter_rdn().map(|part| {
        let attributes = part.iter().map(attribute).collect::<Option<Vec<_>>>();
        attributes.map(|attributes| attributes.join("+"))
    });
    parts.collect::<Option<Vec<_>>>().map(|parts| parts.join(","))
}

fn attribute(attribute: &AttributeTypeAndValue) -> Option<String> {
    let name = NAMES.iter().find(|(oid, _)| ObjectIdentifier::new_unwrap(oid) == attribute.oid);
    if let (Some((_, name)), Some(text)) = (name, text(attribute)) {
        return Some(format!("{name}={}", escaped(&text)));
    }
    let mut shown = format!("{}=#", attribute.oid);
    for byte in attribute.value.to_der().ok()? {
        let _ = write!(shown, "{byte:02X}");
    }
    Some(shown)
}

fn text(attribute: &AttributeTypeAndValue) -> Option<String> {
    let bytes = attribute.value.value();
    match attribute.value.tag() {
        Tag::Utf8String | Tag::PrintableString | Tag::Ia5String => String::from_utf8(bytes.to_vec()).ok(),
        _ => None,
    }
}

fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let last = text.chars().count().saturating_sub(1);
    for (index, character) in text.chars().enumerate() {
        let is_special = matches!(character, ',' | '+' | '"' | '\\' | '<' | '>' | ';')
            || (index == 0 && matches!(character, '#' | ' '))
            || (index == last && character == ' ');
        if is_special {
            shown.push('\\');
        }
        shown.push(character);
    }
    shown
}
