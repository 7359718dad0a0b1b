//! Opening an image of 16 TiB, on XFS, since files of ext4 end there.

use super::lab::Lab;
use crate::Outcome;
use crate::ab::{Metric, Side, sample};
use crate::mount::{Kind, Mounted};
use crate::process::{measure_ok, run};
use std::path::Path;
use std::process::Command;

/// A whole process is measured: start, open, one read of 4 KiB in the middle of the disk, close, exit. Beside it the
/// program alone (`--version`), so that what opening adds can be seen.
pub(super) fn open(lab: &Lab) -> Outcome {
    let xfs = Mounted::new(Kind::Xfs, 8 << 30, &lab.dir)?;
    for (name, options) in [
        ("empty, 64 KiB clusters", "cluster_size=64k"),
        ("tables preallocated, 2 MiB clusters", "cluster_size=2M,preallocation=metadata"),
    ] {
        let image = xfs.path().join("large.qcow2");
        run(lab.qemu_img().args(["create", "-q", "-f", "qcow2", "-o", options]).arg(&image).arg("16T"))?;
        let zebu = ["io", "-f", "qcow2", "-r", "-c", "read 8T 4k"];
        let qemu = ["-f", "qcow2", "-r", "-c", "read 8T 4k"];
        let sides = [
            side("zebu", &lab.zebu, &zebu, &["--version"], &image),
            side("QEMU", &lab.qemu_io, &qemu, &["--version"], &image),
        ];
        lab.compare(&format!("open 16 TiB ({name})"), sides)?;
        std::fs::remove_file(&image).map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn side<'a>(
    label: &str,
    program: &'a Path,
    words: &'a [&'a str],
    alone: &'a [&'a str],
    image: &'a Path,
) -> Side<'a> {
    let run = move || {
        let bare = measure_ok(Command::new(program).args(alone))?;
        let usage = measure_ok(Command::new(program).args(words).arg(image))?;
        let mut figures = sample(&usage);
        let added = usage.wall.saturating_sub(bare.wall).as_secs_f64() * 1000.0;
        figures.push((Metric::OverBareMillis, added));
        Ok(figures)
    };
    Side { label: label.to_owned(), run: Box::new(run) }
}
