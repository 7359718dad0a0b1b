//! Work on whole images, by their size: opening, checking, snapshots, scattered first writes.

use crate::Outcome;
use crate::images::{Allocated, Data, Layout};
use crate::lab::{Lab, remove};
use crate::metric::Metric;
use crate::mount::Kind;
use crate::process::{evict, measure_ok, run};
use crate::programs::{BOTH, CLUSTER, Load, Program, SMALL};
use crate::run::{Side, sample};
use std::path::Path;
use std::process::Command;

/// `zebu io` or `qemu-io`.
fn io(program: Program, lab: &Lab) -> Command {
    if program == Program::Qemu {
        return Command::new(&lab.qemu_io);
    }
    let mut command = lab.zebu();
    command.arg("io");
    command
}

/// Opening for one read of 4 KiB, by both.
fn opened<'a>(lab: &'a Lab, image: &'a Path, at: &'static str) -> [Side<'a>; 2] {
    BOTH.map(|program| {
        Side::new(program.name(), move || {
            let bare = measure_ok(Command::new(io(program, lab).get_program()).arg("--version"))?;
            let mut command = io(program, lab);
            command.args(["-f", "qcow2", "-r", "-c", &format!("read {at} 4k")]);
            let usage = measure_ok(command.arg(image))?;
            let mut figures = sample(&usage);
            let added = usage.wall.saturating_sub(bare.wall).as_secs_f64() * 1000.0;
            figures.push((Metric::OverBareMillis, added));
            Ok(figures)
        })
    })
}

/// A whole process: start, open, one read in the middle of the disk, close, exit; on XFS, since files of ext4 end there.
pub(super) fn open(lab: &Lab) -> Outcome {
    let xfs = lab.file_system(Kind::Xfs, 8 << 30)?;
    for (name, options) in [
        ("empty, 64 KiB clusters", "cluster_size=64k"),
        ("tables preallocated, 2 MiB clusters", "cluster_size=2M,preallocation=metadata"),
    ] {
        let image = xfs.path().join("large.qcow2");
        lab.create(&image, options, 16 << 40)?;
        lab.row(&format!("open 16 TiB ({name})"), opened(lab, &image, "8T"));
        remove(&image)?;
    }
    Ok(())
}

/// A disk that is wholly allocated, whose clusters hold nothing.
fn full(lab: &Lab, dir: &Path, gib: u64, cluster: u64) -> Outcome<std::path::PathBuf> {
    let disk = Allocated { size: gib << 30, cluster, layout: Layout::Sequential, data: Data::Holes };
    disk.make(lab, dir)
}

/// Every reference counted.
pub(super) fn check(lab: &Lab) -> Outcome {
    const LARGE: [(u64, u64, &str); 3] = [
        (1 << 10, CLUSTER, "1 TiB, 64 KiB clusters"),
        (16 << 10, 2 << 20, "16 TiB, 2 MiB clusters"),
        (4 << 10, CLUSTER, "4 TiB, 64 KiB clusters"),
    ];
    let xfs = lab.file_system(Kind::Xfs, lab.sized(4, 12) << 30)?;
    for (gib, cluster, name) in lab.sized(&[(128, CLUSTER, "128 GiB, 64 KiB clusters")][..], &LARGE[..]) {
        let image = &full(lab, &xfs.path(), *gib, *cluster)?;
        let side = |program: Program| {
            Side::new(program.name(), move || {
                evict(image)?;
                let mut command = program.img(lab);
                Ok(sample(&measure_ok(command.args(["check", "-q", "-f", "qcow2"]).arg(image))?))
            })
        };
        lab.row(&format!("check of {name}, all allocated"), BOTH.map(side));
        remove(image)?;
    }
    Ok(())
}

/// An internal snapshot, created and deleted.
pub(super) fn snapshots(lab: &Lab) -> Outcome {
    let xfs = lab.file_system(Kind::Xfs, 4 << 30)?;
    for gib in lab.sized(&[64][..], &[64, 256][..]) {
        let image = &full(lab, &xfs.path(), *gib, CLUSTER)?;
        for (what, is_deletion) in [("create", false), ("delete", true)] {
            let side = |program: Program| {
                Side::new(program.name(), move || {
                    let snapshot = |option: &str| {
                        let mut command = program.img(lab);
                        command.args(["snapshot", option, "one"]).arg(image);
                        command
                    };
                    if is_deletion {
                        run(&mut snapshot("-c"))?;
                    }
                    evict(image)?;
                    let figures = sample(&measure_ok(&mut snapshot(if is_deletion { "-d" } else { "-c" }))?);
                    if !is_deletion {
                        run(&mut snapshot("-d"))?;
                    }
                    Ok(figures)
                })
            };
            lab.row(&format!("{what} a snapshot of {gib} GiB, all allocated"), BOTH.map(side));
        }
        remove(image)?;
    }
    Ok(())
}

/// The cost of the size of the disk: opening it, and first writes that scatter over all of it.
pub(super) fn sizes(lab: &Lab) -> Outcome {
    const WRITES: u64 = 4096;
    const SIZES: [(u64, &str); 4] = [(1, "1 GiB"), (64, "64 GiB"), (4 << 10, "4 TiB"), (64 << 10, "64 TiB")];
    // Room for the clusters of the largest disk, each set aside as a whole.
    let xfs = lab.file_system(Kind::Xfs, 16 << 30)?;
    for (gib, name) in lab.sized(&SIZES[..2], &SIZES[..]) {
        let image = &xfs.path().join("sized.qcow2");
        let cluster = if *gib > 16 << 10 { 2 << 20 } else { CLUSTER };
        let create = || lab.create(image, &format!("cluster_size={cluster}"), gib << 30);
        create()?;
        lab.row(&format!("open {name}, empty"), opened(lab, image, "512M"));
        // The largest step that qemu-img takes reaches over 8 TiB.
        let farthest = i32::MAX as u64 / cluster * cluster;
        let step = ((gib << 30) / WRITES / cluster * cluster).clamp(cluster, farthest);
        let load = Load { block: SMALL, step, count: WRITES, depth: 32, write: true };
        let side = |program: Program| {
            Side::new(program.name(), move || {
                create()?;
                load.run(program, lab, image)
            })
        };
        lab.row(&format!("4096 first writes over {name}"), BOTH.map(side));
        remove(image)?;
    }
    Ok(())
}
