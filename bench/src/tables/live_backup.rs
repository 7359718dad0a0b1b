//! Compressed backups of a disk that a guest uses: zebu's beside QEMU's job, and what they cost the guest and others.

use super::backup::{cached_mib, neighbour};
use crate::Outcome;
use crate::fio::{Ask, Steady, fio_once};
use crate::images::Content;
use crate::lab::{Lab, mib, remove, settle};
use crate::metric::{Metric, Sample};
use crate::process::{evict, run};
use crate::qmp::Qmp;
use crate::run::Side;
use crate::servers::{Disk, Door, Running, Server};
use Extent::{Full, Incremental};
use Waiting::{Guest, Neighbour};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long latency is measured without a backup.
const IDLE: Duration = Duration::from_secs(10);

/// The maker of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maker {
    /// At full speed.
    ZebuFull,
    /// As the disk's latency allows.
    Zebu,
    Qemu,
    /// A server of zebu, and no backup.
    Nobody,
}

impl Maker {
    fn name(self) -> &'static str {
        match self {
            Self::ZebuFull => "zebu, full speed",
            Self::Zebu => "zebu, adaptive",
            Self::Qemu => "QEMU",
            Self::Nobody => "no backup",
        }
    }

    fn server(self) -> Server {
        if self == Self::Qemu { Server::Qemu } else { Server::Zebu }
    }
}

/// The extent of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    Full,
    /// Clusters that a bitmap has recorded since a full backup.
    Incremental,
}

/// The one whose latency is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    /// 700 reads and 300 writes a second of 4 KiB, at most 4 at once.
    Guest,
    /// 1,000 reads a second of another file of the disk.
    Neighbour,
}

/// The files of a row.
struct Files {
    /// Bytes of the disk.
    size: u64,
    /// The image that is copied for each side.
    source: PathBuf,
    /// A file that nobody else uses.
    other: PathBuf,
    disk: PathBuf,
    full: PathBuf,
    target: PathBuf,
    control: PathBuf,
}

/// The table.
pub(super) fn live_backup(lab: &Lab) -> Outcome {
    let raw = Content::FileSystem.file(lab)?;
    let file = |name: &str| lab.file(name);
    let files = &Files {
        size: std::fs::metadata(&raw).map_err(|e| format!("{}: {e}", raw.display()))?.len(),
        source: file("source.qcow2"),
        other: Content::Noise.file(lab)?,
        disk: file("disk.qcow2"),
        full: file("full.qcow2"),
        target: file("target.qcow2"),
        control: file("control"),
    };
    run(lab.zebu().args(["convert", "-q", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&files.source))?;
    remove(&raw)?;
    for (extent, compression, waiting, name) in [
        (Full, "zstd", Guest, "live backup, zstd: the guest's requests"),
        (Full, "zlib", Guest, "live backup, zlib: the guest's requests"),
        (Incremental, "zstd", Guest, "live increment of an eighth, zstd: the guest's requests"),
        (Incremental, "zlib", Guest, "live increment of an eighth, zlib: the guest's requests"),
        (Full, "zstd", Neighbour, "live backup, zstd: reads of another process"),
        (Full, "zlib", Neighbour, "live backup, zlib: reads of another process"),
    ] {
        let side = |maker: Maker| {
            Side::new(maker.name(), move || measured(lab, files, maker, extent, compression, waiting))
        };
        lab.row(name, [Maker::ZebuFull, Maker::Zebu, Maker::Qemu, Maker::Nobody].map(side));
    }
    Ok(())
}

fn measured(
    lab: &Lab,
    files: &Files,
    maker: Maker,
    extent: Extent,
    compression: &str,
    waiting: Waiting,
) -> Outcome<Sample> {
    for made in [&files.disk, &files.full, &files.target, &files.control] {
        remove(made)?;
    }
    run(Command::new("cp").arg(&files.source).arg(&files.disk))?;
    evict(&files.disk)?;
    evict(&files.other)?;
    let disk = Disk { control: Some(&files.control), ..Disk::new(&files.disk, "qcow2") };
    let server = Running::start(lab, maker.server(), Door::Nbd, &disk)?;
    let uri = format!("--uri=nbd+unix:///?socket={}", server.path().display());
    let size = format!("--size={}", files.size);
    let mut backups = Backups { lab, files, maker, compression, qmp: None };
    if maker == Maker::Qemu {
        backups.qmp = Some(Qmp::connect(&files.control)?);
    }
    if extent == Extent::Incremental && maker != Maker::Nobody {
        backups.make(&files.full, extent, None)?;
        let ask = Ask { block: 1 << 20, align: 1 << 20, ..Ask::random("randwrite", 4) };
        fio_once(ask, files.size / 8, &["--ioengine=nbd", &uri])?;
        settle()?;
    }
    let guest = ["--rw=randrw", "--rwmixread=70", "--bs=4k", "--ioengine=nbd", "--iodepth=4"];
    let load = match waiting {
        Waiting::Guest => Steady::start(
            &[&guest[..], &["--rate_iops=700,300", "--unified_rw_reporting=1", &size, &uri]].concat(),
            &lab.file("fio.json"),
        )?,
        Waiting::Neighbour => neighbour(lab, &files.other)?,
    };
    std::thread::sleep(Duration::from_secs(1));
    let kind = if waiting == Waiting::Guest { "mixed" } else { "read" };
    if maker == Maker::Nobody {
        std::thread::sleep(IDLE);
        return load.end(kind);
    }
    // `fincore` takes a processor for milliseconds, which a neighbour's p99 would show.
    let pages = (waiting == Waiting::Guest).then(|| Pages::watch(files));
    let (begin, before) = (Instant::now(), server.cpu_seconds()?);
    let previous = (extent == Extent::Incremental).then_some(files.full.as_path());
    backups.make(&files.target, extent, previous)?;
    let seconds = begin.elapsed().as_secs_f64();
    let cpu = server.cpu_seconds()? - before;
    let (source, target) = match pages {
        Some(pages) => pages.most()?,
        None => (cached_mib(&files.disk)?, cached_mib(&files.target)?),
    };
    let mut figures = vec![(Metric::WallSeconds, seconds), (Metric::CpuSeconds, cpu)];
    figures.extend(load.end(kind)?);
    figures.extend([
        (Metric::ImageMib, mib(&files.target)?),
        (Metric::SourceCachedMib, source),
        (Metric::TargetCachedMib, target),
    ]);
    Ok(figures)
}

/// The backups of one server.
struct Backups<'a> {
    lab: &'a Lab,
    files: &'a Files,
    maker: Maker,
    compression: &'a str,
    qmp: Option<Qmp>,
}

