//! Distinguished names of clients' certificates, as GnuTLS and thus QEMU write them.

use x509_cert::attr::AttributeTypeAndValue;
use x509_cert::certificate::{CertificateInner, Rfc5280};
use x509_cert::der::asn1::ObjectIdentifier;
use x509_cert::der::{Decode, Encode, Tag, Tagged};

/// The type of an attribute's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Syntax {
    /// One of several types of text (RFC 5280, appendix A.1).
    Directory,
    Printable,
    Ia5,
}

/// Attributes that GnuTLS writes by name, and their types.
const NAMES: [(&str, &str, Syntax); 24] = [
    ("2.5.4.3", "CN", Syntax::Directory),
    ("2.5.4.4", "surName", Syntax::Directory),
    ("2.5.4.5", "serialNumber", Syntax::Printable),
    ("2.5.4.6", "C", Syntax::Printable),
    ("2.5.4.7", "L", Syntax::Directory),
    ("2.5.4.8", "ST", Syntax::Directory),
    ("2.5.4.9", "street", Syntax::Directory),
    ("2.5.4.10", "O", Syntax::Directory),
    ("2.5.4.11", "OU", Syntax::Directory),
    ("2.5.4.12", "title", Syntax::Directory),
    ("2.5.4.13", "description", Syntax::Directory),
    ("2.5.4.15", "businessCategory", Syntax::Directory),
    ("2.5.4.17", "postalCode", Syntax::Directory),
    ("2.5.4.20", "telephoneNumber", Syntax::Printable),
    ("2.5.4.41", "name", Syntax::Directory),
    ("2.5.4.42", "givenName", Syntax::Directory),
    ("2.5.4.43", "initials", Syntax::Directory),
    ("2.5.4.44", "generationQualifier", Syntax::Directory),
    ("2.5.4.46", "dnQualifier", Syntax::Printable),
    ("2.5.4.65", "pseudonym", Syntax::Directory),
    ("0.9.2342.19200300.100.1.1", "UID", Syntax::Directory),
    ("0.9.2342.19200300.100.1.25", "DC", Syntax::Ia5),
    ("1.2.840.113549.1.9.1", "EMAIL", Syntax::Ia5),
    ("1.3.6.1.4.1.311.60.2.1.3", "jurisdictionOfIncorporationCountryName", Syntax::Printable),
];

/// The subject of a certificate in DER: its attributes in their order, `C=GB,O=Example,CN=laptop`, with a backslash before
/// special characters (RFC 4514).
///
/// `None` if it can't be read, is empty, or has an attribute whose form in GnuTLS is not known here: a rule must not match
/// what it does not match there.
pub(crate) fn subject(certificate: &[u8]) -> Option<String> {
    let parsed = CertificateInner::<Rfc5280>::from_der(certificate).ok()?;
    // Parsing sorts the attributes of a part; GnuTLS leaves them in their order.
    if parsed.to_der().ok()? != certificate {
        return None;
    }
    let parts = parsed.tbs_certificate().subject().iter_rdn().map(|part| {
        let attributes = part.iter().map(attribute).collect::<Option<Vec<_>>>();
        attributes.map(|attributes| attributes.join("+"))
    });
    parts.collect::<Option<Vec<_>>>().map(|parts| parts.join(",")).filter(|subject| !subject.is_empty())
}

fn attribute(attribute: &AttributeTypeAndValue) -> Option<String> {
    let known = NAMES.iter().find(|(oid, ..)| ObjectIdentifier::new(oid) == Ok(attribute.oid));
    let (_, name, syntax) = known?;
    let value = text(attribute, *syntax)?;
    (!value.is_empty() && !value.contains('\0')).then(|| format!("{name}={}", escaped(&value)))
}

fn text(attribute: &AttributeTypeAndValue, syntax: Syntax) -> Option<String> {
    let bytes = attribute.value.value();
    match (syntax, attribute.value.tag()) {
        (Syntax::Directory, Tag::Utf8String) => String::from_utf8(bytes.to_vec()).ok(),
        (Syntax::Directory | Syntax::Printable, Tag::PrintableString)
        | (Syntax::Ia5, Tag::Ia5String)
        | (Syntax::Directory, Tag::TeletexString) => {
            bytes.is_ascii().then(|| String::from_utf8(bytes.to_vec()).ok()).flatten()
        }
        (Syntax::Directory, Tag::BmpString) => {
            let (units, []) = bytes.as_chunks::<2>() else { return None };
            let units = units.iter().map(|unit| u16::from_be_bytes(*unit));
            char::decode_utf16(units).collect::<Result<String, _>>().ok()
        }
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
