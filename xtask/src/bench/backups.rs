//! Compressed backups: time, size, what they leave in the page cache, memory, and what they cost others on the disk.

use super::compressed::FASTEST;
use super::compressible::Data;
use super::lab::{Lab, remove};
use super::page_cache::{cached_mib, watched};
use super::record::NOBODY;
use crate::Outcome;
use crate::ab::{Metric, Sample, Side, sample};
use crate::process::{evict, find, measure_ok, shown};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Who backs up, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maker {
    Zebu,
    QemuDirect,
    QemuBuffered,
}

/// What a copy through the page cache tells the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Advice {
    /// That it reads in order.
    Sequential,
    /// That what was copied is not needed any more, as it goes.
    DontNeed,
    /// The same, once, at the end.
    FinalDontNeed,
}

impl Advice {
    fn name(self) -> &'static str {
        match self {
            Advice::Sequential => "sequential",
            Advice::DontNeed => "dontneed as it goes",
            Advice::FinalDontNeed => "dontneed at the end",
        }
    }
}

impl Maker {
    fn label(self) -> &'static str {
        match self {
            Maker::Zebu => "zebu",
            Maker::QemuDirect => "QEMU, direct",
            Maker::QemuBuffered => "QEMU, buffered",
        }
    }

    fn command(self, lab: &Lab, compression: &str, source: &Path, target: &Path) -> Command {
        let cache = if self == Maker::QemuBuffered { "writeback" } else { "none" };
        let mut command = match self {
            Maker::Zebu => lab.zebu(),
            Maker::QemuDirect | Maker::QemuBuffered => lab.qemu_img(),
        };
        if self == Maker::Zebu {
            command.args(["backup", "-q", "-f", "raw", "--compression-type", compression]);
        } else {
            command
                .args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-T", cache, "-t", cache])
                .args(["-o", &format!("compression_type={compression}")])
                .args(FASTEST);
        }
        command.arg(source).arg(target);
        command
    }
}

/// The table.
pub(super) fn backup(lab: &Lab) -> Outcome {
    page_cache(lab)?;
    memory(lab)?;
    latency(lab)
}

/// Time, size, and what is left in the page cache.
fn page_cache(lab: &Lab) -> Outcome {
    let (ours, theirs) = (lab.file("ours"), lab.file("theirs"));
    for data in [Data::FileSystem, Data::Ones, Data::Noise] {
        // What zlib takes for the others is in the table of compressed images.
        let methods = if data == Data::FileSystem { &["zlib", "zstd"][..] } else { &["zstd"] };
        for compression in methods {
            let what = |other: &str| format!("backup of {}, {compression}, beside {other}", data.name());
            // The cache of the target is the same matter with both.
            let makers = match *compression {
                "zlib" => &[Maker::QemuDirect][..],
                _ => &[Maker::QemuDirect, Maker::QemuBuffered],
            };
            if !makers.iter().any(|maker| lab.wants(&what(maker.label()))) {
                continue;
            }
            let source = data.file(lab)?;
            let made = |maker, target| made_by(lab, maker, compression, &source, target);
            let others = makers.iter().map(|maker| (what(maker.label()), made(*maker, &theirs)));
            lab.compare_each(made(Maker::Zebu, &ours), others.collect())?;
        }
    }
    let what = |advice: Advice| {
        format!("backup of a file system beside a plain copy with posix_fadvise: {}", advice.name())
    };
    let advices = [Advice::Sequential, Advice::DontNeed, Advice::FinalDontNeed];
    if !advices.iter().any(|advice| lab.wants(&what(*advice))) {
        return Ok(());
    }
    let source = Data::FileSystem.file(lab)?;
    let others = advices.map(|advice| (what(advice), copied(advice, &source, &theirs)));
    lab.compare_each(made_by(lab, Maker::Zebu, "zlib", &source, &ours), others.into())
}

