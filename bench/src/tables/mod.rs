//! The tables: what each is about, and how its rows are measured.

mod allocation;
mod backup;
mod copies;
mod counts;
mod embedding;
mod encryption;
mod fresh;
mod live_backup;
mod mapping;
mod packed;
mod remote;
mod requests;
mod serving;
mod startup;
mod stores;
mod whole;

use crate::Outcome;
use crate::lab::Lab;

/// When a table is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Unless others are named; of a quick run, these parts of the names of its rows.
    Always(&'static [&'static str]),
    /// When it is named, or all are asked for: it shows a promise of zebu's alone.
    Asked,
}

/// A kind of work.
pub(crate) struct Table {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) when: When,
    pub(crate) measure: fn(&Lab) -> Outcome,
}

const fn table(
    name: &'static str,
    measure: fn(&Lab) -> Outcome,
    when: When,
    title: &'static str,
    about: &'static str,
) -> Table {
    Table { name, title, about, when, measure }
}

use When::{Always, Asked};

/// All tables, in the order of the page.
#[rustfmt::skip]
pub(crate) const TABLES: &[Table] = &[
    table("random", requests::random, Always(&["scattered reads, depth 32"]), "Small requests",
        "4 KiB reads and writes of allocated clusters, O_DIRECT, depth 32."),
    table("sequential", requests::sequential, Always(&[]), "Large requests",
        "1 MiB reads and writes, one after the other, O_DIRECT, depth 8."),
    table("fragmentation", requests::fragmentation, Always(&[]), "Fragmented images",
        "Shuffled: no two neighbouring clusters are neighbours in the file."),
    table("encryption", encryption::encryption, Always(&["random reads, depth 32, LUKS in qcow2"]), "Encrypted images",
        "AES-256 in XTS mode: 4 KiB requests at depth 32 and 1 MiB ones at depth 4, O_DIRECT, over NBD beside qemu-storage-daemon; the cipher alone, on one thread, beside OpenSSL's."),
    table("preallocation", allocation::preallocation, Always(&["clusters, preallocation off"]),
        "First writes", "4 KiB into each of many fresh clusters, depth 32, by preallocation (the table of 2020)."),
    table("clusters", allocation::clusters, Always(&["cluster 64k, step 64k"]), "First writes by step",
        "4 KiB writes by step and cluster size on a disk of 15 GiB (the table of 2019), and the calls that they take."),
    table("large-clusters", allocation::large_clusters, Asked, "First writes into large clusters",
        "4 KiB into each of 100,000 fresh clusters of 1 and 2 MiB, where QEMU zeroes the rest of each."),
    table("overlays", allocation::overlays, Asked, "First writes in overlays",
        "Copy-on-write of clusters, and of subclusters (extended L2)."),
    table("recycled", allocation::recycled, Asked, "Recycled clusters",
        "How the rest of a cluster that held data before is zeroed."),
    table("readback", allocation::readback, Asked, "Reading back",
        "How fast, and in how many extents, an image reads that was written at random or by several streams."),
    table("convert", copies::convert, Always(&["raw to qcow2, O_DIRECT"]), "Convert",
        "Data that has no zeroes, O_DIRECT on both sides; QEMU with -m 16 -W. On XFS by reflink, beside a copy."),
    table("defaults", copies::defaults, Asked, "Convert without options",
        "A disk of real files; zebu's copy is durable when the command ends, QEMU's after a sync. What a cache holds is counted beside what it held before."),
    table("compress", copies::compress, Always(&["convert -c of a file system, zstd"]), "Compressed images",
        "convert -c beside QEMU's fastest setting (-m 16 -W), and small reads of the result."),
    table("packed", packed::packed, Asked, "Packed sources",
        "A raw disk in a packed file; beside a pipe into dd, and beside unpacking before QEMU converts (-m 16 -W). Until all is durable; the target's cache is each program's default."),
    table("foreign", packed::foreign, Asked, "Images of other programs",
        "Converting to qcow2, until all is durable; QEMU with -m 16 -W."),
    table("backup", backup::backup, Always(&[]), "Compressed backup",
        "Time, size, what stays in the page cache, and the latency of another process that reads the disk meanwhile."),
    table("live-backup", live_backup::live_backup, Asked, "Compressed backup of a disk in use",
        "A disk of 1 GiB with real files, served over NBD; QEMU's is blockdev-backup with compress in a storage daemon, its target opened with O_DIRECT. The page cache is looked at ten times a second beside a guest, the highest figure counts; beside another process at the end."),
    table("alignment", copies::alignment, Always(&["block requests of convert"]), "Alignment",
        "Requests that reach the disk while an image becomes raw, and of buffers that are not at pages."),
    table("mapping", mapping::mapping, Always(&["never written: reads"]), "Mapping cache",
        "Random requests to a disk of 16 GiB whose mapping does not fit the cache of 1 MiB."),
    table("mapping-large", mapping::large, Always(&[]), "Mapping cache, large clusters",
        "The same on a disk of 2 TiB with clusters of 2 MiB and a cache of 4 MiB."),
    table("counts", counts::counts, Always(&[]), "Counts",
        "What hardly depends on a machine: lookups that miss, calls of a writer, pages that stay in the page cache."),
    table("memory", mapping::memory, Asked, "Memory of the mapping cache",
        "The process on a large disk, beside one of 64 MiB with the least cache."),
    table("chains", mapping::chains, Always(&["chain of 10,"]), "Backing chains",
        "Random reads; each image holds a random part of the data."),
    table("startup", startup::startup, Always(&["start: info"]), "Start-up",
        "Whole processes of zebu under QEMU's name and of qemu-img: medians of 50 starts in each round."),
    table("open", whole::open, Always(&["open"]), "Opening 16 TiB",
        "A whole process: start, open, one read in the middle of the disk, close, exit."),
    table("check", whole::check, Always(&["check of"]), "Check",
        "Disks that are wholly allocated; nothing of the image in the page cache."),
    table("snapshots", whole::snapshots, Always(&["create a snapshot"]), "Internal snapshots",
        "A whole process; nothing of the image in the page cache."),
    table("sizes", whole::sizes, Always(&[]), "Size of the disk",
        "Opening an empty image, and 4 KiB into each of 4096 clusters that are far apart."),
    table("embedding", embedding::embedding, Asked, "The library",
        "4 KiB requests by a queue on the caller's thread, and by Disk (a thread for each request in flight), O_DIRECT; threads of pread64 and pwrite64 on a raw file pay the same waits."),
    table("serve", serving::nbd, Always(&["serve: 4 KiB random reads, depth 32"]), "NBD",
        "Requests to the server; nbdkit serves the raw file."),
    table("remote", remote::converts, Asked, "Disks over the network",
        "Converting from nginx and from and to qemu-nbd, on this machine; QEMU with -m 16 -W."),
    table("stores", stores::transfers, Asked, "Objects in stores",
        "1 GiB of noise to and from MinIO on this machine, beside MinIO's client (mc) and the AWS command line, where they are."),
    table("verify", stores::verified, Asked, "Verified disks",
        "zebu serve of a file on nginx with a local cache, with and without --verify, over NBD; processor time of the server."),
    table("remote-reads", remote::reads, Asked, "Small reads from afar",
        "A file on nginx behind a link of 20 ms and 1 Gbit/s, read for ten seconds by servers that begin with nothing of it (QEMU needs qemu-block-extra). A reader that keeps nothing gets 32 in 20 ms at most: 1,600 a second."),
    table("serve-vhost-user", serving::vhost_user, Always(&[]), "vhost-user-blk",
        "Requests to the server, with the same front end."),
    table("serve-fuse", serving::fuse, Asked, "The disk as a file (FUSE)", "fio on the file."),
];

/// The table of a name.
pub(crate) fn named(name: &str) -> Option<&'static Table> {
    TABLES.iter().find(|table| table.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_different() {
        let mut names: Vec<&str> = TABLES.iter().map(|table| table.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TABLES.len());
    }
}
