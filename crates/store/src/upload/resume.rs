//! Uploads to S3 that were interrupted: the store's own lists say what it has.

use crate::access::Access;
use crate::hex::hex;
use crate::name::StoreName;
use md5::{Digest, Md5};
use object_store::path::Path;
use object_store::signer::{Method, SignedUrlOptions};
use serde::Deserialize;
use std::collections::HashMap;
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
/// Entries of a page that are asked for: S3 gives no more.
const PAGE: &str = "1000";
/// The longest page, in bytes. An entry has a few hundred.
const LONGEST_PAGE: usize = 4 << 20;
/// The most uploads of one name that are looked at.
const MOST_UPLOADS: usize = 8;
/// Digits of a part's ETag, which is an MD5. No other can be that of bytes that are compared.
const ETAG_DIGITS: usize = 32;

/// The bytes of the mark.
pub(super) fn mark(part_size: u64) -> Vec<u8> {
    format!("zebu upload 1: parts of {part_size} bytes\n").into_bytes()
}

/// The ETag that S3 gives a part with these bytes, unless it encrypts it with a key of its own.
pub(super) fn etag(bytes: &[u8]) -> String {
    hex(&Md5::digest(bytes))
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
    is_truncated: bool,
    #[serde(default)]
    next_key_marker: String,
    #[serde(default)]
    next_upload_id_marker: String,
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
    let mark = mark(part_size);
    let mark = Kept { len: mark.len() as u64, etag: etag(&mark) };
    for upload in newest_uploads(access, client, name).await? {
        let Some(mut parts) = parts_of(access, client, name, &upload.upload_id).await else { continue };
        if parts.remove(&(MARK as u64)).is_some_and(|found| found == mark) {
            return Some(Interrupted { id: upload.upload_id, parts });
        }
    }
    None
}

/// The uploads to this name that were begun last, the newest first. A list has the oldest first.
async fn newest_uploads(
    access: &Access,
    client: &Arc<HttpClient>,
    name: &StoreName,
) -> Option<Vec<OneUpload>> {
    let key = name.key().as_ref();
    let mut newest: Vec<OneUpload> = Vec::new();
    let mut after = None;
    for _ in 0..MOST_PAGES {
        let mut query = vec![("uploads".to_owned(), String::new())];
        query.extend(
            [("prefix", key), ("max-uploads", PAGE)].map(|(key, value)| (key.to_owned(), value.to_owned())),
        );
        if let Some((key, id)) = after.take() {
            query.extend([("key-marker".to_owned(), key), ("upload-id-marker".to_owned(), id)]);
        }
        let page: Uploads =
            quick_xml::de::from_str(&get(access, client, &Path::default(), query).await?).ok()?;
        // Keys are in order, and of those that begin so, this is the first.
        let goes_on = page.is_truncated && page.upload.last().is_none_or(|last| last.key == key);
        newest.extend(page.upload.into_iter().filter(|upload| upload.key == key));
        // Times of one form, which sort as texts.
        newest.sort_by(|a, b| b.initiated.cmp(&a.initiated));
        newest.truncate(MOST_UPLOADS);
        if !goes_on || page.next_upload_id_marker.is_empty() {
            break;
        }
        // MinIO leaves the key out.
        let next =
            Some(page.next_key_marker).filter(|next| !next.is_empty()).unwrap_or_else(|| key.to_owned());
        after = Some((next, page.next_upload_id_marker));
    }
    Some(newest)
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
        let mut query =
            vec![("uploadId".to_owned(), id.to_owned()), ("max-parts".to_owned(), PAGE.to_owned())];
        query.extend(after.take().map(|after| ("part-number-marker".to_owned(), after)));
        let page: Parts = quick_xml::de::from_str(&get(access, client, name.key(), query).await?).ok()?;
        add_parts(&mut parts, page.part);
        match page.next_part_number_marker {
            Some(next) if page.is_truncated => after = Some(next),
            _ => return Some(parts),
        }
    }
    None
}

