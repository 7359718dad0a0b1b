//! What others have published about the same questions: shown beside our tables, on other machines and of other years.

use crate::table::Table;
use std::fmt::Write;

/// Published figures that belong to a table of ours.
pub(super) struct Published {
    /// Our table.
    table: &'static str,
    /// Who published what, when, in which unit.
    about: &'static str,
    columns: &'static [&'static str],
    rows: &'static [&'static [&'static str]],
}

const PUBLISHED: &[Published] = &[
    Published {
        table: "preallocation",
        about: "QEMU, August 2020: IOPS of 4 KiB random writes, depth 32, 25 GB, cache=none, mapping cached",
        columns: &["preallocation", "XFS", "ext4"],
        rows: &[
            &["off", "8,139", "11,688"],
            &["off, without zero-range", "2,965", "2,780"],
            &["metadata", "7,768", "9,132"],
            &["falloc", "7,742", "13,108"],
            &["full", "41,389", "16,351"],
            &["raw file, sparse", "7,277", "43,260"],
            &["raw file, falloc", "7,299", "42,810"],
            &["raw file, full", "88,404", "83,197"],
        ],
    },
    Published {
        table: "overlays",
        about: "QEMU, October 2019: IOPS of 4 KiB random writes into overlays on an SSD",
        columns: &["clusters", "with subclusters", "without"],
        rows: &[
            &["64 KiB", "13,341", "1,671"],
            &["128 KiB", "12,391", "870"],
            &["512 KiB", "4,960", "359"],
            &["1 MiB", "2,732", "215"],
            &["2 MiB", "1,630", "214"],
        ],
    },
    Published {
        table: "clusters",
        about: "QEMU, October 2019: seconds of bench -c 50000 -d 64 -o 1k -s 64k on ext4; on XFS (ppc64le) the second one cost up \
                to 88 % of the speed",
        columns: &["version", "seconds"],
        rows: &[
            &["2.12", "20"],
            &["zero-range at allocation (c8bb23cb)", "12"],
            &["the same, past the end in order (292d06b9)", "9"],
        ],
    },
    Published {
        table: "mapping",
        about: "QEMU, September 2017: IOPS of random reads, a full image of 40 GB; slices of a whole table and of 4 KiB",
        columns: &["clusters, cache", "whole tables", "4 KiB"],
        rows: &[
            &["64 KiB, 1 MB", "2,718", "6,545"],
            &["64 KiB, 3 MB", "5,326", "12,045"],
            &["64 KiB, 5 MB (everything)", "57,355", "55,680"],
            &["256 KiB, 512 kB", "1,415", "8,539"],
            &["256 KiB, 1 MB", "4,120", "21,071"],
            &["256 KiB, 1280 kB (everything)", "58,001", "55,417"],
        ],
    },
    Published {
        table: "alignment",
        about: "QEMU, May 2015: buffers that are not at pages",
        columns: &["what", "loss"],
        rows: &[&["4 KiB writes, O_DIRECT", "5 %"], &["requests that the kernel makes of one", "2"]],
    },
    Published {
        table: "readback",
        about: "SUSE, May 2021: MB/s of sequential reads after zero-range at allocation, and without it",
        columns: &["with", "without"],
        rows: &[&["355", "524"]],
    },
    Published {
        table: "backup",
        about: "QEMU, February 2021: seconds of a compressed backup of 1000 MB of ones, SSD to HDD",
        columns: &["cache", "as it was", "with a write cache for clusters"],
        rows: &[&["O_DIRECT", "300", "4.4"], &["page cache", "5.7", "5.4"]],
    },
    Published {
        table: "compress",
        about: "QEMU, May 2020: seconds for an image of 2.2 GB, at the same ratio of 1.57",
        columns: &["what", "zlib", "zstd"],
        rows: &[&["compress", "65.5", "16.3"], &["decompress", "1.9", "1.6"]],
    },
    Published {
        table: "convert",
        about: "QEMU, 2017: seconds of convert with one coroutine, and with eight in any order (-m 8 -W)",
        columns: &["from, to", "one", "eight"],
        rows: &[
            &["NFS, iSCSI", "22.8", "11.0"],
            &["NFS, memory", "11.7", "10.4"],
            &["memory, iSCSI", "12.3", "9.0"],
        ],
    },
    Published {
        table: "fragmentation",
        about: "QEMU: seconds for 4 GB in pieces of 1 MiB from a fragmented image, O_DIRECT, SSD, before and after asynchronous \
                reads of pieces",
        columns: &["clusters", "before", "after"],
        rows: &[
            &["at random", "20.4", "10.05"],
            &["in reverse", "17.5", "9.4"],
            &["partly at random", "14.7", "9.2"],
            &["in order", "9.08", "9.07"],
        ],
    },
    Published {
        table: "serve",
        about: "Linux block layer list, September 2022: IOPS of a preallocated image of 8 GB, one job, ublk-qcow2 and qemu-nbd",
        columns: &["what", "qemu-nbd", "ublk-qcow2"],
        rows: &[&["4 KiB random writes", "24,605", "104,481"], &["4 KiB random reads", "30,938", "114,937"]],
    },
    Published {
        table: "chains",
        about: "SVD/sQEMU, 2022: RocksDB on a chain of 500 images, beside QEMU as it was",
        columns: &["what", "gain"],
        rows: &[&["throughput", "48 %"], &["memory", "15 times less"]],
    },
];

/// What was published about a table of ours.
pub(super) fn about(table: &str) -> Option<&'static Published> {
    PUBLISHED.iter().find(|published| published.table == table)
}

impl Published {
    /// For a terminal.
    pub(super) fn text(&self) -> String {
        let mut table = Table::new(self.columns.iter().copied());
        for row in self.rows {
            table.row(row.iter().map(|cell| (*cell).to_owned()));
        }
        format!("published: {}\n{}", self.about, table.render())
    }

    /// For the page.
    pub(super) fn html(&self) -> String {
        let mut html =
            format!("<p>Published: {}</p>\n<div class=scroll><table class=published><tr>", self.about);
        for column in self.columns {
            let _ = write!(html, "<th>{column}");
        }
        for row in self.rows {
            html.push_str("\n<tr>");
            for cell in *row {
                let _ = write!(html, "<td>{cell}");
            }
        }
        html.push_str("\n</table></div>\n");
        html
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_a_cell_for_each_column() {
        for published in PUBLISHED {
            assert!(
                published.rows.iter().all(|row| row.len() == published.columns.len()),
                "{}",
                published.table
            );
            assert!(published.text().contains(published.rows[0][0]));
            assert!(published.html().contains(published.rows[0][0]));
        }
    }
}
