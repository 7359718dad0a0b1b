//! First writes into clusters: by preallocation mode (the table of 2020), in large clusters, in overlays, by step (the
//! table of 2019), and into recycled clusters; and what writers leave for readers.

use super::fresh::{Fresh, sides};
use crate::Outcome;
use crate::images::noise;
use crate::lab::{Extent, Lab, remove, settle};
use crate::metric::Metric;
use crate::mount::{Kind, Mounted};
use crate::process::{find, output, run};
use crate::programs::{BOTH, CLUSTER, LARGE, Load, Program, RUST, SMALL};
use crate::run::Side;
use crate::system_calls::calls_on;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const FILE_SYSTEMS: [Kind; 2] = [Kind::Ext4, Kind::Xfs];

/// The table of 2020.
pub(super) fn preallocation(lab: &Lab) -> Outcome {
    let (disk, count) = lab.sized((1 << 30, 6_000), (8 << 30, 50_000));
    let load = Load::first_writes(disk, CLUSTER, count);
    for kind in FILE_SYSTEMS {
        let mounted = &lab.even_file_system(kind, disk + (2 << 30))?;
        let of_mode =
            |mode: &str| Fresh::on(mounted, disk, &format!("cluster_size=64k,preallocation={mode}"));
        let name =
            |mode: &str| format!("{kind:?}: first 4 KiB writes, 64 KiB clusters, preallocation {mode}");
        let off = of_mode("off");
        let mut all: Vec<_> = sides(lab, &BOTH, &off, load).collect();
        all.push(off.clone().without_zero_range(lab, load));
        all.push(of_mode("metadata").side("zebu, metadata", Program::Zebu, lab, load));
        if kind == Kind::Xfs {
            let no_hint = Fresh::on(mounted, disk, "cluster_size=64k,extent_size_hint=0");
            all.push(no_hint.side("zebu, no hint", Program::Zebu, lab, load));
        }
        lab.row(&name("off"), all);
        for mode in ["metadata", "falloc"] {
            lab.row(&name(mode), sides(lab, &BOTH, &of_mode(mode), load));
        }
        if lab.wants(&name("full")) {
            // Written again it is as it was: one image for all.
            let full = of_mode("full");
            full.create(lab, Program::Qemu)?;
            lab.row(&name("full"), prepared(lab, &full.path, "qcow2", load, &|| Ok(())));
        }
        // A fifth of the writes: these take minutes otherwise.
        let fewer = Load { count: load.count / 5, ..load };
        let name = format!("{kind:?}: first 4 KiB writes, preallocation off, beside the Rust engines");
        lab.row(&name, sides(lab, &RUST, &off, fewer));
        files_without_space(lab, mounted, kind, load);
    }
    Ok(())
}

/// The cost of a file system by itself: a raw file without any blocks, and an image that shares all of its own.
fn files_without_space(lab: &Lab, mounted: &Mounted, kind: Kind, load: Load) {
    let file = &mounted.path().join("prepared");
    let disk = load.count * CLUSTER;
    let raw = |options: &'static str| {
        move || {
            mounted.renew()?;
            let mut create = lab.qemu_img();
            create.args(["create", "-q", "-f", "raw", "-o", options]).arg(file);
            run(create.arg(disk.to_string()))
        }
    };
    let name = format!("{kind:?}: first 4 KiB writes, raw sparse file");
    lab.row(&name, prepared(lab, file, "raw", load, &raw("extent_size_hint=0")));
    if kind == Kind::Xfs {
        let name = format!("{name} with an extent size hint of 1 MiB");
        lab.row(&name, prepared(lab, file, "raw", load, &raw("extent_size_hint=1M")));
        let base = mounted.path().join("shared.qcow2");
        let reflink = || {
            mounted.renew()?;
            lab.create(&base, "preallocation=full", 1 << 30)?;
            run(Command::new("cp").arg("--reflink=always").arg(&base).arg(file))
        };
        let load = Load::first_writes(1 << 30, CLUSTER, u64::MAX);
        let name = "Xfs: first 4 KiB writes, reflinked copy of a full image";
        lab.row(name, prepared(lab, file, "qcow2", load, &reflink));
    }
}

/// A file that `prepare` makes before each run, written by both programs.
fn prepared<'a>(
    lab: &'a Lab,
    file: &'a Path,
    format: &'static str,
    load: Load,
    prepare: &'a dyn Fn() -> Outcome,
) -> [Side<'a>; 2] {
    BOTH.map(|program| {
        Side::new(program.name(), move || {
            prepare()?;
            settle()?;
            load.timed(&mut load.command(program, lab, file, format)?)
        })
    })
}

/// Clusters so large that zeroing the rest of one takes longer than the write.
pub(super) fn large_clusters(lab: &Lab) -> Outcome {
    let count = lab.sized(2048, 100_000);
    for kind in FILE_SYSTEMS {
        for (cluster, text) in [(1 << 20, "1M"), (2 << 20, "2M")] {
            let disk = cluster * count;
            // QEMU sets each cluster aside as a whole; a file system has tables of its own, too.
            let mounted = lab.file_system(kind, disk / 10 * 11 + (4 << 30))?;
            let image = Fresh::on(&mounted, disk, &format!("cluster_size={text}"));
            let name = format!("{kind:?}: first 4 KiB writes, {text} clusters, preallocation off");
            lab.row(&name, sides(lab, &BOTH, &image, Load::first_writes(disk, cluster, count)));
        }
    }
    Ok(())
}

