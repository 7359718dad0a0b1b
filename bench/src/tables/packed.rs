//! Sources that another program made: packed files, and images of other programs. Each becomes an image or a raw file that
//! is durable.

use crate::Outcome;
use crate::images::Content;
use crate::lab::{Lab, mib, remove};
use crate::metric::{Metric, Sample};
use crate::process::{evict, measure_ok, output, run};
use crate::programs::{BOTH, FASTEST, Program};
use crate::run::{Side, sample};
use std::path::Path;
use std::process::Command;

/// A way to pack a file: the program that packs, and the one that unpacks to its output.
struct Packer {
    name: &'static str,
    pack: &'static [&'static str],
    unpack: &'static str,
}

/// The fastest levels: the speed of unpacking hardly depends on them. xz makes several blocks.
const PACKERS: [Packer; 3] = [
    Packer { name: "zstd", pack: &["zstd", "-qc", "-T0", "-3"], unpack: "zstd -dqc" },
    Packer { name: "xz", pack: &["xz", "-c", "-T2", "-1"], unpack: "xz -dc -T2" },
    Packer { name: "gzip", pack: &["gzip", "-c", "-1"], unpack: "gzip -dc" },
];

/// O_DIRECT, for both programs.
const DIRECT: &str = "-t none -T none";
/// The page cache, for both programs.
const BUFFERED: &str = "-t unsafe -T writeback";

/// Runs a line of the shell that makes `to` of `from`, until `to` is durable. The rate counts bytes of the disk.
fn made(line: &str, disk_mib: f64, from: &Path, to: &Path) -> Outcome<Sample> {
    remove(to)?;
    evict(from)?;
    let mut shell = Command::new("sh");
    // The options of `set`: a pipe fails if a part of it does.
    shell.args(["-c", &format!("set -e; {line}; sync \"$TO\"")]).env("FROM", from).env("TO", to);
    let usage = measure_ok(&mut shell)?;
    let mut figures = vec![(Metric::MibPerSecond, disk_mib / usage.wall.as_secs_f64())];
    // The largest resident set is the shell's.
    figures.extend(sample(&usage).into_iter().filter(|(metric, _)| *metric != Metric::MaxRssMib));
    remove(to)?;
    Ok(figures)
}

/// The line by which a program converts the file `FROM` names.
fn convert(program: Program, lab: &Lab, format: &str, target: &str, cache: &str, from: &str) -> String {
    let (program, options) = match program {
        Program::Zebu => (&lab.zebu, String::new()),
        _ => (&lab.qemu_img, format!(" {}", FASTEST.join(" "))),
    };
    let format = if format.is_empty() { String::new() } else { format!(" -f {format}") };
    format!("'{}' convert{options} {cache}{format} -O {target} {from} \"$TO\"", program.display())
}

/// Packs a file into another.
fn pack(packer: &Packer, from: &Path, to: &Path) -> Outcome {
    let mut shell = Command::new("sh");
    let line = format!("{} \"$FROM\" > \"$TO\"", packer.pack.join(" "));
    output(shell.args(["-c", &line]).env("FROM", from).env("TO", to)).map(drop)
}

/// A raw disk in packed files.
pub(super) fn packed(lab: &Lab) -> Outcome {
    let raw = &Content::LargeFileSystem.file(lab)?;
    let disk_mib = mib(raw)?;
    for packer in PACKERS {
        let names = ["raw", "qcow2"]
            .map(|target| format!("raw disk of a file system in {}, to {target}", packer.name));
        if !names.iter().any(|name| lab.wants(name)) {
            continue;
        }
        let file = &lab.file(packer.name);
        pack(&packer, raw, file)?;
        let side = |who: &str, line: String| {
            let to = lab.file("made");
            Side::new(who, move || made(&line, disk_mib, file, &to))
        };
        let zebu = |target| side("zebu", convert(Program::Zebu, lab, "", target, "", "\"$FROM\""));
        let qemu = |target| {
            let unpacked = format!("'{}'", lab.file("unpacked").display());
            let convert = convert(Program::Qemu, lab, "raw", target, "", &unpacked);
            let line = format!("{} \"$FROM\" > {unpacked}; {convert}; rm {unpacked}", packer.unpack);
            side("QEMU, unpacked before", line)
        };
        let pipe = format!(
            "{} \"$FROM\" | dd of=\"$TO\" bs=1M iflag=fullblock conv=sparse status=none",
            packer.unpack
        );
        lab.row(&names[0], [zebu("raw"), side("dd from a pipe", pipe), qemu("raw")]);
        lab.row(&names[1], [zebu("qcow2"), qemu("qcow2")]);
        remove(file)?;
    }
    Ok(())
}

/// Images of other programs to qcow2, with O_DIRECT and through the page cache.
pub(super) fn foreign(lab: &Lab) -> Outcome {
    let raw = &Content::LargeFileSystem.file(lab)?;
    let disk_mib = mib(raw)?;
    for (format, option, name) in [
        ("vmdk", "subformat=streamOptimized", "streamOptimized VMDK"),
        ("vhdx", "subformat=dynamic", "VHDX"),
        ("vdi", "static=off", "VDI"),
    ] {
        let image = &lab.file(format);
        run(lab.qemu_img().args(["convert", "-f", "raw", "-O", format, "-o", option]).arg(raw).arg(image))?;
        for (how, cache) in [("O_DIRECT", DIRECT), ("buffered", BUFFERED)] {
            let side = |program: Program| {
                let to = lab.file("made");
                let line = convert(program, lab, format, "qcow2", cache, "\"$FROM\"");
                Side::new(program.name(), move || made(&line, disk_mib, image, &to))
            };
            lab.row(&format!("{name} of a file system to qcow2, {how}"), BOTH.map(side));
        }
        remove(image)?;
    }
    Ok(())
}
