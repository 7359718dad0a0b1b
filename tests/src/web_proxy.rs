//! A proxy in front of a web server that does to requests what networks, broken servers and hostile ones do.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// A mishap of one request. Counts are bytes of the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mishap {
    /// Nothing.
    None,
    /// The proxy answers by itself: a status line without the version, and headers.
    Answer(String),
    /// The connection ends after so many.
    CutAfter(u64),
    /// It is reset after so many.
    ResetAfter(u64),
    /// After so many, nothing comes any more, and the connection stays.
    SilentAfter(u64),
    /// The server never learns of the range.
    WithoutRange,
    /// In the head of the response, every first text is the second.
    Replace(&'static str, &'static str),
    /// The response marks no version of the object.
    WithoutVersions,
    /// The range that the response tells is so much higher.
    RangeHigher(u64),
    /// It comes so much later.
    Late(Duration),
    /// Bytes that are no HTTP.
    Garbage,
    /// A head without end.
    EndlessHead,
    /// A chunk without end, in place of the body.
    EndlessChunk,
    /// The server does what it is asked for, and the connection ends before its answer comes.
    LostAnswer,
    /// One byte in so much time.
    Drip(Duration),
    /// So many bytes in a second, of each connection.
    Slow(u64),
}

/// A choice of mishap for a request, by its number and its head.
type Rule = Box<dyn Fn(usize, &str) -> Mishap + Send + Sync>;

/// A running proxy; it ends with the process.
pub struct WebProxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    server: u16,
    rule: Mutex<Arc<Rule>>,
    requests: AtomicUsize,
    connections: AtomicUsize,
    open: Mutex<HashMap<usize, TcpStream>>,
}

impl WebProxy {
    /// A proxy in front of the server at `port` of this machine.
    ///
    /// # Panics
    /// If it can't listen.
    pub fn start(server: u16, rule: impl Fn(usize, &str) -> Mishap + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the proxy listens");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            server,
            rule: Mutex::new(Arc::new(Box::new(rule))),
            requests: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            open: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let number = accepting.connections.fetch_add(1, Ordering::SeqCst);
                if let Ok(copy) = client.try_clone() {
                    lock(&accepting.open).insert(number, copy);
                }
                let shared = Arc::clone(&accepting);
                thread::spawn(move || {
                    let ended = converse(&client, &shared);
                    // A reset is what closing does, if nobody else has the socket.
                    if !matches!(ended, Ok(End::Reset)) {
                        let _ = client.shutdown(Shutdown::Both);
                    }
                    lock(&shared.open).remove(&number);
                });
            }
        });
        Self { port, shared }
    }

    /// The URL of a path that begins with `/`.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// Requests so far.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Waits until every connection that clients have made by now is taken: those come before one of its own.
    ///
    /// # Panics
    /// If it does not listen.
    pub fn catch_up(&self) {
        let mut last = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("the proxy listens");
        let _ = last.shutdown(Shutdown::Write);
        let _ = last.read(&mut [0]);
    }

    /// Connections of clients that are not over.
    pub fn open(&self) -> usize {
        lock(&self.shared.open).len()
    }

    /// From now on, this happens.
    pub fn change(&self, rule: impl Fn(usize, &str) -> Mishap + Send + Sync + 'static) {
        *lock(&self.shared.rule) = Arc::new(Box::new(rule));
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for socket in lock(&self.shared.open).values() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a head to its empty line; `None` at the end of the connection.
fn head(mut from: &TcpStream) -> std::io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if from.read(&mut byte)? == 0 || head.len() > 64 << 10 {
            return Ok(None);
        }
        head.push(byte[0]);
    }
    Ok(Some(String::from_utf8_lossy(&head).into_owned()))
}

fn value<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// Passes the body of a request on, or reads it only.
fn pass_body(mut client: &TcpStream, server: Option<&TcpStream>, request: &str) -> std::io::Result<()> {
    let mut left: usize = value(request, "content-length").and_then(|len| len.parse().ok()).unwrap_or(0);
    let mut buf = vec![0; 64 << 10];
    while left > 0 {
        let want = left.min(buf.len());
        let read = client.read(&mut buf[..want])?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(mut server) = server {
            server.write_all(&buf[..read])?;
        }
        left -= read;
    }
    Ok(())
}

/// Passes a body in chunks on, to its empty one.
fn pass_chunks(mut server: &TcpStream, mut client: &TcpStream) -> std::io::Result<()> {
    let mut last = Vec::new();
    let mut byte = [0];
    while !last.ends_with(b"\r\n0\r\n\r\n") && server.read(&mut byte)? > 0 {
        client.write_all(&byte)?;
        last.push(byte[0]);
    }
    Ok(())
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Closed,
    Reset,
}