/// Copy-on-write of whole clusters, and of subclusters.
pub(super) fn overlays(lab: &Lab) -> Outcome {
    const LARGEST: u64 = 128 << 10;
    let count = lab.sized(8192, 100_000);
    let disk = count * LARGEST;
    for kind in FILE_SYSTEMS {
        // There are two files at a time: both bases, or one and its overlay.
        let mounted = &lab.even_file_system(kind, disk * 2 + (3 << 30))?;
        let (raw, qcow2) = (mounted.path().join("base.raw"), mounted.path().join("base.qcow2"));
        noise(&raw, disk)?;
        overlays_on(lab, mounted, kind, (&raw, "raw"), count);
        run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2))?;
        remove(&raw)?;
        overlays_on(lab, mounted, kind, (&qcow2, "qcow2"), count);
    }
    Ok(())
}

/// Overlays on a base and its format, in which the first write into each of `count` clusters is measured.
fn overlays_on(lab: &Lab, mounted: &Mounted, kind: Kind, base: (&Path, &str), count: u64) {
    let overlay = |cluster: u64, more: &str| {
        let size = count * cluster;
        let image = Fresh::over(mounted, base, size, &format!("cluster_size={cluster}{more}"));
        (image, Load::first_writes(size, cluster, count))
    };
    let (image, load) = overlay(CLUSTER, "");
    let name = format!("{kind:?}: first 4 KiB writes in an overlay on {}, 64 KiB clusters", base.1);
    lab.row(&name, sides(lab, &BOTH, &image, load));
    let ((divided, load), (plain, _)) = (overlay(128 << 10, ",extended_l2=on"), overlay(128 << 10, ""));
    let all = sides(lab, &BOTH, &divided, load);
    let name =
        format!("{kind:?}: first 4 KiB writes into 128 KiB clusters with subclusters, overlay on {}", base.1);
    lab.row(&name, all.chain([plain.side("QEMU, no subclusters", Program::Qemu, lab, load)]));
}

/// The table of 2019: 15,360 writes of 4 KiB by step and cluster size on a disk of 15 GiB.
pub(super) fn clusters(lab: &Lab) -> Outcome {
    let (count, shown) = lab.sized((4096, "4,096"), (15_360, "15,360"));
    let sizes = [("4k", 4 << 10), ("64k", 64 << 10), ("1M", 1 << 20)];
    for kind in FILE_SYSTEMS.into_iter().take(lab.sized(1, FILE_SYSTEMS.len())) {
        let mounted = &match lab.extent {
            Extent::Quick => lab.file_system(kind, 18 << 30)?,
            Extent::Full => lab.even_file_system(kind, 18 << 30)?,
        };
        for (cluster, bytes) in &sizes[1..] {
            let image = Fresh::on(mounted, 15 << 30, &format!("cluster_size={cluster}"));
            for (step, distance) in sizes {
                let load = Load { block: SMALL, step: distance, count, depth: 32, write: true };
                let name = format!("{kind:?}: {shown} first writes of 4 KiB, cluster {cluster}, step {step}");
                lab.row(&name, sides(lab, &BOTH, &image, load));
                if kind == Kind::Ext4 && *cluster == "64k" && step != "1M" {
                    let name = format!("{name}, beside the Rust engines");
                    lab.row(&name, sides(lab, &RUST, &image, load));
                }
            }
            let load = Load { block: SMALL, step: *bytes, count: 4000, depth: 32, write: true };
            let calls = |program: Program| {
                let image = &image;
                Side::new(program.name(), move || {
                    image.create(lab, program)?;
                    let mut command = load.bench(program, lab, "threads");
                    calls_on(lab, command.args(["-f", "qcow2"]).arg(&image.path), &image.path)
                })
            };
            let name = format!("{kind:?}: calls of 4000 first writes of 4 KiB, a cluster of {cluster} each");
            lab.row(&name, BOTH.map(calls));
        }
        if kind == Kind::Ext4 {
            syncs(lab, mounted);
        }
    }
    Ok(())
}

