//! A client whose server says whatever a test or a fuzz target wants, and the parsers of header values.

use super::connection::{Connection, Patience};
use super::headers::ContentRange;
use super::options::HttpOptions;
use super::source::{Reply, Source};
use super::url::HttpUrl;
use crate::stream::Stream;
use std::io::Write;
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The range and the length that the value of a `Content-Range` tells; `None` if it can't be read.
pub fn content_range(value: &str) -> Option<(Option<Range<u64>>, Option<u64>)> {
    ContentRange::parse(value).map(|found| (found.range, found.total))
}

/// The answer of a client that asked for bytes 100 to 199 and whose server sent `bytes` and closed the connection: the bytes
/// of the range, or the reason why there are none.
///
/// # Panics
/// If the system has no sockets to give.
pub fn answer(bytes: &[u8]) -> Result<Vec<u8>, String> {
    // What is longer would not fit into the socket.
    let bytes = &bytes[..bytes.len().min(32 << 10)];
    let (ours, mut theirs) = UnixStream::pair().expect("there are descriptors");
    theirs.write_all(bytes).expect("it fits");
    theirs.shutdown(Shutdown::Write).expect("it is connected");
    let url = HttpUrl::parse("http://host/disk").expect("a URL");
    let source = Source::new(url.clone(), HttpOptions { netrc: false, ..HttpOptions::default() });
    let until = Instant::now() + Duration::from_secs(600);
    let patience = Patience { until, silence: Duration::from_secs(600), is_cancelled: &|| false };
    let mut connection =
        Connection::new(Stream::of_unix(ours, until), None).map_err(|error| error.to_string())?;
    let wanted = 100..200;
    let reason = |trouble: super::source::Trouble| trouble.reason().to_owned();
    let response = source.ask(&mut connection, &url, Some(&wanted), &patience).map_err(reason)?;
    if response.status().is_redirection() {
        let next = connection.redirect(&patience).map_err(|broken| broken.to_string())?;
        return Err(HttpUrl::parse(&next).map_or_else(|reason| reason, |url| url.to_string()));
    }
    let Reply::Part { range, .. } =
        source.judge(&response, Some(&wanted), &mut connection, &patience).map_err(reason)?
    else {
        return Err("all of it".to_owned());
    };
    assert!(range.start == 100 && range.end <= 200);
    let mut found = vec![0; (range.end - range.start) as usize];
    let mut done = 0;
    while done < found.len() {
        match connection.read(&mut found[done..], &patience) {
            Ok(0) => return Err("too short".to_owned()),
            Ok(read) => done += read,
            Err(broken) => return Err(broken.to_string()),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::answer;

    #[test]
    fn only_what_was_asked_for_is_taken() {
        let body = "x".repeat(100);
        let part =
            |head: &str, body: &str| answer(format!("HTTP/1.1 206 P\r\n{head}\r\n\r\n{body}").as_bytes());
        assert_eq!(
            part("Content-Range: bytes 100-199/300\r\nContent-Length: 100", &body),
            Ok(body.clone().into())
        );
        assert_eq!(part("Content-Range: bytes 100-109/300\r\nContent-Length: 10", &body), Ok(vec![b'x'; 10]));
        let chunked = format!("64\r\n{body}\r\n0\r\n\r\n");
        assert_eq!(
            part("Content-Range: bytes 100-199/*\r\nTransfer-Encoding: chunked", &chunked),
            Ok(body.clone().into())
        );
        let informed =
            format!("HTTP/1.1 103 E\r\n\r\nHTTP/1.1 206 P\r\nContent-Range: bytes 100-199/300\r\n\r\n{body}");
        assert_eq!(answer(informed.as_bytes()), Ok(body.clone().into()));
        for (head, word) in [
            ("Content-Range: bytes 0-99/300\r\nContent-Length: 100", "Content-Range"),
            ("Content-Range: bytes 100-299/300\r\nContent-Length: 200", "Content-Range"),
            ("Content-Range: bytes 100-199/150\r\nContent-Length: 100", "Content-Range"),
            ("Content-Length: 100", "Content-Range"),
            (
                "Content-Range: bytes 100-199/300\r\nContent-Range: bytes 0-99/300\r\nContent-Length: 100",
                "Content-Range",
            ),
            ("Content-Range: bytes 100-199/300\r\nContent-Length: 99", "length"),
            ("Content-Range: bytes 100-199/300\r\nContent-Length: 100\r\nContent-Encoding: gzip", "packed"),
        ] {
            let error = part(head, &body).unwrap_err();
            assert!(error.contains(word), "{head}: {error}");
        }
        assert!(part("Content-Range: bytes 100-199/300\r\nContent-Length: 100", "x").is_err());
        assert!(answer(b"").is_err() && answer(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(answer(&vec![b'x'; 100_000]).is_err());
        let endless = format!("HTTP/1.1 206 P\r\nX: {}", "y".repeat(30_000));
        assert!(answer(endless.as_bytes()).is_err());
        let moved = b"HTTP/1.1 302 F\r\nLocation: //u:secret@other/x?y=secret\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(answer(moved), Err("http://other/x?...".to_owned()));
    }
}
