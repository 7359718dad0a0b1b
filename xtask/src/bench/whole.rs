//! Work on whole images, by their size: checking, snapshots, opening, reading scattered clusters.

use super::lab::{Lab, remove};
use super::load::{Load, Program, SMALL};
use super::mapping_images::{Data, Layout, allocated};
use super::peers::beside_all;
use crate::Outcome;
use crate::ab::{Side, sample};
use crate::mount::{Kind, Mounted};
use crate::process::{evict, measure_ok, run};
use std::path::Path;
use std::process::Command;

/// Clusters of most images, in bytes.
const CLUSTER: u64 = 64 << 10;
/// Disks as they grow, in GiB.
const SIZES: [(u64, &str); 4] = [(1, "1 GiB"), (64, "64 GiB"), (4 << 10, "4 TiB"), (64 << 10, "64 TiB")];

/// A whole process, with nothing of the image in the page cache.
fn process<'a>(label: &str, program: &'a Path, words: &'a [&'a str], image: &'a Path) -> Side<'a> {
    let run = move || {
        evict(image)?;
        Ok(sample(&measure_ok(Command::new(program).args(words).arg(image))?))
    };
    Side { label: label.to_owned(), run: Box::new(run) }
}

/// Every reference counted: tables of disks that are wholly allocated.
pub(super) fn check(lab: &Lab) -> Outcome {
    let xfs = Mounted::new(Kind::Xfs, lab.sized(4, 12) << 30, &lab.dir)?;
    let sizes = lab.sized(&[(128, CLUSTER, "128 GiB, 64 KiB clusters")][..], &CHECKED[..]);
    for (gib, cluster, name) in sizes {
        let image = allocated(lab, &xfs.path(), gib << 30, *cluster, Layout::Sequential, Data::Holes)?;
        let words = ["check", "-q", "-f", "qcow2"];
        let sides =
            [process("zebu", &lab.zebu, &words, &image), process("QEMU", &lab.qemu_img, &words, &image)];
        lab.compare(&format!("check of {name}, all allocated"), sides)?;
        remove(&image)?;
    }
    Ok(())
}

const CHECKED: [(u64, u64, &str); 3] = [
    (1 << 10, CLUSTER, "1 TiB, 64 KiB clusters"),
    (16 << 10, 2 << 20, "16 TiB, 2 MiB clusters"),
    (4 << 10, CLUSTER, "4 TiB, 64 KiB clusters"),
];

/// An internal snapshot, created and deleted.
pub(super) fn snapshots(lab: &Lab) -> Outcome {
    let xfs = Mounted::new(Kind::Xfs, 4 << 30, &lab.dir)?;
    for (gib, name) in lab.sized(&[(64, "64 GiB")][..], &[(64, "64 GiB"), (256, "256 GiB")][..]) {
        let image = allocated(lab, &xfs.path(), gib << 30, CLUSTER, Layout::Sequential, Data::Holes)?;
        for (words, undo, what) in [
            (["snapshot", "-c", "one"], ["snapshot", "-d", "one"], "create"),
            (["snapshot", "-d", "one"], ["snapshot", "-c", "one"], "delete"),
        ] {
            let side = |program: Program| {
                let image = &image;
                let run = move || {
                    if what == "delete" {
                        run(program.command(lab).args(undo).arg(image))?;
                    }
                    evict(image)?;
                    let figures = sample(&measure_ok(program.command(lab).args(words).arg(image))?);
                    if what == "create" {
                        run(program.command(lab).args(undo).arg(image))?;
                    }
                    Ok(figures)
                };
                Side { label: program.label().to_owned(), run: Box::new(run) }
            };
            let sides = [side(Program::Zebu), side(Program::Qemu)];
            lab.compare(&format!("{what} a snapshot of {name}, all allocated"), sides)?;
        }
        remove(&image)?;
    }
    Ok(())
}

/// What the size of the disk costs: opening it, and requests that scatter over all of it, each first in its L2 table or
/// near it.
pub(super) fn sizes(lab: &Lab) -> Outcome {
    // Room for the clusters of the largest disk, each set aside as a whole.
    let xfs = Mounted::new(Kind::Xfs, 16 << 30, &lab.dir)?;
    for (gib, name) in lab.sized(&SIZES[..2], &SIZES[..]) {
        let image = xfs.path().join("sized.qcow2");
        let cluster = if *gib > 16 << 10 { 2 << 20 } else { CLUSTER };
        run(lab
            .qemu_img()
            .args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={cluster}")])
            .arg(&image)
            .arg(format!("{gib}G")))?;
        let sides =
            [process("zebu", &lab.zebu, OPEN, &image), process("QEMU", &lab.qemu_io, OPEN_QEMU, &image)];
        lab.compare(&format!("open {name}, empty"), sides)?;
        // The largest step that qemu-img takes reaches over 8 TiB.
        let farthest = i32::MAX as u64 / cluster * cluster;
        let step = ((gib << 30) / WRITES / cluster * cluster).clamp(cluster, farthest);
        let writes = Load { block: SMALL, step, count: WRITES, depth: 32, write: true };
        let side = |program: Program| {
            let image = &image;
            let run = move || {
                run(lab
                    .qemu_img()
                    .args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={cluster}")])
                    .arg(image)
                    .arg(format!("{gib}G")))?;
                writes.timed(writes.command(program.command(lab).get_program().as_ref(), image))
            };
            Side { label: program.label().to_owned(), run: Box::new(run) }
        };
        lab.compare(&format!("4096 first writes over {name}"), [side(Program::Zebu), side(Program::Qemu)])?;
        remove(&image)?;
    }
    Ok(())
}

/// One read, after opening.
const OPEN: &[&str] = &["io", "-f", "qcow2", "-r", "-c", "read 512M 4k"];
const OPEN_QEMU: &[&str] = &["-f", "qcow2", "-r", "-c", "read 512M 4k"];
/// Scattered first writes.
const WRITES: u64 = 4096;

/// Sequential reads of 1 MiB from images whose clusters lie in order, and in none.
pub(super) fn fragmentation(lab: &Lab) -> Outcome {
    let size = 1 << 30;
    for layout in [Layout::Sequential, Layout::Shuffled] {
        let image = allocated(lab, &lab.dir, size, CLUSTER, layout, Data::Written)?;
        let load = Load { block: 1 << 20, step: 1 << 20, count: size >> 20, depth: 8, write: false };
        beside_all(lab, &format!("1 MiB sequential reads, clusters {}", layout.name()), load, &image)?;
        remove(&image)?;
    }
    Ok(())
}
