//! One connection to a web server: a request, its response, and the body, one after the other.
//!
//! `ureq-proto` writes requests and reads responses; the socket, its deadlines and its place in a sandbox are here.

use crate::stream::Stream;
use std::fmt;
use std::io;
use std::time::{Duration, Instant};
use ureq_proto::BodyMode;
use ureq_proto::client::state::{RecvBody, Redirect};
use ureq_proto::client::{Call, RecvBodyResult, RecvResponseResult, RedirectAuthHeaders, SendRequestResult};
use ureq_proto::http::{Request, Response};

/// Bytes that are received at once. A response's head must fit into half of it.
pub(super) const INPUT: usize = 128 << 10;
/// How often a wait looks whether it is over.
const SLICE: Duration = Duration::from_millis(200);
/// The longest line of a request, in bytes.
const LONGEST_LINE: usize = 20 << 10;
/// The most bytes of a body that nobody wants and that are read to keep the connection.
const MOST_DRAINED: usize = 64 << 10;
/// The most times that a response's head is looked for: informational responses come before it.
const MOST_LOOKS: usize = 4096;

/// How long a reader waits.
pub(super) struct Patience<'a> {
    /// Until then at most.
    pub(super) until: Instant,
    /// So long for the next byte.
    pub(super) silence: Duration,
    /// Whether nobody wants the answer any more.
    pub(super) is_cancelled: &'a dyn Fn() -> bool,
}

/// Why there is no more to be had of a connection.
#[derive(Debug)]
pub(super) enum Broken {
    Io(io::Error),
    /// The server closed it before all was there.
    Ended,
    /// Nothing came for too long.
    Silent,
    /// The time of the request is over.
    Late,
    /// Nobody waits any more.
    Cancelled,
    /// The server breaks the protocol.
    Breach(String),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => {
                let text = error.to_string();
                f.write_str(text.rfind(" (os error ").map_or(text.as_str(), |end| &text[..end]))
            }
            Self::Ended => f.write_str("the server closed the connection before the end of its answer"),
            Self::Silent | Self::Late => f.write_str("the server does not answer in time"),
            Self::Cancelled => f.write_str("given up"),
            Self::Breach(what) => write!(f, "the server breaks the protocol: {what}"),
        }
    }
}

impl From<ureq_proto::Error> for Broken {
    fn from(error: ureq_proto::Error) -> Self {
        Self::Breach(error.to_string())
    }
}

impl Patience<'_> {
    /// `since`: when something came last.
    fn check(&self, since: Instant) -> Result<(), Broken> {
        let now = Instant::now();
        if (self.is_cancelled)() {
            Err(Broken::Cancelled)
        } else if now >= self.until {
            Err(Broken::Late)
        } else if now.duration_since(since) >= self.silence {
            Err(Broken::Silent)
        } else {
            Ok(())
        }
    }
}

/// Where the connection is in the exchange.
enum Exchange {
    /// Another request can be sent.
    Ready,
    Body(Box<Call<RecvBody>>),
    Redirect(Box<Call<Redirect>>),
    /// It can't be used again.
    Over,
}

/// How a proxy wants requests that it passes on itself.
#[derive(Debug, Clone)]
pub(super) struct ToProxy {
    /// The value of `Proxy-Authorization`.
    pub(super) authorization: Option<String>,
}

/// A connection.
pub(super) struct Connection {
    stream: Stream,
    input: Box<[u8]>,
    start: usize,
    end: usize,
    to_proxy: Option<ToProxy>,
    place: Exchange,
    /// Whether a response came whole.
    has_answered: bool,
}

impl Connection {
    /// A connection over a stream whose handshake is over.
    pub(super) fn new(mut stream: Stream, to_proxy: Option<ToProxy>) -> io::Result<Self> {
        stream.wait_at_most(SLICE)?;
        let input = vec![0; INPUT].into_boxed_slice();
        Ok(Self { stream, input, start: 0, end: 0, to_proxy, place: Exchange::Ready, has_answered: false })
    }

    /// Whether it answered before. The server may close such a connection whenever it likes.
    pub(super) fn has_answered(&self) -> bool {
        self.has_answered
    }

