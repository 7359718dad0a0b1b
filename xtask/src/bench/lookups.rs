//! Instructions that a lookup takes, by the size of slices; counted by callgrind, so that neither the disk nor the
//! processor's caches have a say in it.

use super::lab::{Lab, remove};
use super::mapping_images::{Data, Layout, allocated};
use crate::Outcome;
use crate::ab::{Metric, Side};
use crate::process::{find, output_of_both, run, shown};
use crate::toolchain::{cargo, target_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 16 << 30;
/// Requests of two runs; what both have, the start and the loading of the slices, cancels out.
const REQUESTS: [u64; 2] = [10_000, 30_000];

/// Everything fits: slices of 4 KiB beside whole tables, one request at a time.
pub(super) fn lookups(lab: &Lab) -> Outcome {
    let zebu = build()?;
    let image = allocated(lab, &lab.dir, SIZE, 64 << 10, Layout::Shuffled, Data::Holes)?;
    let side = |label: &str, slice: u64| {
        let (zebu, image) = (zebu.clone(), image.clone());
        let run = move || {
            let [few, many] = REQUESTS.map(|count| instructions(&zebu, &image, slice, count));
            let more = (many? - few?) / (REQUESTS[1] - REQUESTS[0]) as f64;
            Ok(vec![(Metric::InstructionsPerRequest, more)])
        };
        Side { label: label.to_owned(), run: Box::new(run) }
    };
    let sides = [side("zebu, 4 KiB", 4096), side("zebu, 64 KiB", 65536)];
    lab.compare("all cached: 4 KiB slices beside whole tables, instructions", sides)?;
    remove(&image)
}

/// A zebu that makes its system calls through libc: valgrind hides the vDSO that it would look at else.
fn build() -> Outcome<PathBuf> {
    let target = target_dir()?.join("callgrind");
    let mut build = cargo();
    build.args(["build", "--quiet", "--release", "--locked", "--package", "zebu-cli", "--target-dir"]);
    run(build.arg(&target).env("RUSTFLAGS", "--cfg=rustix_use_libc"))?;
    Ok(target.join("release/zebu"))
}

fn instructions(zebu: &Path, image: &Path, slice: u64, count: u64) -> Outcome<f64> {
    let mut command = Command::new(find("valgrind").ok_or("valgrind is missing")?);
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(zebu);
    command.args(["bench", "-q", "-t", "none", "-i", "threads", "-d", "1", "-s", "4k", "--random"]);
    command.args(["-c", &count.to_string(), "--image-opts"]);
    command.arg(format!(
        "driver=qcow2,file.filename={},cache-size=64M,l2-cache-entry-size={slice},extent-index=off",
        image.display()
    ));
    let text = output_of_both(&mut command)?;
    text.lines()
        .find_map(|line| line.split("Collected :").nth(1)?.trim().parse().ok())
        .ok_or_else(|| format!("{}: no count in its output", shown(&command)))
}
