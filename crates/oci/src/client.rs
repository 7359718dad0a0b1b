//! Requests to registries and servers of tokens, repeated where they are busy.

use crate::document::shown;
use crate::failure::Failure;
use http::{Method, Request, Response};
use serde::Deserialize;
use std::time::Duration;
use zebu_remote::http::{ClientErrorKind, HttpClient, HttpOptions};

/// How often a request is tried.
const MOST_TRIES: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The longest pause that a server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(60);
/// The name that servers are told.
const AGENT: &str = concat!("zebu/", env!("CARGO_PKG_VERSION"));
/// The longest answer where nothing else is said, in bytes.
const LONGEST_ANSWER: usize = 256 << 10;

/// A request.
pub(crate) struct Ask {
    method: Method,
    url: String,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    most: usize,
}

impl Ask {
    pub(crate) fn new(method: Method, url: &str) -> Self {
        Self { method, url: url.to_owned(), headers: Vec::new(), body: Vec::new(), most: LONGEST_ANSWER }
    }

    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.retain(|(known, _)| *known != name || name == "accept");
        self.headers.push((name, value.to_owned()));
        self
    }

    pub(crate) fn body(self, body: Vec<u8>) -> Self {
        Self { body, ..self }
    }

    /// The longest answer that is taken, in bytes.
    pub(crate) fn most(self, most: usize) -> Self {
        Self { most, ..self }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    fn request(&self) -> Result<Request<()>, Failure> {
        let mut request = Request::builder().method(&self.method).uri(&self.url).header("user-agent", AGENT);
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        // The text of the error may have the value of a header.
        request.body(()).map_err(|_| Failure::new(libc::EINVAL, "a request can't be made of this"))
    }
}

/// An answer.
pub(crate) type Answer = Response<Vec<u8>>;

/// A client.
pub(crate) struct Client(HttpClient);

impl Client {
    pub(crate) fn new(options: HttpOptions) -> Self {
        Self(HttpClient::new(options))
    }

    /// Sends a request once.
    pub(crate) fn send_once(&self, ask: &Ask) -> Result<Answer, Unanswered> {
        let request = ask
            .request()
            .map_err(|failure| Unanswered { kind: ClientErrorKind::Invalid, reason: failure.reason })?;
        self.0
            .exchange_at_most(request, &[ask.body.as_slice()], ask.most)
            .map_err(|error| Unanswered { kind: error.kind, reason: error.reason })
    }

    /// Sends a request, again if that may help. What does something each time it is sent is sent again only if nobody heard it.
    pub(crate) fn send(&self, ask: &Ask) -> Result<Answer, Failure> {
        let is_repeatable = ask.method != Method::POST && ask.method != Method::PATCH;
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            let is_last = attempt == MOST_TRIES;
            let asked = match self.send_once(ask) {
                Ok(answer) if is_last || !is_busy(&answer, is_repeatable) => return Ok(answer),
                Ok(answer) => retry_after(&answer),
                Err(error) => {
                    let may_help = match error.kind {
                        ClientErrorKind::Connecting => true,
                        ClientErrorKind::Late | ClientErrorKind::Broken => is_repeatable,
                        _ => false,
                    };
                    if is_last || !may_help {
                        return Err(error.into());
                    }
                    None
                }
            };
            std::thread::sleep(asked.unwrap_or(pause));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Err(Failure::new(libc::EIO, "the server does not answer"))
    }
}

/// Why a request has no answer.
pub(crate) struct Unanswered {
    /// When it failed.
    pub(crate) kind: ClientErrorKind,
    reason: String,
}

impl From<Unanswered> for Failure {
    fn from(error: Unanswered) -> Self {
        let errno = match error.kind {
            ClientErrorKind::Connecting => libc::ECONNREFUSED,
            ClientErrorKind::Late => libc::ETIMEDOUT,
            ClientErrorKind::Invalid => libc::EINVAL,
            _ => libc::EIO,
        };
        Self::new(errno, error.reason)
    }
}

/// Whether the server has done nothing, and may do it later.
fn is_busy(answer: &Answer, is_repeatable: bool) -> bool {
    match answer.status().as_u16() {
        429 | 503 => true,
        408 | 425 | 500 | 502 | 504 => is_repeatable,
        _ => false,
    }
}

/// The pause that a server asks for. A date in its place says nothing here.
fn retry_after(answer: &Answer) -> Option<Duration> {
    let seconds = answer.headers().get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_ASKED))
}

/// The value of a header.
pub(crate) fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

#[derive(Deserialize)]
struct Errors {
    errors: Vec<OneError>,
}

#[derive(Deserialize)]
struct OneError {
    code: String,
    #[serde(default)]
    message: String,
}

/// The failure that an answer tells.
pub(crate) fn refusal(answer: &Answer) -> Failure {
    let status = answer.status();
    let errno = match status.as_u16() {
        401 | 403 => libc::EACCES,
        404 | 410 => libc::ENOENT,
        405 | 501 => libc::EOPNOTSUPP,
        _ => libc::EIO,
    };
    let mut reason = format!("the server answers {}", status.as_u16());
    if let Some(words) = status.canonical_reason() {
        reason.push(' ');
        reason.push_str(words);
    }
    let told =
        serde_json::from_slice(answer.body()).ok().and_then(|Errors { errors }| errors.into_iter().next());
    if let Some(OneError { code, message }) = told {
        reason.push_str(&format!(" ({}: {})", shown(&code), shown(&message)));
    }
    Failure { errno, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_tell_the_code_and_nothing_of_control() {
        let answer = |status: u16, body: &str| {
            Response::builder().status(status).body(body.as_bytes().to_vec()).unwrap()
        };
        let told = refusal(&answer(
            404,
            "{\"errors\":[{\"code\":\"NAME_UNKNOWN\",\"message\":\"no \\u001b[31mname\"}]}",
        ));
        assert_eq!(told.errno, libc::ENOENT);
        assert_eq!(told.reason, "the server answers 404 Not Found (NAME_UNKNOWN: no ?[31mname)");
        assert_eq!(refusal(&answer(403, "<html>")).reason, "the server answers 403 Forbidden");
        assert!(is_busy(&answer(429, ""), false) && !is_busy(&answer(500, ""), false));
    }
}
