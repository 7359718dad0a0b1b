//! Counters over HTTP: as much of HTTP as Prometheus uses.

use super::accept::{ConnectionSlot, Reader, send, within};
use super::control::Controlled;
use std::io;
use std::rc::Rc;
use std::time::Duration;
use zebu_export::prometheus;
use zebu_storage::{Socket, Worker};

/// Bytes of a request's head.
const MAX_HEAD: usize = 8 << 10;
/// How long a connection may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Answers one request.
pub(crate) async fn answer(
    worker: &Worker,
    socket: Socket,
    _slot: Rc<ConnectionSlot>,
    controlled: &Controlled,
) {
    // Whoever asked is gone, or too slow; there is nobody to tell.
    let _ = within(worker, PATIENCE, respond(worker, &socket, controlled)).await;
}

async fn respond(worker: &Worker, socket: &Socket, controlled: &Controlled) -> io::Result<()> {
    let Some(head) = Reader::new(MAX_HEAD).until(worker, socket, b"\r\n\r\n").await? else { return Ok(()) };
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let (status, body) = match line.split(|byte| *byte == b' ').collect::<Vec<_>>()[..] {
        [b"GET", b"/metrics" | b"/", ..] => ("200 OK", prometheus(&controlled.exports, &controlled.memory)),
        [b"GET", ..] => ("404 Not Found", "/metrics is all there is\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET is understood\n".to_owned()),
    };
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    send(worker, socket, response.as_bytes()).await
}
