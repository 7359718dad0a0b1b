//! First writes into clusters: by preallocation mode (the table of 2020), by step (that of 2019), in overlays; what they
//! leave for readers; and what writing in place costs as disks grow.

use super::lab::{Extent, Lab, remove, settle};
use super::load::{LARGE, Load, Program, SMALL, scattering_step};
use super::peers::{ENGINES, Peer, row};
use super::system_calls::calls_on;
use crate::Outcome;
use crate::ab::{Metric, Row, Sample, Side};
use crate::mount::{Kind, Mounted};
use crate::process::{find, output, run};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const DEPTH: u64 = 32;
const FILE_SYSTEMS: [Kind; 2] = [Kind::Ext4, Kind::Xfs];

/// An image that is made anew, unmeasured, before each run.
#[derive(Clone)]
struct Fresh<'a> {
    path: PathBuf,
    size: u64,
    options: String,
    beside: Beside<'a>,
}

/// What else is on the file system of a fresh image.
#[derive(Clone, Copy)]
enum Beside<'a> {
    /// Nothing: it is made anew with the image.
    Nothing(&'a Mounted),
    /// The file below, and its format.
    Backing(&'a Path, &'a str),
}

impl Fresh<'_> {
    fn create(&self, lab: &Lab, program: Program) -> Outcome {
        match self.beside {
            Beside::Nothing(mounted) => mounted.renew()?,
            Beside::Backing(..) => remove(&self.path)?,
        }
        let mut command = program.command(lab);
        command.args(["create", "-q", "-f", "qcow2", "-o", &self.options]);
        if let Beside::Backing(file, format) = self.beside {
            command.arg("-b").arg(file).args(["-F", format]);
        }
        run(command.arg(&self.path).arg(self.size.to_string()))?;
        settle()
    }
}

/// `program` writes a fresh image that it made itself.
fn first_writes<'a>(lab: &'a Lab, program: Program, label: &str, image: Fresh<'a>, load: Load) -> Side<'a> {
    let run = move || {
        image.create(lab, program)?;
        let figures = load.timed(load.command(program.command(lab).get_program().as_ref(), &image.path))?;
        remove(&image.path)?;
        Ok(figures)
    };
    Side { label: label.to_owned(), run: Box::new(run) }
}

/// QEMU writes a fresh image on a file that it believes to have no zero-range for so little: it writes whole clusters then.
fn without_zero_range<'a>(lab: &'a Lab, image: Fresh<'a>, load: Load) -> Side<'a> {
    let run = move || {
        image.create(lab, Program::Qemu)?;
        let mut command = lab.qemu_img();
        command.args(["bench", "-t", "none", "-i", "io_uring", "-w"]);
        command.args(["-d", &load.depth.to_string(), "-c", &load.count.to_string()]);
        command.args(["-s", &load.block.to_string(), "-S", &load.step.to_string()]);
        command.arg("--image-opts").arg(format!(
            "driver=qcow2,file.driver=blkdebug,file.opt-write-zero={LARGE},file.image.driver=file,file.image.filename={}",
            image.path.display()
        ));
        let figures = load.timed(command)?;
        remove(&image.path)?;
        Ok(figures)
    };
    Side { label: "QEMU, no zero-range".to_owned(), run: Box::new(run) }
}

/// Another Rust engine writes a fresh image that QEMU made.
fn first_writes_of_engine<'a>(lab: &'a Lab, peer: Peer, image: Fresh<'a>, load: Load) -> Side<'a> {
    let run = move || {
        image.create(lab, Program::Qemu)?;
        let figures = load.timed(lab.peers.command(peer, load, &image.path)?)?;
        remove(&image.path)?;
        Ok(figures)
    };
    Side { label: peer.label().to_owned(), run: Box::new(run) }
}

/// First writes beside those of the other Rust engines.
fn beside_engines(lab: &Lab, name: &str, image: &Fresh<'_>, load: Load) -> Outcome {
    let ours = first_writes(lab, Program::Zebu, "zebu", image.clone(), load);
    let engines =
        ENGINES.map(|peer| (row(name, peer), first_writes_of_engine(lab, peer, image.clone(), load)));
    lab.compare_each(ours, Vec::from(engines))
}