    /// Whether another request can be sent.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.place, Exchange::Ready)
    }

    /// The stream, with a tunnel through it.
    pub(super) fn into_stream(self) -> Stream {
        self.stream
    }

    /// Sends a request, and waits for the head of its response.
    pub(super) fn request(
        &mut self,
        request: Request<()>,
        patience: &Patience<'_>,
    ) -> Result<Response<()>, Broken> {
        self.request_with(request, &[], patience)
    }

    /// Sends a request whose header `Content-Length` tells the length of `body`, and waits for the head of its response.
    pub(super) fn request_with(
        &mut self,
        request: Request<()>,
        body: &[&[u8]],
        patience: &Patience<'_>,
    ) -> Result<Response<()>, Broken> {
        if !self.is_ready() {
            return Err(Broken::Ended);
        }
        self.place = Exchange::Over;
        let uri = request.uri();
        let origin = match (uri.scheme_str(), uri.authority()) {
            (Some(scheme), Some(authority)) => format!("{scheme}://{authority}"),
            _ => String::new(),
        };
        let mut call = Call::new(request)?.proceed();
        let mut text = Vec::with_capacity(512);
        let mut piece = vec![0; LONGEST_LINE];
        while !call.can_proceed() {
            let written = call.write(&mut piece)?;
            if written == 0 {
                return Err(Broken::Breach("the request is too long".to_owned()));
            }
            text.extend_from_slice(&piece[..written]);
        }
        if let Some(to_proxy) = &self.to_proxy {
            address_proxy(&mut text, &origin, to_proxy);
        }
        self.send(&text, patience)?;
        let mut call = match call.proceed()? {
            Some(SendRequestResult::RecvResponse(call)) => call,
            Some(SendRequestResult::SendBody(mut call)) => {
                for piece in body.iter().filter(|piece| !piece.is_empty()) {
                    call.consume_direct_write(piece.len())?;
                    self.send(piece, patience)?;
                }
                // An empty body has an end as well.
                call.write(&[], &mut [])?;
                call.proceed()
                    .ok_or_else(|| Broken::Breach("a body is shorter than its length".to_owned()))?
            }
            _ => return Err(Broken::Breach("a request that waits for an answer in its middle".to_owned())),
        };
        let mut response = None;
        for _ in 0..MOST_LOOKS {
            let (used, found) = call.try_response(&self.input[self.start..self.end], false)?;
            self.start += used;
            if found.is_some() {
                response = found;
                break;
            }
            if used == 0 {
                if self.end - self.start >= INPUT / 2 {
                    break;
                }
                if self.fill(patience)? == 0 {
                    return Err(Broken::Ended);
                }
            }
        }
        let Some(response) = response else {
            return Err(Broken::Breach("the head of the response has no end".to_owned()));
        };
        self.place = match call.proceed() {
            Some(RecvResponseResult::RecvBody(call)) => Exchange::Body(Box::new(call)),
            Some(RecvResponseResult::Redirect(call)) => Exchange::Redirect(Box::new(call)),
            Some(RecvResponseResult::Cleanup(call)) => {
                if call.must_close_connection() {
                    Exchange::Over
                } else {
                    self.has_answered = true;
                    Exchange::Ready
                }
            }
            None => Exchange::Over,
        };
        Ok(response)
    }

    /// Bytes of the body, if the head told.
    pub(super) fn body_len(&self) -> Option<u64> {
        match &self.place {
            Exchange::Body(call) => match call.body_mode() {
                BodyMode::NoBody => Some(0),
                BodyMode::LengthDelimited(len) => Some(len),
                BodyMode::Chunked | BodyMode::CloseDelimited => None,
            },
            _ => Some(0),
        }
    }

    /// Receives some bytes of the body; 0 at its end.
    pub(super) fn read(&mut self, out: &mut [u8], patience: &Patience<'_>) -> Result<usize, Broken> {
        loop {
            let Exchange::Body(call) = &mut self.place else { return Ok(0) };
            let is_delimited = !matches!(call.body_mode(), BodyMode::CloseDelimited);
            if is_delimited && call.can_proceed() {
                self.end_body();
                return Ok(0);
            }
            if self.start < self.end {
                let (used, read) = call.read(&self.input[self.start..self.end], out)?;
                self.start += used;
                if read > 0 {
                    return Ok(read);
                }
                if used > 0 {
                    continue;
                }
                if self.end - self.start >= INPUT / 2 {
                    return Err(Broken::Breach("a chunk of the body has no end".to_owned()));
                }
            }
            if self.fill(patience)? == 0 {
                let over = std::mem::replace(&mut self.place, Exchange::Over);
                // The connection's end is that of the body only where nothing else tells.
                return if matches!(over, Exchange::Body(_)) && !is_delimited {
                    Ok(0)
                } else {
                    Err(Broken::Ended)
                };
            }
        }
    }

    fn end_body(&mut self) {
        let Exchange::Body(call) = std::mem::replace(&mut self.place, Exchange::Over) else { return };
        self.place = match call.proceed() {
            Some(RecvBodyResult::Redirect(call)) => Exchange::Redirect(Box::new(call)),
            Some(RecvBodyResult::Cleanup(call)) if !call.must_close_connection() => {
                self.has_answered = true;
                Exchange::Ready
            }
            _ => Exchange::Over,
        };
    }

    /// Reads what is left of a short body, so that the connection can be used again.
    pub(super) fn drain(&mut self, patience: &Patience<'_>) {
        if self.body_len().is_none_or(|len| len > MOST_DRAINED as u64) {
            return;
        }
        let mut waste = [0; 4096];
        while matches!(self.place, Exchange::Body(_)) && self.read(&mut waste, patience).is_ok() {}
    }

    /// Reads up to so many bytes of the body of an error.
    pub(super) fn take_body(&mut self, most: usize, patience: &Patience<'_>) -> Vec<u8> {
        let mut body = vec![0; most];
        let mut len = 0;
        while len < most
            && let Ok(read @ 1..) = self.read(&mut body[len..], patience)
        {
            len += read;
        }
        body.truncate(len);
        body
    }

    /// The place that a redirect leads to.
    pub(super) fn redirect(&mut self, patience: &Patience<'_>) -> Result<String, Broken> {
        let mut drained = 0;
        let mut waste = [0; 4096];
        while matches!(self.place, Exchange::Body(_)) && drained < MOST_DRAINED {
            match self.read(&mut waste, patience)? {
                0 => break,
                read => drained += read,
            }
        }
        let Exchange::Redirect(call) = &mut self.place else {
            return Err(Broken::Breach("a redirect that leads nowhere".to_owned()));
        };
        // What the header holds may be secret, and an error would show it.
        let next = call.as_new_call(RedirectAuthHeaders::Never).ok().flatten();
        self.place = Exchange::Over;
        next.map(|call| call.uri().to_string())
            .ok_or_else(|| Broken::Breach("a redirect that can't be followed".to_owned()))
    }

    fn send(&mut self, text: &[u8], patience: &Patience<'_>) -> Result<(), Broken> {
        let mut last = Instant::now();
        let mut sent = 0;
        while sent < text.len() || self.stream.holds_back() {
            let pieces = [io::IoSlice::new(&text[sent..])];
            match self.stream.write_vectored(if sent < text.len() { &pieces } else { &[] }) {
                Ok(written) => {
                    sent += written;
                    last = Instant::now();
                }
                Err(error) if is_pause(&error) => patience.check(last)?,
                Err(error) => return Err(Broken::Io(error)),
            }
        }
        Ok(())
    }

    /// Receives what there is; 0 at the end.
    fn fill(&mut self, patience: &Patience<'_>) -> Result<usize, Broken> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let begin = Instant::now();
        loop {
            // Also where bytes come, but too slowly.
            patience.check(begin)?;
            match self.stream.read(&mut self.input[self.end..]) {
                Ok(read) => {
                    self.end += read;
                    return Ok(read);
                }
                Err(error) if is_pause(&error) => {}
                // A server under TLS that closes without a word.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Err(error) => return Err(Broken::Io(error)),
            }
        }
    }
}

fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::TimedOut)
}

/// Makes a request one to a proxy: the whole URL in the first line (RFC 9112, section 3.2.2), and who asks.
fn address_proxy(text: &mut Vec<u8>, origin: &str, to_proxy: &ToProxy) {
    if let Some(target) = text.iter().position(|byte| *byte == b'/') {
        text.splice(target..target, origin.bytes());
    }
    if let Some(authorization) = &to_proxy.authorization {
        let end = text.len().saturating_sub(2);
        text.splice(end..end, format!("proxy-authorization: {authorization}\r\n").bytes());
    }
}
