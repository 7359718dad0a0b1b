//! Values of a response's headers, as far as a disk depends on them.

use std::ops::Range;
use std::time::Duration;
use ureq_proto::http::HeaderMap;
use ureq_proto::http::header::{CONTENT_ENCODING, CONTENT_RANGE, ETAG, LAST_MODIFIED, RETRY_AFTER};

/// The longest pause that a server may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// A `Content-Range` of bytes (RFC 9110, section 14.4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContentRange {
    /// The bytes that follow; `None` where there are none (`bytes */LENGTH`).
    pub(super) range: Option<Range<u64>>,
    /// The length of the whole object; `None` if the server does not know it.
    pub(super) total: Option<u64>,
}

impl ContentRange {
    /// Reads the value of the header; `None` if it is none of bytes, or contradicts itself.
    pub(super) fn parse(value: &str) -> Option<Self> {
        let (unit, rest) = value.trim().split_once(' ')?;
        if !unit.eq_ignore_ascii_case("bytes") {
            return None;
        }
        let (range, total) = rest.trim().split_once('/')?;
        let total = if total.trim() == "*" { None } else { Some(number(total)?) };
        if range.trim() == "*" {
            return total.map(|total| Self { range: None, total: Some(total) });
        }
        let (first, last) = range.split_once('-')?;
        let (first, last) = (number(first)?, number(last)?);
        let end = last.checked_add(1).filter(|end| first < *end)?;
        if total.is_some_and(|total| end > total) {
            return None;
        }
        Some(Self { range: Some(first..end), total })
    }
}

fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    // `parse` would take a sign.
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// The value of a header that stands there once.
fn single(headers: &HeaderMap, name: &ureq_proto::http::HeaderName) -> Option<String> {
    let mut all = headers.get_all(name).iter();
    let first = all.next()?.to_str().ok()?.trim().to_owned();
    all.next().is_none().then_some(first)
}

/// The `Content-Range` of a response.
pub(super) fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    ContentRange::parse(&single(headers, &CONTENT_RANGE)?)
}

/// Whether the body is the object's bytes, and not packed.
pub(super) fn is_plain(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().all(|value| value.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// The pause that the server asks for. A date in its place says nothing here.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = number(&single(headers, &RETRY_AFTER)?)?;
    Some(Duration::from_secs(seconds).min(LONGEST_PAUSE))
}

/// Marks of an object's version (RFC 9110, section 8.8).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Validators {
    etag: Option<String>,
    modified: Option<String>,
}

impl Validators {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self { etag: single(headers, &ETAG), modified: single(headers, &LAST_MODIFIED) }
    }

    /// The value for `If-Range`: a strong ETag, else the date.
    pub(super) fn condition(&self) -> Option<&str> {
        match &self.etag {
            Some(etag) if !etag.starts_with("W/") => Some(etag),
            _ => self.modified.as_deref(),
        }
    }

    /// The mark of a version that has one sequence of bytes: a strong ETag.
    #[cfg(feature = "cache")]
    pub(super) fn strong(&self) -> Option<&str> {
        self.etag.as_deref().filter(|etag| !etag.starts_with("W/"))
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.etag.is_none() && self.modified.is_none()
    }

    /// Whether a response with `others` can be of the same version. A mark that one of them lacks says nothing, but they
    /// must have one in common if there is any.
    pub(super) fn fit(&self, others: &Self) -> bool {
        let same = |a: &Option<String>, b: &Option<String>| match (a, b) {
            (Some(a), Some(b)) => Some(a == b),
            _ => None,
        };
        match (same(&self.etag, &others.etag), same(&self.modified, &others.modified)) {
            (Some(etag), _) => etag,
            (None, Some(modified)) => modified,
            (None, None) => self.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        let read = |text| ContentRange::parse(text).map(|found| (found.range, found.total));
        assert_eq!(read("bytes 0-9/10"), Some((Some(0..10), Some(10))));
        assert_eq!(read("Bytes  5-5/*"), Some((Some(5..6), None)));
        assert_eq!(read("bytes */7"), Some((None, Some(7))));
        for wrong in [
            "",
            "bytes",
            "bytes 0-9",
            "bytes 9-0/10",
            "bytes 0-10/10",
            "bytes +0-9/10",
            "bytes 0-9/x",
            "bytes -9/10",
            "bytes */*",
            "bits 0-9/10",
            "bytes 0-18446744073709551615/18446744073709551615",
            "bytes 0-99999999999999999999/*",
            "bytes 0x0-9/10",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn versions_are_told_apart() {
        let marks = |etag: Option<&str>, modified: Option<&str>| Validators {
            etag: etag.map(str::to_owned),
            modified: modified.map(str::to_owned),
        };
        let pinned = marks(Some("\"a\""), Some("Monday"));
        assert!(pinned.fit(&pinned) && pinned.fit(&marks(None, Some("Monday"))));
        assert!(!pinned.fit(&marks(Some("\"b\""), Some("Monday"))) && !pinned.fit(&marks(None, None)));
        assert!(!pinned.fit(&marks(None, Some("Tuesday"))) && marks(None, None).fit(&pinned));
        assert_eq!(pinned.condition(), Some("\"a\""));
        assert_eq!(marks(Some("W/\"a\""), Some("Monday")).condition(), Some("Monday"));
        assert_eq!(marks(Some("W/\"a\""), None).condition(), None);
    }
}
