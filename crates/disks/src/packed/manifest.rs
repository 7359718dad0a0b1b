//! Manifests of appliances: the digests of their files.

use super::pieces::Pieces;
use super::range_reader::RangeReader;
use crate::printable::printable;
use crate::watch::Watch;
use sha1::Sha1;
use sha2::digest::Digest;
use sha2::{Sha256, Sha512};
use std::fs::File;
use std::io::{self, Read};

/// Characters of a line that an error shows.
const MOST_SHOWN: usize = 200;
/// Bytes that are read at once.
const PIECE: usize = 1 << 20;

/// How a digest is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    Sha1,
    Sha256,
    Sha512,
}

/// The digest of a file, as a manifest tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) file: String,
    algorithm: Algorithm,
    digest: String,
}

/// The digests in a manifest: lines of `SHA256(file)= digest`.
///
/// # Errors
/// A line that is none, or tells a digest that is not known.
pub(super) fn parse(text: &str) -> Result<Vec<Told>, String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(told).collect()
}

fn told(line: &str) -> Result<Told, String> {
    let bad = || {
        let shown: String = line.chars().take(MOST_SHOWN).collect();
        format!("the manifest has a line without a digest: {}", printable(&shown))
    };
    let (algorithm, rest) = line.split_once('(').ok_or_else(bad)?;
    let (file, digest) = rest.rsplit_once('=').ok_or_else(bad)?;
    let file = file.trim_end().strip_suffix(')').ok_or_else(bad)?;
    let (algorithm, digits) = match algorithm.trim().to_ascii_uppercase().replace('-', "").as_str() {
        "SHA1" => (Algorithm::Sha1, 40),
        "SHA256" => (Algorithm::Sha256, 64),
        "SHA512" => (Algorithm::Sha512, 128),
        other if other.len() < MOST_SHOWN => {
            let other = printable(other);
            return Err(format!("the manifest has digests of the unknown kind {other}"));
        }
        _ => return Err(bad()),
    };
    let digest = digest.trim().to_ascii_lowercase();
    if digest.len() != digits || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(bad());
    }
    Ok(Told { file: file.to_owned(), algorithm, digest })
}

impl Told {
    /// Whether the bytes have the digest. `None` if it was cancelled.
    pub(super) fn is_of(&self, file: &File, bytes: &Pieces, watch: &Watch<'_>) -> io::Result<Option<bool>> {
        match self.algorithm {
            Algorithm::Sha1 => self.is_made_by::<Sha1>(file, bytes, watch),
            Algorithm::Sha256 => self.is_made_by::<Sha256>(file, bytes, watch),
            Algorithm::Sha512 => self.is_made_by::<Sha512>(file, bytes, watch),
        }
    }

    fn is_made_by<D: Digest>(
        &self,
        file: &File,
        bytes: &Pieces,
        watch: &Watch<'_>,
    ) -> io::Result<Option<bool>> {
        let mut digest = D::new();
        let mut reader = RangeReader::new(file, bytes);
        let mut piece = vec![0; PIECE];
        let mut done = 0;
        loop {
            if watch.is_cancelled() {
                return Ok(None);
            }
            let read = reader.read(&mut piece)?;
            if read == 0 {
                let digest = digest.finalize();
                let digits = digest.iter().flat_map(|byte| [byte >> 4, byte & 15]);
                let hex = digits.map(|digit| char::from_digit(digit.into(), 16));
                return Ok(Some(hex.eq(self.digest.chars().map(Some))));
            }
            digest.update(&piece[..read]);
            done += read as u64;
            watch.note("verifying", done, bytes.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_kinds_of_writers_are_understood() {
        let [a, b, c] = [("0A", 20), ("11", 32), ("22", 64)].map(|(byte, times)| byte.repeat(times));
        let text = format!("SHA1(a.ovf)= {a}\n\r\nSHA256 (b (1).vmdk) = {b}\nSHA-512(c)={c}\n");
        let found: Vec<_> =
            parse(&text).unwrap().into_iter().map(|told| (told.file, told.algorithm, told.digest)).collect();
        let expected = [
            ("a.ovf", Algorithm::Sha1, "0a".repeat(20)),
            ("b (1).vmdk", Algorithm::Sha256, b),
            ("c", Algorithm::Sha512, c),
        ];
        assert_eq!(found, expected.map(|(file, algorithm, digest)| (file.to_owned(), algorithm, digest)));
        let long = format!("SHA1(a)= {}", "é".repeat(5000));
        let odd = format!("SHA1(a)= {}", "0g".repeat(20));
        for line in [
            "MD5(a)= 00",
            "SHA1 a= 00",
            "SHA1(a 00",
            "x",
            "SHA1(a)= 00",
            "SHA1(a)=",
            "\u{1b}(a)= 00",
            &odd,
            &long,
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.len() < 1000 && !error.contains('\u{1b}'), "{error}");
        }
    }
}
