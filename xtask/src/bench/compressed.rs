//! Compressed images: making them, what requests that takes, and reading them in small pieces.

use super::compressible::Data;
use super::lab::{Lab, remove};
use super::load::{LARGE, Load, SMALL, scattering_step};
use super::peers::{beside_all, wants_beside_all};
use super::system_calls::calls_on;
use crate::Outcome;
use crate::ab::{Metric, Side, sample};
use crate::mount::{Kind, Mounted};
use crate::process::{evict, measure_ok, run};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// QEMU's fastest way to convert.
pub(super) const FASTEST: [&str; 3] = ["-m", "16", "-W"];

/// Compressed converts beside QEMU's fastest setting, O_DIRECT beside the page cache, and small reads of the result.
pub(super) fn compress(lab: &Lab) -> Outcome {
    beside_qemu(lab)?;
    beside_itself(lab)?;
    system_calls(lab)?;
    device_requests(lab)?;
    small_reads(lab)
}

fn beside_qemu(lab: &Lab) -> Outcome {
    let (ours, theirs) = (lab.file("ours"), lab.file("theirs"));
    for data in [Data::FileSystem, Data::Ones, Data::Noise] {
        for compression in ["zlib", "zstd"] {
            let name = format!("convert -c of {}, {compression}, O_DIRECT", data.name());
            if !lab.wants(&name) {
                continue;
            }
            let source = data.file(lab)?;
            let options = format!("compression_type={compression}");
            let direct = ["-c", "-f", "raw", "-O", "qcow2", "-T", "none", "-t", "none", "-o", &options];
            let fastest: Vec<&str> = direct.into_iter().chain(FASTEST).collect();
            let sides = [
                making("zebu", &lab.zebu, &direct, &source, &ours),
                making("QEMU", &lab.qemu_img, &fastest, &source, &theirs),
            ];
            lab.compare(&name, sides)?;
        }
    }
    Ok(())
}

fn beside_itself(lab: &Lab) -> Outcome {
    let (ours, theirs) = (lab.file("ours"), lab.file("theirs"));
    let with = |cache| ["-c", "-f", "raw", "-O", "qcow2", "-T", "none", "-t", cache];
    let (direct, cached) = (with("none"), with("writeback"));
    let name = "convert -c of a file system: O_DIRECT beside the page cache";
    if lab.wants(name) {
        let source = Data::FileSystem.file(lab)?;
        let sides = [
            making("-t none", &lab.zebu, &direct, &source, &ours),
            making("-t writeback", &lab.zebu, &cached, &source, &theirs),
        ];
        lab.compare(name, sides)?;
    }
    let name = "convert -c of ones beside reading them, O_DIRECT";
    if lab.wants(name) {
        let source = Data::Ones.file(lab)?;
        let read = || {
            evict(&source)?;
            let count = std::fs::metadata(&source).map_err(|e| e.to_string())?.len() / LARGE;
            let mut command = lab.zebu();
            command.args([
                "bench",
                "-f",
                "raw",
                "-t",
                "none",
                "-d",
                "8",
                "-s",
                "1M",
                "-c",
                &count.to_string(),
            ]);
            Ok(sample(&measure_ok(command.arg(&source))?))
        };
        let sides = [
            making("convert -c", &lab.zebu, &direct, &source, &ours),
            Side { label: "read".into(), run: Box::new(read) },
        ];
        lab.compare(name, sides)?;
    }
    Ok(())
}

/// What strace sees of the calls on the target; io_uring would hide them, so both run theirs on threads.
fn system_calls(lab: &Lab) -> Outcome {
    let name = "system calls of convert -c on the target, 256 MiB of a file system";
    if !lab.wants(name) {
        return Ok(());
    }
    let source = a_part(lab, &Data::FileSystem.file(lab)?)?;
    let (ours, theirs) = (lab.file("ours"), lab.file("theirs"));
    let counted = |label: &str, program: &Path, more: Vec<&'static str>, to: &Path| {
        let (program, source, to) = (program.to_owned(), source.clone(), to.to_owned());
        let run = move || {
            remove(&to)?;
            let mut command = Command::new(&program);
            command.args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-T", "none", "-t", "none"]);
            command.args(&more).arg(&source).arg(&to);
            let mut figures = calls_on(lab, &command, &to)?;
            let len = std::fs::metadata(&to).map_err(|e| e.to_string())?.len();
            figures.push((Metric::ImageMib, len as f64 / 1048576.0));
            Ok(figures)
        };
        Side { label: label.to_owned(), run: Box::new(run) }
    };
    let sides = [
        counted("zebu", &lab.zebu, vec!["-i", "threads"], &ours),
        counted("QEMU", &lab.qemu_img, FASTEST.to_vec(), &theirs),
    ];
    lab.compare(name, sides)
}

