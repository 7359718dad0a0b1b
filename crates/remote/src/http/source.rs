//! The object: where it is, which version of it was opened, and what a response says of it.

use super::connection::{Broken, Connection, Patience, ToProxy};
use super::credentials::{Credentials, NetrcEntries};
use super::headers::{self, Validators};
use super::options::{HttpOptions, Redirects, Verification};
use super::proxy::proxy_for;
use super::signed::{SignedUrls, Signing};
use super::store_errors;
use super::url::HttpUrl;
use crate::error::RemoteRemedy;
use crate::network::deadline::{Allowance, Backlog};
use crate::network::{OutOfReach, Reach, is_public, written_address};
use crate::stats::RemoteStats;
use crate::stream::Stream;
#[cfg(feature = "cache")]
use crate::tls::chosen_authorities;
use crate::tls::{ServerTrust, Tls};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use ureq_proto::http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, COOKIE, IF_RANGE, LOCATION, RANGE, USER_AGENT,
};
use ureq_proto::http::{HeaderMap, Request, Response};
use zebu_storage::sync::Mutex;

/// Time without a sign of the server that requests have at the end.
const GRACE: Duration = Duration::from_secs(5);
/// The most redirects from a URL to the object.
const MOST_REDIRECTS: usize = 10;
/// The name that the server is told.
const AGENT: &str = concat!("zebu/", env!("CARGO_PKG_VERSION"));

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Nothing could be connected.
    Unreachable { errno: i32, reason: String },
    /// Another try may help, after the pause that the server asks for.
    Passing { reason: String, pause: Option<Duration> },
    /// The server does not give it at this place.
    Denied { errno: i32, reason: String },
    /// The object is not the one that was opened.
    Changed(String),
    /// Nothing will help.
    Refused { errno: i32, reason: String },
    /// A redirect leads where only [`Redirects::Any`] follows.
    Unsafe(String),
    /// Nobody waits any more.
    Cancelled,
}

impl Trouble {
    pub(super) fn reason(&self) -> &str {
        match self {
            Self::Unreachable { reason, .. }
            | Self::Passing { reason, .. }
            | Self::Denied { reason, .. }
            | Self::Changed(reason)
            | Self::Unsafe(reason)
            | Self::Refused { reason, .. } => reason,
            Self::Cancelled => "given up",
        }
    }

    pub(super) fn errno(&self) -> i32 {
        match self {
            Self::Unreachable { errno, .. } | Self::Denied { errno, .. } | Self::Refused { errno, .. } => {
                *errno
            }
            Self::Unsafe(_) => libc::EACCES,
            _ => libc::EIO,
        }
    }

    pub(super) fn remedy(&self) -> Option<RemoteRemedy> {
        matches!(self, Self::Unsafe(_)).then_some(RemoteRemedy::FollowAnyRedirect)
    }

    fn passing(reason: impl Into<String>) -> Self {
        Self::Passing { reason: reason.into(), pause: None }
    }
}

impl From<Broken> for Trouble {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Cancelled => Self::Cancelled,
            broken => Self::passing(broken.to_string()),
        }
    }
}

/// The answer to a request for a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// These bytes follow, of an object of this length.
    Part { range: Range<u64>, total: Option<u64> },
    /// All of it follows: the server has no ranges.
    Whole { len: Option<u64> },
    /// There is nothing.
    Empty,
}

/// Where an object was found, and the answer to the request for a range of it.
pub(super) type FoundAt = (HttpUrl, Connection, Reply, Validators);

/// The version of the object that was opened.
#[derive(Debug, Clone)]
struct Pinned {
    len: u64,
    validators: Validators,
}

