//! Counters over HTTP: as much of HTTP as Prometheus uses.

use super::accept::{ConnectionSlot, Reader, send, within};
use super::controlled::Controlled;
use std::fmt::Write as _;
use std::io;
use std::rc::Rc;
use std::time::Duration;
use zebu_engine::jobs::CheckpointReport;
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
    controlled: &Controlled<'_>,
) {
    // Whoever asked is gone, or too slow; there is nobody to tell.
    let _ = within(worker, PATIENCE, respond(worker, &socket, controlled)).await;
}

/// All counters.
fn counters(controlled: &Controlled<'_>) -> String {
    let mut text = prometheus(&controlled.exports, &controlled.memory);
    let running = controlled.checkpoints.running();
    let mut family = |family: &str, help: &str, value: fn(&CheckpointReport) -> u64| {
        let _ = writeln!(text, "# HELP {family} {help}\n# TYPE {family} gauge");
        for (name, report) in &running {
            let name = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = writeln!(text, "{family}{{checkpoint=\"{name}\"}} {}", value(report));
        }
    };
    if !running.is_empty() {
        family(
            "zebu_checkpoint_spill_bytes",
            "Bytes that were kept before clients overwrote them.",
            |report| report.spill_memory + report.spill_file,
        );
        family("zebu_checkpoint_spill_limit_bytes", "Bytes at which the checkpoint ends.", |report| {
            report.spill_limit
        });
    }
    text
}

async fn respond(worker: &Worker, socket: &Socket, controlled: &Controlled<'_>) -> io::Result<()> {
    let Some(head) = Reader::new(MAX_HEAD).until(worker, socket, b"\r\n\r\n").await? else { return Ok(()) };
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let (status, body) = match line.split(|byte| *byte == b' ').collect::<Vec<_>>()[..] {
        [b"GET", b"/metrics" | b"/", ..] => ("200 OK", counters(controlled)),
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
