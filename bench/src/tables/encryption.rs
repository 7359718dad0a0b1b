//! Encrypted images: LUKS in qcow2 and by itself, and the cipher alone.

use super::requests::full_image;
use crate::Outcome;
use crate::lab::Lab;
use crate::metric::{Metric, Sample};
use crate::process::{measure_ok, output, run, shown};
use crate::programs::{BOTH, Load, Program, SMALL, scattering_step};
use crate::run::Side;
use crate::workspace::{cargo, target_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The passphrase, which is no secret here.
const SECRET: [&str; 2] = ["--object", "secret,id=key,data=bench"];

/// The ways in which an image is encrypted: a name for tables, the format, creation options.
const IMAGES: [(&str, &str, &str); 2] = [
    ("LUKS in qcow2", "qcow2", "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10"),
    ("LUKS alone", "luks", "key-secret=key,iter-time=10"),
];

/// The image as options that both programs understand.
fn options(image: &Path, format: &str) -> String {
    let key = if format == "luks" { "key-secret" } else { "encrypt.key-secret" };
    format!("driver={format},{key}=key,file.filename={}", image.display())
}

fn side<'a>(program: Program, load: Load, lab: &'a Lab, image: &'a Path, format: &'a str) -> Side<'a> {
    Side::new(program.name(), move || {
        let mut command = load.bench(program, lab, "io_uring");
        load.timed(command.args(SECRET).arg("--image-opts").arg(options(image, format)))
    })
}

/// Requests to images full of data, which QEMU has made; then the cipher alone.
pub(super) fn encryption(lab: &Lab) -> Outcome {
    let (raw, plain) = full_image(lab)?;
    crate::lab::remove(&plain)?;
    let size = lab.gib() << 30;
    for (name, format, options) in IMAGES {
        let image = lab.file(&format!("encrypted.{format}"));
        let mut convert = lab.qemu_img();
        convert.args(["convert", "-f", "raw", "-O", format, "-t", "none", "-T", "none", "-S", "0"]);
        run(convert.args(SECRET).args(["-o", options]).arg(&raw).arg(&image))?;
        for (what, write) in [("reads", false), ("writes", true)] {
            let step = scattering_step(size, SMALL);
            let small = Load { block: SMALL, step, count: lab.sized(50_000, 100_000), depth: 32, write };
            let large = Load::in_order(size / 2, write);
            for (kind, load) in [("4 KiB scattered", small), ("1 MiB sequential", large)]
                .map(|(kind, load)| (format!("{kind} {what}, {name}"), load))
            {
                lab.row(&kind, BOTH.map(|program| side(program, load, lab, &image, format)));
            }
        }
        crate::lab::remove(&image)?;
    }
    cipher(lab)
}

/// The cipher over sectors of 512 bytes, as QEMU and cryptsetup cut them, and over 4096.
fn cipher(lab: &Lab) -> Outcome {
    const NAME: &str = "AES-256-XTS alone";
    if !lab.wants(NAME) {
        return Ok(());
    }
    let mut build = cargo();
    run(build.args([
        "build",
        "--locked",
        "--release",
        "--package",
        "zebu-luks",
        "--example",
        "cipher_speed",
    ]))?;
    let program = target_dir()?.join("release/examples/cipher_speed");
    for sector in [512, 4096] {
        let zebu = || ours(&program, sector);
        let openssl = || openssl(sector);
        let sides = [Side::new("zebu", zebu), Side::new("OpenSSL", openssl)];
        lab.row(&format!("{NAME}, sectors of {sector} bytes"), sides);
    }
    Ok(())
}

fn ours(program: &PathBuf, sector: usize) -> Outcome<Sample> {
    let mut command = Command::new(program);
    let usage = measure_ok(command.args(["aes-xts-plain64", "64", &sector.to_string()]))?;
    let rate = usage.stdout.split_whitespace().next().and_then(|word| word.parse().ok());
    rate.map(|rate| vec![(Metric::MibPerSecond, rate)])
        .ok_or_else(|| format!("{}: no figure in its output", shown(&command)))
}

/// OpenSSL's own measurement, in thousands of bytes a second in the last line.
fn openssl(sector: usize) -> Outcome<Sample> {
    let mut command = Command::new("openssl");
    command.args([
        "speed",
        "-elapsed",
        "-seconds",
        "1",
        "-bytes",
        &sector.to_string(),
        "-evp",
        "aes-256-xts",
    ]);
    let text = output(&mut command)?;
    let word = text.lines().last().and_then(|line| line.split_whitespace().last());
    let rate = word.and_then(|word| word.strip_suffix('k')?.parse::<f64>().ok());
    rate.map(|rate| vec![(Metric::MibPerSecond, rate * 1000.0 / 1_048_576.0)])
        .ok_or_else(|| format!("{}: no figure in its output", shown(&command)))
}
