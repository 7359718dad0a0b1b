//! The command `messages`: sequences of messages to running servers, which are built with AddressSanitizer.

use crate::nightly::{TARGET, cargo_nightly, ensure};
use crate::run_log::{Kept, Origin, by_origin};
use crate::test_programs::BUILT;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};
use zebu_bench::table::grouped;
use zebu_bench::workspace::{cargo, root, target_dir};

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask messages --minutes 60 --record
  cargo xtask messages --turns 1 --seed 4711    # one seed again

A seed that fails is printed. The same seed sends the same messages; how they meet is not chosen, so that it may take several
runs to see a fault again.")]
pub(crate) struct MessagesArgs {
    /// How long, in minutes of the clock
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// So many seeds instead
    #[arg(long)]
    turns: Option<u64>,
    /// The first seed [default: from the clock]
    #[arg(long)]
    seed: Option<u64>,
    /// A server without a sanitizer, whose memory is measured instead
    #[arg(long)]
    plain: bool,
    /// Add the counts to docs/records/messages.jsonl, and write the sums into docs/records.md
    #[arg(long)]
    record: bool,
}

const KEPT: Kept = Kept {
    runs: "docs/records/messages.jsonl",
    page: "docs/records.md",
    begin: "<!-- messages: written by `cargo xtask messages --record` -->",
    end: "<!-- end of messages -->",
};

/// The record of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    #[serde(flatten)]
    origin: Origin,
    sanitized: bool,
    seconds: f64,
    #[serde(flatten)]
    done: Done,
}

/// Counts of the runner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Done {
    servers: u64,
    turns: u64,
    nbd: u64,
    vhost: u64,
    control: u64,
    leaking: u64,
    failures: u64,
}

impl Done {
    /// From the last line of the runner.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.lines().next_back()?.split_whitespace();
        let mut of = |name: &str| words.next().filter(|word| *word == name).and(words.next())?.parse().ok();
        Some(Self {
            servers: of("servers")?,
            turns: of("turns")?,
            nbd: of("nbd")?,
            vhost: of("vhost")?,
            control: of("control")?,
            leaking: of("leaking")?,
            failures: 0,
        })
    }

    fn add(&mut self, other: &Self) {
        self.servers += other.servers;
        self.turns += other.turns;
        self.nbd += other.nbd;
        self.vhost += other.vhost;
        self.control += other.control;
        self.leaking += other.leaking;
        self.failures += other.failures;
    }
}

pub(crate) fn command(args: &MessagesArgs) -> Outcome {
    let origin = if args.record { Origin::now()? } else { Origin::or_unknown() };
    let server = if args.plain { plain_server()? } else { sanitized_server()? };
    let target = target_dir()?;
    let build = ["build", "--quiet", "--locked", "--package", "zebu-tests", "--bin", "messages"];
    run(cargo().args(build))?;
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs() << 20);
    let seed = args.seed.unwrap_or_else(clock);
    let mut runner = std::process::Command::new(target.join(BUILT).join("messages"));
    runner.env("ZEBU_BIN", server).args(["--seed", &seed.to_string()]);
    // libdeflate compiles one source several times, with the same static tables.
    runner.env("ASAN_OPTIONS", "detect_odr_violation=0:detect_leaks=1");
    if !args.plain {
        runner.arg("--sanitized");
    }
    match args.turns {
        Some(turns) => runner.args(["--turns", &turns.to_string()]),
        None => runner.args(["--seconds", &((args.minutes * 60.0) as u64).to_string()]),
    };
    println!("seeds from {seed} on");
    let start = Instant::now();
    let said = output(&mut runner);
    let seconds = start.elapsed().as_secs_f64();
    let done = match &said {
        Ok(text) => Done::parse(text).ok_or_else(|| format!("the runner said {text:?}"))?,
        Err(_) => Done { failures: 1, ..Done::default() },
    };
    println!("{done:?} in {seconds:.0} s");
    if args.record {
        KEPT.add(&Run { origin, sanitized: !args.plain, seconds, done }, sums)?;
    }
    said.map(drop)
}

fn plain_server() -> Outcome<PathBuf> {
    run(cargo().args(["build", "--quiet", "--locked", "--package", "zebu-cli"]))?;
    Ok(target_dir()?.join(BUILT).join("zebu"))
}

fn sanitized_server() -> Outcome<PathBuf> {
    ensure(&["rust-src"])?;
    let target = target_dir()?.join("address");
    let mut command = cargo_nightly();
    command.current_dir(root()).args(["build", "--locked", "-Zbuild-std", "--target", TARGET]);
    command.args(["--package", "zebu-cli", "--target-dir"]).arg(&target);
    command.env("RUSTFLAGS", "-Zsanitizer=address");
    // Some versions of GCC take static tables in functions for variables whose scope has ended.
    let flags = std::env::var("CFLAGS").unwrap_or_default();
    command.env("CFLAGS", format!("{flags} -fno-sanitize-address-use-after-scope"));
    run(&mut command)?;
    Ok(target.join(TARGET).join(BUILT).join("zebu"))
}

/// Sums of all runs, by the commit that was run.
fn sums(runs: &[Run]) -> String {
    let mut text = "| date | commit | build | minutes | turns | NBD | vhost-user | control | leaking images | failures |\n\
                    |---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for sanitized in [true, false] {
        let of_build: Vec<Run> = runs.iter().filter(|run| run.sanitized == sanitized).cloned().collect();
        for (Origin { date, commit }, group) in by_origin(&of_build, |run| &run.origin) {
            let mut sum = Done::default();
            for run in &group {
                sum.add(&run.done);
            }
            let minutes = group.iter().map(|run| run.seconds).sum::<f64>() / 60.0;
            let build = if sanitized { "AddressSanitizer" } else { "plain" };
            let numbers =
                [sum.turns, sum.nbd, sum.vhost, sum.control, sum.leaking, sum.failures].map(grouped);
            text += &format!("| {date} | {commit} | {build} | {minutes:.0} | {} |\n", numbers.join(" | "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runners_last_line_is_read() {
        let done =
            Done::parse("something\nservers 1 turns 60 nbd 864 vhost 1189 control 556 leaking 0\n").unwrap();
        let expected =
            Done { servers: 1, turns: 60, nbd: 864, vhost: 1189, control: 556, leaking: 0, failures: 0 };
        assert_eq!(done, expected);
        assert_eq!(Done::parse("seed 3: the server is stuck\n"), None);
    }

    #[test]
    fn the_page_says_what_was_run() {
        KEPT.assert_up_to_date(sums);
    }
}
