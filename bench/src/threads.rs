//! The figures of `docs/threads.md`: written from what is saved, each between two markers, never by hand.

use crate::Outcome;
use crate::metric::{Kind, Metric};
use crate::record::{Heading, Results, find};
use crate::stats::Summary;
use crate::table::{grouped, shown};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

const END: &str = "<!-- end of figures -->";

/// A table beside a question.
struct Figures {
    /// In the marker.
    name: &'static str,
    /// Headings of the figures that were published.
    then: &'static [&'static str],
    /// Headings of the figures that are measured.
    now: &'static [&'static str],
    lines: &'static [Line],
}

/// The figure of a row that is shown.
#[derive(Clone, Copy)]
enum Shown {
    Median(Metric),
    /// Seconds for so many requests, from their rate.
    SecondsFor(u32),
}

/// A line: figures that were published, and sides of a row.
#[derive(Clone, Copy)]
struct Line {
    name: &'static str,
    /// Under the first headings; there may be fewer.
    then: &'static [&'static str],
    table: &'static str,
    row: &'static str,
    shown: Shown,
    /// The side below each heading, where there is one.
    sides: &'static [Option<&'static str>],
}

const IOPS: Shown = Shown::Median(Metric::RequestsPerSecond);
const SECONDS: Shown = Shown::Median(Metric::WallSeconds);

/// A line of QEMU and zebu.
const fn line(
    name: &'static str,
    then: &'static [&'static str],
    table: &'static str,
    row: &'static str,
    shown: Shown,
) -> Line {
    Line { name, then, table, row, shown, sides: &[Some("QEMU"), Some("zebu")] }
}

impl Line {
    /// The same line of other sides.
    const fn of(self, sides: &'static [Option<&'static str>]) -> Self {
        Self { sides, ..self }
    }
}

