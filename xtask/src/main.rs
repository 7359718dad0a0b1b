//! Developer commands: `cargo xtask help`.

mod bindings;
mod built_tools;
mod c_interface;
mod ceph;
mod coverage;
mod fuzz;
mod go_embed;
mod guests;
mod install;
mod interleave;
mod iotests;
mod messages;
mod miri;
mod mutants;
mod nextest;
mod nightly;
mod package;
mod pictures;
mod run_log;
mod sanitize;
mod setup;
mod startup_order;
mod suite;
mod tenth;
mod test_programs;
mod threads;
mod times;
mod toolchain;
mod torture;
#[cfg(test)]
mod tutorial;
mod under_load;
mod wheel;

use clap::{Args, Parser, Subcommand};
use setup::Need;
use std::process::ExitCode;
use zebu_bench::{Outcome, ab, bench, demo, lazy_boot};
use zebu_source::structure;

/// The failures among several things, each of which is done whatever became of the others.
fn all(outcomes: impl IntoIterator<Item = Outcome>) -> Outcome {
    let errors: Vec<String> = outcomes.into_iter().filter_map(Result::err).collect();
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

#[derive(Parser)]
#[command(name = "cargo xtask", about = "zebu's developer commands")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what tests and measurements need (as root), or say what is missing
    Setup,
    /// Run all checks and tests: what continuous integration runs
    Test(suite::TestArgs),
    /// A disk's life in a minute, beside QEMU: convert, backup, a kill, check, snapshot, a lazy disk
    Demo(demo::DemoArgs),
    /// Compare zebu with a model and with QEMU over seeded random operations
    Differential(PassThrough),
    /// Compare zebu under QEMU's names with QEMU's programs: `lines`, `stacks`
    BesideQemu(PassThrough),
    /// Age an image by rewrites, trims, snapshots and resizes, and judge every command on it
    Aged(PassThrough),
    /// Serve an image under mixed load for as long as wanted, and record what the server takes
    Days(PassThrough),
    /// Stall the disks of servers, and judge that nothing fails and nothing is lost
    Stalls(PassThrough),
    /// Run everything that looks for mistakes by chance, for as long as wanted, and report what was done
    Torture(torture::TortureArgs),
    /// Run the fuzz targets in turns, guided by coverage (nightly Rust)
    Fuzz(fuzz::FuzzArgs),
    /// Send sequences of messages to running servers that are built with AddressSanitizer (nightly Rust)
    Messages(messages::MessagesArgs),
    /// Run threads against each other under schedules chosen to hurt
    Interleave(interleave::InterleaveArgs),
    /// Run tests of QEMU's own suite on zebu under QEMU's names
    Iotests(iotests::IotestsArgs),
    /// Have guestfish, virt-sparsify, virt-v2v and others work on guests' disks through zebu under QEMU's names
    Guests(guests::GuestsArgs),
    /// Start a Ceph cluster of one node and run the tests of RBD disks against it (as root, from Debian's packages)
    Ceph(ceph::CephArgs),
    /// Circles of files that import each other: there shall be none
    Structure,
    /// Write the list of functions that short commands run, by which the program is laid out (Valgrind)
    StartupOrder,
    /// Run real threads that share an image, and judge what each saw and what a kill leaves
    Threads(threads::ThreadsArgs),
    /// Run tests of the format and of the buffers in Miri, which sees undefined behaviour (nightly Rust)
    Miri(miri::MiriArgs),
    /// Run tests of storage, engine and servers under AddressSanitizer and ThreadSanitizer (nightly Rust)
    Sanitize(sanitize::SanitizeArgs),
    /// Change the commit, the allocator and the cache in every way that cargo-mutants knows, and see which tests notice
    Mutants(mutants::MutantsArgs),
    /// Count the lines of the format crate that its tests reach (cargo-llvm-cov)
    Coverage(coverage::CoverageArgs),
    /// Measure two commands alternately: `cargo xtask ab -- CMD_A --vs CMD_B`
    Ab(ab::AbArgs),
    /// Tables of measurements beside QEMU and fio
    Bench(bench::BenchArgs),
    /// Boot a Debian from a disk in an object store behind a slow link, beside a local one and nbdkit (as root)
    LazyBoot(lazy_boot::LazyBootArgs),
    /// Check licences, sources and advisories of the dependencies with cargo-deny
    Deny,
    /// Build with the oldest supported Rust
    Msrv,
    /// Pack the crates that are published, and build what was packed as a static binary (musl)
    Publish(PublishArgs),
    /// Install the library for C, its header and its pkg-config file
    Install(install::InstallArgs),
    /// Make everything that a release consists of: archives, packages, repositories, a container image, sums
    Package(package::PackageArgs),
    /// Draw the pictures of the documents: maps of disks, the plot of the figures (rsvg-convert)
    Pictures(pictures::PicturesArgs),
    /// Make the package of Python for each machine and C library (maturin and Zig of PyPI)
    Wheel(wheel::WheelArgs),
    /// Make the module of Go that has the program in it
    GoEmbed(go_embed::GoEmbedArgs),
}

#[derive(Args)]
struct PublishArgs {
    /// Upload nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Args)]
struct PassThrough {
    /// Options of the runner (`-- --help` lists them)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Setup => setup::command(),
        Command::Test(args) => suite::command(&args),
        Command::Demo(args) => setup::ensure(Need::Demo).and_then(|()| demo::command(&args)),
        Command::Differential(pass) => suite::program_of_tests("differential", &pass.args),
        Command::BesideQemu(pass) => suite::program_of_tests("beside_qemu", &pass.args),
        Command::Days(pass) => suite::program_of_tests("days", &pass.args),
        Command::Stalls(pass) => suite::program_of_tests("stalls", &pass.args),
        Command::Aged(pass) => suite::program_of_tests("aged", &pass.args),
        Command::Torture(args) => torture::command(&args),
        Command::Fuzz(args) => fuzz::command(&args),
        Command::Messages(args) => messages::command(&args),
        Command::Interleave(args) => interleave::command(&args),
        Command::Threads(args) => threads::command(&args),
        Command::Miri(args) => miri::command(&args),
        Command::Sanitize(args) => sanitize::command(&args),
        Command::Mutants(args) => mutants::command(&args),
        Command::Coverage(args) => coverage::command(&args),
        Command::Ab(args) => ab::command(&args),
        Command::Bench(args) => {
            if let Err(missing) = setup::ensure(Need::Everything) {
                // The tables that need it say so.
                println!("note: {missing}");
            }
            bench::command(&args)
        }
        Command::LazyBoot(args) => lazy_boot::command(&args),
        Command::Iotests(args) => iotests::command(&args),
        Command::Guests(args) => guests::command(&args),
        Command::Ceph(args) => ceph::command(&args),
        Command::Structure => structure::command(),
        Command::StartupOrder => startup_order::command(),
        Command::Deny => toolchain::deny(),
        Command::Msrv => toolchain::msrv(),
        Command::Install(args) => install::command(&args),
        Command::Package(args) => package::command(&args),
        Command::Pictures(args) => pictures::command(&args),
        Command::Wheel(args) => wheel::command(&args),
        Command::GoEmbed(args) => go_embed::command(&args),
        Command::Publish(PublishArgs { dry_run: true }) => toolchain::publish().map(drop),
        Command::Publish(PublishArgs { dry_run: false }) => {
            Err("only `cargo xtask publish --dry-run` is done here; `cargo publish` uploads".to_owned())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
