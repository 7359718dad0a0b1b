//! What the compressed benchmarks read: a real file system, ones, noise; each made once, when a row needs it.

use super::lab::{Lab, fill};
use crate::Outcome;
use crate::process::run;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the file system is made of: programs and their data, as on any root disk.
const TREES: [&str; 4] = ["/usr/bin", "/usr/share", "/usr/lib", "/usr/include"];

/// What a source holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    /// An ext4 file system with the machine's own programs and data in it.
    FileSystem,
    /// Bytes of 1: the data of the report of 2021.
    Ones,
    /// Nothing that could become shorter.
    Noise,
}

impl Data {
    pub(super) fn name(self) -> &'static str {
        match self {
            Data::FileSystem => "a file system",
            Data::Ones => "ones",
            Data::Noise => "noise",
        }
    }

    /// The file, made if it is not there.
    pub(super) fn file(self, lab: &Lab) -> Outcome<PathBuf> {
        let file = lab.file(match self {
            Data::FileSystem => "filesystem.raw",
            Data::Ones => "ones.raw",
            Data::Noise => "noise.raw",
        });
        if file.exists() {
            return Ok(file);
        }
        match self {
            Data::FileSystem => make_file_system(lab, &file)?,
            Data::Ones => write_ones(&file, lab.sized(256 << 20, 1000 << 20))?,
            Data::Noise => fill(&file, lab.sized(128 << 20, 512 << 20))?,
        }
        Ok(file)
    }
}

/// Copies files of the trees, in the order of their names, until there are `bytes` of them: so many that the file
/// system is nearly full of them.
fn make_file_system(lab: &Lab, file: &Path) -> Outcome {
    let (tree, size) = (lab.file("tree"), lab.sized::<u64>(512 << 20, 1 << 30));
    std::fs::create_dir_all(&tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    let most = size / 10 * 8;
    // cp would follow its list to the end: the list is cut instead.
    let script = "find \"$@\" -xdev -type f -size -64M -printf '%s %p\\n' 2>/dev/null | sort -k2 \
                  | awk -v most=\"$MOST\" '{ sum += $1 + 2048; if (sum > most) exit; sub(/^[0-9]+ /, \"\"); print }' \
                  | tar -C / -cf - --ignore-failed-read -T - 2>/dev/null | tar -C \"$TREE\" -xf -";
    let done = run(Command::new("sh")
        .args(["-c", script, "sh"])
        .args(TREES.iter().filter(|tree| Path::new(tree).is_dir()))
        .env("MOST", most.to_string())
        .env("TREE", &tree));
    let out = std::fs::File::create(file).map_err(|e| format!("{}: {e}", file.display()))?;
    out.set_len(size).map_err(|e| format!("{}: {e}", file.display()))?;
    let made =
        done.and_then(|()| run(Command::new("mkfs.ext4").args(["-q", "-F", "-d"]).arg(&tree).arg(file)));
    std::fs::remove_dir_all(&tree).map_err(|e| format!("{}: {e}", tree.display()))?;
    made
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