/// Memory of a backup of a full disk and of one that is large and empty but for a few places.
fn memory(lab: &Lab) -> Outcome {
    let name = "memory of a backup with --buffer-memory 64M: a file system, and 100 GiB that are sparse";
    if !lab.wants(name) {
        return Ok(());
    }
    let (full, ours, other) = (Data::FileSystem.file(lab)?, lab.file("ours"), lab.file("theirs"));
    let sparse = lab.file("sparse.raw");
    let said = |e: std::io::Error| format!("{}: {e}", sparse.display());
    let out = File::create(&sparse).map_err(said)?;
    out.set_len(100 << 30).map_err(said)?;
    let data = vec![7; 65536];
    for place in 0..100 {
        std::os::unix::fs::FileExt::write_all_at(&out, &data, place << 30).map_err(said)?;
    }
    drop(out);
    let labelled = |label: &str, source, target| Side {
        label: label.to_owned(),
        ..made_by(lab, Maker::Zebu, "zlib", source, target)
    };
    lab.compare(name, [labelled("zebu: full", &full, &ours), labelled("zebu: sparse", &sparse, &other)])
}

/// What another process feels that reads another file of the disk.
fn latency(lab: &Lab) -> Outcome {
    let (ours, theirs) = (lab.file("ours"), lab.file("theirs"));
    let what = |other: Option<Maker>| {
        let beside = other.map_or("an idle machine", Maker::label);
        format!("4 KiB random reads of another process during a backup, beside {beside}")
    };
    let others = [None, Some(Maker::QemuDirect), Some(Maker::QemuBuffered)];
    if !others.iter().any(|other| lab.wants(&what(*other))) {
        return Ok(());
    }
    let source = Data::FileSystem.file(lab)?;
    let read = Data::Noise.file(lab)?;
    let others = others.map(|other| (what(other), bothered(lab, other, &source, &theirs, &read)));
    lab.compare_each(bothered(lab, Some(Maker::Zebu), &source, &ours, &read), others.into())
}

/// A backup, with what it left.
fn made_by<'a>(
    lab: &'a Lab,
    maker: Maker,
    compression: &'static str,
    source: &Path,
    target: &Path,
) -> Side<'a> {
    let (source, target) = (source.to_owned(), target.to_owned());
    let run = move || {
        remove(&target)?;
        evict(&source)?;
        let files = [source.clone(), target.clone(), partial(&target)];
        let usage = watched(&files, || measure_ok(&mut maker.command(lab, compression, &source, &target)));
        let (usage, peak) = usage?;
        let mut figures = sample(&usage);
        figures.extend(left(&source, &target, peak)?);
        Ok(figures)
    };
    Side { label: maker.label().to_owned(), run: Box::new(run) }
}

/// The name that a backup has until it is complete.
fn partial(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.zebu-partial"))
}

fn left(source: &Path, target: &Path, peak: f64) -> Outcome<Sample> {
    let len = std::fs::metadata(target).map_err(|e| format!("{}: {e}", target.display()))?.len();
    Ok(vec![
        (Metric::ImageMib, len as f64 / 1048576.0),
        (Metric::SourceCachedMib, cached_mib(source)?),
        (Metric::TargetCachedMib, cached_mib(target)?),
        (Metric::PeakCachedMib, peak),
    ])
}

/// A copy through the page cache, not compressed: what it leaves is what is of interest.
fn copied(advice: Advice, source: &Path, target: &Path) -> Side<'static> {
    let (source, target) = (source.to_owned(), target.to_owned());
    let run = move || {
        remove(&target)?;
        evict(&source)?;
        let files = [source.clone(), target.clone()];
        let start = Instant::now();
        let ((), peak) = watched(&files, || copy_advised(advice, &source, &target))?;
        let mut figures = vec![(Metric::WallSeconds, start.elapsed().as_secs_f64())];
        figures.extend(left(&source, &target, peak)?);
        Ok(figures)
    };
    Side { label: "copy".into(), run: Box::new(run) }
}

