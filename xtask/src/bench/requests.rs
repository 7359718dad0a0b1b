//! Reads and writes of allocated clusters: `zebu bench` beside `qemu-img bench` and fio.

use super::lab::Lab;
use super::load::{LARGE, Load, SMALL, scattering_step};
use super::peers::beside_all;
use crate::Outcome;
use crate::ab::Side;
use crate::process::{find, measure_ok, output, run, shown};
use std::path::Path;
use std::process::Command;

const DEPTH: u64 = 32;

/// 4 KiB, depth 32.
pub(super) fn random(lab: &Lab) -> Outcome {
    let raw = lab.raw_file()?;
    let image = full_image(lab, &raw)?;
    let step = scattering_step(lab.gib << 30, SMALL);
    for write in [false, true] {
        let load = Load { block: SMALL, step, count: lab.sized(50_000, 100_000), depth: DEPTH, write };
        let what = if write { "writes" } else { "reads" };
        beside_all(lab, &format!("4 KiB scattered {what}, depth 32"), load, &image)?;
        let sides = [zebu_random(lab, &image, load), fio(&raw, load)?];
        lab.compare(&format!("4 KiB random {what}, depth 32, beside fio on raw"), sides)?;
    }
    Ok(())
}

/// 1 MiB, one after the other.
pub(super) fn sequential(lab: &Lab) -> Outcome {
    let raw = lab.raw_file()?;
    let image = full_image(lab, &raw)?;
    for write in [false, true] {
        // Half of the disk takes seconds.
        let count = (lab.gib << 30) / 2 / LARGE;
        let load = Load { block: LARGE, step: LARGE, count, depth: 8, write };
        let what = if write { "writes" } else { "reads" };
        beside_all(lab, &format!("1 MiB sequential {what}, depth 8"), load, &image)?;
    }
    Ok(())
}

/// A qcow2 image with every cluster allocated and written, made by QEMU.
fn full_image(lab: &Lab, raw: &Path) -> Outcome<std::path::PathBuf> {
    let image = lab.file("full.qcow2");
    let mut convert = lab.qemu_img();
    convert.args(["convert", "-f", "raw", "-O", "qcow2", "-t", "none", "-T", "none", "-S", "0"]);
    run(convert.arg(raw).arg(&image))?;
    Ok(image)
}

fn zebu_random<'a>(lab: &'a Lab, image: &'a Path, load: Load) -> Side<'a> {
    let run = move || {
        let mut command = load.command(&lab.zebu, image);
        command.arg("--random=1");
        load.timed(command)
    };
    Side { label: "zebu".into(), run: Box::new(run) }
}

/// fio on the raw file with the same load.
fn fio(raw: &Path, load: Load) -> Outcome<Side<'_>> {
    let program = find("fio").ok_or("fio is missing")?;
    output(Command::new(&program).arg("--version"))?;
    let run = move || {
        let mut command = Command::new(&program);
        command.args(["--name=raw", "--direct=1", "--ioengine=io_uring", "--output-format=json"]);
        command.arg(format!("--rw={}", if load.write { "randwrite" } else { "randread" }));
        command.arg(format!("--bs={}", load.block)).arg(format!("--iodepth={}", load.depth));
        command.arg(format!("--number_ios={}", load.count)).arg("--filename").arg(raw);
        let usage = measure_ok(&mut command)?;
        let report: serde_json::Value =
            serde_json::from_str(&usage.stdout).map_err(|e| format!("{}: {e}", shown(&command)))?;
        let job = &report["jobs"][0];
        let part = &job[if load.write { "write" } else { "read" }];
        let seconds = part["runtime"].as_f64().unwrap_or(0.0) / 1000.0;
        // fio's own threads and set-up cost CPU that is not the requests': its own percentages are of the job alone.
        let percent = job["usr_cpu"].as_f64().unwrap_or(0.0) + job["sys_cpu"].as_f64().unwrap_or(0.0);
        Ok(load.figures(seconds, seconds * percent / 100.0, usage.max_rss))
    };
    Ok(Side { label: "fio raw".into(), run: Box::new(run) })
}
