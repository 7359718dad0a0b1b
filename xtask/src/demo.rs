//! The command `demo`: the main job on a real file system image, with the figures of every step.

use crate::Outcome;
use crate::ab::{Metric, sample};
use crate::process::{Usage, evict, find, measure, measure_ok, output, run, shown};
use crate::setup::{self, Need};
use crate::table::{Table, number};
use crate::toolchain::{cargo, target_dir};
use clap::Args;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(Args)]
pub(crate) struct DemoArgs {
    /// The folder that the file system image is made of; default: /usr, or the first other one that is large enough
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Stop adding to the image at so many MiB of files
    #[arg(long, default_value_t = 1400)]
    mib: u64,
    /// Where the images are made (a few GiB); default: the target directory
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keep the images
    #[arg(long)]
    keep: bool,
}

/// The fewest bytes of files that make a real image.
const ENOUGH: u64 = 1 << 30;

pub(crate) fn run_demo(args: &DemoArgs) -> Outcome {
    setup::ensure(Need::Demo)?;
    println!("building zebu (release)");
    run(cargo().args(["build", "--quiet", "--release", "--locked", "--package", "zebu-cli"]))?;
    let zebu = target_dir()?.join("release/zebu");
    let base = args.dir.clone().map_or_else(target_dir, Ok)?;
    let scratch = tempfile::TempDir::with_prefix_in("zebu-demo-", &base)
        .map_err(|e| format!("{}: {e}", base.display()))?;
    let raw = scratch.path().join("disk.raw");
    make_image(args, scratch.path(), &raw)?;
    let qemu = find("qemu-img").filter(|_| setup::qemu_version().is_some());
    let rows = steps(&zebu, qemu.as_deref(), &raw, scratch.path())?;
    println!("\n{}", table(&rows, qemu.is_some()).render());
    if let Some(version) = setup::qemu_version() {
        println!("beside {version}; one run of each step, files out of the page cache before it");
    }
    if args.keep {
        println!("images kept in {}", scratch.keep().display());
    }
    Ok(())
}

/// An ext4 image of (a part of) a folder of this machine, made by mkfs.
fn make_image(args: &DemoArgs, dir: &Path, image: &Path) -> Outcome {
    let folder = choose(args.folder.as_deref())?;
    let (source, bytes) = gather(&folder, args.mib << 20, dir)?;
    // The file system's own tables, and free space as any disk has some.
    let size = (bytes + bytes / 4 + (256 << 20)).next_multiple_of(1 << 20);
    println!(
        "making an ext4 image of {} ({} MiB of files, {} MiB)",
        folder.display(),
        bytes >> 20,
        size >> 20
    );
    let mkfs = find("mkfs.ext4").ok_or("mkfs.ext4 is missing (package e2fsprogs)")?;
    let mut command = Command::new(mkfs);
    command.args(["-q", "-F", "-d"]).arg(&source).arg(image).arg(format!("{}k", size >> 10));
    measure_ok(command.stderr(Stdio::inherit()))?;
    if source != folder {
        std::fs::remove_dir_all(&source).map_err(|e| format!("{}: {e}", source.display()))?;
    }
    Ok(())
}

fn choose(wanted: Option<&Path>) -> Outcome<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let candidates = match wanted {
        Some(folder) => vec![folder.to_owned()],
        None => ["/usr".into()].into_iter().chain(home).chain(["/".into()]).collect(),
    };
    for folder in &candidates {
        if disk_usage(folder)? >= ENOUGH {
            return Ok(folder.clone());
        }
    }
    let tried: Vec<String> = candidates.iter().map(|f| f.display().to_string()).collect();
    Err(format!(
        "{} hold less than 1 GiB, too little for a real image: name a larger folder with --folder",
        tried.join(", ")
    ))
}

/// The tree for mkfs, which reads real files, and its bytes: the folder itself if it is not larger than `limit`,
/// else a copy of as much of it as that.
fn gather(folder: &Path, limit: u64, dir: &Path) -> Outcome<(PathBuf, u64)> {
    let total = disk_usage(folder)?;
    if total <= limit && folder != Path::new("/") {
        return Ok((folder.to_owned(), total));
    }
    let tree = dir.join("tree");
    let device = folder.metadata().map_err(|e| format!("{}: {e}", folder.display()))?.dev();
    let mut copy = Copier { left: limit, copied: 0, device, except: dir.to_owned() };
    copy.tree(folder, &tree)?;
    Ok((tree, copy.copied))
}

/// Copies regular files, links and folders of one file system until a budget is used up.
struct Copier {
    left: u64,
    copied: u64,
    device: u64,
    /// Where the copy itself goes.
    except: PathBuf,
}