fn both<'a>(lab: &'a Lab, image: &Fresh<'a>, load: Load) -> [Side<'a>; 2] {
    [Program::Zebu, Program::Qemu]
        .map(|program| first_writes(lab, program, program.label(), image.clone(), load))
}

/// 4 KiB into each of many clusters, scattered.
fn scattered(disk: u64, cluster: u64, count: u64) -> Load {
    let step = scattering_step(disk, cluster);
    Load { block: SMALL, step, count: count.min(disk / cluster), depth: DEPTH, write: true }
}

/// The table of 2020.
pub(super) fn preallocation(lab: &Lab) -> Outcome {
    let (disk, count) = lab.sized((1 << 30, 6_000), (8 << 30, 50_000));
    for kind in FILE_SYSTEMS {
        let mounted = lab.file_system(kind, disk + (2 << 30))?;
        let image = |options: String| Fresh {
            path: mounted.path().join("fresh"),
            size: disk,
            options,
            beside: Beside::Nothing(&mounted),
        };
        let of_mode = |mode: &str| image(format!("cluster_size=64k,preallocation={mode}"));
        let load = scattered(disk, 64 << 10, count);
        let by = |program, label: &str, image| first_writes(lab, program, label, image, load);
        let what =
            |rest: &str| format!("{kind:?}: first 4 KiB writes, 64 KiB clusters, preallocation {rest}");
        let mut sides = vec![
            by(Program::Zebu, "zebu", of_mode("off")),
            by(Program::Qemu, "QEMU", of_mode("off")),
            without_zero_range(lab, of_mode("off"), load),
            by(Program::Zebu, "zebu, metadata", of_mode("metadata")),
            by(Program::Qemu, "QEMU", of_mode("metadata")),
        ];
        let mut rows = vec![
            Row::of(what("off"), [0, 1]),
            Row::of(format!("{kind:?}: first 4 KiB writes, beside QEMU's off without zero-range"), [0, 2]),
            Row::of(what("metadata"), [3, 4]),
            Row::of(format!("{kind:?}: zebu, preallocation off beside metadata"), [0, 3]),
        ];
        if kind == Kind::Xfs {
            let no_hint = image("cluster_size=64k,extent_size_hint=0".to_owned());
            sides.push(by(Program::Zebu, "zebu, no hint", no_hint));
            let name = "Xfs: zebu, preallocation off, with and without an extent size hint of 1 MiB";
            rows.push(Row::of(name, [0, 5]));
        }
        lab.compare_all(sides, rows)?;
        lab.compare(&what("falloc"), both(lab, &of_mode("falloc"), load))?;
        if lab.wants(&what("full")) {
            // Written again it is as it was: one image for all.
            let full = of_mode("full");
            full.create(lab, Program::Qemu)?;
            lab.compare(&what("full"), prepared(lab, &full.path, "qcow2", load, &|| Ok(())))?;
        }
        // A fifth of the writes: these take minutes otherwise.
        let fewer = Load { count: load.count / 5, ..load };
        let name = format!("{kind:?}: first 4 KiB writes, preallocation off");
        beside_engines(lab, &name, &of_mode("off"), fewer)?;
        files_without_space(lab, &mounted, kind, disk, load)?;
    }
    Ok(())
}

/// Clusters so large that zeroing the rest of one takes longer than the write.
pub(super) fn large_clusters(lab: &Lab) -> Outcome {
    let count = lab.sized(2048, 100_000);
    for kind in FILE_SYSTEMS {
        for (cluster, text) in [(1 << 20, "1M"), (2 << 20, "2M")] {
            let disk = cluster * count;
            // QEMU sets each cluster aside as a whole; a file system has tables of its own, too.
            let mounted = lab.sparse_file_system(kind, disk / 10 * 11 + (4 << 30))?;
            let path = mounted.path().join("fresh");
            let options = format!("cluster_size={text}");
            let image = Fresh { path, size: disk, options, beside: Beside::Nothing(&mounted) };
            let name = format!("{kind:?}: first 4 KiB writes, {text} clusters, preallocation off");
            lab.compare(&name, both(lab, &image, scattered(disk, cluster, count)))?;
        }
    }
    Ok(())
}