fn converse(client: &TcpStream, shared: &Shared) -> std::io::Result<End> {
    let mut to_client = client;
    client.set_nodelay(true)?;
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, shared.server))?;
    server.set_nodelay(true)?;
    while let Some(request) = head(client)? {
        let number = shared.requests.fetch_add(1, Ordering::SeqCst);
        let rule = Arc::clone(&lock(&shared.rule));
        let mishap = rule(number, &request);
        match &mishap {
            Mishap::Answer(text) => {
                pass_body(client, None, &request)?;
                let text = format!("HTTP/1.1 {text}\r\nContent-Length: 0\r\n\r\n");
                to_client.write_all(text.as_bytes())?;
                continue;
            }
            Mishap::Garbage => return to_client.write_all(&[0x16; 3000]).map(|()| End::Closed),
            Mishap::EndlessHead => {
                to_client.write_all(b"HTTP/1.1 206 Partial Content\r\n")?;
                loop {
                    to_client.write_all(b"X-More: and more\r\n")?;
                }
            }
            Mishap::Late(time) => thread::sleep(*time),
            _ => {}
        }
        let mut kept: Vec<&str> = request.trim_end().split("\r\n").collect();
        if mishap == Mishap::WithoutRange {
            kept.retain(|line| {
                let line = line.to_ascii_lowercase();
                !line.starts_with("range:") && !line.starts_with("if-range:")
            });
        }
        (&server).write_all(format!("{}\r\n\r\n", kept.join("\r\n")).as_bytes())?;
        pass_body(client, Some(&server), &request)?;
        let Some(mut response) = head(&server)? else { return Ok(End::Closed) };
        if mishap == Mishap::LostAnswer {
            return Ok(End::Closed);
        }
        let mut left: u64 = value(&response, "content-length").and_then(|len| len.parse().ok()).unwrap_or(0);
        if request.starts_with("HEAD ") {
            left = 0;
        }
        match &mishap {
            Mishap::Replace(old, new) => response = response.replace(old, new),
            Mishap::WithoutVersions => {
                response = response.replace("ETag:", "X-Tag:").replace("Last-Modified:", "X-Modified:");
            }
            Mishap::RangeHigher(more) => {
                if let Some((start, end)) = value(&response, "content-range")
                    .and_then(|range| range.strip_prefix("bytes ")?.split('/').next()?.split_once('-'))
                {
                    let numbers = [start, end].map(|number| number.parse::<u64>().unwrap_or(0) + more);
                    response = response
                        .replace(&format!("{start}-{end}/"), &format!("{}-{}/", numbers[0], numbers[1]));
                }
            }
            Mishap::EndlessChunk => {
                let length = format!("Content-Length: {left}");
                response = response.replace(&length, "Transfer-Encoding: chunked");
                to_client.write_all(response.as_bytes())?;
                loop {
                    to_client.write_all(b"0000000000000000")?;
                }
            }
            _ => {}
        }
        to_client.write_all(response.as_bytes())?;
        if value(&response, "transfer-encoding").is_some() {
            pass_chunks(&server, to_client)?;
        }
        let mut passed = 0;
        let mut buf = vec![0; 64 << 10];
        while left > 0 {
            let most = match mishap {
                Mishap::CutAfter(most) | Mishap::ResetAfter(most) | Mishap::SilentAfter(most) => {
                    most - passed
                }
                Mishap::Drip(time) => {
                    thread::sleep(time);
                    1
                }
                Mishap::Slow(rate) => {
                    thread::sleep(Duration::from_millis(50));
                    rate / 20
                }
                _ => u64::MAX,
            };
            if most == 0 {
                match mishap {
                    Mishap::SilentAfter(_) => while let Ok(1..) = (&*client).read(&mut buf) {},
                    Mishap::ResetAfter(_) => {
                        rustix::net::sockopt::set_socket_linger(client, Some(Duration::ZERO))?;
                        return Ok(End::Reset);
                    }
                    _ => {}
                }
                return Ok(End::Closed);
            }
            let want = left.min(most).min(buf.len() as u64) as usize;
            let read = (&server).read(&mut buf[..want])?;
            if read == 0 {
                return Ok(End::Closed);
            }
            to_client.write_all(&buf[..read])?;
            left -= read as u64;
            passed += read as u64;
        }
    }
    Ok(End::Closed)
}