fn copy_advised(advice: Advice, source: &Path, target: &Path) -> Outcome {
    /// Bytes after which what was copied is written and given up.
    const STRETCH: u64 = 16 << 20;
    let said = |e: std::io::Error| format!("copying {}: {e}", source.display());
    let mut from = File::open(source).map_err(said)?;
    let mut to = File::create(target).map_err(said)?;
    if advice == Advice::Sequential {
        advise(&from, 0, 0, libc::POSIX_FADV_SEQUENTIAL).map_err(said)?;
        advise(&to, 0, 0, libc::POSIX_FADV_SEQUENTIAL).map_err(said)?;
    }
    let mut chunk = vec![0; 1 << 20];
    let (mut at, mut given_up) = (0, 0);
    loop {
        let len = from.read(&mut chunk).map_err(said)?;
        to.write_all(chunk.get(..len).unwrap_or_default()).map_err(said)?;
        at += len as u64;
        if advice == Advice::DontNeed && (at - given_up >= STRETCH || len == 0) {
            // Pages that are not written yet stay.
            to.sync_data().map_err(said)?;
            advise(&from, given_up, at - given_up, libc::POSIX_FADV_DONTNEED).map_err(said)?;
            advise(&to, given_up, at - given_up, libc::POSIX_FADV_DONTNEED).map_err(said)?;
            given_up = at;
        }
        if len == 0 {
            break;
        }
    }
    to.sync_data().map_err(said)?;
    if advice == Advice::FinalDontNeed {
        advise(&from, 0, 0, libc::POSIX_FADV_DONTNEED).map_err(said)?;
        advise(&to, 0, 0, libc::POSIX_FADV_DONTNEED).map_err(said)?;
    }
    Ok(())
}

fn advise(file: &File, offset: u64, len: u64, advice: libc::c_int) -> std::io::Result<()> {
    // SAFETY: the descriptor is open for the whole call; the call touches no memory of ours.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice) }
    {
        0 => Ok(()),
        errno => Err(std::io::Error::from_raw_os_error(errno)),
    }
}

/// The 99th percentile of the latency of fio's reads while somebody (or nobody) backs up.
fn bothered<'a>(lab: &'a Lab, maker: Option<Maker>, source: &Path, target: &Path, read: &Path) -> Side<'a> {
    let (source, target, read) = (source.to_owned(), target.to_owned(), read.to_owned());
    let run = move || {
        remove(&target)?;
        evict(&source)?;
        evict(&read)?;
        let report = lab.file("fio.json");
        remove(&report)?;
        let fio = find("fio").ok_or("fio is missing")?;
        let mut command = Command::new(fio);
        command.args(["--name=reader", "--rw=randread", "--bs=4k", "--iodepth=1", "--ioengine=psync"]);
        command.args(["--direct=1", "--time_based", "--readonly", "--output-format=json"]);
        // A reader that is not always there.
        command.args(["--rate_iops=1000", &format!("--runtime={}", if maker.is_some() { 300 } else { 5 })]);
        command.arg(format!("--filename={}", read.display())).arg(format!("--output={}", report.display()));
        let mut reader = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| format!("cannot run {}: {e}", shown(&command)))?;
        let backed_up = match maker {
            Some(maker) => {
                std::thread::sleep(Duration::from_millis(500));
                let done = measure_ok(&mut maker.command(lab, "zstd", &source, &target)).map(drop);
                // It reports what it has when it is interrupted.
                let id = libc::pid_t::try_from(reader.id()).map_err(|e| e.to_string())?;
                // SAFETY: takes numbers; the process is our child and was not waited for.
                unsafe { libc::kill(id, libc::SIGINT) };
                done
            }
            None => Ok(()),
        };
        reader.wait().map_err(|e| e.to_string())?;
        backed_up?;
        let text = std::fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
        // It may say something before the report.
        let json = text.find('{').and_then(|at| text.get(at..)).unwrap_or_default();
        let json: Value = serde_json::from_str(json).map_err(|e| format!("fio's report: {e}"))?;
        let nanos = json["jobs"][0]["read"]["clat_ns"]["percentile"]["99.000000"].as_f64();
        Ok(vec![(Metric::LatencyP99Micros, nanos.ok_or("fio's report has no percentiles")? / 1000.0)])
    };
    Side { label: maker.map_or(NOBODY, Maker::label).to_owned(), run: Box::new(run) }
}
