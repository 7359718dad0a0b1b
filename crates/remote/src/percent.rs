//! Percent-encoding of URLs (RFC 3986, section 2.1).

/// The text that `encoded` stands for.
///
/// # Errors
/// A `%` without two hexadecimal digits, or bytes that are no UTF-8 or NUL.
pub(crate) fn decode(encoded: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = tail.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let byte = digits
            .filter(|two| two.bytes().all(|digit| digit.is_ascii_hexdigit()))
            .and_then(|two| u8::from_str_radix(two, 16).ok())
            .ok_or_else(|| format!("'{encoded}': after % come two hexadecimal digits"))?;
        bytes.push(byte);
        rest = &tail[2..];
    }
    if bytes.contains(&0) {
        return Err(format!("'{encoded}' has a NUL in it"));
    }
    String::from_utf8(bytes).map_err(|_| format!("'{encoded}' is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn escapes_are_read_and_wrong_ones_refused() {
        assert_eq!(decode("a%20b%2Fc%c3%a9+"), Ok("a b/c\u{e9}+".to_owned()));
        for wrong in ["%", "%2", "%zz", "%+1", "%ff", "a%00"] {
            assert!(decode(wrong).is_err(), "{wrong}");
        }
    }
}
