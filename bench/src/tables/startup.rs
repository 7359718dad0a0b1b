//! Starts of short commands, which services make thousands of times a minute.

use crate::Outcome;
use crate::lab::{Lab, remove};
use crate::metric::{Metric, Sample};
use crate::process::{measure_ok, peak_memory};
use crate::run::Side;
use crate::stats::Summary;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Size of the disks.
const DISK: &str = "64M";

/// `--version`, `info` and `create`, by zebu under QEMU's name and by QEMU.
pub(super) fn startup(lab: &Lab) -> Outcome {
    let link = lab.file("qemu-img");
    std::os::unix::fs::symlink(&lab.zebu, &link).map_err(|e| format!("{}: {e}", link.display()))?;
    let image = lab.file("small.qcow2");
    lab.create(&image, "cluster_size=64k", 64 << 20)?;
    let new = lab.file("new.qcow2");
    let (image_name, new_name) = (image.to_string_lossy(), new.to_string_lossy());
    for (name, arguments) in [
        ("start: --version", vec!["--version"]),
        ("start: info of a small image", vec!["info", &image_name]),
        ("start: create of an image", vec!["create", "-q", "-f", "qcow2", &new_name, DISK]),
    ] {
        let (new, arguments) = (&new, &arguments);
        let side = |who: &'static str, program: &Path| {
            let program = program.to_owned();
            let command = move || {
                let mut command = Command::new(&program);
                command.args(arguments);
                command
            };
            Side::new(who, move || starts(lab, new, &command))
        };
        lab.row(name, [side("zebu", &link), side("QEMU", &lab.qemu_img)]);
    }
    remove(&link)
}

/// The medians of many starts, each of which is to make `new` if it makes anything. Memory is that of starts of their own: the
/// program is stopped at its end.
fn starts(lab: &Lab, new: &Path, command: &dyn Fn() -> Command) -> Outcome<Sample> {
    let (mut millis, mut cpu, mut mib) = (Vec::new(), Vec::new(), Vec::new());
    let in_millis = |time: Duration| time.as_secs_f64() * 1000.0;
    for _ in 0..lab.sized(10, 50) {
        remove(new)?;
        let usage = measure_ok(&mut command())?;
        millis.push(in_millis(usage.wall));
        cpu.push(in_millis(usage.cpu));
    }
    for _ in 0..lab.sized(3, 10) {
        remove(new)?;
        mib.push(peak_memory(&mut command())? as f64 / 1048576.0);
    }
    let median = |values: &[f64]| Summary::of(values).median;
    Ok(vec![
        (Metric::WallMillis, median(&millis)),
        (Metric::CpuMillis, median(&cpu)),
        (Metric::MaxRssMib, median(&mib)),
    ])
}