#[rustfmt::skip]
const FIGURES: &[Figures] = &[
    Figures { name: "short", then: &["then"], now: &["QEMU now", "zebu"], lines: &[
        line("[buffers](#buffers-at-pages): `convert` of 1 GiB, O_DIRECT, seconds", &["4.0 and 4.2"], "alignment", "block requests of convert qcow2 to raw, 1 GiB", SECONDS),
        line("[parts of L2 tables](#parts-of-l2-tables): reads of 16 GiB with 1 MiB of cache, IOPS", &["5,000 and 12,700"], "mapping", "16 GiB, 64 KiB clusters, 1 MiB, shuffled, written: reads", IOPS),
        line("[zeroing](#zeroing-the-rest-of-a-cluster): 15,360 first writes, 1 MiB clusters, seconds", &["0.685 and 38.9"], "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 1M, step 1M", Shown::SecondsFor(15_360)),
        line("[first writes](#first-writes-and-preallocation): `off` on XFS, IOPS", &["8,139"], "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS),
        line("the same: `off` on ext4, IOPS", &["11,688"], "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS),
        line("[compressed backups](#compressed-backups): 1,000 MiB of ones, O_DIRECT, seconds", &["300 and 4.4"], "backup", "backup of ones, zstd", SECONDS).of(&[Some("QEMU, direct"), Some("zebu")]),
    ] },
    Figures { name: "alignment", then: &["2015, at pages", "2015, past them"], now: &["QEMU now", "zebu"], lines: &[
        line("`convert` of 1 GiB to raw, O_DIRECT: seconds", &["4.0 (30 in 119.7)", "4.2 (30 in 126.3)"], "alignment", "block requests of convert qcow2 to raw, 1 GiB", SECONDS),
        line("the same: reads of the device", &[], "alignment", "block requests of convert qcow2 to raw, 1 GiB", Shown::Median(Metric::DeviceReads)),
        line("the same: writes to the device", &["2,086 of all kinds", "3,622 of all kinds"], "alignment", "block requests of convert qcow2 to raw, 1 GiB", Shown::Median(Metric::DeviceWrites)),
    ] },
    Figures { name: "buffers", then: &[], now: &["buffers at pages", "512 bytes past them"], lines: &[
        line("1 GiB in reads of 1 MiB, O_DIRECT: seconds", &[], "alignment", "block requests of 1 MiB reads, buffers at pages and past them, 1 GiB", SECONDS).of(&[Some("zebu, pages"), Some("zebu, 512 bytes past them")]),
        line("the same: reads of the device", &[], "alignment", "block requests of 1 MiB reads, buffers at pages and past them, 1 GiB", Shown::Median(Metric::DeviceReads)).of(&[Some("zebu, pages"), Some("zebu, 512 bytes past them")]),
        line("1 GiB in writes of 1 MiB, O_DIRECT: seconds", &[], "alignment", "block requests of 1 MiB writes, buffers at pages and past them, 1 GiB", SECONDS).of(&[Some("zebu, pages"), Some("zebu, 512 bytes past them")]),
        line("the same: writes to the device", &[], "alignment", "block requests of 1 MiB writes, buffers at pages and past them, 1 GiB", Shown::Median(Metric::DeviceWrites)).of(&[Some("zebu, pages"), Some("zebu, 512 bytes past them")]),
    ] },
    Figures { name: "mapping", then: &["2017, whole tables", "2017, 4 KiB"], now: &["QEMU now, whole tables", "QEMU now, 4 KiB", "zebu", "a raw file"], lines: &[
        line("16 GiB, 64 KiB clusters, 1 MiB of cache", &["5,000", "12,700"], "mapping", "16 GiB, 64 KiB clusters, 1 MiB, shuffled, written: reads", IOPS).of(&[Some("QEMU, whole tables"), Some("QEMU"), Some("zebu"), Some("raw")]),
        line("the same, clusters in order, never written", &[], "mapping", "16 GiB, 64 KiB clusters, 1 MiB, sequential, never written: reads", IOPS).of(&[Some("QEMU, whole tables"), Some("QEMU"), Some("zebu"), Some("raw")]),
        line("the same, the mapping all in the cache", &["some 60,000", "some 60,000"], "mapping", "16 GiB, 64 KiB clusters, 1 MiB, sequential, never written: reads, all cached", IOPS).of(&[None, Some("QEMU"), Some("zebu"), None]),
        line("32 jobs in 32 MiB each, 1 MiB of cache", &["", "\u{201c}20x faster\u{201d}"], "mapping", "16 GiB, 64 KiB clusters, 1 MiB, sequential, never written: reads of 32 jobs in 32 MiB each", IOPS).of(&[None, Some("QEMU"), Some("zebu"), Some("raw")]),
        line("2 TiB, 2 MiB clusters, 4 MiB of cache", &["576", "11,000"], "mapping-large", "2 TiB, 2 MiB clusters, 4 MiB, shuffled, first blocks written: reads", IOPS).of(&[Some("QEMU, whole tables"), Some("QEMU"), Some("zebu"), Some("raw")]),
        line("the same, clusters in order, never written", &[], "mapping-large", "2 TiB, 2 MiB clusters, 4 MiB, sequential, never written: reads", IOPS).of(&[Some("QEMU, whole tables"), Some("QEMU"), Some("zebu"), Some("raw")]),
        line("the same, the mapping all in the cache", &["some 60,000", "some 60,000"], "mapping-large", "2 TiB, 2 MiB clusters, 4 MiB, sequential, never written: reads, all cached", IOPS).of(&[None, Some("QEMU"), Some("zebu"), None]),
        line("32 jobs in 32 MiB each, 4 MiB of cache", &[], "mapping-large", "2 TiB, 2 MiB clusters, 4 MiB, sequential, never written: reads of 32 jobs in 32 MiB each", IOPS).of(&[None, Some("QEMU"), Some("zebu"), Some("raw")]),
    ] },
    Figures { name: "memory", then: &[], now: &["the disk", "64 MiB, least cache"], lines: &[
        line("16 GiB, 64 KiB clusters, 1 MiB of cache", &[], "memory", "memory: 16 GiB, 1 MiB of cache, reads", Shown::Median(Metric::MaxRssMib)).of(&[Some("zebu"), Some("zebu, 64 MiB disk")]),
        line("2 TiB, 2 MiB clusters, 4 MiB of cache", &[], "memory", "memory: 2 TiB, 4 MiB of cache, reads", Shown::Median(Metric::MaxRssMib)).of(&[Some("zebu"), Some("zebu, 64 MiB disk")]),
        line("64 TiB, 2 MiB clusters, 32 MiB of cache", &[], "memory", "memory: 64 TiB, 32 MiB of cache, reads", Shown::Median(Metric::MaxRssMib)).of(&[Some("zebu"), Some("zebu, 64 MiB disk")]),
    ] },
    Figures { name: "tables", then: &[], now: &["QEMU now", "zebu"], lines: &[
        line("IOPS of 4,096 first writes, far apart, 1 GiB", &[], "sizes", "4096 first writes over 1 GiB", IOPS),
        line("the same, 64 GiB", &[], "sizes", "4096 first writes over 64 GiB", IOPS),
        line("the same, 4 TiB", &[], "sizes", "4096 first writes over 4 TiB", IOPS),
        line("the same, 64 TiB", &[], "sizes", "4096 first writes over 64 TiB", IOPS),
        line("500 first writes, each in its own L2 table, and a flush: writes", &[], "clusters", "calls of 500 writes, each the first in its own L2 table, and a flush", Shown::Median(Metric::TargetWrites)),
        line("the same: writes that are no whole blocks of 4 KiB", &[], "clusters", "calls of 500 writes, each the first in its own L2 table, and a flush", Shown::Median(Metric::UnalignedWrites)),
        line("the same: syncs", &[], "clusters", "calls of 500 writes, each the first in its own L2 table, and a flush", Shown::Median(Metric::TargetSyncs)),
        line("snapshot of 256 GiB, all allocated: seconds", &[], "snapshots", "create a snapshot of 256 GiB, all allocated", SECONDS),
    ] },
    Figures { name: "zeroing", then: &["2019, SSD", "without", "2019, disk that rotates", "without"], now: &["QEMU now", "zebu"], lines: &[
        line("ext4, 64 KiB clusters, step 4 KiB", &["0.291", "0.395", "1.75", "1.76"], "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 64k, step 4k", Shown::SecondsFor(15_360)),
        line("ext4, 64 KiB clusters, step 64 KiB", &["0.813", "4.23", "14.8", "9.84"], "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 64k, step 64k", Shown::SecondsFor(15_360)),
        line("ext4, 64 KiB clusters, step 1 MiB", &["2.80", "5.60", "18.3", "13.4"], "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 64k, step 1M", Shown::SecondsFor(15_360)),
        line("ext4, 1 MiB clusters, step 4 KiB", &["0.217", "0.352", "0.759", "1.85"], "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 1M, step 4k", Shown::SecondsFor(15_360)),
        line("ext4, 1 MiB clusters, step 64 KiB", &["0.332", "2.52", "13.6", "19.4"], "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 1M, step 64k", Shown::SecondsFor(15_360)),
        line("ext4, 1 MiB clusters, step 1 MiB", &["0.685", "38.9", "29.0", "157"], "clusters", "Ext4: 15,360 first writes of 4 KiB, cluster 1M, step 1M", Shown::SecondsFor(15_360)),
        line("XFS, 64 KiB clusters, step 4 KiB", &[], "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 64k, step 4k", Shown::SecondsFor(15_360)),
        line("XFS, 64 KiB clusters, step 64 KiB", &[], "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 64k, step 64k", Shown::SecondsFor(15_360)),
        line("XFS, 64 KiB clusters, step 1 MiB", &[], "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 64k, step 1M", Shown::SecondsFor(15_360)),
        line("XFS, 1 MiB clusters, step 4 KiB", &[], "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 1M, step 4k", Shown::SecondsFor(15_360)),
        line("XFS, 1 MiB clusters, step 64 KiB", &[], "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 1M, step 64k", Shown::SecondsFor(15_360)),
        line("XFS, 1 MiB clusters, step 1 MiB", &[], "clusters", "Xfs: 15,360 first writes of 4 KiB, cluster 1M, step 1M", Shown::SecondsFor(15_360)),
    ] },
    Figures { name: "calls", then: &[], now: &["QEMU now", "zebu"], lines: &[
        line("ext4, 64 KiB clusters: writes", &[], "clusters", "Ext4: calls of 4000 first writes of 4 KiB, a cluster of 64k each", Shown::Median(Metric::TargetWrites)),
        line("the same: fallocate and ftruncate", &[], "clusters", "Ext4: calls of 4000 first writes of 4 KiB, a cluster of 64k each", Shown::Median(Metric::TargetOthers)),
        line("ext4, 1 MiB clusters: writes", &[], "clusters", "Ext4: calls of 4000 first writes of 4 KiB, a cluster of 1M each", Shown::Median(Metric::TargetWrites)),
        line("the same: fallocate and ftruncate", &[], "clusters", "Ext4: calls of 4000 first writes of 4 KiB, a cluster of 1M each", Shown::Median(Metric::TargetOthers)),
        line("XFS, 64 KiB clusters: writes", &[], "clusters", "Xfs: calls of 4000 first writes of 4 KiB, a cluster of 64k each", Shown::Median(Metric::TargetWrites)),
        line("the same: fallocate and ftruncate", &[], "clusters", "Xfs: calls of 4000 first writes of 4 KiB, a cluster of 64k each", Shown::Median(Metric::TargetOthers)),
        line("XFS, 1 MiB clusters: writes", &[], "clusters", "Xfs: calls of 4000 first writes of 4 KiB, a cluster of 1M each", Shown::Median(Metric::TargetWrites)),
        line("the same: fallocate and ftruncate", &[], "clusters", "Xfs: calls of 4000 first writes of 4 KiB, a cluster of 1M each", Shown::Median(Metric::TargetOthers)),
    ] },
    Figures { name: "recycled", then: &[], now: &["written whole", "zero-range and a write", "as zebu chooses"], lines: &[
        line("ext4, 16 KiB clusters", &[], "recycled", "Ext4: 4 KiB writes into recycled clusters of 16k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("ext4, 64 KiB clusters", &[], "recycled", "Ext4: 4 KiB writes into recycled clusters of 64k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("ext4, 256 KiB clusters", &[], "recycled", "Ext4: 4 KiB writes into recycled clusters of 256k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("ext4, 1 MiB clusters", &[], "recycled", "Ext4: 4 KiB writes into recycled clusters of 1M", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("ext4, 2 MiB clusters", &[], "recycled", "Ext4: 4 KiB writes into recycled clusters of 2M", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("XFS, 16 KiB clusters", &[], "recycled", "Xfs: 4 KiB writes into recycled clusters of 16k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("XFS, 64 KiB clusters", &[], "recycled", "Xfs: 4 KiB writes into recycled clusters of 64k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("XFS, 256 KiB clusters", &[], "recycled", "Xfs: 4 KiB writes into recycled clusters of 256k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("XFS, 1 MiB clusters", &[], "recycled", "Xfs: 4 KiB writes into recycled clusters of 1M", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("XFS, 2 MiB clusters", &[], "recycled", "Xfs: 4 KiB writes into recycled clusters of 2M", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("btrfs, 16 KiB clusters", &[], "recycled", "Btrfs: 4 KiB writes into recycled clusters of 16k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("btrfs, 64 KiB clusters", &[], "recycled", "Btrfs: 4 KiB writes into recycled clusters of 64k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("btrfs, 256 KiB clusters", &[], "recycled", "Btrfs: 4 KiB writes into recycled clusters of 256k", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("btrfs, 1 MiB clusters", &[], "recycled", "Btrfs: 4 KiB writes into recycled clusters of 1M", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
        line("btrfs, 2 MiB clusters", &[], "recycled", "Btrfs: 4 KiB writes into recycled clusters of 2M", IOPS).of(&[Some("zebu, write"), Some("zebu, fallocate"), Some("zebu, auto")]),
    ] },
    Figures { name: "subclusters", then: &["October 2019, without", "with"], now: &["QEMU now, without", "QEMU now, with", "zebu, with"], lines: &[
        line("ext4, overlay on raw", &["870", "12,391"], "overlays", "Ext4: first 4 KiB writes into 128 KiB clusters with subclusters, overlay on raw", IOPS).of(&[Some("QEMU, no subclusters"), Some("QEMU"), Some("zebu")]),
        line("ext4, overlay on qcow2", &[], "overlays", "Ext4: first 4 KiB writes into 128 KiB clusters with subclusters, overlay on qcow2", IOPS).of(&[Some("QEMU, no subclusters"), Some("QEMU"), Some("zebu")]),
        line("XFS, overlay on raw", &[], "overlays", "Xfs: first 4 KiB writes into 128 KiB clusters with subclusters, overlay on raw", IOPS).of(&[Some("QEMU, no subclusters"), Some("QEMU"), Some("zebu")]),
        line("XFS, overlay on qcow2", &[], "overlays", "Xfs: first 4 KiB writes into 128 KiB clusters with subclusters, overlay on qcow2", IOPS).of(&[Some("QEMU, no subclusters"), Some("QEMU"), Some("zebu")]),
    ] },
    Figures { name: "preallocation", then: &["2020, QEMU 5.1, in a guest"], now: &["QEMU now", "zebu"], lines: &[
        line("ext4, off", &["11,688"], "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS),
        line("ext4, off, without zero-range", &["2,780"], "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS).of(&[Some("QEMU, no zero-range"), None]),
        line("ext4, metadata", &["9,132"], "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation metadata", IOPS),
        line("ext4, falloc", &["13,108"], "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation falloc", IOPS),
        line("ext4, full", &["16,351"], "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation full", IOPS),
        line("ext4, raw, sparse", &["43,260"], "preallocation", "Ext4: first 4 KiB writes, raw sparse file", IOPS),
        line("ext4, raw, falloc", &["42,810"], "preallocation", "", IOPS).of(&[None, None]),
        line("ext4, raw, full", &["83,197"], "preallocation", "", IOPS).of(&[None, None]),
        line("XFS, off", &["8,139"], "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS),
        line("XFS, off, without zero-range", &["2,965"], "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS).of(&[Some("QEMU, no zero-range"), None]),
        line("XFS, off, without an extent size hint", &[], "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation off", IOPS).of(&[None, Some("zebu, no hint")]),
        line("XFS, metadata", &["7,768"], "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation metadata", IOPS),
        line("XFS, falloc", &["7,742"], "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation falloc", IOPS),
        line("XFS, full", &["41,389"], "preallocation", "Xfs: first 4 KiB writes, 64 KiB clusters, preallocation full", IOPS),
        line("XFS, raw, sparse", &["7,277"], "preallocation", "Xfs: first 4 KiB writes, raw sparse file", IOPS),
        line("XFS, raw, sparse, with a hint of 1 MiB", &[], "preallocation", "Xfs: first 4 KiB writes, raw sparse file with an extent size hint of 1 MiB", IOPS),
        line("XFS, raw, falloc", &["7,299"], "preallocation", "", IOPS).of(&[None, None]),
        line("XFS, raw, full", &["88,404"], "preallocation", "", IOPS).of(&[None, None]),
        line("XFS, a copy (`cp --reflink`) of a full image", &[], "preallocation", "Xfs: first 4 KiB writes, reflinked copy of a full image", IOPS),
    ] },
    Figures { name: "pieces", then: &[], now: &["QEMU now", "zebu"], lines: &[
        line("ext4, written at random", &[], "readback", "Ext4: 1 MiB sequential reads of what was written at random", Shown::Median(Metric::ExtentsPerGib)).of(&[Some("QEMU's image"), Some("zebu's image")]),
        line("ext4, written by four streams", &[], "readback", "Ext4: 1 MiB sequential reads of what was written by four streams", Shown::Median(Metric::ExtentsPerGib)).of(&[Some("QEMU's image"), Some("zebu's image")]),
        line("XFS, written at random", &[], "readback", "Xfs: 1 MiB sequential reads of what was written at random", Shown::Median(Metric::ExtentsPerGib)).of(&[Some("QEMU's image"), Some("zebu's image")]),
        line("XFS, written by four streams", &[], "readback", "Xfs: 1 MiB sequential reads of what was written by four streams", Shown::Median(Metric::ExtentsPerGib)).of(&[Some("QEMU's image"), Some("zebu's image")]),
    ] },
    Figures { name: "guest", then: &[], now: &["QEMU now", "zebu", "fio on a raw file"], lines: &[
        line("writes, depth 32", &[], "serve-vhost-user", "serve over vhost-user-blk: 4 KiB random writes, depth 32", IOPS).of(&[Some("QEMU"), Some("zebu"), Some("fio, raw file")]),
        line("writes, 4 rings x 32", &[], "serve-vhost-user", "serve over vhost-user-blk: 4 KiB random writes, 4 rings x 32", IOPS).of(&[Some("QEMU"), Some("zebu"), Some("fio, raw file")]),
        line("reads, depth 32", &[], "serve-vhost-user", "serve over vhost-user-blk: 4 KiB random reads, depth 32", IOPS).of(&[Some("QEMU"), Some("zebu"), Some("fio, raw file")]),
        line("reads, 4 rings x 32", &[], "serve-vhost-user", "serve over vhost-user-blk: 4 KiB random reads, 4 rings x 32", IOPS).of(&[Some("QEMU"), Some("zebu"), Some("fio, raw file")]),
    ] },
    Figures { name: "compressed", then: &["2021, as it was", "2021, with the cache"], now: &["QEMU now, O_DIRECT", "QEMU now, page cache", "zebu"], lines: &[
        line("1,000 MiB of ones, O_DIRECT: seconds", &["300", "4.4"], "backup", "backup of ones, zstd", SECONDS).of(&[Some("QEMU, direct"), None, Some("zebu")]),
        line("1,000 MiB of ones, page cache: seconds", &["5.7", "5.4"], "backup", "backup of ones, zstd", SECONDS).of(&[None, Some("QEMU, buffered"), None]),
        line("1 GiB of a file system, zstd: seconds", &[], "backup", "backup of a file system, zstd", SECONDS).of(&[Some("QEMU, direct"), Some("QEMU, buffered"), Some("zebu")]),
        line("the same: memory of the process, MiB", &[], "backup", "backup of a file system, zstd", Shown::Median(Metric::MaxRssMib)).of(&[Some("QEMU, direct"), Some("QEMU, buffered"), Some("zebu")]),
        line("the same: image, MiB", &[], "backup", "backup of a file system, zstd", Shown::Median(Metric::ImageMib)).of(&[Some("QEMU, direct"), Some("QEMU, buffered"), Some("zebu")]),
        line("the same: of the source in the page cache, MiB", &[], "backup", "backup of a file system, zstd", Shown::Median(Metric::SourceCachedMib)).of(&[Some("QEMU, direct"), Some("QEMU, buffered"), Some("zebu")]),
        line("the same: of the target in the page cache, MiB", &[], "backup", "backup of a file system, zstd", Shown::Median(Metric::TargetCachedMib)).of(&[Some("QEMU, direct"), Some("QEMU, buffered"), Some("zebu")]),
        line("1 GiB of a file system, zlib: seconds", &[], "backup", "backup of a file system, zlib", SECONDS).of(&[Some("QEMU, direct"), None, Some("zebu")]),
        line("512 MiB of noise, zstd: seconds", &[], "backup", "backup of noise, zstd", SECONDS).of(&[Some("QEMU, direct"), Some("QEMU, buffered"), Some("zebu")]),
        line("100 GiB, sparse: seconds", &[], "backup", "memory of a backup: a file system, and 100 GiB that are sparse", SECONDS).of(&[None, None, Some("zebu, sparse")]),
        line("the same: memory of the process, MiB", &[], "backup", "memory of a backup: a file system, and 100 GiB that are sparse", Shown::Median(Metric::MaxRssMib)).of(&[None, None, Some("zebu, sparse")]),
        line("p99 of another process that reads the disk meanwhile, \u{b5}s", &[], "backup", "4 KiB random reads of another process during a backup", Shown::Median(Metric::LatencyP99Micros)).of(&[Some("QEMU, direct"), Some("QEMU, buffered"), Some("zebu")]),
        line("256 MiB of a file system: writes to the target", &[], "compress", "system calls of convert -c on the target, 256 MiB of a file system", Shown::Median(Metric::TargetWrites)).of(&[Some("QEMU"), None, Some("zebu")]),
        line("the same: writes that are no whole blocks of 4 KiB", &[], "compress", "system calls of convert -c on the target, 256 MiB of a file system", Shown::Median(Metric::UnalignedWrites)).of(&[Some("QEMU"), None, Some("zebu")]),
        line("the same: reads of the target", &[], "compress", "system calls of convert -c on the target, 256 MiB of a file system", Shown::Median(Metric::TargetReads)).of(&[Some("QEMU"), None, Some("zebu")]),
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
        let headings = [self.then, self.now].concat();
        let mut text = format!("| | {} |\n|---|{}\n", headings.join(" | "), "---:|".repeat(headings.len()));
        for line in self.lines {
            let then =
                (0..self.then.len()).map(|at| line.then.get(at).copied().unwrap_or_default().to_owned());
            let now = line.sides.iter().map(|side| line.figure(*side, tables));
            let cells: Vec<String> = then.chain(now).collect();
            let _ = writeln!(text, "| {} | {} |", line.name, cells.join(" | "));
        }
        let used = tables.iter().filter(|results| self.lines.iter().any(|line| line.table == results.table));
        let used: Vec<&Results> = used.collect();
        let names: Vec<&str> = used.iter().map(|results| results.table.as_str()).collect();
        let of: BTreeSet<String> = used.iter().map(|results| origin(&results.heading)).collect();
        let of: Vec<String> = of.into_iter().collect();
        let _ = writeln!(text, "\n`cargo xtask bench {}` ({}).", names.join(" "), of.join("; "));
        text
    }
}

/// When a table was measured, of what, and where.
fn origin(Heading { machine, date, commit, .. }: &Heading) -> String {
    let commit = if commit.starts_with("built") { commit.clone() } else { format!("commit {commit}") };
    let parts: Vec<&str> = machine.split(", ").collect();
    let place: Vec<&str> = parts.iter().take(2).copied().collect();
    let mut text = format!("{date}, {commit}, {}", place.join(" on "));
    let version = parts.iter().find_map(|part| part.strip_prefix("qemu-img version "));
    if let Some(version) = version.and_then(|version| version.split(' ').next()) {
        let _ = write!(text, ", QEMU {version}");
    }
    text
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
        let is_count = matches!(self.shown, Shown::Median(metric) if metric.kind() == Kind::Count);
        value().map_or_else(String::new, |value| {
            if is_count && value.fract() == 0.0 { grouped(value as u64) } else { shown(value) }
        })
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
        for figures in FIGURES {
            for line in figures.lines {
                assert!(line.then.len() <= figures.then.len(), "{}", line.name);
                assert_eq!(line.sides.len(), figures.now.len(), "{}", line.name);
                for side in line.sides.iter().copied().flatten() {
                    assert!(!line.figure(Some(side), &tables).is_empty(), "{}: {side}", line.name);
                }
            }
        }
    }
}
