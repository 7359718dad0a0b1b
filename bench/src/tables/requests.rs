//! Reads and writes of allocated clusters, small and large.

use crate::Outcome;
use crate::fio::{Ask, fio};
use crate::images::{Allocated, Data, Layout, noise};
use crate::lab::Lab;
use crate::process::run;
use crate::programs::{ALL, CLUSTER, Load, Program, SMALL, scattering_step};
use crate::run::Side;
use std::path::PathBuf;

/// 4 KiB, depth 32.
pub(super) fn random(lab: &Lab) -> Outcome {
    let (raw, image) = full_image(lab)?;
    let size = lab.gib() << 30;
    for (what, write) in [("reads", false), ("writes", true)] {
        let (step, count) = (scattering_step(size, SMALL), lab.sized(50_000, 100_000));
        let load = Load { block: SMALL, step, count, depth: 32, write };
        lab.row(&format!("4 KiB scattered {what}, depth 32"), load.by(&ALL, lab, &image));
        let zebu = || {
            let mut command = load.command(Program::Zebu, lab, &image, "qcow2")?;
            load.timed(command.arg("--random=1"))
        };
        let disk = || {
            let file = format!("--filename={}", raw.display());
            let ask = Ask::random(if write { "randwrite" } else { "randread" }, 32);
            Ok(fio(ask, size, 2, &["--ioengine=io_uring", "--direct=1", &file])?.sample())
        };
        let sides = [Side::new("zebu", zebu), Side::new("fio, raw file", disk)];
        lab.row(&format!("4 KiB random {what}, depth 32, beside the disk"), sides);
    }
    Ok(())
}

/// 1 MiB, one after the other; half of the disk takes seconds.
pub(super) fn sequential(lab: &Lab) -> Outcome {
    let (_, image) = full_image(lab)?;
    for (what, write) in [("reads", false), ("writes", true)] {
        let load = Load::in_order((lab.gib() << 30) / 2, write);
        lab.row(&format!("1 MiB sequential {what}, depth 8"), load.by(&ALL, lab, &image));
    }
    Ok(())
}

/// The same from images whose clusters lie in order, and in none.
pub(super) fn fragmentation(lab: &Lab) -> Outcome {
    let size = 1 << 30;
    for layout in [Layout::Sequential, Layout::Shuffled] {
        let image = Allocated { size, cluster: CLUSTER, layout, data: Data::Written }.make(lab, &lab.dir)?;
        let name = format!("1 MiB sequential reads, clusters {}", layout.name());
        lab.row(&name, Load::in_order(size, false).by(&ALL, lab, &image));
    }
    Ok(())
}

/// A raw file full of data, and an image of it in which every cluster is allocated and written, made by QEMU.
pub(super) fn full_image(lab: &Lab) -> Outcome<(PathBuf, PathBuf)> {
    let (raw, image) = (lab.file("data.raw"), lab.file("full.qcow2"));
    noise(&raw, lab.gib() << 30)?;
    let mut convert = lab.qemu_img();
    convert.args(["convert", "-f", "raw", "-O", "qcow2", "-t", "none", "-T", "none", "-S", "0"]);
    run(convert.arg(&raw).arg(&image))?;
    Ok((raw, image))
}
