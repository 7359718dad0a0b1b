//! Seeded random operations through zebu on images made by QEMU: every answer is compared with a model, and at the end
//! QEMU checks the image and compares it with the model. A case that fails prints the one command that repeats it.

use clap::{Parser, ValueEnum};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use zebu_engine::CacheMode;
use zebu_engine::storage::Engine;
use zebu_tests::images::Shape;
use zebu_tests::qemu::Qemu;
use zebu_tests::run::Case;

#[derive(Parser)]
#[command(about = "Compare zebu with a model and with QEMU over seeded random operations")]
struct Options {
    /// The first seed
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// How many seeds; each chooses whatever the options below leave open
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// Operations per seed
    #[arg(long, default_value_t = 500)]
    ops: usize,
    /// The shape of the image, such as v3-c65536-r16-plain
    #[arg(long)]
    shape: Option<String>,
    /// The worker
    #[arg(long, value_enum)]
    engine: Option<WhichEngine>,
    /// The cache mode
    #[arg(long, value_enum)]
    cache: Option<WhichCache>,
    /// Most operations in flight
    #[arg(long)]
    depth: Option<usize>,
    /// Threads with a worker of their own
    #[arg(long)]
    queues: Option<usize>,
    /// Bytes of metadata cache
    #[arg(long)]
    cache_size: Option<u64>,
    /// Cases at the same time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum WhichEngine {
    IoUring,
    Threads,
}

#[derive(Clone, Copy, ValueEnum)]
enum WhichCache {
    Writeback,
    None,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let shapes = Shape::matrix();
    let named = |name: &String| shapes.iter().find(|s| s.to_string() == *name).copied();
    let shape = match options.shape.as_ref().map(|name| (name, named(name))) {
        Some((name, None)) => {
            eprintln!("no shape {name}; one of:");
            for shape in &shapes {
                eprintln!("  {shape}");
            }
            return ExitCode::FAILURE;
        }
        found => found.and_then(|(_, shape)| shape),
    };
    let Some(qemu) = Qemu::find() else { return ExitCode::SUCCESS };
    let (next, failures) = (AtomicU64::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= options.seeds {
                        break;
                    }
                    let case = case(&options, shape, options.first_seed + number);
                    if let Err(what) = case.run(&qemu) {
                        failures.fetch_add(1, Ordering::Relaxed);
                        eprintln!("FAILED {case}\n  {what}\n");
                    }
                }
            });
        }
    });
    let failures = failures.into_inner();
    println!(
        "{} seeds, {} operations, {failures} failures",
        options.seeds,
        options.seeds * options.ops as u64
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Makes a case: the options' choices, and the seed's where they are open.
fn case(options: &Options, shape: Option<Shape>, seed: u64) -> Case {
    let chosen = Case::chosen_by(seed, options.ops);
    Case {
        shape: shape.unwrap_or(chosen.shape),
        engine: match options.engine {
            Some(WhichEngine::IoUring) => Engine::IoUring,
            Some(WhichEngine::Threads) => Engine::Threads,
            None => chosen.engine,
        },
        cache: match options.cache {
            Some(WhichCache::None) => CacheMode::None,
            Some(WhichCache::Writeback) => CacheMode::Writeback,
            None => chosen.cache,
        },
        depth: options.depth.unwrap_or(chosen.depth),
        queues: options.queues.unwrap_or(chosen.queues),
        // A given shape means that a case is repeated: then nothing is left to the seed.
        cache_size: options.cache_size.or(chosen.cache_size.filter(|_| shape.is_none())),
        ..chosen
    }
}
