//! The report of a new point.

use super::new_point::{Followed, Made, Way};
use crate::output::stderr;
use crate::output::units::size_short;
use crate::unreadable;
use serde::Serialize;
use zebu_disks::Program;
use zebu_store::points::readable_time;

/// The exit code where the point is published, and something that was to follow failed.
pub(crate) const PUBLISHED: u8 = 3;

/// The JSON report. Figures are bytes.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Report {
    point: String,
    sequence: u64,
    time: String,
    /// The id of the moment that it shares with points of other disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    moment: Option<String>,
    way: Way,
    /// Why it is not by the bitmap, or not on the last point.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    disk_size: u64,
    read: u64,
    written: u64,
    unreadable: u64,
    added: u64,
    forgotten: Vec<String>,
    /// Manifests of other points that can't be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    damaged: Vec<String>,
    /// Why not all was done that was to follow the point, which is published.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

impl Report {
    /// Says on standard error what is wrong, behind `prefix`, and gathers the rest.
    pub(crate) fn telling(dialect: Program, prefix: &str, made: Made, followed: Followed) -> Self {
        let Made { report, point, way, reason, damaged } = made;
        unreadable::tell(
            dialect,
            &report.unreadable_ranges,
            report.unreadable_range_count,
            report.unreadable,
        );
        if let Some(reason) = &reason {
            let what = if way == Way::Full { "the point is a full one" } else { "the whole disk was read" };
            stderr::tell(dialect, &format!("{prefix}{what}: {reason}"));
        }
        if let Some(failed) = &followed.failed {
            let name = &point.name;
            let told = format!("{prefix}point {name} is published, but a later step failed: {failed}");
            stderr::tell(dialect, &told);
        }
        Self {
            point: point.name,
            sequence: point.sequence,
            time: readable_time(point.time),
            moment: point.moment,
            way,
            reason,
            parent: point.parent,
            disk_size: point.disk_size,
            read: report.read,
            written: report.written,
            unreadable: report.unreadable,
            added: point.added,
            forgotten: followed.forgotten,
            damaged: followed.damaged.unwrap_or(damaged),
            failed: followed.failed,
        }
    }

    /// The exit code of the command.
    pub(crate) fn code(&self) -> u8 {
        if self.failed.is_some() { PUBLISHED } else { 0 }
    }

    /// The report on a terminal.
    pub(crate) fn summary(&self) -> String {
        let unreadable = match self.unreadable {
            0 => String::new(),
            bytes => format!(", {} could not be read", size_short(bytes)),
        };
        let mut text = format!(
            "point {} ({}): {} read{unreadable}, {} added to the store\n",
            self.point,
            self.way_text(),
            size_short(self.read),
            size_short(self.added)
        );
        text.extend(self.forgotten.iter().map(|name| format!("forgotten: {name}\n")));
        text
    }

    /// The report with exact figures.
    pub(crate) fn human_text(&self) -> String {
        let way = self.way_text();
        let mut text = format!(
            "point {} ({way}): read {}, written {}, unreadable {} (bytes of the disk); {} bytes added to the store\n",
            self.point, self.read, self.written, self.unreadable, self.added
        );
        text.extend(self.forgotten.iter().map(|name| format!("forgotten: {name}\n")));
        text
    }

    fn way_text(&self) -> &'static str {
        match self.way {
            Way::Full => "full",
            Way::Bitmap => "by the bitmap",
            Way::Scan => "compared",
        }
    }
}
