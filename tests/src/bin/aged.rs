//! Ages an image by weeks of use in minutes, then has every command work on it: QEMU judges all of it.

use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use zebu_tests::aged_commands::judge;
use zebu_tests::aging::AgedDisk;
use zebu_tests::qemu::Qemu;

#[derive(Parser)]
#[command(about = "Age an image by rewrites, trims, snapshots and resizes, and judge every command on it")]
struct Options {
    /// Where the image `aged` is made; nothing of it is removed
    directory: PathBuf,
    /// Requests
    #[arg(long, default_value_t = 10_000_000)]
    operations: u64,
    /// MiB of the disk at first
    #[arg(long, default_value_t = 4096)]
    size: u64,
    /// Seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Options of the image, as of `create -o`
    #[arg(long, default_value = "")]
    options: String,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let Some(qemu) = Qemu::find() else { return ExitCode::SUCCESS };
    let image = options.directory.join("aged");
    qemu.create(&options.directory, "aged", "qcow2", &options.options, options.size << 20);
    let mut disk = AgedDisk::new(&image, options.size << 20, options.seed);
    let start = Instant::now();
    let aged = disk.age(options.operations);
    println!("{} requests, {:.0} s", options.operations, start.elapsed().as_secs_f64());
    match aged.and_then(|()| judge(&qemu, &options.directory, "aged", &disk)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("seed {}: {what}", options.seed);
            ExitCode::FAILURE
        }
    }
}
