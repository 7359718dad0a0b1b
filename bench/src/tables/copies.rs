//! Converting: by copy with O_DIRECT, by reflink, compressed; and how many requests reach the disk.

use crate::Outcome;
use crate::images::{Content, noise};
use crate::lab::{Lab, mib, remove, settle};
use crate::metric::{Metric, Sample};
use crate::mount::{Kind, Mounted};
use crate::process::{evict, measure_ok, run};
use crate::programs::{ALL, BOTH, FASTEST, Load, Program, SMALL, scattering_step};
use crate::run::{Side, sample};
use crate::system_calls::calls_on;
use crate::tables::backup::cached_mib;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const DIRECT: [&str; 4] = ["-t", "none", "-T", "none"];
/// Without reflink or copy offload: the bytes are moved by the program itself.
const BUFFERS: [&str; 2] = ["--copy", "buffers"];

/// `convert`, with QEMU's best setting or with zebu's `options`.
fn convert_by(program: Program, lab: &Lab, formats: [&str; 2], options: &[&str]) -> Command {
    let mut command = program.img(lab);
    command.args(["convert", "-f", formats[0], "-O", formats[1]]);
    if program == Program::Qemu {
        command.args(FASTEST)
    } else {
        command.args(options)
    };
    command
}

/// Measures a convert into a new file.
fn converted(mut command: Command, from: &Path, to: &Path) -> Outcome<Sample> {
    remove(to)?;
    evict(from)?;
    let usage = measure_ok(command.arg(from).arg(to))?;
    let mut figures = vec![(Metric::MibPerSecond, mib(from)? / usage.wall.as_secs_f64())];
    figures.extend(sample(&usage));
    figures.push((Metric::ImageMib, mib(to)?));
    Ok(figures)
}

/// Data that has no zeroes: with O_DIRECT on both sides, and on XFS by reflink beside a copy.
pub(super) fn convert(lab: &Lab) -> Outcome {
    let gib = lab.gib();
    let (raw, qcow2) = (lab.file("data.raw"), lab.file("source.qcow2"));
    noise(&raw, gib << 30)?;
    run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2))?;
    let cases = [(&raw, ["raw", "qcow2"]), (&qcow2, ["qcow2", "raw"])];
    for (from, formats) in cases {
        let side = |program: Program| {
            let to = lab.file(program.name());
            Side::new(program.name(), move || {
                let mut command = convert_by(program, lab, formats, &BUFFERS);
                command.args(DIRECT);
                converted(command, from, &to)
            })
        };
        let name = format!("convert {} to {}, O_DIRECT, {gib} GiB", formats[0], formats[1]);
        lab.row(&name, BOTH.map(side));
    }
    let xfs = lab.file_system(Kind::Xfs, (gib * 6 + 2) << 30)?;
    for (from, formats) in cases {
        let source = xfs.path().join(formats[0]);
        run(Command::new("cp").arg(from).arg(&source))?;
        let side = |mode: &'static str| {
            let (source, to) = (source.clone(), xfs.path().join(mode));
            Side::new(format!("zebu, {mode}"), move || {
                converted(convert_by(Program::Zebu, lab, formats, &["--copy", mode]), &source, &to)
            })
        };
        let name = format!("convert {} to {} on XFS, {gib} GiB", formats[0], formats[1]);
        lab.row(&name, ["reflink", "buffers"].map(side));
        for made in ["reflink", "buffers"] {
            remove(&xfs.path().join(made))?;
        }
    }
    Ok(())
}

/// The maker of a copy with no options but the formats. zebu's copy is durable when it ends, QEMU's when it was synced.
#[derive(Debug, Clone, Copy)]
enum Maker {
    Zebu,
    Qemu,
    QemuSynced,
}

/// `convert` with no options but the formats, of a file that is in the page cache or is not.
pub(super) fn defaults(lab: &Lab) -> Outcome {
    let raw = &Content::LargeFileSystem.file(lab)?;
    let qcow2 = &lab.file("source.qcow2");
    run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(raw).arg(qcow2))?;
    for (from, formats) in [(raw, ["raw", "qcow2"]), (qcow2, ["qcow2", "raw"])] {
        for cached in [false, true] {
            let side = |(who, maker): (&str, Maker)| {
                let to = lab.file("made");
                Side::new(who, move || copied_by_default(maker, lab, formats, from, cached, &to))
            };
            let name = format!(
                "convert {} to {} without options, {} page cache",
                formats[0],
                formats[1],
                if cached { "source in the" } else { "nothing in the" }
            );
            let makers = [("zebu", Maker::Zebu), ("QEMU", Maker::Qemu), ("QEMU, synced", Maker::QemuSynced)];
            lab.row(&name, makers.map(side));
        }
    }
    Ok(())
}

fn copied_by_default(
    maker: Maker,
    lab: &Lab,
    formats: [&str; 2],
    from: &Path,
    cached: bool,
    to: &Path,
) -> Outcome<Sample> {
    remove(to)?;
    evict(from)?;
    if cached {
        run(Command::new("cat").arg(from).stdout(Stdio::null()))?;
    }
    settle()?;
    let cached_before = cached_mib(from)?;
    let mut command = if matches!(maker, Maker::Zebu) { lab.zebu() } else { lab.qemu_img() };
    command.args(["convert", "-f", formats[0], "-O", formats[1]]);
    let usage = measure_ok(command.arg(from).arg(to))?;
    let mut seconds = usage.wall.as_secs_f64();
    if matches!(maker, Maker::QemuSynced) {
        let begin = Instant::now();
        File::open(to).and_then(|file| file.sync_all()).map_err(|e| format!("{}: {e}", to.display()))?;
        seconds += begin.elapsed().as_secs_f64();
    }
    let cached = [cached_mib(from)? - cached_before, cached_mib(to)?];
    remove(to)?;
    Ok(vec![
        (Metric::WallSeconds, seconds),
        (Metric::CpuSeconds, usage.cpu.as_secs_f64()),
        (Metric::MaxRssMib, usage.max_rss as f64 / 1048576.0),
        (Metric::SourceCachedMib, cached[0]),
        (Metric::TargetCachedMib, cached[1]),
    ])
}

