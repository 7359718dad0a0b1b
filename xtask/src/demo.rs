//! The command `demo`: the main job on a real file system image, with the figures of every step.

use crate::Outcome;
use crate::ab::{Metric, sample};
use crate::process::{Usage, evict, find, measure, measure_ok, run, shown};
use crate::setup::{self, Need};
use crate::table::{Table, number};
use crate::toolchain::{cargo, target_dir};
use clap::Args;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[derive(Args)]
pub(crate) struct DemoArgs {
    /// The folder that the file system image is made of; default: a folder of /usr, or of the home directory, that
    /// holds a little more than 1 GiB
    #[arg(long)]
    folder: Option<PathBuf>,
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

/// An ext4 image of a folder of this machine, made by mkfs.
fn make_image(args: &DemoArgs, dir: &Path, image: &Path) -> Outcome {
    let choice = choose(args.folder.as_deref())?;
    let (source, bytes) = gather(&choice, dir)?;
    // The file system's own tables, and some free space as any disk has.
    let size = (bytes + bytes / 8 + (128 << 20)).next_multiple_of(1 << 20);
    println!(
        "making an ext4 image of {} ({} MiB of files, {} MiB)",
        choice.folder.display(),
        bytes >> 20,
        size >> 20
    );
    let mkfs = find("mkfs.ext4").ok_or("mkfs.ext4 is missing (package e2fsprogs)")?;
    let mut command = Command::new(mkfs);
    command.args(["-q", "-F", "-d"]).arg(&source).arg(image).arg(format!("{}k", size >> 10));
    measure_ok(command.stderr(Stdio::inherit()))?;
    if source != choice.folder {
        std::fs::remove_dir_all(&source).map_err(|e| format!("{}: {e}", source.display()))?;
    }
    Ok(())
}

/// A folder, and the bytes of disk that its files use.
struct Choice {
    folder: PathBuf,
    bytes: u64,
}

/// The smallest folder with enough in it; of those that the user named, that one.
fn choose(wanted: Option<&Path>) -> Outcome<Choice> {
    if let Some(folder) = wanted {
        let own = usage(folder, 0).into_iter().find(|c| c.bytes >= ENOUGH);
        return own.ok_or_else(|| format!("{} holds less than 1 GiB", folder.display()));
    }
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let places = [PathBuf::from("/usr")].into_iter().chain(home).chain([PathBuf::from("/")]);
    for place in places {
        let enough = usage(&place, 3).into_iter().filter(|c| c.bytes >= ENOUGH);
        if let Some(choice) = enough.min_by_key(|c| c.bytes) {
            return Ok(choice);
        }
    }
    Err("no folder of this machine holds 1 GiB: name one with --folder".into())
}

/// The folder and those in it, to a depth, with what they hold on the folder's own file system. What can't be read is
/// left out, as it will be from the image.
fn usage(folder: &Path, depth: u32) -> Vec<Choice> {
    let mut command = Command::new("du");
    command.args(["-xk", &format!("--max-depth={depth}"), "--"]).arg(folder).stderr(Stdio::null());
    let text = command.output().map(|out| out.stdout).unwrap_or_default();
    let line = |line: &str| {
        let (kib, folder) = line.split_once('\t')?;
        Some(Choice { folder: folder.into(), bytes: kib.parse::<u64>().ok()? << 10 })
    };
    String::from_utf8_lossy(&text).lines().filter_map(line).collect()
}

/// The tree for mkfs, which reads real files, and its bytes: the folder itself, unless it is so large that a copy of a
/// part of it takes less time.
fn gather(choice: &Choice, dir: &Path) -> Outcome<(PathBuf, u64)> {
    if choice.bytes <= 2 * ENOUGH && choice.folder != Path::new("/") {
        return Ok((choice.folder.clone(), choice.bytes));
    }
    let tree = dir.join("tree");
    let said = |e: std::io::Error| format!("{}: {e}", choice.folder.display());
    let device = choice.folder.metadata().map_err(said)?.dev();
    let mut copy = Copier { left: ENOUGH + ENOUGH / 16, copied: 0, device, except: dir.to_owned() };
    copy.tree(&choice.folder, &tree)?;
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

/// One step with its figures.
struct Row {
    step: &'static str,
    /// Bytes that the step moves or reads; `None` where it works on tables alone, so that no rate is given.
    bytes: Option<u64>,
    zebu: Usage,
    qemu: Option<Usage>,
}

/// One step to be measured: `PROGRAM words source target`.
struct Step<'a> {
    name: &'static str,
    words: &'a [&'a str],
    /// Files that are read: out of the page cache before.
    source: &'a [&'a Path],
    /// The file that zebu writes, and the one that QEMU writes; neither has to be there.
    targets: [Option<&'a Path>; 2],
    beside_qemu: bool,
    bytes: Option<u64>,
}