/// A file that `prepare` makes before each run, written by both programs.
fn prepared<'a>(
    lab: &'a Lab,
    file: &'a Path,
    format: &'static str,
    load: Load,
    prepare: &'a dyn Fn() -> Outcome,
) -> [Side<'a>; 2] {
    [Program::Zebu, Program::Qemu].map(|program| {
        let run = move || {
            prepare()?;
            settle()?;
            let program = program.command(lab);
            load.timed(load.command_of_format(program.get_program().as_ref(), file, format))
        };
        Side { label: program.label().to_owned(), run: Box::new(run) }
    })
}

/// What a file system by itself costs: a raw file without any blocks, and an image that shares all of its own.
fn files_without_space(lab: &Lab, mounted: &Mounted, kind: Kind, disk: u64, load: Load) -> Outcome {
    let file = mounted.path().join("prepared");
    let sparse = || {
        mounted.renew()?;
        run(Command::new("truncate").arg("-s").arg(disk.to_string()).arg(&file))
    };
    lab.compare(
        &format!("{kind:?}: first 4 KiB writes, raw sparse file"),
        prepared(lab, &file, "raw", load, &sparse),
    )?;
    if kind == Kind::Xfs {
        let hinted = || {
            mounted.renew()?;
            let mut create = lab.qemu_img();
            create.args(["create", "-q", "-f", "raw", "-o", "extent_size_hint=1M"]).arg(&file);
            run(create.arg(disk.to_string()))
        };
        lab.compare(
            "Xfs: first 4 KiB writes, raw sparse file with an extent size hint of 1 MiB",
            prepared(lab, &file, "raw", load, &hinted),
        )?;
    }
    if kind == Kind::Xfs {
        let base = mounted.path().join("shared.qcow2");
        let reflink = || {
            mounted.renew()?;
            run(lab
                .qemu_img()
                .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=full"])
                .arg(&base)
                .arg("1G"))?;
            run(Command::new("cp").arg("--reflink=always").arg(&base).arg(&file))
        };
        let load = scattered(1 << 30, 64 << 10, u64::MAX);
        lab.compare(
            "Xfs: first 4 KiB writes, reflinked copy of a full image",
            prepared(lab, &file, "qcow2", load, &reflink),
        )?;
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
        let mounted = lab.file_system(kind, disk * 2 + (3 << 30))?;
        let (raw, qcow2) = (mounted.path().join("base.raw"), mounted.path().join("base.qcow2"));
        super::lab::fill(&raw, disk)?;
        overlays_on(lab, &mounted, kind, (&raw, "raw"), count)?;
        run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2))?;
        remove(&raw)?;
        overlays_on(lab, &mounted, kind, (&qcow2, "qcow2"), count)?;
    }
    Ok(())
}

/// Overlays on a base and its format, in which the first write into each of `count` clusters is measured.
fn overlays_on(lab: &Lab, mounted: &Mounted, kind: Kind, base: (&Path, &str), count: u64) -> Outcome {
    let (base, format) = base;
    let overlay = |cluster: u64, more: &str| {
        let image = Fresh {
            path: mounted.path().join("overlay"),
            size: count * cluster,
            options: format!("cluster_size={cluster}{more}"),
            beside: Beside::Backing(base, format),
        };
        (image, scattered(count * cluster, cluster, count))
    };
    let (image, load) = overlay(64 << 10, "");
    let name = format!("{kind:?}: first 4 KiB writes in an overlay on {format}, 64 KiB clusters");
    lab.compare(&name, both(lab, &image, load))?;
    let (divided, load) = overlay(128 << 10, ",extended_l2=on");
    let (plain, _) = overlay(128 << 10, "");
    let others = [("QEMU, subclusters", divided.clone()), ("QEMU, none", plain)].map(|(label, image)| {
        let name = format!(
            "{kind:?}: first 4 KiB writes into 128 KiB clusters with subclusters, overlay on {format}, beside {label}"
        );
        (name, first_writes(lab, Program::Qemu, label, image, load))
    });
    let ours = first_writes(lab, Program::Zebu, "zebu, subclusters", divided, load);
    lab.compare_each(ours, Vec::from(others))
}

