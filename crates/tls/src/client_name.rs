//! Distinguished names of clients' certificates, as GnuTLS and thus QEMU write them.

use x509_cert::attr::AttributeTypeAndValue;
use x509_cert::certificate::{CertificateInner, Rfc5280};
use x509_cert::der::asn1::ObjectIdentifier;
use x509_cert::der::{Decode, Encode, Tag, Tagged};
use x509_cert::name::Name;

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
    written(parsed.tbs_certificate().subject())
}

fn written(name: &Name) -> Option<String> {
    let parts = name.iter_rdn().map(|part| {
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

#[cfg(test)]
mod tests {
    use super::*;

    const UTF8: u8 = 12;
    const NUMERIC: u8 = 18;
    const PRINTABLE: u8 = 19;
    const T61: u8 = 20;
    const IA5: u8 = 22;
    const BMP: u8 = 30;

    fn der(tag: u8, content: &[u8]) -> Vec<u8> {
        let len = u8::try_from(content.len()).ok().filter(|len| *len < 128).expect("a short one");
        [&[tag, len], content].concat()
    }

    /// A name with one attribute in each part.
    fn name(attributes: &[(&str, u8, &[u8])]) -> Name {
        let part = |(oid, tag, value): &(&str, u8, &[u8])| {
            let oid = ObjectIdentifier::new(oid).unwrap();
            der(0x31, &der(0x30, &[der(6, oid.as_bytes()), der(*tag, value)].concat()))
        };
        let parts: Vec<u8> = attributes.iter().flat_map(part).collect();
        Name::from_der(&der(0x30, &parts)).unwrap()
    }

    /// The forms that QEMU 10.0 logs, with GnuTLS 3.7.
    #[test]
    fn names_are_written_as_gnutls_does() {
        for (attributes, expected) in [
            (&[("2.5.4.6", PRINTABLE, &b"GB"[..]), ("2.5.4.3", UTF8, b"a,b")][..], "C=GB,CN=a\\,b"),
            (&[("2.5.4.3", PRINTABLE, b"bob")], "CN=bob"),
            (&[("2.5.4.3", T61, b"bob")], "CN=bob"),
            (&[("2.5.4.3", BMP, b"\0b\0o\0b")], "CN=bob"),
            (&[("2.5.4.5", PRINTABLE, b"77")], "serialNumber=77"),
            (&[("2.5.4.42", UTF8, b"Bob"), ("2.5.4.9", UTF8, b"1 Main")], "givenName=Bob,street=1 Main"),
            (&[("1.2.840.113549.1.9.1", IA5, b"a@b")], "EMAIL=a@b"),
            (&[("0.9.2342.19200300.100.1.25", IA5, b"ex")], "DC=ex"),
            (&[("2.5.4.3", UTF8, b" #a ")], "CN=\\ #a\\ "),
        ] {
            assert_eq!(written(&name(attributes)).as_deref(), Some(expected));
        }
    }

    /// QEMU has other forms for these, which rules must not take for the text.
    #[test]
    fn what_gnutls_writes_otherwise_has_no_name() {
        for attributes in [
            &[][..],
            &[("2.5.4.3", IA5, &b"bob"[..])],
            &[("2.5.4.3", NUMERIC, b"12")],
            &[("2.5.4.3", UTF8, b"a\0b")],
            &[("2.5.4.3", UTF8, b"")],
            &[("2.5.4.3", T61, b"b\xf6b")],
            &[("2.5.4.3", BMP, b"\0b\0")],
            &[("2.5.4.6", UTF8, b"GB")],
            &[("1.2.840.113549.1.9.1", UTF8, b"a@b")],
            &[("1.2.3.4.5", UTF8, b"v"), ("2.5.4.3", UTF8, b"bob")],
        ] {
            assert_eq!(written(&name(attributes)), None, "{attributes:?}");
        }
    }
}
