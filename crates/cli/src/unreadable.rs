//! Ranges of a source that could not be read, as reports list them.

use crate::output::stderr;
use serde::Serialize;
use zebu_disks::{Program, errno_text};
use zebu_engine::jobs::SkippedRange;

/// A range in a JSON report, in bytes of the virtual disk.
#[derive(Serialize)]
pub(crate) struct UnreadableRange {
    start: u64,
    length: u64,
    error: String,
}

/// The ranges that a report lists.
pub(crate) fn list(ranges: &[SkippedRange]) -> Vec<UnreadableRange> {
    ranges
        .iter()
        .map(|range| UnreadableRange {
            start: range.offset,
            length: range.len,
            error: range.error.to_string(),
        })
        .collect()
}

/// How many ranges there are, if more than are listed.
pub(crate) fn count_in_all(listed: &[SkippedRange], count: u64) -> Option<u64> {
    (count > listed.len() as u64).then_some(count)
}

/// Says on standard error what could not be read: the ranges that are listed, how many more there are, and the sum.
pub(crate) fn tell(dialect: Program, listed: &[SkippedRange], count: u64, bytes: u64) {
    for range in listed {
        if dialect.is_qemu() {
            let reason = errno_text(range.error.errno());
            stderr::tell(dialect, &format!("warning: error while reading offset {}: {reason}", range.offset));
            continue;
        }
        stderr::tell(
            dialect,
            &format!("error while reading {} bytes at offset {}: {}", range.len, range.offset, range.error),
        );
    }
    if count_in_all(listed, count).is_some() {
        let more = count - listed.len() as u64;
        stderr::tell(dialect, &format!("error while reading {more} more ranges"));
    }
    if count > 1 {
        stderr::tell(
            dialect,
            &format!("{bytes} bytes in {count} ranges could not be read: they are zero in the copy"),
        );
    }
}
