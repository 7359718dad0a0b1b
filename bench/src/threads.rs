//! The figures of `docs/threads.md`: written from what is saved, each between two markers, never by hand.

use crate::Outcome;
use crate::metric::Metric;
use crate::record::{Results, find};
use crate::stats::Summary;
use crate::table::shown;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

const END: &str = "<!-- end of figures -->";

/// A table beside a question.
struct Figures {
    /// In the marker.
    name: &'static str,
    /// The year and the version of the figures that were published.
    then: &'static str,
    lines: &'static [Line],
}

/// The figure of a row that is shown.
#[derive(Clone, Copy)]
enum Shown {
    Median(Metric),
    /// Seconds for so many requests, from their rate.
    SecondsFor(u32),
}

/// A line: the figure that was published, and two sides of a row.
struct Line {
    name: &'static str,
    then: &'static str,
    table: &'static str,
    row: &'static str,
    shown: Shown,
    sides: [Option<&'static str>; 2],
}

const IOPS: Shown = Shown::Median(Metric::RequestsPerSecond);
const SECONDS: Shown = Shown::Median(Metric::WallSeconds);
const BOTH: [Option<&str>; 2] = [Some("zebu"), Some("QEMU")];

const fn line(
    name: &'static str,
    then: &'static str,
    table: &'static str,
    row: &'static str,
    shown: Shown,
) -> Line {
    Line { name, then, table, row, shown, sides: BOTH }
}

#[rustfmt::skip]
const FIGURES: &[Figures] = &[
    Figures { name: "alignment", then: "2015, QEMU with and without the change", lines: &[
        line("`convert` of 1 GiB to raw, O_DIRECT: seconds", "119.7 and 126.3 (30 times)", "alignment", "block requests of convert qcow2 to raw, 1 GiB", SECONDS),
        line("the same: reads of the device", "2,086 and 3,622 requests in all", "alignment", "block requests of convert qcow2 to raw, 1 GiB", Shown::Median(Metric::DeviceReads)),
        Line { sides: [Some("zebu, pages"), None], ..line("1 MiB reads into buffers at pages: seconds", "", "alignment", "block requests of 1 MiB reads, buffers at pages and past them, 1 GiB", SECONDS) },
        Line { sides: [Some("zebu, 512 bytes past them"), None], ..line("1 MiB reads into buffers 512 bytes past pages: seconds", "", "alignment", "block requests of 1 MiB reads, buffers at pages and past them, 1 GiB", SECONDS) },
    ] },
    Figures { name: "mapping", then: "2017, QEMU with whole tables, and with 4 KiB", lines: &[
        line("16 GiB, 64 KiB clusters, 1 MiB of cache", "5,000 and 12,700", "mapping", "16 GiB, 64 KiB clusters, 1 MiB, shuffled, written: reads", IOPS),
        Line { sides: [None, Some("QEMU, whole tables")], ..line("the same, whole tables", "5,000", "mapping", "16 GiB, 64 KiB clusters, 1 MiB, shuffled, written: reads", IOPS) },
        line("2 TiB, 2 MiB clusters, 4 MiB of cache", "576 and 11,000", "mapping-large", "2 TiB, 2 MiB clusters, 4 MiB, shuffled, first blocks written: reads", IOPS),
        Line { sides: [None, Some("QEMU, whole tables")], ..line("the same, whole tables", "576", "mapping-large", "2 TiB, 2 MiB clusters, 4 MiB, shuffled, first blocks written: reads", IOPS) },
        line("16 GiB, the mapping all in the cache", "some 60,000", "mapping", "16 GiB, 64 KiB clusters, 1 MiB, sequential, never written: reads, all cached", IOPS),
        line("16 GiB, 32 jobs in 32 MiB each", "\u{201c}20x faster\u{201d}", "mapping", "16 GiB, 64 KiB clusters, 1 MiB, sequential, never written: reads of 32 jobs in 32 MiB each", IOPS),
    ] },
    Figures { name: "zeroing", then: "2019, SSD, QEMU with zero-range, and without", lines: &[
        line("64 KiB clusters, step 4 KiB", "0.291 and 0.395", "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 64k, step 4k", Shown::SecondsFor(15_360)),
        line("64 KiB clusters, step 64 KiB", "0.813 and 4.23", "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 64k, step 64k", Shown::SecondsFor(15_360)),
        line("64 KiB clusters, step 1 MiB", "2.80 and 5.60", "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 64k, step 1M", Shown::SecondsFor(15_360)),
        line("1 MiB clusters, step 4 KiB", "0.217 and 0.352", "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 1M, step 4k", Shown::SecondsFor(15_360)),
        line("1 MiB clusters, step 64 KiB", "0.332 and 2.52", "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 1M, step 64k", Shown::SecondsFor(15_360)),
        line("1 MiB clusters, step 1 MiB", "0.685 and 38.9", "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 1M, step 1M", Shown::SecondsFor(15_360)),
        line("the same on XFS: 64 KiB clusters, step 64 KiB", "", "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 64k, step 64k", Shown::SecondsFor(15_360)),
        line("the same on XFS: 1 MiB clusters, step 1 MiB", "", "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 1M, step 1M", Shown::SecondsFor(15_360)),
    ] },
    Figures { name: "preallocation", then: "2020, QEMU 5.1, in a guest", lines: &[
        line("ext4, off", "11,688", "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS),
        Line { sides: [None, Some("QEMU, no zero-range")], ..line("ext4, off, without zero-range", "2,780", "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS) },
        line("ext4, metadata", "9,132", "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation metadata", IOPS),
        line("ext4, falloc", "13,108", "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation falloc", IOPS),
        line("ext4, full", "16,351", "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation full", IOPS),
        line("ext4, raw, sparse", "43,260", "preallocation", "Ext4: first 4 KiB writes, raw sparse file", IOPS),
        line("XFS, off", "8,139", "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS),
        Line { sides: [None, Some("QEMU, no zero-range")], ..line("XFS, off, without zero-range", "2,965", "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS) },
        Line { sides: [Some("zebu, no hint"), None], ..line("XFS, off, without an extent size hint", "", "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS) },
        line("XFS, metadata", "7,768", "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation metadata", IOPS),
        line("XFS, falloc", "7,742", "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation falloc", IOPS),
        line("XFS, full", "41,389", "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation full", IOPS),
        line("XFS, raw, sparse", "7,277", "preallocation", "Xfs: first 4 KiB writes, raw sparse file", IOPS),
        line("XFS, raw, sparse, with a hint of 1 MiB", "", "preallocation", "Xfs: first 4 KiB writes, raw sparse file with an extent size hint of 1 MiB", IOPS),
        line("XFS, a copy by reflink of a full image", "", "preallocation", "Xfs: first 4 KiB writes, reflinked copy of a full image", IOPS),
    ] },
    Figures { name: "compressed", then: "2021, QEMU as it was, and with the cache", lines: &[
        Line { sides: [Some("zebu"), Some("QEMU, direct")], ..line("backup of 1,000 MiB of ones, O_DIRECT: seconds", "300 and 4.4", "backup", "backup of ones, zstd", SECONDS) },
        Line { sides: [None, Some("QEMU, buffered")], ..line("the same, through the page cache: seconds", "5.7 and 5.4", "backup", "backup of ones, zstd", SECONDS) },
        Line { sides: [Some("zebu"), Some("QEMU, direct")], ..line("backup of a file system, zstd: seconds", "", "backup", "backup of a file system, zstd", SECONDS) },
        line("writes to the target, 256 MiB of a file system", "", "compress", "system calls of convert -c on the target, 256 MiB of a file system", Shown::Median(Metric::TargetWrites)),
    ] },
];

/// Writes the figures into the page, which has the markers.
pub(crate) fn write(page: &Path, tables: &[Results]) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", page.display());
    let text = std::fs::read_to_string(page).map_err(said)?;
    std::fs::write(page, filled(&text, tables).map_err(|e| format!("{}: {e}", page.display()))?).map_err(said)
}

/// The page with the figures of `tables`.
fn filled(page: &str, tables: &[Results]) -> Outcome<String> {
    FIGURES.iter().try_fold(page.to_owned(), |page, figures| {
        let begin = format!("<!-- figures {}: written by `cargo xtask bench` -->", figures.name);
        let missing = || format!("it has no place '{begin}'");
        let (before, rest) = page.split_once(&begin).ok_or_else(missing)?;
        let (_, after) = rest.split_once(END).ok_or_else(missing)?;
        Ok(format!("{before}{begin}\n\n{}\n{END}{after}", figures.render(tables)))
    })
}

impl Figures {
    fn render(&self, tables: &[Results]) -> String {
        let mut text = format!("| | {} | QEMU now | zebu |\n|---|---:|---:|---:|\n", self.then);
        for line in self.lines {
            let [zebu, qemu] = line.sides.map(|side| line.figure(side, tables));
            let _ = writeln!(text, "| {} | {} | {qemu} | {zebu} |", line.name, line.then);
        }
        let used = tables.iter().filter(|results| self.lines.iter().any(|line| line.table == results.table));
        let used: Vec<&Results> = used.collect();
        let names: Vec<&str> = used.iter().map(|results| results.table.as_str()).collect();
        let of: BTreeSet<String> = used
            .iter()
            .map(|Results { heading, .. }| format!("{}, commit {}", heading.date, heading.commit))
            .collect();
        let of: Vec<String> = of.into_iter().collect();
        let _ = writeln!(text, "\n`cargo xtask bench {}` ({}).", names.join(" "), of.join("; "));
        text
    }
}

impl Line {
    fn figure(&self, side: Option<&str>, tables: &[Results]) -> String {
        let value = || {
            let side = find(tables, self.table, self.row)?.side(side?)?;
            let median = |metric| side.of(metric).map(|values| Summary::of(values).median);
            match self.shown {
                Shown::Median(metric) => median(metric),
                Shown::SecondsFor(requests) => {
                    median(Metric::RequestsPerSecond).map(|rate| f64::from(requests) / rate)
                }
            }
        };
        value().map_or_else(String::new, shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::root;

    #[test]
    fn the_page_says_what_is_kept() {
        let tables = Results::read_all(&root().join("bench/results")).unwrap();
        let page = std::fs::read_to_string(root().join("docs/threads.md")).unwrap();
        assert!(filled(&page, &tables).unwrap() == page, "run `cargo xtask bench --page`");
        for line in FIGURES.iter().flat_map(|figures| figures.lines) {
            for side in line.sides.into_iter().flatten() {
                assert!(!line.figure(Some(side), &tables).is_empty(), "{}: {side}", line.name);
            }
        }
    }
}
