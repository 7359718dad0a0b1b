//! First writes into clusters: by preallocation mode (the table of 2020), by step (that of 2019), in overlays; what they
//! leave for readers; and what writing in place costs as disks grow.

use super::lab::{Lab, remove, settle};
use super::load::{LARGE, Load, Program, SMALL, scattering_step};
use super::peers::{ENGINES, Peer};
use crate::Outcome;
use crate::ab::{Metric, Sample, Side};
use crate::mount::{Kind, Mounted};
use crate::process::{find, output, run};
use std::path::{Path, PathBuf};
use std::process::Command;

const DEPTH: u64 = 32;
const FILE_SYSTEMS: [Kind; 2] = [Kind::Ext4, Kind::Xfs];

/// An image that is made anew, unmeasured, before each run.
#[derive(Clone)]
struct Fresh<'a> {
    path: PathBuf,
    size: u64,
    options: String,
    backing: Option<(&'a Path, &'a str)>,
}

impl Fresh<'_> {
    fn create(&self, lab: &Lab, program: Program) -> Outcome {
        remove(&self.path)?;
        let mut command = program.command(lab);
        command.args(["create", "-q", "-f", "qcow2", "-o", &self.options]);
        if let Some((file, format)) = self.backing {
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

fn both<'a>(lab: &'a Lab, image: &Fresh<'a>, load: Load) -> [Side<'a>; 2] {
    [Program::Zebu, Program::Qemu]
        .map(|program| first_writes(lab, program, program.label(), image.clone(), load))
}

/// 4 KiB into each of many clusters, scattered.
fn scattered(disk: u64, cluster: u64, count: u64) -> Load {
    let step = scattering_step(disk, cluster);
    Load { block: SMALL, step, count: count.min(disk / cluster), depth: DEPTH, write: true }
}

/// The table of 2020, and larger clusters.
pub(super) fn preallocation(lab: &Lab) -> Outcome {
    let (disk, count) = lab.sized((1 << 30, 16_000), (8 << 30, 100_000));
    let large_clusters = lab.sized(2048, 8192);
    for kind in FILE_SYSTEMS {
        // The space of an image that was removed is not free before the journal's next commit.
        let mounted = lab.file_system(kind, 2 * disk + (2 << 30))?;
        let image = |options: String| Fresh {
            path: mounted.path().join("fresh"),
            size: disk,
            options,
            backing: None,
        };
        let of_mode = |mode: &str| image(format!("cluster_size=64k,preallocation={mode}"));
        let load = scattered(disk, 64 << 10, count);
        for mode in ["off", "metadata", "falloc", "full"] {
            let name = format!("{kind:?}: first 4 KiB writes, 64 KiB clusters, preallocation {mode}");
            lab.compare(&name, both(lab, &of_mode(mode), load))?;
        }
        for peer in ENGINES {
            let image = of_mode("off");
            let sides = [
                first_writes(lab, Program::Zebu, "zebu", image.clone(), load),
                first_writes_of_engine(lab, peer, image, load),
            ];
            let name = format!("{kind:?}: first 4 KiB writes, preallocation off, beside {}", peer.label());
            lab.compare(&name, sides)?;
        }
        let ours = |label: &str, options: &str| {
            first_writes(lab, Program::Zebu, label, image(options.to_owned()), load)
        };
        let sides = [ours("off", "preallocation=off"), ours("metadata", "preallocation=metadata")];
        lab.compare(&format!("{kind:?}: zebu, preallocation off beside metadata"), sides)?;
        if kind == Kind::Xfs {
            let sides = [ours("hint 1M", "extent_size_hint=1M"), ours("none", "extent_size_hint=0")];
            lab.compare("Xfs: zebu, preallocation off, with and without an extent size hint", sides)?;
        }
        files_without_space(lab, &mounted, kind, disk, load)?;
        drop(mounted);
        let mounted = lab.sparse_file_system(kind, 2 * LARGE * large_clusters + (4 << 30))?;
        for (cluster, text) in [(1 << 20, "1M"), (2 << 20, "2M")] {
            let disk = cluster * large_clusters;
            let path = mounted.path().join("fresh");
            let options = format!("cluster_size={text}");
            let image = Fresh { path, size: disk, options, backing: None };
            let name = format!("{kind:?}: first 4 KiB writes, {text} clusters, preallocation off");
            lab.compare(&name, both(lab, &image, scattered(disk, cluster, u64::MAX)))?;
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
            remove(file)?;
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
    let sparse = || run(Command::new("truncate").arg("-s").arg(disk.to_string()).arg(&file));
    lab.compare(
        &format!("{kind:?}: first 4 KiB writes, raw sparse file"),
        prepared(lab, &file, "raw", load, &sparse),
    )?;
    if kind == Kind::Xfs {
        let base = mounted.path().join("shared.qcow2");
        run(lab
            .qemu_img()
            .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=full"])
            .arg(&base)
            .arg("1G"))?;
        let reflink = || run(Command::new("cp").arg("--reflink=always").arg(&base).arg(&file));
        let load = scattered(1 << 30, 64 << 10, u64::MAX);
        lab.compare(
            "Xfs: first 4 KiB writes, reflinked copy of a full image",
            prepared(lab, &file, "qcow2", load, &reflink),
        )?;
        remove(&base)?;
    }
    remove(&file)
}

/// Copy-on-write of 64 KiB clusters, and of subclusters.
pub(super) fn overlays(lab: &Lab) -> Outcome {
    let disk = lab.gib << 30;
    for kind in FILE_SYSTEMS {
        let mounted = lab.file_system(kind, disk * 4 + (2 << 30))?;
        let raw = mounted.path().join("base.raw");
        super::lab::fill(&raw, disk)?;
        let qcow2 = mounted.path().join("base.qcow2");
        run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2))?;
        for (base, format) in [(&raw, "raw"), (&qcow2, "qcow2")] {
            for (options, what) in [
                ("cluster_size=64k", "64 KiB clusters"),
                ("cluster_size=128k,extended_l2=on", "128 KiB clusters with subclusters"),
            ] {
                let image = Fresh {
                    path: mounted.path().join("overlay"),
                    size: disk,
                    options: options.to_owned(),
                    backing: Some((base, format)),
                };
                let load = scattered(disk, 128 << 10, lab.sized(4096, 16_384));
                let name = format!("{kind:?}: first 4 KiB writes in an overlay on {format}, {what}");
                lab.compare(&name, both(lab, &image, load))?;
                if options.contains("extended_l2") {
                    let plain = Fresh { options: "cluster_size=128k".into(), ..image.clone() };
                    let sides = [
                        first_writes(lab, Program::Zebu, "zebu, subclusters", image, load),
                        first_writes(lab, Program::Qemu, "QEMU, none", plain, load),
                    ];
                    let name = format!("{kind:?}: an overlay on {format}: subclusters beside QEMU without");
                    lab.compare(&name, sides)?;
                }
            }
        }
    }
    Ok(())
}

/// The table of 2019: 15,360 writes of 4 KiB by step and cluster size on a disk of 15 GiB.
pub(super) fn clusters(lab: &Lab) -> Outcome {
    for kind in FILE_SYSTEMS {
        let mounted = lab.file_system(kind, 18 << 30)?;
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
                backing: None,
            };
            let load = Load { block: SMALL, step: bytes, count: 15_360, depth: 64, write: true };
            let name = format!("{kind:?}: 15,360 first writes of 4 KiB, cluster {cluster}, step {step}");
            lab.compare(&name, both(lab, &image, load))?;
        }
    }
    Ok(())
}

/// What writers leave for readers: the image of each is read by zebu.
pub(super) fn readback(lab: &Lab) -> Outcome {
    let disk = lab.gib << 30;
    let random = scattered(disk, 64 << 10, u64::MAX);
    // Four streams in turn, each of which goes on where it was, half a cluster at a time. (Requests that would cross the
    // end of the disk fail in qemu-img.)
    let block = 32 << 10;
    let streams = Load { block, step: disk / 4 + block, count: disk / block, depth: 8, write: true };
    for kind in FILE_SYSTEMS {
        let mounted = lab.file_system(kind, disk * 2 + (2 << 30))?;
        for (written, load) in [("at random", random), ("by four streams", streams)] {
            let side = |program: Program| {
                let image = Fresh {
                    path: mounted.path().join(program.label()),
                    size: disk,
                    options: "cluster_size=64k".into(),
                    backing: None,
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

fn read_after(lab: &Lab, program: Program, image: &Fresh<'_>, load: Load) -> Outcome<Sample> {
    image.create(lab, program)?;
    load.timed(load.command(program.command(lab).get_program().as_ref(), &image.path))?;
    settle()?;
    let read = Load { block: LARGE, step: LARGE, count: image.size / LARGE, depth: 8, write: false };
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