impl Backups<'_> {
    /// Makes a backup, to its end; the target is durable then.
    fn make(&mut self, target: &Path, extent: Extent, previous: Option<&Path>) -> Outcome {
        match &mut self.qmp {
            Some(qmp) => by_qemu(self.lab, qmp, self.files.size, self.compression, target, extent, previous),
            None => self.by_zebu(target, extent, previous),
        }
    }

    fn by_zebu(&self, target: &Path, extent: Extent, previous: Option<&Path>) -> Outcome {
        let mut command = self.lab.zebu();
        command.arg("ctl").arg(&self.files.control).args(["backup-start", "-w", "-p=none"]);
        command.args(["--compression-type", self.compression]);
        command.args(["--speed", if self.maker == Maker::Zebu { "adaptive" } else { "full" }]);
        if extent == Extent::Incremental {
            command.args(["--bitmap", "changes"]);
        }
        if let Some(previous) = previous {
            command.arg("--previous").arg(previous);
        }
        run(command.arg("").arg(target).stdout(std::process::Stdio::null()))
    }
}

/// `blockdev-backup` in a storage daemon, to an image that it opens with O_DIRECT.
fn by_qemu(
    lab: &Lab,
    qmp: &mut Qmp,
    size: u64,
    compression: &str,
    target: &Path,
    extent: Extent,
    previous: Option<&Path>,
) -> Outcome {
    let mut create = lab.qemu_img();
    create.args(["create", "-q", "-f", "qcow2", "-o", &format!("compression_type={compression}")]);
    if let Some(previous) = previous {
        create.args(["-F", "qcow2", "-b"]).arg(previous);
    }
    run(create.arg(target).arg(size.to_string()))?;
    evict(target)?;
    let file = json!({
        "driver": "file", "filename": target, "aio": "io_uring", "cache": { "direct": true },
    });
    qmp.execute("blockdev-add", &json!({ "driver": "qcow2", "node-name": "target", "file": file }))?;
    if extent == Extent::Incremental && previous.is_none() {
        qmp.execute("block-dirty-bitmap-add", &json!({ "node": "disk", "name": "changes" }))?;
    }
    let mut job = json!({
        "job-id": "backup", "device": "disk", "target": "target", "sync": "full", "compress": true,
    });
    if previous.is_some() {
        (job["sync"], job["bitmap"]) = ("incremental".into(), "changes".into());
    }
    qmp.execute("blockdev-backup", &job)?;
    let ended = qmp.wait_for("BLOCK_JOB_COMPLETED")?;
    if let Some(error) = ended["data"]["error"].as_str() {
        return Err(format!("QEMU's job: {error}"));
    }
    qmp.execute("blockdev-del", &json!({ "node-name": "target" }))?;
    std::fs::File::open(target)
        .and_then(|file| file.sync_all())
        .map_err(|e| format!("{}: {e}", target.display()))
}

/// Looks all along at how much of source and target is in the page cache.
struct Pages {
    stop: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<Outcome<(f64, f64)>>,
}

impl Pages {
    fn watch(files: &Files) -> Self {
        let (stop, stopped) = mpsc::channel();
        let (source, target) = (files.disk.clone(), files.target.clone());
        let thread = std::thread::spawn(move || {
            let mut most = (0.0f64, 0.0f64);
            loop {
                most.0 = most.0.max(cached_mib(&source)?);
                if target.exists() {
                    most.1 = most.1.max(cached_mib(&target)?);
                }
                if stopped.recv_timeout(Duration::from_millis(100)) != Err(RecvTimeoutError::Timeout) {
                    return Ok(most);
                }
            }
        });
        Self { stop, thread }
    }

    /// MiB of the source and of the target, at most.
    fn most(self) -> Outcome<(f64, f64)> {
        drop(self.stop);
        self.thread.join().map_err(|_| "the watch of the page cache ended".to_owned())?
    }
}
