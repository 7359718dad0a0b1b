//! Files and images for the tables: data of several kinds, and images whose tables say what a table asks about.

use crate::Outcome;
use crate::lab::{Lab, remove};
use crate::process::{evict, run};
use crate::programs::LARGE;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The content of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// An ext4 file system with the machine's own programs and data in it.
    FileSystem,
    /// The same, four times as large: so that starting and ending count for little.
    LargeFileSystem,
    /// Bytes of 1: the data of the report of 2021.
    Ones,
    /// Nothing that could become shorter.
    Noise,
}

impl Content {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Content::FileSystem | Content::LargeFileSystem => "a file system",
            Content::Ones => "ones",
            Content::Noise => "noise",
        }
    }

    /// The file, made if it is not there.
    pub(crate) fn file(self, lab: &Lab) -> Outcome<PathBuf> {
        let file = lab.file(&format!("{self:?}.raw"));
        if !file.exists() {
            match self {
                Content::FileSystem => file_system(&file, lab.sized(512 << 20, 1 << 30), &programs())?,
                Content::LargeFileSystem => file_system(&file, lab.sized(512 << 20, 4 << 30), &programs())?,
                Content::Ones => fill(&file, lab.sized(256 << 20, 1000 << 20), |chunk| chunk.fill(1))?,
                Content::Noise => noise(&file, lab.sized(128 << 20, 512 << 20))?,
            }
        }
        Ok(file)
    }
}

/// Folders of a machine's own programs.
fn programs() -> [&'static Path; 4] {
    ["/usr/bin", "/usr/share", "/usr/lib", "/usr/include"].map(Path::new)
}

/// An ext4 file system of `size` bytes, nearly full of files of `folders`, in the order of their names.
pub(crate) fn file_system(image: &Path, size: u64, folders: &[&Path]) -> Outcome {
    let tree = image.with_extension("tree");
    std::fs::create_dir_all(&tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    // cp would follow its list to the end: the list is cut instead.
    let script = "find \"$@\" -xdev -type f -size -64M -printf '%s %p\\n' 2>/dev/null | sort -k2 \
                  | awk -v most=\"$MOST\" '{ sum += $1 + 2048; if (sum > most) exit; sub(/^[0-9]+ /, \"\"); print }' \
                  | tar -C / -cf - --ignore-failed-read -T - 2>/dev/null | tar -C \"$TREE\" -xf -";
    let mut copy = Command::new("sh");
    copy.args(["-c", script, "sh"]).args(folders.iter().filter(|folder| folder.is_dir()));
    let done = run(copy.env("MOST", (size / 10 * 8).to_string()).env("TREE", &tree));
    File::create(image).and_then(|f| f.set_len(size)).map_err(|e| format!("{}: {e}", image.display()))?;
    let made =
        done.and_then(|()| run(Command::new("mkfs.ext4").args(["-q", "-F", "-d"]).arg(&tree).arg(image)));
    std::fs::remove_dir_all(&tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    made
}

/// Fills a file with pseudo-random bytes (xorshift64*: fast, and nothing that a file system could compress).
pub(crate) fn noise(file: &Path, len: u64) -> Outcome {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    fill(file, len, |chunk| {
        for word in chunk.chunks_exact_mut(8) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            word.copy_from_slice(&state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
        }
    })
}

fn fill(file: &Path, len: u64, mut next: impl FnMut(&mut [u8])) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", file.display());
    let mut out = File::create(file).map_err(said)?;
    let mut chunk = vec![0; LARGE as usize];
    for _ in 0..len / LARGE {
        next(&mut chunk);
        out.write_all(&chunk).map_err(said)?;
    }
    out.sync_all().map_err(said)
}

/// The order of clusters in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// As on the virtual disk.
    Sequential,
    /// No two neighbours are neighbours: cluster i lies where cluster `i * k mod n` of a sequential image lies, for an
    /// odd k near the golden section of n, the number of clusters, which is a power of two.
    Shuffled,
}

