//! The library as a monitor uses it, beside the engine's own `bench`, another library, and plain system calls.

use crate::Outcome;
use crate::lab::Lab;
use crate::metric::{Metric, Sample};
use crate::process::run;
use crate::programs::{Load, Program, SMALL, scattering_step};
use crate::run::Side;
use crate::tables::requests::full_image;
use crate::workspace::{cargo, target_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

/// 4 KiB at depth 1 and 32, by each of the ways to use the library.
pub(super) fn embedding(lab: &Lab) -> Outcome {
    let program = load_program()?;
    let (raw, image) = full_image(lab)?;
    let size = lab.gib() << 30;
    for depth in [1, 32] {
        for (what, write) in [("reads", false), ("writes", true)] {
            let count = if depth == 1 { lab.sized(5_000, 20_000) } else { lab.sized(50_000, 100_000) };
            let load = Load { block: SMALL, step: scattering_step(size, SMALL), count, depth, write };
            let by_library = |who: &'static str, way: &'static str, file: &Path| {
                let (program, file) = (program.clone(), file.to_owned());
                Side::new(who, move || {
                    let mut command = Command::new(&program);
                    load.options(command.arg(way));
                    with_waits(load, command.arg(&file))
                })
            };
            let by_program = |program: Program| {
                let image = image.clone();
                Side::new(program.name(), move || {
                    with_waits(load, &mut load.command(program, lab, &image, "qcow2")?)
                })
            };
            // The first is compared with each of the others.
            let sides = [by_library("queue", "queue", &image), by_program(Program::Zebu)];
            lab.row(&format!("4 KiB scattered {what}, depth {depth}, by a queue"), sides);
            let sides = [
                by_library("Disk", "disk", &image),
                by_program(Program::Zebu),
                by_program(Program::Imago),
                by_library("raw file, threads", "raw", &raw),
            ];
            lab.row(&format!("4 KiB scattered {what}, depth {depth}, by Disk"), sides);
        }
    }
    Ok(())
}

fn with_waits(load: Load, command: &mut Command) -> Outcome<Sample> {
    let (mut sample, waits) = load.timed_with_waits(command)?;
    sample.push((Metric::WaitsPerRequest, waits as f64 / load.count as f64));
    Ok(sample)
}

/// The program that puts a load on the library.
fn load_program() -> Outcome<PathBuf> {
    run(cargo().args([
        "build",
        "--quiet",
        "--release",
        "--locked",
        "-p",
        "zebu-adapters",
        "--example",
        "load",
    ]))?;
    Ok(target_dir()?.join("release/examples/load"))
}