/// The object.
pub(super) struct Source {
    original: HttpUrl,
    /// The one who signs the URLs of the object, if it is one of a store.
    signed: Option<SignedUrls>,
    /// When the signed URL is to be replaced.
    sign_at: Mutex<Option<Instant>>,
    pub(super) options: HttpOptions,
    pub(super) stats: RemoteStats,
    /// Made for the first server, and reused with another name.
    tls: OnceLock<Tls>,
    /// Entries of netrc by host. In a sandbox, it can't be read.
    netrc: Mutex<HashMap<(String, NetrcEntries), Option<Credentials>>>,
    /// Where redirects led, and how often that was looked for.
    current: Mutex<(HttpUrl, u64)>,
    /// Held while that is looked for.
    renewing: Mutex<()>,
    pinned: OnceLock<Pinned>,
    /// Whether what was named is at a public address.
    is_public: OnceLock<bool>,
    /// When bytes came last, in milliseconds since `opened`.
    last_byte: AtomicU64,
    /// When the user of the disk began to wait for its end, in the same milliseconds; 0 before.
    hurried: AtomicU64,
    /// Of all that is fetched.
    backlog: Backlog,
    opened: Instant,
    failure: Mutex<Option<String>>,
    /// Why reads were given up, if any were.
    given_up: Mutex<Option<String>>,
}

impl Source {
    pub(super) fn new(url: HttpUrl, options: HttpOptions) -> Self {
        Self {
            current: Mutex::new((url.clone(), 0)),
            original: url,
            signed: None,
            sign_at: Mutex::default(),
            options,
            stats: RemoteStats::default(),
            tls: OnceLock::new(),
            netrc: Mutex::default(),
            renewing: Mutex::default(),
            pinned: OnceLock::new(),
            is_public: OnceLock::new(),
            last_byte: AtomicU64::new(0),
            hurried: AtomicU64::new(0),
            backlog: Backlog::default(),
            opened: Instant::now(),
            failure: Mutex::default(),
            given_up: Mutex::default(),
        }
    }

    /// An object whose URLs `signed` signs.
    ///
    /// # Errors
    /// It can't sign one.
    pub(super) fn of_store(signed: SignedUrls, options: HttpOptions) -> Result<Self, Trouble> {
        let first = signed.sign(Signing::InTime).map_err(unsigned)?;
        Ok(Self { signed: Some(signed), ..Self::new(first.url.without_query(), options) })
    }

    /// The URL that was named; of a store, where the object is, without a signature.
    pub(super) fn url(&self) -> &HttpUrl {
        &self.original
    }

    /// The name, without secrets.
    pub(super) fn name(&self) -> String {
        match &self.signed {
            Some(signed) => signed.name().to_owned(),
            None => self.original.to_string(),
        }
    }

    /// Bytes of the object that was opened.
    pub(super) fn len(&self) -> u64 {
        self.pinned.get().map_or(0, |pinned| pinned.len)
    }

    /// Whether the server marks versions of the object.
    pub(super) fn has_validators(&self) -> bool {
        self.options.mark.is_some() || self.pinned.get().is_some_and(|pinned| !pinned.validators.is_empty())
    }

    /// The version that was opened, if the server marks it strongly.
    #[cfg(feature = "cache")]
    pub(super) fn strong_mark(&self) -> Option<&str> {
        let given = self.options.mark.as_deref();
        given.or_else(|| self.pinned.get().and_then(|pinned| pinned.validators.strong()))
    }

