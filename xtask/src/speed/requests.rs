//! Reads and writes of allocated clusters: `zebu bench` beside `qemu-img bench` and fio.

use super::Lab;
use crate::Outcome;
use crate::ab::{Metric, Sample, Side, alternate};
use crate::process::{find, measure_ok, output, run, shown};
use std::path::Path;
use std::process::Command;

const DEPTH: u64 = 32;
const SMALL: u64 = 4096;
const LARGE: u64 = 1 << 20;

/// What one benchmark asks for.
#[derive(Clone, Copy)]
struct Load {
    block: u64,
    /// Distance between the offsets of two requests, in bytes.
    step: u64,
    count: u64,
    depth: u64,
    write: bool,
}

/// 4 KiB, depth 32. `qemu-img bench` has no random mode: a step of an odd number of blocks near the golden section of
/// the disk (or of the largest step that it takes) scatters the offsets over all of it, each block once before any
/// comes again.
pub(super) fn random(lab: &Lab) -> Outcome {
    let raw = lab.raw_file()?;
    let image = full_image(lab, &raw)?;
    let blocks = ((lab.gib << 30) / SMALL).min(i32::MAX as u64 / SMALL);
    let step = ((blocks as f64 * 0.381_966) as u64 | 1) * SMALL;
    for write in [false, true] {
        let load = Load { block: SMALL, step, count: 200_000, depth: DEPTH, write };
        let what = if write { "writes" } else { "reads" };
        let sides = [zebu(lab, &image, load), qemu(lab, &image, load)];
        lab.report(&alternate(
            &format!("4 KiB scattered {what}, depth 32, beside QEMU"),
            lab.rounds,
            sides,
        )?)?;
        let sides = [zebu_random(lab, &image, load), fio(&raw, load)?];
        lab.report(&alternate(
            &format!("4 KiB random {what}, depth 32, beside fio on raw"),
            lab.rounds,
            sides,
        )?)?;
    }
    Ok(())
}

/// 1 MiB, one after the other.
pub(super) fn sequential(lab: &Lab) -> Outcome {
    let raw = lab.raw_file()?;
    let image = full_image(lab, &raw)?;
    for write in [false, true] {
        let count = (lab.gib << 30) / LARGE;
        let load = Load { block: LARGE, step: LARGE, count, depth: 8, write };
        let what = if write { "writes" } else { "reads" };
        let sides = [zebu(lab, &image, load), qemu(lab, &image, load)];
        lab.report(&alternate(&format!("1 MiB sequential {what}, depth 8"), lab.rounds, sides)?)?;
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

/// The options that `zebu bench` and `qemu-img bench` share; the cache covers the whole disk by default in both.
fn bench(program: &Path, image: &Path, load: Load) -> Command {
    let mut command = Command::new(program);
    command.args(["bench", "-f", "qcow2", "-t", "none", "-i", "io_uring"]);
    command.args(["-d", &load.depth.to_string(), "-c", &load.count.to_string()]);
    command.args(["-s", &load.block.to_string(), "-S", &load.step.to_string()]);
    if load.write {
        command.arg("-w");
    }
    command.arg(image);
    command
}

fn zebu<'a>(lab: &'a Lab, image: &'a Path, load: Load) -> Side<'a> {
    Side { label: "zebu".into(), run: Box::new(move || timed(bench(&lab.zebu, image, load), load)) }
}

fn qemu<'a>(lab: &'a Lab, image: &'a Path, load: Load) -> Side<'a> {
    Side { label: "QEMU".into(), run: Box::new(move || timed(bench(&lab.qemu_img, image, load), load)) }
}

fn zebu_random<'a>(lab: &'a Lab, image: &'a Path, load: Load) -> Side<'a> {
    let run = move || {
        let mut command = bench(&lab.zebu, image, load);
        command.arg("--random=1");
        timed(command, load)
    };
    Side { label: "zebu".into(), run: Box::new(run) }
}

/// Runs a benchmark that says `Run completed in N seconds.`: the time of the requests, without opening the image.
fn timed(mut command: Command, load: Load) -> Outcome<Sample> {
    let usage = measure_ok(&mut command)?;
    let seconds: f64 = usage
        .stdout
        .split("Run completed in ")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|n| n.parse().ok())
        .ok_or_else(|| format!("{}: no time in its output", shown(&command)))?;
    Ok(figures(load, seconds, usage.cpu.as_secs_f64(), usage.max_rss))
}

fn figures(load: Load, seconds: f64, cpu: f64, max_rss: u64) -> Sample {
    let count = load.count as f64;
    let rate = if load.block >= LARGE {
        (Metric::MibPerSecond, count * load.block as f64 / 1048576.0 / seconds)
    } else {
        (Metric::RequestsPerSecond, count / seconds)
    };
    let cpu = (Metric::CpuMicrosPerRequest, cpu * 1e6 / count);
    vec![rate, cpu, (Metric::MaxRssMib, max_rss as f64 / 1048576.0)]
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
        Ok(figures(load, seconds, seconds * percent / 100.0, usage.max_rss))
    };
    Ok(Side { label: "fio raw".into(), run: Box::new(run) })
}