/// What the target's own device sees, io_uring included.
fn device_requests(lab: &Lab) -> Outcome {
    let name = "block requests of convert -c to the target's device, 256 MiB of a file system";
    if !lab.wants(name) {
        return Ok(());
    }
    let source = a_part(lab, &Data::FileSystem.file(lab)?)?;
    let disk = Mounted::new(Kind::Ext4, 2 << 30, &lab.dir)?;
    let target = disk.path().join("target");
    let counted = |label: &str, program: PathBuf, more: &'static [&'static str]| {
        let (disk, source, target) = (&disk, &source, &target);
        let run = move || {
            remove(target)?;
            run(&mut Command::new("sync"))?;
            let before = disk.requests()?;
            let mut command = Command::new(&program);
            command
                .args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-t", "none", "-T", "none"])
                .args(more);
            measure_ok(command.arg(source).arg(target))?;
            let after = disk.requests()?;
            let len = std::fs::metadata(target).map_err(|e| e.to_string())?.len();
            Ok(vec![
                (Metric::DeviceReads, (after.0 - before.0) as f64),
                (Metric::DeviceWrites, (after.1 - before.1) as f64),
                (Metric::ImageMib, len as f64 / 1048576.0),
            ])
        };
        Side { label: label.to_owned(), run: Box::new(run) }
    };
    let sides =
        [counted("zebu", lab.zebu.clone(), &[]), counted("QEMU", lab.qemu_img.clone(), &["-m", "16", "-W"])];
    lab.compare(name, sides)
}

/// The first 256 MiB of a file.
fn a_part(lab: &Lab, file: &Path) -> Outcome<PathBuf> {
    let part = lab.file("part.raw");
    if !part.exists() {
        run(Command::new("dd")
            .args(["bs=1M", "count=256", "status=none"])
            .arg(format!("if={}", file.display()))
            .arg(format!("of={}", part.display())))?;
    }
    Ok(part)
}

/// The same image for both: what QEMU wrote.
fn small_reads(lab: &Lab) -> Outcome {
    let rows = ["zlib", "zstd"].map(|compression| {
        ["scattered", "sequential"].map(|order| {
            (
                compression,
                order,
                format!("4 KiB {order} reads of a compressed image, {compression}, depth 32"),
            )
        })
    });
    for (compression, order, name) in
        rows.into_iter().flatten().filter(|(.., name)| wants_beside_all(lab, name))
    {
        let image = lab.file(compression);
        let source = Data::FileSystem.file(lab)?;
        if !image.exists() {
            let options = format!("compression_type={compression}");
            run(lab
                .qemu_img()
                .args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options])
                .args(FASTEST)
                .arg(&source)
                .arg(&image))?;
        }
        let len = std::fs::metadata(&source).map_err(|e| e.to_string())?.len();
        let step = if order == "scattered" { scattering_step(len, SMALL) } else { SMALL };
        let load = Load { block: SMALL, step, count: 10_000, depth: 32, write: false };
        beside_all(lab, &name, load, &image)?;
    }
    Ok(())
}

/// A convert into a new file, measured with the size of what it made.
fn making<'a>(label: &str, program: &'a Path, options: &[&str], from: &'a Path, to: &'a Path) -> Side<'a> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    let run = move || {
        remove(to)?;
        evict(from)?;
        let mut command = Command::new(program);
        let usage = measure_ok(command.arg("convert").args(&options).arg(from).arg(to))?;
        let mut figures = sample(&usage);
        let found = |file: &Path| std::fs::metadata(file).map_err(|e| format!("{}: {e}", file.display()));
        let (source, image) = (found(from)?, found(to)?.len() as f64);
        figures.push((Metric::MibPerSecond, source.len() as f64 / 1048576.0 / usage.wall.as_secs_f64()));
        figures.push((Metric::ImageMib, image / 1048576.0));
        // Blocks are of 512 bytes (stat(2)); what is a hole is no data.
        figures.push((Metric::CompressionRatio, (source.blocks() * 512) as f64 / image));
        Ok(figures)
    };
    Side { label: label.to_owned(), run: Box::new(run) }
}
