//! Converting: by copy with O_DIRECT, by reflink, and how many requests reach the disk.

use super::lab::{Lab, fill};
use crate::Outcome;
use crate::ab::{Metric, Side, sample};
use crate::mount::{Kind, Mounted};
use crate::process::{evict, measure_ok, run};
use std::path::{Path, PathBuf};
use std::process::Command;

/// `PROGRAM convert` from one file to another, measured; the target is removed first.
fn side<'a>(
    label: &str,
    program: &'a Path,
    options: &'a [&'a str],
    from: &'a Path,
    to: &'a Path,
) -> Side<'a> {
    let run = move || {
        if to.exists() {
            std::fs::remove_file(to).map_err(|e| format!("{}: {e}", to.display()))?;
        }
        evict(from)?;
        let mut command = Command::new(program);
        let usage = measure_ok(command.arg("convert").args(options).arg(from).arg(to))?;
        let mut figures = sample(&usage);
        let bytes = std::fs::metadata(from).map_err(|e| e.to_string())?.len();
        figures.push((Metric::MibPerSecond, bytes as f64 / 1048576.0 / usage.wall.as_secs_f64()));
        Ok(figures)
    };
    Side { label: label.to_owned(), run: Box::new(run) }
}

/// Real data, O_DIRECT on both sides; QEMU with its best setting: 16 coroutines, writes in any order.
pub(super) fn convert(lab: &Lab) -> Outcome {
    let raw = lab.raw_file()?;
    let qcow2 = lab.file("source.qcow2");
    run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2))?;
    let (ours, theirs) = (lab.file("ours"), lab.file("theirs"));
    for (from, name, formats) in [
        (&raw, "convert raw to qcow2", ["-f", "raw", "-O", "qcow2"]),
        (&qcow2, "convert qcow2 to raw", ["-f", "qcow2", "-O", "raw"]),
    ] {
        let direct = ["-t", "none", "-T", "none"];
        let zebu: Vec<&str> = formats.into_iter().chain(direct).collect();
        // Without reflink or copy offload: both sides move the bytes themselves.
        let zebu: Vec<&str> = zebu.into_iter().chain(["--copy", "buffers"]).collect();
        let qemu: Vec<&str> = formats.into_iter().chain(direct).chain(["-m", "16", "-W"]).collect();
        let sides =
            [side("zebu", &lab.zebu, &zebu, from, &ours), side("QEMU", &lab.qemu_img, &qemu, from, &theirs)];
        lab.compare(&format!("{name}, O_DIRECT, {} GiB", lab.gib), sides)?;
    }
    Ok(())
}

/// On XFS both sides are zebu: by reflink, and by copying.
pub(super) fn reflink(lab: &Lab) -> Outcome {
    let xfs = Mounted::new(Kind::Xfs, (lab.gib * 6 + 2) << 30, &lab.dir)?;
    let raw = xfs.path().join("data.raw");
    fill(&raw, lab.gib << 30)?;
    let qcow2 = xfs.path().join("source.qcow2");
    run(lab.zebu().args(["convert", "-f", "raw", "-O", "qcow2", "--copy", "buffers"]).arg(&raw).arg(&qcow2))?;
    let (linked, copied) = (xfs.path().join("linked"), xfs.path().join("copied"));
    for (from, name, formats) in [
        (&raw, "XFS raw to qcow2", ["-f", "raw", "-O", "qcow2"]),
        (&qcow2, "XFS qcow2 to raw", ["-f", "qcow2", "-O", "raw"]),
    ] {
        let by = |mode: &'static str| -> Vec<&str> { formats.into_iter().chain(["--copy", mode]).collect() };
        let (reflink, buffers) = (by("reflink"), by("buffers"));
        let sides = [
            side("reflink", &lab.zebu, &reflink, from, &linked),
            side("copy", &lab.zebu, &buffers, from, &copied),
        ];
        lab.compare(&format!("{name}, {} GiB", lab.gib), sides)?;
        for made in [&linked, &copied] {
            run(lab
                .qemu_img()
                .args(["compare", "-q", "-f", formats[3], "-F", formats[1]])
                .arg(made)
                .arg(from))?;
        }
    }
    Ok(())
}

/// Requests that a file system's device sees while an image becomes raw, O_DIRECT on both sides.
pub(super) fn device_requests(lab: &Lab) -> Outcome {
    let disk = Mounted::new(Kind::Ext4, 6 << 30, &lab.dir)?;
    let raw = disk.path().join("data.raw");
    let (size, shown) = lab.sized((256u64 << 20, "256 MiB"), (1 << 30, "1 GiB"));
    fill(&raw, size)?;
    let qcow2 = disk.path().join("source.qcow2");
    run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2))?;
    std::fs::remove_file(&raw).map_err(|e| e.to_string())?;
    let target = disk.path().join("target.raw");
    let counted = |label: &str, program: PathBuf, more: &'static [&'static str]| {
        let (disk, qcow2, target) = (&disk, &qcow2, &target);
        Side {
            label: label.to_owned(),
            run: Box::new(move || {
                if target.exists() {
                    std::fs::remove_file(target).map_err(|e| e.to_string())?;
                }
                run(&mut Command::new("sync"))?;
                let before = disk.requests()?;
                let mut command = Command::new(&program);
                command.args(["convert", "-f", "qcow2", "-O", "raw", "-t", "none", "-T", "none"]).args(more);
                let usage = measure_ok(command.arg(qcow2).arg(target))?;
                let after = disk.requests()?;
                Ok(vec![
                    (Metric::WallSeconds, usage.wall.as_secs_f64()),
                    (Metric::DeviceReads, (after.0 - before.0) as f64),
                    (Metric::DeviceWrites, (after.1 - before.1) as f64),
                ])
            }),
        }
    };
    let sides = [
        counted("zebu", lab.zebu.clone(), &["--copy", "buffers"]),
        counted("QEMU", lab.qemu_img.clone(), &["-m", "16", "-W"]),
    ];
    lab.compare(&format!("block requests of convert qcow2 to raw, {shown}"), sides)?;
    // qemu-img has no buffers but such as suit the disk: the figures of 2015 are of a QEMU that had others.
    for (write, what) in [(false, "reads"), (true, "writes")] {
        let side = |label: &str, offset: &'static str| {
            let (disk, qcow2) = (&disk, &qcow2);
            let run = move || {
                let before = disk.requests()?;
                let mut command = lab.zebu();
                command.args(["bench", "-f", "qcow2", "-t", "none", "-d", "8", "-s", "1M", "-c"]);
                command.arg((size >> 20).to_string());
                if write {
                    command.arg("-w");
                }
                let usage = measure_ok(command.args(["--buffer-offset", offset]).arg(qcow2))?;
                let after = disk.requests()?;
                Ok(vec![
                    (Metric::WallSeconds, usage.wall.as_secs_f64()),
                    (Metric::DeviceReads, (after.0 - before.0) as f64),
                    (Metric::DeviceWrites, (after.1 - before.1) as f64),
                ])
            };
            Side { label: label.to_owned(), run: Box::new(run) }
        };
        let sides = [side("zebu, pages", "0"), side("zebu, 512 bytes past them", "512")];
        let name = format!("block requests of 1 MiB {what}, buffers at pages and past them, {shown}");
        lab.compare(&name, sides)?;
    }
    Ok(())
}
