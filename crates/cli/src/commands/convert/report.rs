//! The reports of `zebu convert`.

use crate::unreadable::{self, UnreadableRange};
use serde::Serialize;
use zebu_disks::{Disks, RemoteTransfers};
use zebu_engine::jobs::ConvertReport;

/// The JSON report. Figures are bytes of the virtual disk.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Report {
    total: u64,
    read: u64,
    written: u64,
    reflinked: u64,
    range_copied: u64,
    skipped: u64,
    zeroed: u64,
    unreadable: u64,
    unreadable_ranges: Vec<UnreadableRange>,
    /// Where those are not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    unreadable_range_count: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    skipped_bitmaps: Vec<String>,
    /// Counts of what went over the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    remote: Option<RemoteTransfers>,
}

/// The report in JSON.
pub(super) fn json_report(disks: &Disks, report: &ConvertReport, skipped_bitmaps: Vec<String>) -> Report {
    Report {
        total: report.total,
        read: report.read,
        written: report.written,
        reflinked: report.reflinked,
        range_copied: report.range_copied,
        skipped: report.skipped,
        zeroed: report.zeroed,
        unreadable: report.unreadable,
        unreadable_ranges: unreadable::list(&report.unreadable_ranges),
        unreadable_range_count: unreadable::count_in_all(
            &report.unreadable_ranges,
            report.unreadable_range_count,
        ),
        skipped_bitmaps,
        remote: disks.remote.transfers(&disks.uploads),
    }
}

/// The report in words.
pub(super) fn human_text(report: &ConvertReport) -> String {
    format!(
        "total {}, read {}, written {}, reflinked {}, copied by the kernel {}, skipped {}, zeroed {}, unreadable {} \
         (bytes of the disk){}\n",
        report.total,
        report.read,
        report.written,
        report.reflinked,
        report.range_copied,
        report.skipped,
        report.zeroed,
        report.unreadable,
        match report.unreadable_range_count {
            0 => String::new(),
            count => format!("; unreadable ranges: {count}"),
        }
    )
}