/// The table of 2019: 15,360 writes of 4 KiB by step and cluster size on a disk of 15 GiB.
pub(super) fn clusters(lab: &Lab) -> Outcome {
    let (count, shown) = lab.sized((4096, "4,096"), (15_360, "15,360"));
    for kind in FILE_SYSTEMS.into_iter().take(lab.sized(1, FILE_SYSTEMS.len())) {
        let mounted = match lab.extent {
            Extent::Quick => lab.sparse_file_system(kind, 18 << 30)?,
            Extent::Full => lab.file_system(kind, 18 << 30)?,
        };
        for (cluster, step) in
            [("64k", "4k"), ("64k", "64k"), ("64k", "1M"), ("1M", "4k"), ("1M", "64k"), ("1M", "1M")]
        {
            let bytes = match step {
                "4k" => 4 << 10,
                "64k" => 64 << 10,
                _ => 1 << 20,
            };
            let image = Fresh {
                path: mounted.path().join("fresh"),
                size: 15 << 30,
                options: format!("cluster_size={cluster}"),
                beside: Beside::Nothing(&mounted),
            };
            let load = Load { block: SMALL, step: bytes, count, depth: DEPTH, write: true };
            let name = format!("{kind:?}: {shown} first writes of 4 KiB, cluster {cluster}, step {step}");
            lab.compare(&name, both(lab, &image, load))?;
            if kind == Kind::Ext4 && cluster == "64k" && step != "1M" {
                beside_engines(lab, &name, &image, load)?;
            }
        }
        calls_of_first_writes(lab, kind, &mounted)?;
        if kind == Kind::Ext4 {
            syncs(lab, &mounted)?;
        }
    }
    Ok(())
}

/// How often changes of tables have to be made durable: the same commands of `io`, one after the other.
fn syncs(lab: &Lab, mounted: &Mounted) -> Outcome {
    let tables: Vec<String> = (0..500).map(|i| format!("write -q {}M 4k", i * 512)).collect();
    let pairs = |i| [format!("discard {}k 64k", i * 64), format!("write -q {}k 64k", i * 64)];
    let pairs: Vec<String> = (0..100).flat_map(pairs).collect();
    for (name, size, commands) in [
        ("500 writes, each the first in its own L2 table, and a flush", 256u64 << 30, tables),
        ("100 pairs of a discard and a write of 64 KiB, and a flush", 64 << 20, pairs),
    ] {
        let side = |program: Program| {
            let image = Fresh {
                path: mounted.path().join("fresh"),
                size,
                options: "cluster_size=64k".to_owned(),
                beside: Beside::Nothing(mounted),
            };
            let mut io = if program == Program::Zebu { lab.zebu() } else { Command::new(&lab.qemu_io) };
            if program == Program::Zebu {
                io.arg("io");
            }
            io.args(["-f", "qcow2", "-t", "none", "-i", "threads"]);
            let commands = commands.clone();
            let run = move || {
                image.create(lab, program)?;
                let mut fill = Command::new(&lab.qemu_io);
                fill.args(["-f", "qcow2", "-c", "write -q 0 16M"]);
                run(fill.arg(&image.path))?;
                let mut traced = Command::new(io.get_program());
                traced.args(io.get_args());
                for command in commands.iter().map(String::as_str).chain(["flush"]) {
                    traced.args(["-c", command]);
                }
                calls_on(lab, traced.arg(&image.path), &image.path)
            };
            Side { label: program.label().to_owned(), run: Box::new(run) as Box<_> }
        };
        lab.compare(&format!("calls of {name}"), [Program::Zebu, Program::Qemu].map(side))?;
    }
    Ok(())
}

/// The system calls that take clusters into use.
fn calls_of_first_writes(lab: &Lab, kind: Kind, mounted: &Mounted) -> Outcome {
    const CLUSTERS: u64 = 4000;
    for (cluster, text) in [(64 << 10, "64k"), (1 << 20, "1M")] {
        let load = Load { block: SMALL, step: cluster, count: CLUSTERS, depth: DEPTH, write: true };
        let side = |program: Program| {
            let image = Fresh {
                path: mounted.path().join("fresh"),
                size: 15 << 30,
                options: format!("cluster_size={text}"),
                beside: Beside::Nothing(mounted),
            };
            let run = move || {
                image.create(lab, program)?;
                let bench = load.command(program.command(lab).get_program().as_ref(), &image.path);
                let mut on_threads = Command::new(bench.get_program());
                on_threads.args(
                    bench.get_args().map(|word| if word == "io_uring" { "threads".as_ref() } else { word }),
                );
                calls_on(lab, &on_threads, &image.path)
            };
            Side { label: program.label().to_owned(), run: Box::new(run) }
        };
        let name = format!("{kind:?}: calls of {CLUSTERS} first writes of 4 KiB, a cluster of {text} each");
        lab.compare(&name, [Program::Zebu, Program::Qemu].map(side))?;
    }
    Ok(())
}

