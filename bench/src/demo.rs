//! The command `demo`: the main job on a real file system image, with the figures of every step.

use crate::Outcome;
use crate::images::file_system;
use crate::metric::Metric;
use crate::process::{Usage, evict, find, measure_ok, qemu_version, run, shown};
use crate::table::{Table, number};
use crate::workspace::{cargo, target_dir};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The options of `demo`.
#[derive(Args)]
pub struct DemoArgs {
    /// The folder that the file system image is made of
    #[arg(long, default_value = "/usr")]
    folder: PathBuf,
    /// Where the images are made (a few GiB); default: the target directory
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keep the images
    #[arg(long)]
    keep: bool,
}

/// A step: `PROGRAM words sources target`. The target is zebu's or QEMU's own.
struct Step<'a> {
    name: &'a str,
    words: &'a [&'a str],
    /// Files that are read: out of the page cache before.
    sources: Vec<&'a Path>,
    target: Option<&'a str>,
    beside_qemu: bool,
}

/// The command `demo`.
pub fn command(args: &DemoArgs) -> Outcome {
    println!("building zebu (release)");
    run(cargo().args(["build", "--quiet", "--release", "--locked", "--package", "zebu-cli"]))?;
    let zebu = target_dir()?.join("release/zebu");
    let base = args.dir.clone().map_or_else(target_dir, Ok)?;
    let scratch = tempfile::TempDir::with_prefix_in("zebu-demo-", &base)
        .map_err(|e| format!("{}: {e}", base.display()))?;
    let dir = scratch.path();
    let raw = &dir.join("disk.raw");
    println!("making an ext4 image of {}", args.folder.display());
    file_system(raw, 1 << 30, &[&args.folder])?;
    let [qcow2, back] = &["zebu.qcow2", "zebu.raw"].map(|name| dir.join(name));
    let step = |name, words, sources, target| Step { name, words, sources, target, beside_qemu: true };
    let clone = step("clone", &["clone"][..], vec![qcow2.as_path()], Some("clone.qcow2"));
    let steps = [
        step("convert raw to qcow2", &["convert", "-f", "raw", "-O", "qcow2"], vec![raw], Some("qcow2")),
        step("convert qcow2 to raw", &["convert", "-f", "qcow2", "-O", "raw"], vec![qcow2], Some("raw")),
        step("check", &["check", "-f", "qcow2"], vec![qcow2], None),
        step("compare with the original", &["compare", "-f", "raw", "-F", "qcow2"], vec![raw, qcow2], None),
        step("compare the copy back", &["compare", "-f", "raw", "-F", "raw"], vec![raw, back], None),
        Step { beside_qemu: false, ..clone },
    ];
    let qemu = find("qemu-img");
    let mut table = Table::new(["step", "zebu s", "CPU s", "qemu-img s", "CPU s"]);
    for step in &steps {
        let ours = step.run(&zebu, &dir.join("zebu"))?;
        let theirs = match &qemu {
            Some(program) if step.beside_qemu => figures(&step.run(program, &dir.join("qemu"))?),
            _ => [const { String::new() }; 2],
        };
        table.row([step.name.to_owned()].into_iter().chain(figures(&ours)).chain(theirs));
    }
    if let Some(program) = &qemu {
        // QEMU's opinion of what zebu made; it must be a good one.
        let mut judge = Command::new(program);
        measure_ok(
            judge.args(["compare", "-f", "raw", "-F", "qcow2"]).arg(raw).arg(dir.join("zebu.clone.qcow2")),
        )?;
        println!("  QEMU agrees: {}", shown(&judge));
    }
    println!("\n{}", table.render());
    if let Some(version) = qemu_version() {
        println!("beside {version}; one run of each step, files out of the page cache before it");
    }
    if args.keep {
        println!("images kept in {}", scratch.keep().display());
    }
    Ok(())
}

impl Step<'_> {
    fn run(&self, program: &Path, own: &Path) -> Outcome<Usage> {
        for file in &self.sources {
            evict(file)?;
        }
        let mut command = Command::new(program);
        command.args(self.words).args(&self.sources);
        command.args(self.target.map(|name| own.with_extension(name)));
        println!("  {}", shown(&command));
        measure_ok(&mut command)
    }
}

fn figures(usage: &Usage) -> [String; 2] {
    let sample = crate::run::sample(usage);
    [Metric::WallSeconds, Metric::CpuSeconds].map(|wanted| {
        let value = sample.iter().find(|(metric, _)| *metric == wanted);
        number(value.map_or(0.0, |(_, value)| *value))
    })
}
