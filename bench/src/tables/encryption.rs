//! Encrypted images: LUKS in qcow2 and by itself, and the cipher alone.
//!
//! Over NBD, since `qemu-img bench` takes no secrets.

use super::requests::full_image;
use super::serving::{in_order, over_nbd, served};
use crate::Outcome;
use crate::fio::Ask;
use crate::lab::{Lab, remove};
use crate::metric::{Metric, Sample};
use crate::process::{measure_ok, output, run, shown};
use crate::run::Side;
use crate::servers::{Disk, Door, Server};
use crate::workspace::{cargo, target_dir};
use std::path::Path;
use std::process::Command;

/// The passphrase, which is no secret here.
const SECRET: &str = "secret,id=key,data=bench";

/// The ways in which an image is encrypted: a name for tables, the format, creation options, and those that open it.
const IMAGES: [(&str, &str, &str, &str); 2] = [
    (
        "LUKS in qcow2",
        "qcow2",
        "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10",
        ",encrypt.format=luks,encrypt.key-secret=key",
    ),
    ("LUKS alone", "luks", "key-secret=key,iter-time=10", ",key-secret=key"),
];

/// Loads, with their names.
const ASKS: [(&str, Ask); 4] = [
    ("4 KiB random reads, depth 32", Ask::random("randread", 32)),
    ("4 KiB random writes, depth 32", Ask::random("randwrite", 32)),
    ("1 MiB sequential reads", in_order("read")),
    ("1 MiB sequential writes", in_order("write")),
];

/// Requests to images full of data, which QEMU has made; then the cipher alone.
pub(super) fn encryption(lab: &Lab) -> Outcome {
    let (raw, plain) = full_image(lab)?;
    remove(&plain)?;
    for (name, format, options, opening) in IMAGES {
        let image = lab.file(&format!("encrypted.{format}"));
        let mut convert = lab.qemu_img();
        convert.args(["convert", "-f", "raw", "-O", format, "-t", "none", "-T", "none", "-S", "0"]);
        run(convert.args(["--object", SECRET, "-o", options]).arg(&raw).arg(&image))?;
        for (load, ask) in ASKS {
            let side = |server| {
                let disk = Disk::new(&image, format);
                let disk = Disk { options: opening.to_owned(), secret: Some(SECRET), ..disk };
                served(lab, server, Door::Nbd, disk, over_nbd(lab, ask))
            };
            lab.row(&format!("{load}, {name}"), [Server::Zebu, Server::Qemu].map(side));
        }
        remove(&image)?;
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

fn ours(program: &Path, sector: usize) -> Outcome<Sample> {
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
