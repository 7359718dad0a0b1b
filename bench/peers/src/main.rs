//! One load, on another Rust engine: `zebu-peers imago --count 1000 disk.qcow2`. The options are those of
//! `qemu-img bench`, and so is the line that is printed.

mod imago_engine;
mod load;
mod qcow2_rs_engine;

use clap::{Parser, ValueEnum};
use load::Load;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(version = concat!("with imago 0.2.6 and qcow2-rs 0.1.6"))]
struct Options {
    engine: Engine,
    /// The qcow2 image
    image: PathBuf,
    /// Requests
    #[arg(short, default_value_t = 75_000)]
    count: u64,
    /// Requests in flight
    #[arg(short, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,
    /// Bytes of a request
    #[arg(short = 's', default_value_t = 4096)]
    block: usize,
    /// Bytes from one request's offset to the next one's
    #[arg(short = 'S', default_value_t = 4096)]
    step: u64,
    /// Write
    #[arg(short)]
    write: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Engine {
    /// imago without a runtime: a thread for each request in flight
    Imago,
    /// qcow2-rs on io_uring: a task for each request in flight
    #[value(name = "qcow2-rs")]
    Qcow2Rs,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let load = Load::new(options.count, options.depth, options.block, options.step, options.write);
    let run: fn(&std::path::Path, Load) -> Result<Duration, String> = match options.engine {
        Engine::Imago => imago_engine::run,
        Engine::Qcow2Rs => qcow2_rs_engine::run,
    };
    match run(&options.image, load) {
        Ok(time) => {
            println!("Run completed in {:.3} seconds.", time.as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("zebu-peers: {}: {error}", options.image.display());
            ExitCode::FAILURE
        }
    }
}
