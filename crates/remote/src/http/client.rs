//! Requests with bodies, one after the other on each connection: for programs that speak to a service over HTTP.

use super::connection::{Broken, Connection, Patience};
use super::options::{HttpOptions, Redirects};
use super::source::{Source, Trouble};
use super::url::HttpUrl;
use std::time::{Duration, Instant};
use ureq_proto::http::header::{CONNECTION, CONTENT_LENGTH};
use ureq_proto::http::{Method, Request, Response};
use zebu_storage::sync::Mutex;

/// The longest body of a response, in bytes.
const LONGEST_ANSWER: usize = 16 << 20;
/// The most connections that are kept for later.
const MOST_IDLE: usize = 16;
/// How long one is kept: servers close those that are silent for longer.
const LONGEST_IDLE: Duration = Duration::from_secs(15);

/// Why a request has no answer, in words without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientError {
    /// When it was.
    pub kind: ClientErrorKind,
    /// The reason.
    pub reason: String,
}

/// When a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClientErrorKind {
    /// Nothing was sent.
    Connecting,
    /// Its time was over.
    Late,
    /// The server may or may not have done it.
    Broken,
    /// It can't be sent at all.
    Invalid,
}

impl std::fmt::Display for ClientError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for ClientError {}

/// A client. It follows no redirects, and sends nothing twice but what a server's idle connection has lost.
#[derive(Debug)]
pub struct HttpClient {
    options: HttpOptions,
    idle: Mutex<Vec<Idle>>,
}

struct Idle {
    origin: String,
    connection: Connection,
    since: Instant,
}

impl std::fmt::Debug for Idle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Idle").field(&self.origin).finish()
    }
}

impl HttpClient {
    /// A client with the certificates, timeouts, proxies and network of `options`; the others mean nothing here.
    pub fn new(options: HttpOptions) -> Self {
        // Addresses are those of the caller's choice, not of a server's.
        Self { options: options.bounded().redirects(Redirects::Any), idle: Mutex::default() }
    }

    /// Sends a request with `body`, and receives its answer. It waits.
    ///
    /// # Errors
    /// There is no answer, whatever its status would be.
    pub fn exchange(&self, request: Request<()>, body: &[&[u8]]) -> Result<Response<Vec<u8>>, ClientError> {
        self.exchange_at_most(request, body, LONGEST_ANSWER)
    }

    /// As [`HttpClient::exchange`], for an answer whose body has at most `most` bytes.
    ///
    /// # Errors
    /// There is no answer, or it is longer.
    pub fn exchange_at_most(
        &self,
        mut request: Request<()>,
        body: &[&[u8]],
        most: usize,
    ) -> Result<Response<Vec<u8>>, ClientError> {
        let invalid = |reason: String| ClientError { kind: ClientErrorKind::Invalid, reason };
        let url = HttpUrl::parse(&request.uri().to_string()).map_err(invalid)?;
        let len: usize = body.iter().map(|piece| piece.len()).sum();
        if len > 0 || matches!(*request.method(), Method::PUT | Method::POST) {
            request.headers_mut().insert(CONTENT_LENGTH, len.into());
        }
        let origin = url.origin();
        // A request that does something each time goes where no idle connection can lose it.
        let can_repeat = *request.method() != Method::POST;
        let mut kept = if can_repeat { self.take(&origin) } else { None };
        loop {
            let is_kept = kept.is_some();
            let mut connection = match kept.take() {
                Some(connection) => connection,
                None => self.connect(&url)?,
            };
            match self.attempt(&mut connection, request.clone(), body, most) {
                Ok(answer) => {
                    let ends = answer.headers().get(CONNECTION).is_some_and(|value| value == "close");
                    if connection.is_ready() && !ends {
                        self.keep(origin, connection);
                    }
                    return Ok(answer);
                }
                Err(Broken::Ended | Broken::Io(_)) if is_kept => {}
                Err(broken) => {
                    let kind = match broken {
                        Broken::Late | Broken::Silent => ClientErrorKind::Late,
                        _ => ClientErrorKind::Broken,
                    };
                    return Err(ClientError { kind, reason: broken.to_string() });
                }
            }
        }
    }

    fn attempt(
        &self,
        connection: &mut Connection,
        request: Request<()>,
        body: &[&[u8]],
        most: usize,
    ) -> Result<Response<Vec<u8>>, Broken> {
        // Silence ends it; what moves may take its time.
        let until = Instant::now() + Duration::from_secs(24 * 3600);
        let patience = Patience { until, silence: self.options.timeout, is_cancelled: &|| false };
        let response = connection.request_with(request, body, &patience)?;
        let mut answer = Vec::new();
        let mut piece = vec![0; 16 << 10];
        loop {
            match connection.read(&mut piece, &patience)? {
                0 => break,
                read if answer.len() + read > most => {
                    return Err(Broken::Breach("the answer is too long".to_owned()));
                }
                read => answer.extend_from_slice(&piece[..read]),
            }
        }
        Ok(response.map(|()| answer))
    }

    fn connect(&self, url: &HttpUrl) -> Result<Connection, ClientError> {
        let source = Source::new(url.clone(), self.options.clone());
        source.connect(url, Instant::now() + self.options.connect_timeout).map_err(|trouble| {
            let kind = match trouble {
                Trouble::Refused { .. } | Trouble::Unsafe(_) => ClientErrorKind::Invalid,
                _ => ClientErrorKind::Connecting,
            };
            ClientError { kind, reason: format!("{}: {}", url.origin(), trouble.reason()) }
        })
    }

    fn take(&self, origin: &str) -> Option<Connection> {
        let mut idle = self.idle.lock();
        idle.retain(|one| one.since.elapsed() < LONGEST_IDLE);
        let index = idle.iter().position(|one| one.origin == origin)?;
        Some(idle.swap_remove(index).connection)
    }

    fn keep(&self, origin: String, connection: Connection) {
        let mut idle = self.idle.lock();
        if idle.len() < MOST_IDLE {
            idle.push(Idle { origin, connection, since: Instant::now() });
        }
    }
}
