//! Every command on an aged image, with QEMU as the judge.

use crate::aging::AgedDisk;
use crate::program::zebu;
use crate::qemu::Qemu;
use std::path::Path;

/// Commands that only look at an image.
const LOOKING: &[&str] = &[
    "info IMAGE",
    "info --output json IMAGE",
    "map IMAGE",
    "measure -O qcow2 IMAGE",
    "check IMAGE",
    "snapshot -l IMAGE",
];

/// Commands that make `OUT`, which shows the same disk.
const COPYING: &[&str] = &[
    "convert -O qcow2 IMAGE OUT",
    "convert -W -O qcow2 IMAGE OUT",
    "convert -c -O qcow2 IMAGE OUT",
    "convert -O raw IMAGE OUT",
    "convert -O vmdk IMAGE OUT",
    "dd -O qcow2 bs=1M if=IMAGE of=OUT",
    "backup IMAGE OUT",
];

/// Commands on a copy of the image, each after the one before, that change nothing of what the disk shows.
const CHANGING: &[&str] = &[
    "bitmap --add COPY one",
    "bitmap --remove COPY one",
    "resize -q COPY +64M",
    "resize -q --shrink COPY -64M",
    "snapshot -c last COPY",
    "snapshot -a last COPY",
    "snapshot -d last COPY",
    "amend -o lazy_refcounts=on COPY",
    "amend -o lazy_refcounts=off COPY",
    "check -r all COPY",
];

/// Judges the image `IMAGE` of `disk` in `dir` itself, then what every command makes of it.
///
/// # Errors
/// What is wrong.
///
/// # Panics
/// If a command fails.
pub fn judge(qemu: &Qemu, dir: &Path, image: &str, disk: &AgedDisk) -> Result<(), String> {
    disk.write_expected(&dir.join("expected")).map_err(|e| e.to_string())?;
    qemu.check_clean(dir, image)?;
    qemu.same_content(dir, "expected", image)?;
    let words = |line: &str| -> Vec<String> {
        let name = |word: &str| match word {
            "IMAGE" => image.to_owned(),
            "COPY" => "copy".to_owned(),
            _ => word.replace("IMAGE", image).replace("OUT", "out"),
        };
        line.split(' ').map(name).collect()
    };
    for line in LOOKING {
        zebu(dir, words(line)).ok();
    }
    for line in COPYING {
        zebu(dir, words(line)).ok();
        let out = qemu.img(dir, ["compare", "-f", "raw", "expected", "out"]);
        if out.code != Some(0) {
            return Err(format!("{line}: {out}"));
        }
        std::fs::remove_file(dir.join("out")).map_err(|e| e.to_string())?;
    }
    for snapshot in disk.snapshots() {
        disk.write_expected_of(snapshot, &dir.join("of-snapshot")).map_err(|e| e.to_string())?;
        let same = |found: &str| {
            let out = qemu.img(dir, ["compare", "-f", "raw", "-F", "raw", "of-snapshot", found]);
            let removed = std::fs::remove_file(dir.join(found)).map_err(|e| e.to_string());
            if out.code == Some(0) { removed } else { Err(format!("snapshot {snapshot}, {found}: {out}")) }
        };
        zebu(dir, ["convert", "-l", snapshot, "-O", "raw", image, "of-zebu"]).ok();
        same("of-zebu")?;
        // QEMU shows it with the size that the disk has now. In a cluster in which the snapshot's disk ends, that is what lies there.
        qemu.img(dir, ["convert", "-f", "qcow2", "-l", snapshot, "-O", "raw", image, "of-qemu"]).ok();
        let len =
            std::fs::metadata(dir.join("of-snapshot")).map_err(|e| e.to_string())?.len().min(disk.size());
        for file in ["of-snapshot", "of-qemu"] {
            let cut = std::fs::File::options().write(true).open(dir.join(file));
            cut.and_then(|file| file.set_len(len)).map_err(|e| e.to_string())?;
        }
        same("of-qemu")?;
    }
    std::fs::copy(dir.join(image), dir.join("copy")).map_err(|e| e.to_string())?;
    for line in CHANGING {
        zebu(dir, words(line)).ok();
        qemu.check_clean(dir, "copy").map_err(|e| format!("{line}: {e}"))?;
        qemu.same_content(dir, "expected", "copy").map_err(|e| format!("{line}: {e}"))?;
    }
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "copy", "-F", "qcow2", "top"]).ok();
    zebu(dir, ["io", "-f", "qcow2", "top", "-c", "write -q -P 7 1M 3M"]).ok();
    zebu(dir, ["commit", "-q", "top"]).ok();
    qemu.check_clean(dir, "copy").map_err(|e| format!("commit: {e}"))?;
    qemu.io(dir, "-f raw", "expected", &["write -q -P 7 1M 3M"]).ok();
    qemu.same_content(dir, "expected", "copy").map_err(|e| format!("commit: {e}"))
}
