//! Zebu under QEMU's names beside QEMU's programs: every command, option and state of a file, or random stacks of drivers. Ends with 1 if
//! there is a difference that docs/guide/qemu-differences.md does not name, or one that it names and that is no more.

use clap::{Args, Parser};
use std::process::ExitCode;
use zebu_tests::beside_qemu::run::{run_lines, run_stacks};
use zebu_tests::beside_qemu::{lines, run};

#[derive(Parser)]
#[command(about = "Compare zebu under QEMU's names with QEMU's programs")]
enum Options {
    /// Command lines: each command, option and state of a file
    Lines(LineArgs),
    /// Stacks of three drivers with random options
    Stacks(StackArgs),
}

#[derive(Args)]
struct LineArgs {
    /// Only lines that contain this
    #[arg(long)]
    only: Option<String>,
    /// Only lines whose number has this last digit
    #[arg(long)]
    tenth: Option<usize>,
    /// Print the lines and run nothing
    #[arg(long)]
    list: bool,
    /// Lines at the same time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
}

#[derive(Args)]
struct StackArgs {
    /// The first seed
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// How many stacks, each of its own seed
    #[arg(long, default_value_t = 1000)]
    stacks: u64,
    /// Stacks at the same time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
}

fn main() -> ExitCode {
    let result = match Options::parse() {
        Options::Lines(args) => lines_of(&args),
        Options::Stacks(args) => {
            run_stacks(args.first_seed..args.first_seed.saturating_add(args.stacks), args.jobs)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn lines_of(args: &LineArgs) -> Result<(), String> {
    let chosen: Vec<_> = run::numbered(lines::all()?)
        .filter(|(number, _)| args.tenth.is_none_or(|tenth| run::is_in_tenth(*number, tenth)))
        .filter(|(_, line)| args.only.as_ref().is_none_or(|text| line.text().contains(text)))
        .collect();
    if args.list {
        for (number, line) in &chosen {
            println!("{number}: {} ({})", line.text(), line.state.name);
        }
        return Ok(());
    }
    let extent =
        if args.only.is_none() && args.tenth.is_none() { run::Extent::Whole } else { run::Extent::Part };
    run_lines(&chosen, extent, args.jobs)
}