/// A command, with the requests that reach the device of `disk` meanwhile.
fn counted(disk: &Mounted, command: &mut Command) -> Outcome<Sample> {
    settle()?;
    let before = disk.requests()?;
    let usage = measure_ok(command)?;
    let after = disk.requests()?;
    Ok(vec![
        (Metric::WallSeconds, usage.wall.as_secs_f64()),
        (Metric::DeviceReads, (after.0 - before.0) as f64),
        (Metric::DeviceWrites, (after.1 - before.1) as f64),
    ])
}

/// Requests that a file system's device sees while an image becomes raw, and of buffers that are not at pages.
pub(super) fn alignment(lab: &Lab) -> Outcome {
    let disk = &lab.file_system(Kind::Ext4, 6 << 30)?;
    let (size, shown) = lab.sized((256u64 << 20, "256 MiB"), (1 << 30, "1 GiB"));
    let [raw, qcow2, target] = &["data.raw", "source.qcow2", "target.raw"].map(|name| disk.path().join(name));
    noise(raw, size)?;
    run(lab.qemu_img().args(["convert", "-f", "raw", "-O", "qcow2"]).arg(raw).arg(qcow2))?;
    remove(raw)?;
    let side = |program: Program| {
        Side::new(program.name(), move || {
            remove(target)?;
            let mut command = convert_by(program, lab, ["qcow2", "raw"], &BUFFERS);
            counted(disk, command.args(DIRECT).arg(qcow2).arg(target))
        })
    };
    lab.row(&format!("block requests of convert qcow2 to raw, {shown}"), BOTH.map(side));
    // qemu-img has no buffers but such as suit the disk: the figures of 2015 are of a QEMU that had others.
    for (what, write) in [("reads", false), ("writes", true)] {
        let load = Load::in_order(size, write);
        let side = |(who, offset): (&str, &'static str)| {
            Side::new(who, move || {
                let mut command = load.command(Program::Zebu, lab, qcow2, "qcow2")?;
                counted(disk, command.args(["--buffer-offset", offset]))
            })
        };
        let sides = [("zebu, pages", "0"), ("zebu, 512 bytes past them", "512")].map(side);
        lab.row(&format!("block requests of 1 MiB {what}, buffers at pages and past them, {shown}"), sides);
    }
    Ok(())
}

/// Compressed converts beside QEMU's fastest setting, the calls that they take, and small reads of the result.
pub(super) fn compress(lab: &Lab) -> Outcome {
    for content in [Content::FileSystem, Content::Ones, Content::Noise] {
        for compression in ["zlib", "zstd"] {
            let name = format!("convert -c of {}, {compression}, O_DIRECT", content.name());
            if !lab.wants(&name) {
                continue;
            }
            let source = &content.file(lab)?;
            let side = |program: Program| {
                let to = lab.file(program.name());
                Side::new(program.name(), move || {
                    converted(compressed(program, lab, compression), source, &to)
                })
            };
            lab.row(&name, BOTH.map(side));
        }
    }
    let name = "system calls of convert -c on the target, 256 MiB of a file system";
    if lab.wants(name) {
        let (part, whole) = (&lab.file("part.raw"), Content::FileSystem.file(lab)?);
        let mut dd = Command::new("dd");
        dd.args(["bs=1M", "count=256", "status=none"]).arg(format!("if={}", whole.display()));
        run(dd.arg(format!("of={}", part.display())))?;
        let side = |program: Program| {
            let to = lab.file(program.name());
            Side::new(program.name(), move || {
                remove(&to)?;
                let mut command = compressed(program, lab, "zlib");
                if program == Program::Zebu {
                    command.args(["-i", "threads"]);
                }
                calls_on(lab, command.arg(part).arg(&to), &to)
            })
        };
        lab.row(name, BOTH.map(side));
    }
    for compression in ["zlib", "zstd"] {
        for order in ["scattered", "sequential"] {
            let name = format!("4 KiB {order} reads of a compressed image, {compression}, depth 32");
            if !lab.wants(&name) {
                continue;
            }
            // The same image for all: QEMU's.
            let (source, image) = (Content::FileSystem.file(lab)?, lab.file(compression));
            if !image.exists() {
                run(compressed(Program::Qemu, lab, compression).arg(&source).arg(&image))?;
            }
            let len = std::fs::metadata(&source).map_err(|e| e.to_string())?.len();
            let step = if order == "scattered" { scattering_step(len, SMALL) } else { SMALL };
            let load = Load { block: SMALL, step, count: 10_000, depth: 32, write: false };
            lab.row(&name, load.by(&ALL, lab, &image));
        }
    }
    Ok(())
}

fn compressed(program: Program, lab: &Lab, compression: &str) -> Command {
    let mut command = convert_by(program, lab, ["raw", "qcow2"], &[]);
    command.arg("-c").args(DIRECT).arg("-o").arg(format!("compression_type={compression}"));
    command
}
