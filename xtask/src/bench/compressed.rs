//! Compressed images: making them from a real file system, and reading them in small pieces.

use super::lab::{Lab, fill, remove};
use super::load::{Load, Program, SMALL, scattering_step};
use crate::Outcome;
use crate::ab::{Metric, Side, sample};
use crate::process::{evict, measure_ok, run};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the file system is made of: programs and their data, as on any root disk.
const TREES: [&str; 2] = ["/usr/bin", "/usr/share"];

/// Compressed converts beside QEMU's fastest setting, O_DIRECT beside the page cache, and small reads of the result.
pub(super) fn compress(lab: &Lab) -> Outcome {
    let (ours, theirs) = (lab.file("ours"), lab.file("theirs"));
    let file_system = file_system(lab)?;
    let ones = lab.file("ones.raw");
    write_ones(&ones, lab.sized(256 << 20, 1000 << 20))?;
    let noise = lab.file("noise.raw");
    fill(&noise, lab.sized(256 << 20, 1 << 30))?;
    for (source, what) in [(&file_system, "a file system"), (&ones, "ones"), (&noise, "noise")] {
        for compression in ["zlib", "zstd"] {
            let options = format!("compression_type={compression}");
            let direct = ["-c", "-f", "raw", "-O", "qcow2", "-t", "none", "-o", &options];
            let fastest: Vec<&str> = direct.into_iter().chain(["-m", "16", "-W"]).collect();
            let sides = [
                making("zebu", &lab.zebu, &direct, source, &ours),
                making("QEMU", &lab.qemu_img, &fastest, source, &theirs),
            ];
            lab.compare(&format!("convert -c of {what}, {compression}, O_DIRECT"), sides)?;
        }
    }
    let with = |cache| ["-c", "-f", "raw", "-O", "qcow2", "-t", cache];
    let (direct, cached) = (with("none"), with("writeback"));
    let sides = [
        making("-t none", &lab.zebu, &direct, &file_system, &ours),
        making("-t writeback", &lab.zebu, &cached, &file_system, &theirs),
    ];
    lab.compare("convert -c of a file system: O_DIRECT beside the page cache", sides)?;

    // The same image for both: what QEMU wrote.
    remove(&theirs)?;
    run(lab
        .qemu_img()
        .args(["convert", "-c", "-W", "-m", "16", "-f", "raw", "-O", "qcow2"])
        .arg(&file_system)
        .arg(&theirs))?;
    let len = std::fs::metadata(&file_system).map_err(|e| e.to_string())?.len();
    let load = Load {
        block: SMALL,
        step: scattering_step(len, SMALL),
        count: lab.sized(20_000, 100_000),
        depth: 32,
        write: false,
    };
    let sides = [Program::Zebu, Program::Qemu].map(|program| load.on(lab, program, &theirs));
    lab.compare("4 KiB scattered reads of a compressed image, depth 32", sides)?;
    let load = Load { step: SMALL, ..load };
    let sides = [Program::Zebu, Program::Qemu].map(|program| load.on(lab, program, &theirs));
    lab.compare("4 KiB sequential reads of a compressed image, depth 32", sides)
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
        let len = |file: &Path| std::fs::metadata(file).map(|found| found.len()).map_err(|e| e.to_string());
        figures.push((Metric::MibPerSecond, len(from)? as f64 / 1048576.0 / usage.wall.as_secs_f64()));
        figures.push((Metric::ImageMib, len(to)? as f64 / 1048576.0));
        Ok(figures)
    };
    Side { label: label.to_owned(), run: Box::new(run) }
}

/// An ext4 file system with the machine's own programs and data in it.
fn file_system(lab: &Lab) -> Outcome<PathBuf> {
    let (tree, file) = (lab.file("tree"), lab.file("filesystem.raw"));
    std::fs::create_dir_all(&tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    for part in lab.sized(&TREES[..1], &TREES[..]) {
        run(Command::new("cp").arg("-a").arg(part).arg(&tree))?;
    }
    let out = std::fs::File::create(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    out.set_len(lab.sized(1 << 30, 2 << 30)).map_err(|e| format!("{}: {e}", file.display()))?;
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-d"]).arg(&tree).arg(&file))?;
    std::fs::remove_dir_all(&tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    Ok(file)
}

fn write_ones(file: &Path, len: usize) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", file.display());
    let mut out = std::fs::File::create(file).map_err(said)?;
    let chunk = vec![1; 1 << 20];
    for _ in 0..len / chunk.len() {
        std::io::Write::write_all(&mut out, &chunk).map_err(said)?;
    }
    out.sync_all().map_err(said)
}
