//! Files of keys.

use super::PskError;
use std::collections::HashMap;
use std::fmt;
use std::io::Read;
use std::path::Path;
use zeroize::Zeroizing;

/// Bytes of a file at most.
const MAX_FILE: u64 = 1 << 20;
/// Bytes of an identity at most (OpenSSL's `PSK_MAX_IDENTITY_LEN` of version 1.1).
const MAX_IDENTITY: usize = 128;
/// Bytes of a key at most (OpenSSL's `PSK_MAX_PSK_LEN` of version 1.1).
const MAX_KEY: usize = 256;

/// Keys by their identities. Wiped when dropped; never shown.
pub struct Keys(HashMap<Vec<u8>, Zeroizing<Vec<u8>>>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Keys").field(&self.0.len()).finish()
    }
}

impl Keys {
    /// Reads a file as GnuTLS's `psktool` writes it: in each line an identity, a colon, and the key in hexadecimal digits.
    /// An identity that begins with `#` is in hexadecimal digits itself.
    ///
    /// # Errors
    /// The file can't be read, is larger than 1 MiB, has no key, or a line is of another form. An identity may have 128
    /// bytes, and a key 256.
    pub fn from_file(path: &Path) -> Result<Self, PskError> {
        let fail = |reason: String| PskError::File { path: path.to_owned(), reason };
        // What grows leaves copies behind.
        let mut text = Zeroizing::new(Vec::with_capacity(MAX_FILE as usize + 2));
        let read = std::fs::File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut text));
        read.map_err(|error| fail(error.to_string()))?;
        if text.len() as u64 > MAX_FILE {
            return Err(fail(format!("a file of keys has at most {MAX_FILE} bytes")));
        }
        Self::parse(&text).map_err(fail)
    }

    fn parse(text: &[u8]) -> Result<Self, String> {
        let mut keys = HashMap::new();
        for (index, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            let (identity, key) =
                parse_line(line).map_err(|reason| format!("line {}: {reason}", index + 1))?;
            // The first one counts, as in GnuTLS.
            keys.entry(identity).or_insert(key);
        }
        if keys.is_empty() {
            return Err("there is no key in it; psktool makes some".to_owned());
        }
        Ok(Self(keys))
    }

    pub(super) fn get(&self, identity: &[u8]) -> Option<&[u8]> {
        self.0.get(identity).map(|key| key.as_slice())
    }

    /// Takes the key of one identity.
    pub(super) fn take(mut self, identity: &str) -> Result<Zeroizing<Vec<u8>>, PskError> {
        let key = self.0.remove(identity.as_bytes());
        key.ok_or_else(|| PskError::NoKey { identity: identity.to_owned() })
    }
}

fn parse_line(line: &[u8]) -> Result<(Vec<u8>, Zeroizing<Vec<u8>>), &'static str> {
    let colon = line.iter().rposition(|byte| *byte == b':').ok_or("it is not IDENTITY:KEY")?;
    let (identity, key) = (&line[..colon], &line[colon + 1..]);
    let identity = match identity.strip_prefix(b"#") {
        Some(digits) => from_hex(digits).ok_or("after '#', the identity is of hexadecimal digits")?.to_vec(),
        None => identity.to_vec(),
    };
    if identity.is_empty() || identity.len() > MAX_IDENTITY || identity.contains(&0) {
        return Err("an identity has 1 to 128 bytes, and no zero among them");
    }
    let key = from_hex(key).ok_or("the key is not of pairs of hexadecimal digits")?;
    if key.is_empty() || key.len() > MAX_KEY {
        return Err("a key has 1 to 256 bytes");
    }
    Ok((identity, key))
}

fn from_hex(digits: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let digit = |byte: u8| (byte as char).to_digit(16).and_then(|value| u8::try_from(value).ok());
    // With room for all: what grows leaves copies behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    for pair in digits.chunks_exact(2) {
        bytes.push(digit(pair[0])? << 4 | digit(pair[1])?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_psktool() {
        let keys = Keys::parse(b"qemu:00ff10\r\n\n#6162:0A\nqemu:22\nwith:colon:33\n").unwrap();
        assert_eq!(keys.get(b"qemu"), Some(&[0, 0xff, 0x10][..]));
        assert_eq!(keys.get(b"ab"), Some(&[0x0a][..]));
        assert_eq!(keys.get(b"with:colon"), Some(&[0x33][..]));
        assert_eq!(keys.get(b"nobody"), None);
        assert!(!format!("{keys:?}").contains("255"));
        assert!(matches!(keys.take("other"), Err(PskError::NoKey { .. })));
    }

    #[test]
    fn other_lines_are_refused_with_their_number() {
        let long = format!("{}:00", "i".repeat(129));
        let large = format!("i:{}", "00".repeat(257));
        for (text, reason) in [
            ("", "no key"),
            ("a:00\nb", "line 2: it is not"),
            ("a:0", "pairs"),
            ("a:0x", "pairs"),
            ("a:", "1 to 256"),
            (":00", "1 to 128"),
            ("#0:00", "hexadecimal"),
            ("#00:00", "no zero"),
            (long.as_str(), "1 to 128"),
            (large.as_str(), "1 to 256"),
        ] {
            let error = Keys::parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_is_read_and_named_in_errors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys.psk");
        let error = Keys::from_file(&path).unwrap_err().to_string();
        assert!(error.contains("keys.psk"), "{error}");
        std::fs::write(&path, vec![b'a'; (1 << 20) + 1]).unwrap();
        assert!(Keys::from_file(&path).unwrap_err().to_string().contains("1048576"));
        std::fs::write(&path, "a:00\n").unwrap();
        assert!(Keys::from_file(&path).is_ok());
    }
}
