//! Uploads to S3 that were interrupted: the store's own lists say what it has.

use crate::access::Access;
use crate::name::StoreName;
use md5::{Digest, Md5};
use object_store::path::Path;
use object_store::signer::{Method, SignedUrlOptions};
use serde::Deserialize;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;
use zebu_remote::http::HttpClient;

/// The index of the part that marks an upload as one of zebu's. It is the last that an upload can have, and becomes no part of
/// the object.
pub(super) const MARK: usize = 9_999;
/// How long the signature of a list is good.
const GOOD_FOR: Duration = Duration::from_secs(300);
/// The most pages of a list that are read.
const MOST_PAGES: usize = 16;
/// The most uploads of one name that are looked at.
const MOST_UPLOADS: usize = 8;

/// The bytes of the mark.
pub(super) fn mark(part_size: u64) -> Vec<u8> {
    format!("zebu upload 1: parts of {part_size} bytes\n").into_bytes()
}

/// The ETag that S3 gives a part with these bytes, unless it encrypts it with a key of its own.
pub(super) fn etag(bytes: &[u8]) -> String {
    hex(&Md5::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The ETag of an object of parts.
pub(super) fn etag_of_parts<'a>(etags: impl ExactSizeIterator<Item = &'a str>) -> Option<String> {
    let count = etags.len();
    let mut all = Md5::new();
    for etag in etags {
        let digits = etag.trim_matches('"');
        for at in (0..digits.len()).step_by(2) {
            all.update([u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?]);
        }
    }
    Some(format!("{}-{count}", hex(&all.finalize())))
}

/// A part that the store has: its bytes and ETag, without quotes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) len: u64,
    pub(super) etag: String,
}

/// An upload that was interrupted.
#[derive(Debug)]
pub(super) struct Interrupted {
    pub(super) id: String,
    /// By index.
    pub(super) parts: HashMap<u64, Kept>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Uploads {
    #[serde(default)]
    upload: Vec<OneUpload>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct OneUpload {
    key: String,
    upload_id: String,
    #[serde(default)]
    initiated: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Parts {
    #[serde(default)]
    is_truncated: bool,
    next_part_number_marker: Option<String>,
    #[serde(default)]
    part: Vec<OnePart>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct OnePart {
    part_number: u64,
    #[serde(rename = "ETag")]
    etag: String,
    size: u64,
}

/// The newest upload of zebu's to this name with parts of this size, if there is any. What can't be listed is begun anew.
pub(super) async fn find(
    access: &Access,
    client: &Arc<HttpClient>,
    name: &StoreName,
    part_size: u64,
) -> Option<Interrupted> {
    let key = name.key().as_ref();
    let query = vec![("uploads".to_owned(), String::new()), ("prefix".to_owned(), key.to_owned())];
    let list: Uploads = quick_xml::de::from_str(&get(access, client, &Path::default(), query).await?).ok()?;
    let mut uploads: Vec<OneUpload> = list.upload.into_iter().filter(|upload| upload.key == key).collect();
    // Times of one form, which sort as texts.
    uploads.sort_by(|a, b| b.initiated.cmp(&a.initiated));
    let mark = mark(part_size);
    let mark = Kept { len: mark.len() as u64, etag: etag(&mark) };
    for upload in uploads.into_iter().take(MOST_UPLOADS) {
        let Some(mut parts) = parts_of(access, client, name, &upload.upload_id).await else { continue };
        if parts.remove(&(MARK as u64)).is_some_and(|found| found == mark) {
            return Some(Interrupted { id: upload.upload_id, parts });
        }
    }
    None
}

async fn parts_of(
    access: &Access,
    client: &Arc<HttpClient>,
    name: &StoreName,
    id: &str,
) -> Option<HashMap<u64, Kept>> {
    let mut parts = HashMap::new();
    let mut after = None;
    for _ in 0..MOST_PAGES {
        let mut query = vec![("uploadId".to_owned(), id.to_owned())];
        query.extend(after.take().map(|after| ("part-number-marker".to_owned(), after)));
        let page: Parts = quick_xml::de::from_str(&get(access, client, name.key(), query).await?).ok()?;
        for part in page.part {
            let etag = part.etag.trim_matches('"').to_owned();
            parts.insert(part.part_number.checked_sub(1)?, Kept { len: part.size, etag });
        }
        match page.next_part_number_marker {
            Some(next) if page.is_truncated => after = Some(next),
            _ => return Some(parts),
        }
    }
    None
}

/// The document at a place of the bucket.
async fn get(
    access: &Access,
    client: &Arc<HttpClient>,
    path: &Path,
    query: Vec<(String, String)>,
) -> Option<String> {
    let options = SignedUrlOptions::new().with_query(query);
    let url = access.signer().signed_url_opts(Method::GET, path, GOOD_FOR, &options).await.ok()?;
    let request = http::Request::get(url.as_str()).body(()).ok()?;
    let client = Arc::clone(client);
    let answer = tokio::task::spawn_blocking(move || client.exchange(request, &[])).await.ok()?.ok()?;
    if !answer.status().is_success() {
        return None;
    }
    String::from_utf8(answer.into_body()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        let text = "<?xml version=\"1.0\"?><ListPartsResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>b</Bucket>\
                    <IsTruncated>true</IsTruncated><NextPartNumberMarker>2</NextPartNumberMarker>\
                    <Part><PartNumber>1</PartNumber><LastModified>x</LastModified><ETag>&quot;aa&quot;</ETag><Size>5</Size></Part>\
                    <Part><PartNumber>2</PartNumber><ETag>\"bb\"</ETag><Size>6</Size></Part></ListPartsResult>";
        let parts: Parts = quick_xml::de::from_str(text).unwrap();
        assert!(parts.is_truncated && parts.part.len() == 2 && parts.part[0].etag.trim_matches('"') == "aa");
        let none: Uploads =
            quick_xml::de::from_str("<ListMultipartUploadsResult></ListMultipartUploadsResult>").unwrap();
        assert!(none.upload.is_empty());
    }

    #[test]
    fn etags_are_those_of_the_store() {
        assert_eq!(etag(b""), "d41d8cd98f00b204e9800998ecf8427e");
        let of_two = etag_of_parts([etag(b"a").as_str(), &format!("\"{}\"", etag(b"b"))].into_iter());
        // By Python's hashlib.
        assert_eq!(of_two.as_deref(), Some("96e024ba2074fe77e8e965ba43a704be-2"));
        assert_eq!(etag_of_parts(["x"].into_iter()), None);
    }
}
