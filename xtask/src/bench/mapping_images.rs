//! Images for measuring the mapping: what their tables say matters, not what is in their clusters.

use super::lab::{Lab, remove};
use crate::Outcome;
use crate::process::run;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// In which order clusters lie in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// As on the virtual disk.
    Sequential,
    /// No two neighbours are neighbours: cluster i lies where cluster `i * k mod n` of a sequential image lies, for an
    /// odd k near the golden section of n, the number of clusters, which is a power of two.
    Shuffled,
}

impl Layout {
    pub(super) fn name(self) -> &'static str {
        match self {
            Layout::Sequential => "sequential",
            Layout::Shuffled => "shuffled",
        }
    }
}

/// What is in the clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    /// Nothing: holes of the file.
    Holes,
    /// Bytes.
    Written,
    /// Bytes in the first 4 KiB of every `step` bytes.
    FirstBlocks { step: u64 },
}

impl Data {
    pub(super) fn name(self) -> &'static str {
        match self {
            Data::Holes => "never written",
            Data::Written => "written",
            Data::FirstBlocks { .. } => "first blocks written",
        }
    }
}

/// Writes what is to be in a disk that has place for it all.
fn write(lab: &Lab, file: &Path, format: &str, size: u64, data: Data) -> Outcome {
    let Data::FirstBlocks { step } = data else { return Ok(()) };
    let mut fill = lab.zebu();
    fill.args(["bench", "-q", "-w", "-t", "none", "--pattern", "7", "-f", format]);
    fill.args(["-s", "4k", "-S", &step.to_string(), "-c", &(size / step).to_string()]);
    run(fill.arg(file))
}

/// A qcow2 image with all clusters allocated, in `dir`.
pub(super) fn allocated(
    lab: &Lab,
    dir: &Path,
    size: u64,
    cluster: u64,
    layout: Layout,
    data: Data,
) -> Outcome<PathBuf> {
    let image = dir.join(format!("{}-{size}-{cluster}.qcow2", layout.name()));
    let preallocation = if data == Data::Written { "full" } else { "metadata" };
    let options = format!("cluster_size={cluster},preallocation={preallocation}");
    run(lab
        .qemu_img()
        .args(["create", "-q", "-f", "qcow2", "-o", &options])
        .arg(&image)
        .arg(size.to_string()))?;
    write(lab, &image, "qcow2", size, data)?;
    match layout {
        Layout::Shuffled => shuffle(&image)?,
        Layout::Sequential => crate::process::evict(&image)?,
    }
    Ok(image)
}

/// A raw file of the same size.
pub(super) fn raw(lab: &Lab, size: u64, data: Data) -> Outcome<PathBuf> {
    let file = lab.dir.join(format!("{size}.raw"));
    let said = |e: std::io::Error| format!("{}: {e}", file.display());
    File::create(&file).and_then(|f| f.set_len(size)).map_err(said)?;
    if data == Data::Written {
        super::lab::fill(&file, size)?;
    }
    write(lab, &file, "raw", size, data)?;
    Ok(file)
}

/// Gives the entries of all L2 tables another order. What was written to them is on the disk then, and not in the page cache.
pub(super) fn shuffle(image: &Path) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", image.display());
    let file = File::options().read(true).write(true).open(image).map_err(said)?;
    let mut header = [0; 48];
    file.read_exact_at(&mut header, 0).map_err(said)?;
    let field = |at: usize, len: usize| header[at..at + len].iter().fold(0u64, |n, b| n << 8 | u64::from(*b));
    let cluster = 1u64 << field(20, 4);
    let (entries, l1_offset) = (field(36, 4), field(40, 8));
    let words = |offset: u64, count: u64| -> Outcome<Vec<u64>> {
        let mut bytes = vec![0; (count * 8) as usize];
        file.read_exact_at(&mut bytes, offset).map_err(said)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect())
    };
    let tables: Vec<u64> =
        words(l1_offset, entries)?.iter().map(|entry| entry & 0x00ff_ffff_ffff_fe00).collect();
    let mut clusters = Vec::new();
    for table in &tables {
        clusters.extend(words(*table, cluster / 8)?);
    }
    while clusters.last() == Some(&0) {
        clusters.pop();
    }
    let n = clusters.len();
    if !n.is_power_of_two() {
        return Err(format!("{}: {n} clusters can't be shuffled", image.display()));
    }
    let step = (n as f64 * 0.381_966) as usize | 1;
    let shuffled: Vec<u8> = (0..n).flat_map(|i| clusters[i * step % n].to_be_bytes()).collect();
    for (table, bytes) in tables.iter().zip(shuffled.chunks(cluster as usize)) {
        file.write_all_at(bytes, *table).map_err(said)?;
    }
    crate::process::evict(image)
}

/// A chain of `images` on a disk of `size` bytes, each with a random part of about `1/images` of its clusters, written
/// whole. Returns the top.
pub(super) fn chain(lab: &Lab, dir: &Path, size: u64, cluster: u64, images: u64) -> Outcome<PathBuf> {
    let mut below: Option<PathBuf> = None;
    for level in 0..images {
        let image = dir.join(format!("chain-{images}-{level}.qcow2"));
        let mut create = lab.zebu();
        create.args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={cluster}")]);
        run(create.arg(&image).arg(size.to_string()))?;
        let mut fill = lab.zebu();
        fill.args(["bench", "-q", "-w", "--pattern", "7"]).arg(format!("--random={}", level + 1));
        fill.args(["-s", &cluster.to_string(), "-c", &(size / cluster / images).max(1).to_string()]);
        run(fill.arg(&image))?;
        // Afterwards, or each image would be filled through all those below.
        if let Some(below) = &below {
            run(lab.zebu().args(["rebase", "-u", "-F", "qcow2", "-b"]).arg(below).arg(&image))?;
        }
        below = Some(image);
    }
    below.ok_or_else(|| "a chain of no images".to_owned())
}

/// Removes what [`chain`] made.
pub(super) fn remove_chain(dir: &Path, images: u64) -> Outcome {
    (0..images).try_for_each(|level| remove(&dir.join(format!("chain-{images}-{level}.qcow2"))))
}

/// Copies a file to where it is needed.
pub(super) fn copy_sparse(from: &Path, to: &Path) -> Outcome {
    run(Command::new("cp").args(["--sparse=always"]).arg(from).arg(to))
}