impl Step<'_> {
    fn run(&self, zebu: &Path, qemu: Option<&Path>) -> Outcome<Row> {
        let run = |program: &Path, target: Option<&Path>| {
            for file in self.source {
                evict(file)?;
            }
            let mut command = Command::new(program);
            command.args(self.words).args(self.source).args(target);
            println!("  {}", shown(&command));
            measure_ok(&mut command)
        };
        let [ours, theirs] = self.targets;
        let zebu = run(zebu, ours)?;
        let qemu = qemu.filter(|_| self.beside_qemu).map(|program| run(program, theirs)).transpose()?;
        Ok(Row { step: self.name, bytes: self.bytes, zebu, qemu })
    }
}

fn steps(zebu: &Path, qemu: Option<&Path>, raw: &Path, dir: &Path) -> Outcome<Vec<Row>> {
    let bytes = Some(std::fs::metadata(raw).map_err(|e| e.to_string())?.len());
    let [qcow2, back, clone, qemu_qcow2, qemu_back] =
        ["disk.qcow2", "back.raw", "clone.qcow2", "qemu.qcow2", "qemu.raw"].map(|name| dir.join(name));
    let steps = [
        Step {
            name: "convert raw to qcow2",
            words: &["convert", "-f", "raw", "-O", "qcow2"],
            source: &[raw],
            targets: [Some(&qcow2), Some(&qemu_qcow2)],
            beside_qemu: true,
            bytes,
        },
        Step {
            name: "convert qcow2 to raw",
            words: &["convert", "-f", "qcow2", "-O", "raw"],
            source: &[&qcow2],
            targets: [Some(&back), Some(&qemu_back)],
            beside_qemu: true,
            bytes,
        },
        Step {
            name: "check",
            words: &["check", "-f", "qcow2"],
            source: &[&qcow2],
            targets: [None, None],
            beside_qemu: true,
            bytes: None,
        },
        Step {
            name: "compare with the original",
            words: &["compare", "-f", "raw", "-F", "qcow2"],
            source: &[raw, &qcow2],
            targets: [None, None],
            beside_qemu: true,
            bytes,
        },
        Step {
            name: "compare the copy back",
            words: &["compare", "-f", "raw", "-F", "raw"],
            source: &[raw, &back],
            targets: [None, None],
            beside_qemu: true,
            bytes,
        },
        Step {
            name: "clone",
            words: &["clone"],
            source: &[&qcow2],
            targets: [Some(&clone), None],
            beside_qemu: false,
            bytes: None,
        },
    ];
    let rows = steps.iter().map(|step| step.run(zebu, qemu)).collect::<Outcome<Vec<Row>>>()?;
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
    let figures = |usage: Option<&Usage>, bytes: Option<u64>| match usage {
        None => [const { String::new() }; 3],
        Some(usage) => {
            let value = |metric| sample(usage).iter().find(|(m, _)| *m == metric).map_or(0.0, |(_, v)| *v);
            let wall = value(Metric::WallSeconds);
            let rate = bytes.map(|bytes| number(bytes as f64 / 1e6 / wall)).unwrap_or_default();
            [number(wall), number(value(Metric::CpuSeconds)), rate]
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