    /// The authorities whose word it is that the bytes are the server's, as a part of a key: what one reader got is not given
    /// to another who would not have believed it.
    ///
    /// # Errors
    /// Nobody's word; in words.
    #[cfg(feature = "cache")]
    pub(super) fn trust(&self) -> Result<String, &'static str> {
        let HttpOptions { verification, authorities, redirects, .. } = &self.options;
        if !self.original.is_secure() {
            return Ok("nobody".to_owned());
        }
        if *verification == Verification::Off {
            return Err("the server's certificate is not verified");
        }
        let by = match authorities.clone().or_else(chosen_authorities) {
            None => "system".to_owned(),
            Some(file) => {
                let bytes = std::fs::read(file).map_err(|_| "the file of authorities can't be read")?;
                blake3::hash(&bytes).to_hex().to_string()
            }
        };
        Ok(if *redirects == Redirects::Any { format!("{by} any-redirect") } else { by })
    }

    pub(super) fn note_failure(&self, reason: &str) {
        *self.failure.lock() = Some(reason.to_owned());
    }

    pub(super) fn last_failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    pub(super) fn note_given_up(&self, reason: &str) {
        self.given_up.lock().get_or_insert_with(|| reason.to_owned());
    }

    pub(super) fn given_up(&self) -> Option<String> {
        self.given_up.lock().clone()
    }

    /// Bytes came.
    pub(super) fn count_read(&self, bytes: u64) {
        self.stats.count_read(bytes);
        self.backlog.note(Instant::now(), bytes);
        self.last_byte.store(self.opened.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// The time of a fetch of so many bytes whose readers have asked at `asked`.
    pub(super) fn allowance(&self, asked: Instant, bytes: u64) -> Allowance {
        self.backlog.allowance(asked, self.options.timeout, bytes)
    }

    /// Whether a request's time is over: at its deadline, but as long as bytes come, later, at the limit.
    pub(super) fn is_late(&self, deadline: Instant, limit: Instant) -> bool {
        let now = Instant::now();
        now >= limit
            || self.is_out_of_grace()
            || now >= deadline
                && now.saturating_duration_since(self.backlog.progress()) >= self.options.timeout
    }

    pub(super) fn hurry(&self) {
        let now = (self.opened.elapsed().as_millis() as u64).max(1);
        let _ = self.hurried.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether the disk is about to end, and no bytes came for a while.
    pub(super) fn is_out_of_grace(&self) -> bool {
        let hurried = self.hurried.load(Ordering::Relaxed);
        let last_sign = Duration::from_millis(hurried.max(self.last_byte.load(Ordering::Relaxed)));
        hurried > 0 && self.opened.elapsed().saturating_sub(last_sign) >= GRACE
    }

    /// Where the object is now.
    pub(super) fn place(&self) -> (HttpUrl, u64) {
        let is_due = self.sign_at.lock().is_some_and(|at| Instant::now() >= at);
        // If that fails, the store's denial is what is told.
        if is_due && let Ok(url) = self.sign(Signing::InTime) {
            let mut current = self.current.lock();
            if current.0.has_origin_of(&url) {
                current.0 = url;
            }
        }
        self.current.lock().clone()
    }

    /// A URL to begin with, which is signed anew if it is an object of a store.
    fn sign(&self, why: Signing) -> Result<HttpUrl, Trouble> {
        let Some(signed) = &self.signed else { return Ok(self.original.clone()) };
        let made = signed.sign(why).map_err(unsigned)?;
        *self.sign_at.lock() = Some(Instant::now() + made.good_for / 2);
        Ok(made.url)
    }

    /// Follows redirects from what was named, with a request for `range`.
    pub(super) fn find(
        &self,
        range: Option<&Range<u64>>,
        patience: &Patience<'_>,
    ) -> Result<FoundAt, Trouble> {
        let why = if self.pinned.get().is_some() { Signing::AfterDenial } else { Signing::InTime };
        let mut url = self.sign(why)?;
        for _ in 0..=MOST_REDIRECTS {
            let mut connection = self.connect(&url, patience.until)?;
            let response = self.ask(&mut connection, &url, range, patience)?;
            // What is signed is for one host. A store's redirect only says where the bucket is.
            if self.signed.is_none()
                && response.status().is_redirection()
                && response.headers().contains_key(LOCATION)
            {
                check_location(&response)?;
                let next = connection.redirect(patience)?;
                url = self.check_redirect(&url, &next)?;
                continue;
            }
            if response.status().as_u16() == 416
                && let Some(found) = self.find_empty(&url, &response, patience)?
            {
                return Ok(found);
            }
            let reply = self.judge(&response, range, &mut connection, patience)?;
            return Ok((url, connection, reply, Validators::of(response.headers())));
        }
        let reason = format!("there are more than {MOST_REDIRECTS} redirects");
        Err(Trouble::Refused { errno: libc::ELOOP, reason })
    }

    /// The object at `url`, if it is empty. Stores refuse a range of an empty object, and don't say how long it is.
    fn find_empty(
        &self,
        url: &HttpUrl,
        refusal: &Response<()>,
        patience: &Patience<'_>,
    ) -> Result<Option<FoundAt>, Trouble> {
        if self.pinned.get().is_some() || headers::content_range(refusal.headers()).is_some() {
            return Ok(None);
        }
        let mut connection = self.connect(url, patience.until)?;
        let response = self.ask(&mut connection, url, None, patience)?;
        let is_empty = response.status().as_u16() == 200 && connection.body_len() == Some(0);
        let validators = Validators::of(response.headers());
        Ok(is_empty.then(|| (url.clone(), connection, Reply::Empty, validators)))
    }

    /// Pins what `find` found.
    pub(super) fn pin(&self, url: HttpUrl, len: u64, validators: Validators) {
        let validators = if self.options.mark.is_some() { Validators::default() } else { validators };
        let _ = self.pinned.set(Pinned { len, validators });
        *self.current.lock() = (url, 0);
    }

    /// Looks for the object again, unless another thread has since `generation`.
    pub(super) fn renew(&self, generation: u64, patience: &Patience<'_>) -> Result<(), Trouble> {
        let _one = self.renewing.lock();
        if self.place().1 != generation {
            return Ok(());
        }
        let (url, ..) = self.find(Some(&(0..1)), patience)?;
        *self.current.lock() = (url, generation + 1);
        Ok(())
    }

    /// Whether the object is somewhere else than what was named, and so may have moved.
    pub(super) fn is_moved(&self, url: &HttpUrl) -> bool {
        *url != self.original
    }

    fn check_redirect(&self, from: &HttpUrl, to: &str) -> Result<HttpUrl, Trouble> {
        let refused = |reason: String| Trouble::Refused { errno: libc::EACCES, reason };
        let to = HttpUrl::parse(to)
            .map_err(|reason| refused(format!("a redirect leads to what can't be opened: {reason}")))?;
        if self.options.redirects == Redirects::Safe && from.is_secure() && !to.is_secure() {
            return Err(Trouble::Unsafe(format!("a redirect leads from https to '{to}'")));
        }
        Ok(to)
    }

    /// Connects to the server at `url`, or to its proxy.
    pub(super) fn connect(&self, url: &HttpUrl, until: Instant) -> Result<Connection, Trouble> {
        let until = until.min(Instant::now() + self.options.connect_timeout);
        let refused = |reason: String| Trouble::Refused { errno: libc::EINVAL, reason };
        let unreachable = |error: io::Error| {
            let errno = error.raw_os_error().unwrap_or(match error.kind() {
                io::ErrorKind::TimedOut => libc::ETIMEDOUT,
                io::ErrorKind::PermissionDenied => libc::EACCES,
                io::ErrorKind::NotFound => libc::ENOENT,
                _ => libc::EIO,
            });
            Trouble::Unreachable { errno, reason: Broken::Io(error).to_string() }
        };
        let network = &self.options.network;
        let proxy = proxy_for(url, |name| std::env::var(name).ok()).map_err(refused)?;
        let Some(proxy) = proxy else {
            let reach = self.reach(url);
            let tcp =
                network.tcp(url.host(), url.port(), reach, until).map_err(|error| match error.kind() {
                    io::ErrorKind::PermissionDenied
                        if error.get_ref().is_some_and(|inner| inner.is::<OutOfReach>()) =>
                    {
                        Trouble::Unsafe(error.to_string())
                    }
                    io::ErrorKind::PermissionDenied => {
                        Trouble::Refused { errno: libc::EACCES, reason: error.to_string() }
                    }
                    _ => unreachable(error),
                })?;
            let mut stream = Stream::of_tcp(tcp, until);
            if *url == self.original {
                self.is_public.get_or_init(|| stream.peer().is_some_and(is_public));
            }
            if url.is_secure() {
                stream.start_tls(&self.tls_to(url.host()).map_err(refused)?).map_err(unreachable)?;
            }
            return Connection::new(stream, None).map_err(unreachable);
        };
        self.check_through_proxy(url)?;
        let through = |error: Trouble| match error {
            Trouble::Unreachable { errno, reason } => {
                Trouble::Unreachable { errno, reason: format!("the proxy {}: {reason}", proxy.host) }
            }
            other => other,
        };
        let tcp =
            network.tcp(&proxy.host, proxy.port, Reach::Any, until).map_err(|e| through(unreachable(e)))?;
        let stream = Stream::of_tcp(tcp, until);
        let credentials = self.options.proxy_credentials.as_ref().or(proxy.credentials.as_ref());
        let authorization = credentials.map(Credentials::basic);
        if !url.is_secure() {
            return Connection::new(stream, Some(ToProxy { authorization })).map_err(unreachable);
        }
        let mut tunnel = Connection::new(stream, None).map_err(unreachable)?;
        let authority = format!("{}:{}", url.bracketed(), url.port());
        let mut request = Request::connect(&authority).header(USER_AGENT, AGENT);
        if let Some(authorization) = authorization {
            request = request.header("proxy-authorization", authorization);
        }
        let request = request.body(()).map_err(|error| refused(error.to_string()))?;
        let patience = Patience { until, silence: self.options.connect_timeout, is_cancelled: &|| false };
        let response = tunnel.request(request, &patience)?;
        if !response.status().is_success() {
            let reason = format!("the proxy {} refuses: {}", proxy.host, status_of(&response));
            return Err(Trouble::Unreachable { errno: libc::EACCES, reason });
        }
        let mut stream = tunnel.into_stream();
        stream.wait_until(until);
        stream.start_tls(&self.tls_to(url.host()).map_err(refused)?).map_err(unreachable)?;
        Connection::new(stream, None).map_err(unreachable)
    }

    /// Addresses that may be connected to for `url`: what was named says.
    fn reach(&self, url: &HttpUrl) -> Reach {
        if self.signed.is_some() {
            // The host is the choice of whoever signs.
            return Reach::Any;
        }
        let was_public = match self.is_public.get() {
            Some(is_public) => *is_public,
            // A proxy has connected to what was named, if anybody has.
            None => *url != self.original && !is_private(&self.original),
        };
        if self.options.redirects == Redirects::Safe && was_public { Reach::Public } else { Reach::Any }
    }

    /// A proxy connects for itself: only an address that stands in the URL can be judged here.
    fn check_through_proxy(&self, url: &HttpUrl) -> Result<(), Trouble> {
        if self.options.redirects == Redirects::Safe && is_private(url) && !is_private(&self.original) {
            return Err(Trouble::Unsafe(format!("a redirect leads to the private address '{url}'")));
        }
        Ok(())
    }

    fn tls_to(&self, host: &str) -> Result<Tls, String> {
        if let Some(tls) = self.tls.get() {
            return tls.and_to(host);
        }
        let authorities = match (self.options.verification, &self.options.authorities) {
            (Verification::Off, _) => ServerTrust::Unchecked,
            (Verification::On, Some(path)) => ServerTrust::File(path),
            (Verification::On, None) => ServerTrust::System,
        };
        let tls = Tls::to_host(authorities, host)?;
        Ok(self.tls.get_or_init(|| tls.clone()).and_to(host).unwrap_or(tls))
    }

    /// Sends a request for `range`, or for all of it, and waits for the head of the response.
    pub(super) fn ask(
        &self,
        connection: &mut Connection,
        url: &HttpUrl,
        range: Option<&Range<u64>>,
        patience: &Patience<'_>,
    ) -> Result<Response<()>, Trouble> {
        let refused = |reason: String| Trouble::Refused { errno: libc::EINVAL, reason };
        let mut request = Request::get(url.for_request())
            .header(USER_AGENT, AGENT)
            .header(ACCEPT, "*/*")
            // A packed body has no ranges of the object.
            .header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
            if let Some(condition) = self.pinned.get().and_then(|pinned| pinned.validators.condition()) {
                request = request.header(IF_RANGE, condition);
            }
        }
        let given = self.options.authorizations.as_ref();
        // What is for the server that was named goes to no other.
        let renewed = given.filter(|_| url.has_origin_of(&self.original));
        let authorization = match given {
            Some(_) => {
                renewed.map(|given| given.get(Signing::InTime)).transpose().map_err(unsigned)?.flatten()
            }
            None => self.credentials_for(url).map_err(refused)?.map(|credentials| credentials.basic()),
        };
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if let Some(cookie) = &self.options.cookie
            && url.has_origin_of(&self.original)
        {
            request = request.header(COOKIE, cookie.0.as_str());
        }
        let request = request.body(()).map_err(|error| refused(error.to_string()))?;
        self.stats.count_request(0);
        let response = connection.request(request, patience)?;
        if let (Some(given), 401) = (renewed, response.status().as_u16()) {
            given.get(Signing::AfterDenial).map_err(unsigned)?;
            return Err(Trouble::passing(format!("the server answers {}", status_of(&response))));
        }
        Ok(response)
    }

    /// The user that asks. What was given for the server that was named goes to no other.
    fn credentials_for(&self, url: &HttpUrl) -> Result<Option<Credentials>, String> {
        let given = self.options.credentials.as_ref().or(self.original.credentials());
        if let Some(given) = given {
            return Ok(url.has_origin_of(&self.original).then(|| given.clone()));
        }
        if !self.options.netrc || self.signed.is_some() {
            return Ok(None);
        }
        // The default is for whom the user has named, and not for where a server sends its clients.
        let entries = if url.has_origin_of(&self.original) { NetrcEntries::All } else { NetrcEntries::Named };
        let key = (url.host().to_owned(), entries);
        if let Some(known) = self.netrc.lock().get(&key) {
            return Ok(known.clone());
        }
        let found = Credentials::of_netrc(url.host(), entries)?;
        self.netrc.lock().insert(key, found.clone());
        Ok(found)
    }

    /// The worth of a response. `wanted` is what was asked for.
    pub(super) fn judge(
        &self,
        response: &Response<()>,
        wanted: Option<&Range<u64>>,
        connection: &mut Connection,
        patience: &Patience<'_>,
    ) -> Result<Reply, Trouble> {
        let status = response.status().as_u16();
        let headers = response.headers();
        match status {
            206 => return self.judge_part(headers, wanted, connection),
            200 => {
                self.check_version(headers, connection.body_len())?;
                if !headers::is_plain(headers) {
                    return Err(Trouble::passing("the server sends the object packed (Content-Encoding)"));
                }
                return Ok(Reply::Whole { len: connection.body_len() });
            }
            416 if self.pinned.get().is_none() => {
                let range = headers::content_range(headers);
                if range.is_some_and(|range| range.total == Some(0)) {
                    return Ok(Reply::Empty);
                }
            }
            _ => {}
        }
        if self.signed.is_some() {
            let document = connection.take_body(store_errors::MOST, patience);
            let is_passing = matches!(status, 408 | 412 | 416 | 425 | 429 | 500..=599);
            if !is_passing && let Some((errno, reason)) = store_errors::explain(status, headers, &document) {
                return Err(Trouble::Denied { errno, reason });
            }
        }
        connection.drain(patience);
        let reason = format!("the server answers {}", status_of(response));
        Err(match status {
            412 | 416 => Trouble::Changed(format!("{reason}: the object is shorter than it was, or another")),
            401 | 407 => Trouble::Denied {
                errno: libc::EACCES,
                reason: format!("{reason} (a netrc file or username and password-file say who asks)"),
            },
            403 => Trouble::Denied { errno: libc::EACCES, reason },
            404 | 410 => Trouble::Denied { errno: libc::ENOENT, reason },
            408 | 425 | 429 | 500..=599 => Trouble::Passing { reason, pause: headers::retry_after(headers) },
            _ => Trouble::Denied { errno: libc::EIO, reason },
        })
    }

    fn judge_part(
        &self,
        headers: &HeaderMap,
        wanted: Option<&Range<u64>>,
        connection: &Connection,
    ) -> Result<Reply, Trouble> {
        if !headers::is_plain(headers) {
            return Err(Trouble::passing("the server sends a range packed (Content-Encoding)"));
        }
        let wrong = || Trouble::passing("the server sends another range than was asked for (Content-Range)");
        let content = headers::content_range(headers).ok_or_else(wrong)?;
        let (Some(range), Some(wanted)) = (content.range, wanted) else { return Err(wrong()) };
        // A part of what was asked for is allowed, from its beginning on.
        if range.start != wanted.start || range.end > wanted.end {
            return Err(wrong());
        }
        if connection.body_len().is_some_and(|len| len != range.end - range.start) {
            return Err(Trouble::passing("the length of a body is not that of its range"));
        }
        self.check_version(headers, content.total)?;
        Ok(Reply::Part { range, total: content.total })
    }

    /// Whether a response is of the version that was opened.
    fn check_version(&self, headers: &HeaderMap, len: Option<u64>) -> Result<(), Trouble> {
        let Some(pinned) = self.pinned.get() else { return Ok(()) };
        if len.is_some_and(|len| len != pinned.len) {
            return Err(Trouble::Changed("the object has another length than when it was opened".to_owned()));
        }
        if !pinned.validators.fit(&Validators::of(headers)) {
            return Err(Trouble::Changed(
                "the object is another than when it was opened (ETag, Last-Modified)".to_owned(),
            ));
        }
        Ok(())
    }
}

/// Why there is no signed URL. Where credentials are got from may answer a moment later.
fn unsigned(error: super::signed::SigningError) -> Trouble {
    Trouble::Denied { errno: error.errno, reason: error.reason }
}

fn status_of(response: &Response<()>) -> String {
    let status = response.status();
    match status.canonical_reason() {
        Some(words) => format!("{} {words}", status.as_u16()),
        None => status.as_u16().to_string(),
    }
}

/// Whether the host of a URL is a private address, as far as its text tells.
fn is_private(url: &HttpUrl) -> bool {
    let host = url.host().strip_suffix('.').unwrap_or(url.host()).to_ascii_lowercase();
    host == "localhost"
        || host.ends_with(".localhost")
        || written_address(&host).is_some_and(|address| !is_public(address))
}

/// Refuses a redirect to what is no place on the web.
fn check_location<T>(response: &Response<T>) -> Result<(), Trouble> {
    let refused = |reason: &str| Err(Trouble::Refused { errno: libc::EACCES, reason: reason.to_owned() });
    let Some(Ok(location)) = response.headers().get(LOCATION).map(|location| location.to_str()) else {
        return refused("a redirect leads to what can't be read");
    };
    let is_of_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    // A colon after the first of these belongs to something else.
    let beginning = location.split(['/', '?', '#']).next().unwrap_or_default();
    match beginning.split_once(':') {
        Some((scheme, _))
            if scheme.chars().all(is_of_scheme)
                && !["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) =>
        {
            refused("a redirect leads to another scheme than http and https")
        }
        _ => Ok(()),
    }
}