/// Adds the parts of a page that an upload can have, by index.
fn add_parts(parts: &mut HashMap<u64, Kept>, page: Vec<OnePart>) {
    for part in page {
        let etag = part.etag.trim_matches('"');
        let index = part.part_number.checked_sub(1).filter(|index| *index <= MARK as u64);
        if let Some(index) = index
            && etag.len() == ETAG_DIGITS
        {
            parts.insert(index, Kept { len: part.size, etag: etag.to_owned() });
        }
    }
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
    let answer = tokio::task::spawn_blocking(move || client.exchange_at_most(request, &[], LONGEST_PAGE))
        .await
        .ok()?
        .ok()?;
    if !answer.status().is_success() {
        return None;
    }
    String::from_utf8(answer.into_body()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Environment;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use zebu_remote::http::HttpOptions;

    /// A store that answers each request by its first line, and its access.
    fn store(answer: impl Fn(&str) -> String + Send + 'static) -> (Access, Arc<HttpClient>, StoreName) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let head: Vec<String> = BufReader::new(&stream)
                    .lines()
                    .map(Result::unwrap)
                    .take_while(|line| !line.is_empty())
                    .collect();
                let body = answer(&head[0]);
                let _ = write!(
                    stream,
                    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
            }
        });
        let variable = |name: &str| match name {
            "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => Some("x".to_owned()),
            "AWS_ENDPOINT_URL" => Some(endpoint.clone()),
            _ => None,
        };
        let (name, http) = (StoreName::parse("s3://b/k").unwrap(), HttpOptions::default());
        let access = Access::new(&name, &http, Environment(&variable)).unwrap();
        (access, Arc::new(HttpClient::new(http)), name)
    }

    fn part(number: u64, etag: &str, size: u64) -> String {
        format!("<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag><Size>{size}</Size></Part>")
    }

    #[test]
    fn the_newest_of_many_uploads_is_found() {
        let mark = mark(8 << 20);
        let marked = part(MARK as u64 + 1, &etag(&mark), mark.len() as u64);
        for names_key in [true, false] {
            let marked = marked.clone();
            let (access, client, name) = store(move |line| {
                if line.contains("uploadId=") {
                    let own = part(3, &etag(b"three"), 5);
                    let parts = if line.contains("uploadId=id2500") { own + &marked } else { String::new() };
                    return format!("<ListPartsResult>{parts}</ListPartsResult>");
                }
                let after = line.split_once("upload-id-marker=id").map_or(0, |(_, rest)| {
                    assert!(line.contains("key-marker=k&"), "{line}");
                    rest.split(['&', ' ']).next().unwrap().parse().unwrap()
                });
                let end = 2500.min(after + 1000);
                let one = |id: u64| {
                    format!(
                        "<Upload><Key>k</Key><UploadId>id{id}</UploadId><Initiated>{id:06}</Initiated></Upload>"
                    )
                };
                let uploads = (after + 1..=end).map(one).collect::<Vec<String>>().concat();
                let next = if names_key { "<NextKeyMarker>k</NextKeyMarker>" } else { "<NextKeyMarker/>" };
                format!(
                    "<ListMultipartUploadsResult>{next}<NextUploadIdMarker>id{end}</NextUploadIdMarker>\
                     <IsTruncated>{}</IsTruncated>{uploads}</ListMultipartUploadsResult>",
                    end < 2500
                )
            });
            let found = crate::runtime::wait(find(&access, &client, &name, 8 << 20)).unwrap();
            let found = found.expect("the upload of the last page");
            assert_eq!((found.id.as_str(), found.parts.len()), ("id2500", 1));
        }
    }

    #[test]
    fn a_store_that_lists_anything_fills_no_memory() {
        let mut parts = HashMap::new();
        for page in 0..40u64 {
            let one = |at: u64| {
                let etag = if at.is_multiple_of(2) { "e".repeat(8 << 10) } else { etag(&at.to_le_bytes()) };
                OnePart { part_number: page * 1000 + at, etag, size: 1 }
            };
            add_parts(&mut parts, (0..1000).map(one).collect());
        }
        assert!(parts.len() <= MARK + 1 && parts.values().all(|part| part.etag.len() == ETAG_DIGITS));
        assert!(parts.len() > 4000);
        // A list without an end, and one that is too long.
        let (access, client, name) = store(|line| {
            if line.contains("uploadId=long") {
                return format!("<ListPartsResult>{}</ListPartsResult>", " ".repeat(LONGEST_PAGE));
            }
            "<ListPartsResult><IsTruncated>true</IsTruncated><NextPartNumberMarker>1</NextPartNumberMarker></ListPartsResult>"
                .to_owned()
        });
        for id in ["long", "endless"] {
            assert!(crate::runtime::wait(parts_of(&access, &client, &name, id)).unwrap().is_none(), "{id}");
        }
    }

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