/// What writers leave for readers: the image of each is read by zebu.
pub(super) fn readback(lab: &Lab) -> Outcome {
    let disk = lab.gib << 30;
    let random = scattered(disk, 64 << 10, u64::MAX);
    // Four streams in turn, each of which goes on where it was, half a cluster at a time: four steps are the disk and a
    // block. The last round would cross the end of the disk, which fails in qemu-img.
    let block = 32 << 10;
    let streams = Load { block, step: (disk + block) / 4, count: disk / block - 4, depth: 8, write: true };
    for kind in FILE_SYSTEMS {
        let mounted = lab.file_system(kind, disk + (2 << 30))?;
        for (written, load) in [("at random", random), ("by four streams", streams)] {
            let side = |program: Program| {
                let image = Fresh {
                    path: mounted.path().join("fresh"),
                    size: disk,
                    options: "cluster_size=64k".into(),
                    beside: Beside::Nothing(&mounted),
                };
                let run = move || read_after(lab, program, &image, load);
                Side { label: format!("{}'s image", program.label()), run: Box::new(run) as Box<_> }
            };
            let name = format!("{kind:?}: 1 MiB sequential reads of what was written {written}");
            lab.compare(&name, [Program::Zebu, Program::Qemu].map(side))?;
        }
    }
    Ok(())
}

/// Between the last write and the first read.
const REST: Duration = Duration::from_secs(4);

fn read_after(lab: &Lab, program: Program, image: &Fresh<'_>, load: Load) -> Outcome<Sample> {
    image.create(lab, program)?;
    load.timed(load.command(program.command(lab).get_program().as_ref(), &image.path))?;
    settle()?;
    // What a fast writer has just written may still keep busy what is behind the disk; a slow one has that behind it.
    std::thread::sleep(REST);
    // Four times over: once is over too soon where most of the image was never written.
    let read = Load { block: LARGE, step: LARGE, count: 4 * image.size / LARGE, depth: 8, write: false };
    let mut figures = read.timed(read.command(&lab.zebu, &image.path))?;
    figures.push((Metric::ExtentsPerGib, extents(&image.path)? / (image.size as f64 / f64::from(1 << 30))));
    remove(&image.path)?;
    Ok(figures)
}

/// Extents of a file on its file system.
fn extents(file: &Path) -> Outcome<f64> {
    let program = find("filefrag").ok_or("filefrag is missing (package e2fsprogs)")?;
    let said = output(Command::new(program).arg(file))?;
    let number = said.rsplit(": ").next().and_then(|rest| rest.split_whitespace().next());
    number.and_then(|n| n.parse().ok()).ok_or_else(|| format!("filefrag: no number of extents in: {said}"))
}

/// Overwriting in place on a small and on a large disk.
pub(super) fn growth(lab: &Lab) -> Outcome {
    let xfs: Mounted = lab.file_system(Kind::Xfs, 8 << 30)?;
    let span = 512 * LARGE;
    for program in [Program::Zebu, Program::Qemu] {
        let images = ["64G", "16T"].map(|size| xfs.path().join(format!("{}-{size}", program.label())));
        for (image, size) in images.iter().zip(["64G", "16T"]) {
            let mut create = program.command(lab);
            run(create.args(["create", "-q", "-f", "qcow2"]).arg(image).arg(size))?;
            let fill = Load { block: LARGE, step: LARGE, count: span / LARGE, depth: 4, write: true };
            fill.timed(fill.command(&lab.zebu, image))?;
        }
        let load = Load { block: SMALL, step: SMALL, count: span / SMALL, depth: DEPTH, write: true };
        let [small, large] = &images;
        let mut sides = [load.on(lab, program, small), load.on(lab, program, large)];
        sides[0].label = "64 GiB".into();
        sides[1].label = "16 TiB".into();
        lab.compare(&format!("{}: overwriting 4 KiB in place, by size of the disk", program.label()), sides)?;
    }
    Ok(())
}
