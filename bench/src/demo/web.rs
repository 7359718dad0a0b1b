//! A web server of one file, which sends ranges and counts what it sends.

use crate::Outcome;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Bytes that are read of the file at a time.
const PIECE: usize = 256 << 10;

/// A server on a port of its own. It runs until the program ends.
pub(super) struct WebServer {
    port: u16,
    sent: Arc<AtomicU64>,
}

impl WebServer {
    /// Begins to serve a file, whatever path is asked for.
    pub(super) fn start(file: &Path) -> Outcome<Self> {
        let said = |e: std::io::Error| format!("{}: {e}", file.display());
        let opened = Arc::new(File::open(file).map_err(said)?);
        let len = opened.metadata().map_err(said)?.len();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| e.to_string())?;
        let port = listener.local_addr().map_err(|e| e.to_string())?.port();
        let sent = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&sent);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (file, counter) = (Arc::clone(&opened), Arc::clone(&counter));
                // A client that goes away in the middle has what it wants.
                thread::spawn(move || drop(answer(&client, &file, len, &counter)));
            }
        });
        Ok(Self { port, sent })
    }

    /// The URL of the file under this name.
    pub(super) fn url(&self, name: &str) -> String {
        format!("http://127.0.0.1:{}/{name}", self.port)
    }

    /// Bytes of the file that were sent so far.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

/// Answers the requests of a connection.
fn answer(client: &TcpStream, file: &File, len: u64, sent: &AtomicU64) -> std::io::Result<()> {
    let mut lines = BufReader::new(client).lines();
    while let Some(request) = lines.next().transpose()? {
        let mut wanted = None;
        for line in lines.by_ref() {
            let line = line?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').unwrap_or_default();
            if name.eq_ignore_ascii_case("range") {
                wanted = range(value.trim(), len);
            }
        }
        let mut out = client;
        let part = wanted.clone().unwrap_or(0..len);
        let status = if wanted.is_some() { "206 Partial Content" } else { "200 OK" };
        let place = wanted.map_or_else(String::new, |part| {
            format!("Content-Range: bytes {}-{}/{len}\r\n", part.start, part.end - 1)
        });
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nAccept-Ranges: bytes\r\nETag: \"1\"\r\n{place}\r\n",
            part.end - part.start
        );
        out.write_all(head.as_bytes())?;
        if request.starts_with("HEAD ") {
            continue;
        }
        let mut piece = vec![0; PIECE];
        let mut at = part.start;
        while at < part.end {
            let count = PIECE.min(usize::try_from(part.end - at).unwrap_or(PIECE));
            file.read_exact_at(&mut piece[..count], at)?;
            out.write_all(&piece[..count])?;
            sent.fetch_add(count as u64, Ordering::Relaxed);
            at += count as u64;
        }
    }
    Ok(())
}

/// The bytes that `bytes=FIRST-LAST` names, if some of them are there.
fn range(value: &str, len: u64) -> Option<Range<u64>> {
    let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
    let last = if last.is_empty() { len } else { last.parse::<u64>().ok()?.checked_add(1)?.min(len) };
    let first = first.parse::<u64>().ok()?;
    (first < last).then_some(first..last)
}

#[cfg(test)]
mod tests {
    use super::range;

    #[test]
    fn ranges_are_those_of_the_file() {
        assert_eq!(range("bytes=0-9", 100), Some(0..10));
        assert_eq!(range("bytes=90-", 100), Some(90..100));
        assert_eq!(range("bytes=90-200", 100), Some(90..100));
        assert_eq!(range("bytes=100-", 100), None);
        assert_eq!(range("bytes=-5", 100), None);
    }
}