/// How often changes of tables have to be made durable: the same commands of `io`, one after the other.
fn syncs(lab: &Lab, mounted: &Mounted) {
    let tables: Vec<String> = (0..500).map(|i| format!("write -q {}M 4k", i * 512)).collect();
    let pairs = |i| [format!("discard {}k 64k", i * 64), format!("write -q {}k 64k", i * 64)];
    let pairs: Vec<String> = (0..100).flat_map(pairs).collect();
    for (name, size, commands) in [
        ("500 writes, each the first in its own L2 table, and a flush", 256u64 << 30, tables),
        ("100 pairs of a discard and a write of 64 KiB, and a flush", 64 << 20, pairs),
    ] {
        let image = &Fresh::on(mounted, size, "cluster_size=64k");
        let commands = &commands;
        let side = |program: Program| {
            Side::new(program.name(), move || {
                image.create(lab, program)?;
                let mut fill = Command::new(&lab.qemu_io);
                run(fill.args(["-f", "qcow2", "-c", "write -q 0 16M"]).arg(&image.path))?;
                let mut io = Command::new(&lab.qemu_io);
                if program == Program::Zebu {
                    io = lab.zebu();
                    io.arg("io");
                }
                io.args(["-f", "qcow2", "-t", "none", "-i", "threads"]);
                for command in commands.iter().map(String::as_str).chain(["flush"]) {
                    io.args(["-c", command]);
                }
                calls_on(lab, io.arg(&image.path), &image.path)
            })
        };
        lab.row(&format!("calls of {name}"), BOTH.map(side));
    }
}

/// How the rest of a cluster that held data before is zeroed: by writing the zeroes with the data, by zero-range before
/// it, or as zebu chooses by size and file system.
pub(super) fn recycled(lab: &Lab) -> Outcome {
    /// Less than 2 GiB, the most that is filled at once.
    const PIECE: u64 = 512 << 20;
    let clusters =
        [(16 << 10, "16k"), (64 << 10, "64k"), (256 << 10, "256k"), (1 << 20, "1M"), (2 << 20, "2M")];
    for kind in [Kind::Ext4, Kind::Xfs, Kind::Btrfs].into_iter().take(lab.sized(2, 3)) {
        // What btrfs overwrites takes its place a second time.
        let mounted = &lab.even_file_system(kind, lab.sized(4, 8) << 30)?;
        for (cluster, text) in clusters {
            // Enough clusters that the writes take long beside the clock's resolution.
            let disk = if cluster <= CLUSTER { 1 << 30 } else { lab.sized(512 << 20, 2 << 30) };
            let image = &Fresh::on(mounted, disk, &format!("cluster_size={text}"));
            let load = Load::first_writes(disk, cluster, u64::MAX);
            let side = |policy: &'static str| {
                Side::new(format!("zebu, {policy}"), move || {
                    image.create(lab, Program::Zebu)?;
                    let mut recycle = lab.zebu();
                    recycle.args(["io", "-f", "qcow2", "-t", "none"]);
                    for what in ["-P 7", "-z"] {
                        for at in (0..disk).step_by(PIECE as usize) {
                            recycle.arg("-c").arg(format!("write -q {what} {at} {PIECE}"));
                        }
                    }
                    run(recycle.arg(&image.path))?;
                    settle()?;
                    let mut command = load.command(Program::Zebu, lab, &image.path, "qcow2")?;
                    load.timed(command.args(["--zero-policy", policy]))
                })
            };
            let name = format!("{kind:?}: 4 KiB writes into recycled clusters of {text}");
            lab.row(&name, ["auto", "write", "fallocate"].map(side));
        }
    }
    Ok(())
}

/// The speed that writers leave to readers: the image of each is read by zebu.
pub(super) fn readback(lab: &Lab) -> Outcome {
    /// Between the last write and the first read: what a fast writer has just written may still keep busy what is behind
    /// the disk.
    const REST: Duration = Duration::from_secs(4);
    let disk = lab.gib() << 30;
    let random = Load::first_writes(disk, CLUSTER, u64::MAX);
    // Four streams in turn, each of which goes on where it was, half a cluster at a time: four steps are the disk and a
    // block. The last round would cross the end of the disk, which fails in qemu-img.
    let block = 32 << 10;
    let streams = Load { block, step: (disk + block) / 4, count: disk / block - 4, depth: 8, write: true };
    for kind in FILE_SYSTEMS {
        let mounted = lab.even_file_system(kind, disk + (2 << 30))?;
        let image = &Fresh::on(&mounted, disk, "cluster_size=64k");
        for (written, load) in [("at random", random), ("by four streams", streams)] {
            let side = |program: Program| {
                Side::new(format!("{}'s image", program.name()), move || {
                    image.create(lab, program)?;
                    load.run(program, lab, &image.path)?;
                    settle()?;
                    std::thread::sleep(REST);
                    // Four times over: once is over too soon where most of the image was never written.
                    let read = Load { count: 4 * disk / LARGE, ..Load::in_order(disk, false) };
                    let mut figures = read.run(Program::Zebu, lab, &image.path)?;
                    let extents = extents(&image.path)? / (disk as f64 / f64::from(1 << 30));
                    figures.push((Metric::ExtentsPerGib, extents));
                    Ok(figures)
                })
            };
            let name = format!("{kind:?}: 1 MiB sequential reads of what was written {written}");
            lab.row(&name, BOTH.map(side));
        }
    }
    Ok(())
}

/// Extents of a file on its file system.
fn extents(file: &Path) -> Outcome<f64> {
    let program = find("filefrag").ok_or("filefrag is missing (package e2fsprogs)")?;
    let said = output(Command::new(program).arg(file))?;
    let number = said.rsplit(": ").next().and_then(|rest| rest.split_whitespace().next());
    number.and_then(|n| n.parse().ok()).ok_or_else(|| format!("filefrag: no number of extents in: {said}"))
}
