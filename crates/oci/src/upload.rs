//! Blobs to a registry: in chunks, which go on where they were broken off.

use crate::client::{Answer, Ask, header, refusal};
use crate::content::Content;
use crate::document::Descriptor;
use crate::failure::Failure;
use crate::registry::{Registry, location};
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::time::Duration;

/// Bytes of a chunk, and the most that a registry may want in one.
const CHUNK: u64 = 16 << 20;
const MOST_CHUNK: u64 = 256 << 20;
/// How often an upload goes on after a failure.
const MOST_TRIES: u32 = 8;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// The way of a blob to the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It was sent.
    Now,
    /// The registry had it.
    Before,
}

/// An upload that the registry knows.
struct Begun {
    url: String,
    /// Bytes that it has.
    at: u64,
    /// Bytes of a chunk.
    chunk: u64,
}

/// Sends a blob, unless the registry has it. `on` hears of the bytes that it has.
pub(crate) fn upload(
    registry: &Registry,
    content: &Content,
    blob: &Descriptor,
    on: &dyn Fn(u64) -> Result<(), Failure>,
) -> Result<Sent, Failure> {
    if is_there(registry, blob)? {
        on(blob.size)?;
        return Ok(Sent::Before);
    }
    let mut begun: Option<Begun> = None;
    let (mut tries, mut pause) = (1, FIRST_PAUSE);
    // One that begins anew gets no further by that.
    let mut furthest = 0;
    loop {
        let failure = match go_on(registry, content, blob, &mut begun, on) {
            Ok(()) => return Ok(Sent::Now),
            Err(failure) => failure,
        };
        // Its answer may have been lost.
        if begun.as_ref().is_some_and(|begun| begun.at == blob.size)
            && is_there(registry, blob).unwrap_or(false)
        {
            return Ok(Sent::Now);
        }
        let at = begun.as_ref().map_or(0, |begun| begun.at);
        if at > furthest {
            (furthest, tries, pause) = (at, 1, FIRST_PAUSE);
        }
        let is_final =
            matches!(failure.errno, libc::EACCES | libc::ECANCELED | libc::EINVAL | libc::EOPNOTSUPP);
        if is_final || tries == MOST_TRIES {
            return Err(failure);
        }
        tries += 1;
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
        if let Some(one) = begun.take() {
            begun = ask_where(registry, one);
        }
    }
}

fn is_there(registry: &Registry, blob: &Descriptor) -> Result<bool, Failure> {
    let answer = registry.ask(Ask::new(Method::HEAD, &registry.url(&format!("blobs/{}", blob.digest))))?;
    match answer.status().as_u16() {
        200 => {
            let len = header(&answer, "content-length").and_then(|len| len.parse::<u64>().ok());
            Ok(len.is_none_or(|len| len == blob.size))
        }
        // It is elsewhere.
        301 | 302 | 307 | 308 => Ok(true),
        404 => Ok(false),
        _ => Err(refusal(&answer)),
    }
}

/// Sends chunks from where the upload is, to its end.
fn go_on(
    registry: &Registry,
    content: &Content,
    blob: &Descriptor,
    begun: &mut Option<Begun>,
    on: &dyn Fn(u64) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let begun = match begun {
        Some(begun) => begun,
        None => begun.insert(begin(registry)?),
    };
    while begun.at < blob.size {
        let len = begun.chunk.min(blob.size - begun.at);
        let mut bytes = vec![0; len as usize];
        content.read_exact_at(&mut bytes, begun.at)?;
        let ask = Ask::new(Method::PATCH, &begun.url)
            .header("content-type", "application/octet-stream")
            .header("content-range", &format!("{}-{}", begun.at, begun.at + len - 1))
            .body(bytes);
        let answer = registry.ask(ask)?;
        if answer.status().as_u16() != 202 {
            return Err(refusal(&answer));
        }
        let has = range_end(&answer).unwrap_or(begun.at + len);
        if has > begun.at + len {
            return Err(Failure::wrong("the registry says that it has more than was sent (Range)"));
        }
        if has <= begun.at {
            return Err(Failure::new(libc::EIO, "the registry takes nothing of what it was sent (Range)"));
        }
        begun.url = next(registry, &begun.url, &answer)?;
        begun.at = has;
        on(has)?;
    }
    let digest = utf8_percent_encode(&blob.digest.to_string(), NON_ALPHANUMERIC).to_string();
    let sign = if begun.url.contains('?') { '&' } else { '?' };
    let ask = Ask::new(Method::PUT, &format!("{}{sign}digest={digest}", begun.url))
        .header("content-type", "application/octet-stream");
    let answer = registry.ask(ask)?;
    if answer.status().is_success() { Ok(()) } else { Err(refusal(&answer)) }
}

fn begin(registry: &Registry) -> Result<Begun, Failure> {
    let url = registry.url("blobs/uploads/");
    let answer = registry.ask(Ask::new(Method::POST, &url))?;
    if answer.status().as_u16() != 202 {
        return Err(refusal(&answer).during("the upload can't begin"));
    }
    let least = header(&answer, "oci-chunk-min-length").and_then(|len| len.parse::<u64>().ok()).unwrap_or(0);
    if least > MOST_CHUNK {
        return Err(Failure::unsupported(format!("the registry wants chunks of {least} bytes")));
    }
    Ok(Begun { url: next(registry, &url, &answer)?, at: 0, chunk: CHUNK.max(least) })
}

/// Where the upload is; `None` if it must begin anew.
fn ask_where(registry: &Registry, begun: Begun) -> Option<Begun> {
    let answer = registry.ask(Ask::new(Method::GET, &begun.url)).ok()?;
    if !answer.status().is_success() {
        return None;
    }
    let url = next(registry, &begun.url, &answer).unwrap_or(begun.url);
    Some(Begun { url, at: range_end(&answer).unwrap_or(0), chunk: begun.chunk })
}

fn next(registry: &Registry, from: &str, answer: &Answer) -> Result<String, Failure> {
    let to = location(from, answer)?;
    registry.check_step(from, &to)?;
    Ok(to)
}

/// The bytes that a registry has, by its header `Range` (`0-LAST`). `0-0` may mean none of them, and is taken for that.
fn range_end(answer: &Answer) -> Option<u64> {
    let range = header(answer, "range")?;
    let (first, last) = range.strip_prefix("bytes=").unwrap_or(range).split_once('-')?;
    let last: u64 = last.trim().parse().ok()?;
    match (first.trim(), last) {
        ("0", 0) => Some(0),
        ("0", last) => last.checked_add(1),
        _ => None,
    }
}
