//! Reports of requests: their amount and rate, and dumps of the bytes read.

use crate::output::units::size_exact;
use std::fmt::Write as _;
use std::time::Duration;

/// How a finished request is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportStyle {
    /// Two lines for people.
    Human,
    /// One line of numbers (`-C`).
    Machine,
    /// Nothing (`-q`).
    Quiet,
}

/// A finished request in words: `read`, `wrote`, `discard`.
pub(crate) fn request_text(
    verb: &str,
    offset: u64,
    bytes: u64,
    elapsed: Duration,
    style: ReportStyle,
) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    let (rate, operations) = (bytes as f64 / seconds, 1.0 / seconds);
    match style {
        ReportStyle::Quiet => String::new(),
        ReportStyle::Machine => {
            format!("{bytes},1,{},{rate:.3},{operations:.3}\n", hours_text(elapsed))
        }
        ReportStyle::Human => format!(
            "{verb} {bytes}/{bytes} bytes at offset {offset}\n{}, 1 ops; {} ({}/sec and {operations:.4} ops/sec)\n",
            size_exact(bytes as f64),
            short_time(elapsed),
            size_exact(rate),
        ),
    }
}

/// Seconds, with minutes and hours where there are any.
fn short_time(elapsed: Duration) -> String {
    if elapsed.as_secs() >= 60 {
        hours_text(elapsed)
    } else {
        format!("{:02}.{:02} sec", elapsed.as_secs(), elapsed.subsec_millis() / 10)
    }
}

fn hours_text(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    format!(
        "{}:{:02}:{:02}.{:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        elapsed.subsec_millis() / 10
    )
}

/// Bytes in rows of 16, in hexadecimal and, where they are letters or digits, as text.
pub(crate) fn dump_text(offset: u64, bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() / 16 * 78);
    for (index, row) in bytes.chunks(16).enumerate() {
        let _ = write!(out, "{:08x}:  ", offset + index as u64 * 16);
        for byte in row {
            let _ = write!(out, "{byte:02x} ");
        }
        out.push(' ');
        out.extend(row.iter().map(|&byte| if byte.is_ascii_alphanumeric() { char::from(byte) } else { '.' }));
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    // The layout is that of qemu-io 10.0.
    #[test]
    fn requests_are_told_in_two_lines() {
        let text = request_text("read", 512, 1024, Duration::from_millis(1250), ReportStyle::Human);
        assert_eq!(
            text,
            "read 1024/1024 bytes at offset 512\n1 KiB, 1 ops; 01.25 sec (819.200000 bytes/sec and 0.8000 ops/sec)\n"
        );
        let long = request_text("wrote", 0, 4096, Duration::from_secs(3723), ReportStyle::Human);
        assert!(long.contains("4 KiB, 1 ops; 1:02:03.00 ("), "{long}");
    }

    #[test]
    fn machines_get_one_line_of_numbers() {
        let text = request_text("read", 0, 4096, Duration::from_millis(500), ReportStyle::Machine);
        assert_eq!(text, "4096,1,0:00:00.50,8192.000,2.000\n");
    }

    #[test]
    fn dumps_have_rows_of_sixteen() {
        assert_eq!(
            dump_text(512, b"AAAAAAAAAAAAAAAA\x00z"),
            "00000200:  41 41 41 41 41 41 41 41 41 41 41 41 41 41 41 41  AAAAAAAAAAAAAAAA\n\
             00000210:  00 7a  .z\n"
        );
    }
}