impl Copier {
    fn tree(&mut self, from: &Path, to: &Path) -> Outcome {
        let said = |e: std::io::Error| format!("{}: {e}", from.display());
        std::fs::create_dir(to).map_err(said)?;
        let mut entries: Vec<_> = std::fs::read_dir(from).map_err(said)?.flatten().collect();
        // The same files in every run.
        entries.sort_by_key(|e| e.file_name());
        for entry in entries {
            let Ok(metadata) = entry.metadata() else { continue };
            let target = to.join(entry.file_name());
            if metadata.dev() != self.device || entry.path() == self.except {
                continue;
            }
            if metadata.is_dir() {
                self.tree(&entry.path(), &target)?;
            } else if metadata.is_symlink() {
                let link = std::fs::read_link(entry.path()).map_err(said)?;
                std::os::unix::fs::symlink(link, target).map_err(said)?;
            } else if metadata.is_file() && metadata.len() <= self.left {
                std::fs::copy(entry.path(), target).map_err(said)?;
                self.left -= metadata.len();
                self.copied += metadata.len();
            }
            if self.left < (1 << 20) {
                break;
            }
        }
        Ok(())
    }
}

fn disk_usage(folder: &Path) -> Outcome<u64> {
    let text = output(Command::new("du").args(["-sxk", "--"]).arg(folder))?;
    let kib: u64 =
        text.split_whitespace().next().and_then(|n| n.parse().ok()).ok_or("du: unexpected output")?;
    Ok(kib << 10)
}

/// One step with its figures.
struct Row {
    step: &'static str,
    bytes: u64,
    zebu: Usage,
    qemu: Option<Usage>,
}

fn steps(zebu: &Path, qemu: Option<&Path>, raw: &Path, dir: &Path) -> Outcome<Vec<Row>> {
    let bytes = std::fs::metadata(raw).map_err(|e| e.to_string())?.len();
    let path = |name: &str| dir.join(name);
    let mut rows = Vec::new();
    let mut step = |name: &'static str, words: &[&str], files: [&Path; 2], qemu_target: Option<&Path>| {
        let run = |program: &Path, target: &Path| {
            let mut command = Command::new(program);
            command.args(words).arg(files[0]);
            if target != Path::new("") {
                command.arg(target);
            }
            evict(files[0])?;
            let usage = measure_ok(&mut command)?;
            println!("  {}", shown(&command));
            Ok::<_, String>(usage)
        };
        let ours = run(zebu, files[1])?;
        let theirs = match (qemu, qemu_target) {
            (Some(program), Some(target)) => Some(run(program, target)?),
            _ => None,
        };
        rows.push(Row { step: name, bytes, zebu: ours, qemu: theirs });
        Ok::<_, String>(())
    };
    let (qcow2, back, clone, none) =
        (path("disk.qcow2"), path("back.raw"), path("clone.qcow2"), PathBuf::new());
    let (qemu_qcow2, qemu_back) = (path("qemu.qcow2"), path("qemu.raw"));
    step("convert raw to qcow2", &["convert", "-f", "raw", "-O", "qcow2"], [raw, &qcow2], Some(&qemu_qcow2))?;
    step(
        "convert qcow2 to raw",
        &["convert", "-f", "qcow2", "-O", "raw"],
        [&qcow2, &back],
        Some(&qemu_back),
    )?;
    step("check", &["check", "-f", "qcow2"], [&qcow2, &none], Some(&none))?;
    step("compare with the original", &["compare", "-f", "raw", "-F", "qcow2"], [raw, &qcow2], Some(&qcow2))?;
    step("compare the copy back", &["compare", "-f", "raw", "-F", "raw"], [raw, &back], Some(&back))?;
    step("clone", &["clone"], [&qcow2, &clone], None)?;
    if let Some(program) = qemu {
        judge(program, &["check", "-f", "qcow2"], &qcow2, None)?;
        judge(program, &["compare", "-f", "raw", "-F", "qcow2"], raw, Some(&clone))?;
    }
    Ok(rows)
}

/// QEMU's opinion of what zebu made; it must be a good one.
fn judge(qemu: &Path, words: &[&str], first: &Path, second: Option<&Path>) -> Outcome {
    let mut command = Command::new(qemu);
    command.args(words).arg(first).args(second);
    match measure(&mut command)?.code {
        Some(0) => {
            println!("  QEMU agrees: {}", shown(&command));
            Ok(())
        }
        code => Err(format!("QEMU does not agree: {}: exit code {code:?}", shown(&command))),
    }
}

fn table(rows: &[Row], with_qemu: bool) -> Table {
    let figures = |usage: Option<&Usage>, bytes: u64| match usage {
        None => [const { String::new() }; 3],
        Some(usage) => {
            let value = |metric| sample(usage).iter().find(|(m, _)| *m == metric).map_or(0.0, |(_, v)| *v);
            let wall = value(Metric::WallSeconds);
            [number(wall), number(value(Metric::CpuSeconds)), number(bytes as f64 / 1e6 / wall)]
        }
    };
    let theirs = ["qemu-img s", "CPU s", "MB/s"].into_iter().filter(|_| with_qemu);
    let mut table = Table::new(["step", "zebu s", "CPU s", "MB/s"].into_iter().chain(theirs));
    for row in rows {
        let theirs = figures(row.qemu.as_ref(), row.bytes).into_iter().filter(|_| with_qemu);
        table.row([row.step.to_owned()].into_iter().chain(figures(Some(&row.zebu), row.bytes)).chain(theirs));
    }
    table
}