impl Layout {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Layout::Sequential => "sequential",
            Layout::Shuffled => "shuffled",
        }
    }
}

/// The content of the clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Data {
    /// Nothing: holes of the file.
    Holes,
    /// Bytes.
    Written,
    /// Bytes in the first 4 KiB of every `step` bytes.
    FirstBlocks { step: u64 },
}

impl Data {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Data::Holes => "never written",
            Data::Written => "written",
            Data::FirstBlocks { .. } => "first blocks written",
        }
    }

    fn write_first_blocks(self, lab: &Lab, file: &Path, format: &str, size: u64) -> Outcome {
        let Data::FirstBlocks { step } = self else { return Ok(()) };
        let mut fill = lab.zebu();
        fill.args(["bench", "-q", "-w", "-t", "none", "--pattern", "7", "-f", format]);
        fill.args(["-s", "4k", "-S", &step.to_string(), "-c", &(size / step).to_string()]);
        run(fill.arg(file))
    }
}

/// An image of a disk of `size` bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocated {
    pub(crate) size: u64,
    pub(crate) cluster: u64,
    pub(crate) layout: Layout,
    pub(crate) data: Data,
}

impl Allocated {
    /// Makes the image, with all clusters allocated, in `dir`.
    pub(crate) fn make(self, lab: &Lab, dir: &Path) -> Outcome<PathBuf> {
        let Self { size, cluster, layout, data } = self;
        let image = dir.join(format!("{}-{size}-{cluster}.qcow2", layout.name()));
        let preallocation = if data == Data::Written { "full" } else { "metadata" };
        lab.create(&image, &format!("cluster_size={cluster},preallocation={preallocation}"), size)?;
        data.write_first_blocks(lab, &image, "qcow2", size)?;
        match layout {
            Layout::Shuffled => shuffle(&image)?,
            Layout::Sequential => evict(&image)?,
        }
        Ok(image)
    }
}

/// A raw file.
pub(crate) fn raw(lab: &Lab, size: u64, data: Data) -> Outcome<PathBuf> {
    let file = lab.file(&format!("{size}.raw"));
    File::create(&file).and_then(|f| f.set_len(size)).map_err(|e| format!("{}: {e}", file.display()))?;
    if data == Data::Written {
        noise(&file, size)?;
    }
    data.write_first_blocks(lab, &file, "raw", size)?;
    Ok(file)
}

/// Gives the entries of all L2 tables another order. What was written to them is on the disk then, and not in the page cache.
pub(crate) fn shuffle(image: &Path) -> Outcome {
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
    evict(image)
}

/// A chain of images on one disk, each with a random part of about `1/images` of its clusters, written whole; removed on
/// drop.
pub(crate) struct Chain {
    images: Vec<PathBuf>,
}

impl Chain {
    pub(crate) fn make(lab: &Lab, size: u64, cluster: u64, images: u64) -> Outcome<Self> {
        let mut chain = Self { images: Vec::new() };
        for level in 0..images {
            let image = lab.file(&format!("chain-{images}-{level}.qcow2"));
            lab.create(&image, &format!("cluster_size={cluster}"), size)?;
            let mut fill = lab.zebu();
            fill.args(["bench", "-q", "-w", "--pattern", "7"]).arg(format!("--random={}", level + 1));
            fill.args(["-s", &cluster.to_string(), "-c", &(size / cluster / images).max(1).to_string()]);
            run(fill.arg(&image))?;
            // Afterwards, or each image would be filled through all those below.
            if let Some(below) = chain.images.last() {
                run(lab.zebu().args(["rebase", "-u", "-F", "qcow2", "-b"]).arg(below).arg(&image))?;
            }
            chain.images.push(image);
        }
        Ok(chain)
    }

    pub(crate) fn top(&self) -> &Path {
        self.images.last().map_or(Path::new("no-image"), PathBuf::as_path)
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        for image in &self.images {
            let _ = remove(image);
        }
    }
}
