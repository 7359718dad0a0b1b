//! Compressed backups: time, size, the page cache, memory, and what they cost others on the disk.

use crate::Outcome;
use crate::fio::Steady;
use crate::images::Content;
use crate::lab::{Lab, mib, remove};
use crate::metric::{Metric, Sample};
use crate::process::{evict, find, measure_ok, output};
use crate::programs::FASTEST;
use crate::run::{Side, sample};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The makers of backups: zebu, and QEMU with its target opened for O_DIRECT or for the page cache.
const MAKERS: [&str; 3] = ["zebu", "QEMU, direct", "QEMU, buffered"];

fn command(maker: &str, lab: &Lab, compression: &str, source: &Path, target: &Path) -> Command {
    let mut command;
    if maker == "zebu" {
        command = lab.zebu();
        command.args(["backup", "-q", "-f", "raw", "--compression-type", compression]);
    } else {
        let cache = if maker == "QEMU, buffered" { "writeback" } else { "none" };
        command = lab.qemu_img();
        command.args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-T", cache, "-t", cache]).args(FASTEST);
        command.args(["-o", &format!("compression_type={compression}")]);
    }
    command.arg(source).arg(target);
    command
}

/// A backup, with what it left.
fn made(mut command: Command, source: &Path, target: &Path) -> Outcome<Sample> {
    remove(target)?;
    evict(source)?;
    let mut figures = sample(&measure_ok(&mut command)?);
    figures.push((Metric::ImageMib, mib(target)?));
    figures.push((Metric::SourceCachedMib, cached_mib(source)?));
    figures.push((Metric::TargetCachedMib, cached_mib(target)?));
    Ok(figures)
}

/// MiB of a file in the page cache.
pub(super) fn cached_mib(file: &Path) -> Outcome<f64> {
    let fincore = find("fincore").ok_or("fincore is missing")?;
    let text = output(Command::new(fincore).args(["-b", "-n", "-o", "RES"]).arg(file))?;
    let bytes: f64 = text.trim().parse().map_err(|_| format!("fincore said: {text}"))?;
    Ok(bytes / 1048576.0)
}

/// The table.
pub(super) fn backup(lab: &Lab) -> Outcome {
    let contents = [Content::FileSystem, Content::FileSystem, Content::Ones, Content::Noise];
    for (content, compression) in contents.into_iter().zip(["zlib", "zstd", "zstd", "zstd"]) {
        let name = format!("backup of {}, {compression}", content.name());
        if lab.wants(&name) {
            let source = &content.file(lab)?;
            let side = |maker: &'static str| {
                let target = lab.file(maker);
                Side::new(maker, move || {
                    made(command(maker, lab, compression, source, &target), source, &target)
                })
            };
            lab.row(&name, MAKERS.map(side));
        }
    }
    memory(lab)?;
    others(lab)
}

/// Memory of a backup of a full disk, and of one that is large and empty but for a few places.
fn memory(lab: &Lab) -> Outcome {
    let name = "memory of a backup: a file system, and 100 GiB that are sparse";
    if !lab.wants(name) {
        return Ok(());
    }
    let (full, sparse) = (&Content::FileSystem.file(lab)?, &lab.file("sparse.raw"));
    let said = |e: std::io::Error| format!("{}: {e}", sparse.display());
    let out = File::create(sparse).map_err(said)?;
    out.set_len(100 << 30).map_err(said)?;
    (0..100).try_for_each(|gib| out.write_all_at(&vec![7; 65536], gib << 30)).map_err(said)?;
    let side = |(who, source): (&'static str, &'static str)| {
        let source = if source == "full" { full } else { sparse };
        let target = lab.file(who);
        Side::new(who, move || made(command("zebu", lab, "zlib", source, &target), source, &target))
    };
    lab.row(name, [("zebu, full", "full"), ("zebu, sparse", "sparse")].map(side));
    Ok(())
}

/// The latency of another process that reads another file of the disk meanwhile.
fn others(lab: &Lab) -> Outcome {
    let name = "4 KiB random reads of another process during a backup";
    if !lab.wants(name) {
        return Ok(());
    }
    let (source, read) = (&Content::FileSystem.file(lab)?, &Content::Noise.file(lab)?);
    let side = |maker: &'static str| {
        let target = lab.file(maker);
        Side::new(maker, move || {
            remove(&target)?;
            evict(source)?;
            evict(read)?;
            bothered(lab, read, (maker != "idle").then(|| command(maker, lab, "zstd", source, &target)))
        })
    };
    lab.row(name, ["zebu", "idle", "QEMU, direct", "QEMU, buffered"].map(side));
    Ok(())
}

/// The latency of fio's reads while a backup runs, or for a while.
fn bothered(lab: &Lab, read: &Path, backup: Option<Command>) -> Outcome<Sample> {
    let reader = neighbour(lab, read)?;
    std::thread::sleep(Duration::from_millis(500));
    match backup {
        Some(mut backup) => measure_ok(&mut backup).map(drop)?,
        None => std::thread::sleep(Duration::from_secs(5)),
    }
    reader.end("read")
}

/// Another process that reads another file of the disk, past the page cache, a thousand times a second.
pub(super) fn neighbour(lab: &Lab, read: &Path) -> Outcome<Steady> {
    let file = format!("--filename={}", read.display());
    let words = ["--rw=randread", "--bs=4k", "--iodepth=1", "--ioengine=psync", "--direct=1", "--readonly"];
    Steady::start(&[&words[..], &["--rate_iops=1000", &file]].concat(), &lab.file("fio.json"))
}
