//! Message fuzzing of a running server, for as long as it is told; `cargo xtask messages` runs it with a server that is built
//! with AddressSanitizer.

use clap::Parser;
use std::time::Duration;
use zebu_tests::message_fuzz::{Build, Extent, run};

#[derive(Parser)]
#[command(about = "Send sequences of messages to running servers (ZEBU_BIN names the program)")]
struct Options {
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long
    #[arg(long, value_name = "SECONDS", conflicts_with = "turns")]
    seconds: Option<u64>,
    /// So many seeds
    #[arg(long, default_value_t = 100)]
    turns: u64,
    /// The server is built with a sanitizer: its memory is not measured
    #[arg(long)]
    sanitized: bool,
}

fn main() {
    let options = Options::parse();
    let time = options.seconds.map(|seconds| Extent::Time(Duration::from_secs(seconds)));
    let build = if options.sanitized { Build::Sanitized } else { Build::Plain };
    let sums = run(options.seed, time.unwrap_or(Extent::Turns(options.turns)), build);
    println!(
        "servers {} turns {} nbd {} vhost {} control {} leaking {}",
        sums.servers, sums.turns, sums.nbd, sums.vhost, sums.control, sums.leaking
    );
}
