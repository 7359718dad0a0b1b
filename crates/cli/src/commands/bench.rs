//! `zebu bench`: many requests, and how fast they were served.

use crate::arguments::InspectArgs;
use crate::bench::load::{Measured, run as run_load};
use crate::bench::plan::{Direction, Drain, FlushEvery, Order, Plan};
use crate::failure::Failure;
use crate::output::units::size_exact;
use crate::output::{json, stdout};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, caches, formats};
use crate::watch::{ProgressMode, Watch};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::time::Duration;
use zebu_disks::Context;
use zebu_disks::Program;
use zebu_disks::size::size_argument;
use zebu_engine::{Access, CacheMode, ErrorKind, ExtentIndex, ImageStats};

/// Requests that are sent if neither a number nor a time is given.
const DEFAULT_COUNT: u64 = 75_000;
/// Requests in flight that one queue may have.
const MAX_DEPTH: u32 = 65_536;

/// Arguments of `zebu bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    /// Format of the image [default: probed; writing to a raw image needs it]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Cache mode of the image
    #[arg(
        short = 't',
        long,
        value_name = "CACHE",
        value_parser = caches(),
        default_value = "writeback"
    )]
    cache: CacheMode,

    /// Requests to send, over all queues [default: 75000, or without end if --runtime is given]
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=i64::MAX as u64))]
    count: Option<u64>,

    /// Stop after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = runtime_argument)]
    runtime: Option<Duration>,

    /// Requests in flight, per queue
    #[arg(
        short,
        long,
        value_name = "DEPTH",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)),
        default_value = "64"
    )]
    depth: u32,

    /// Threads that send requests, each with an I/O worker of its own
    #[arg(long, value_name = "NUM", value_parser = clap::value_parser!(u32).range(1..=256), default_value = "1")]
    queues: u32,

    /// Bytes of a request
    #[arg(short = 's', long, value_name = "SIZE", value_parser = buffer_argument, default_value = "4k")]
    buffer_size: usize,

    /// Begin buffers so many bytes past a page, as those of a guest may (multiples of 512)
    #[arg(long, value_name = "BYTES", value_parser = buffer_offset_argument, default_value = "0")]
    buffer_offset: usize,

    /// Bytes from the beginning of a request to that of the next one [default: the size of a request]
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = size_argument)]
    step_size: Option<u64>,

    /// Offset of the first request; requests wrap around at the end of the disk
    #[arg(short, long, value_name = "OFFSET", value_parser = size_argument, default_value = "0")]
    offset: u64,

    /// Send requests to random multiples of the step; the same seed gives the same offsets
    #[arg(long, value_name = "SEED", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
    random: Option<u64>,

    /// Write instead of reading
    #[arg(short, long)]
    write: bool,

    /// Write this byte
    #[arg(long, value_name = "BYTE", value_parser = pattern_argument, default_value = "0")]
    pattern: u8,

    /// Flush after so many requests (of a queue)
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    flush_interval: Option<u64>,

    /// Do not wait for requests in flight before a flush
    #[arg(long, requires = "flush_interval")]
    no_drain: bool,

    /// Use native AIO, which here is io_uring
    #[arg(short, long, conflicts_with = "aio")]
    native: bool,

    /// Look every cluster up in the slices of the tables, to measure those alone
    #[arg(long)]
    no_extent_index: bool,

    #[command(flatten)]
    inspect: InspectArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

fn buffer_argument(text: &str) -> Result<usize, String> {
    match size_argument(text) {
        Ok(bytes @ 1..=0x7fff_ffff) => Ok(bytes as usize),
        _ => Err("Invalid buffer size specified. Must be between 1 and 2147483647.".to_owned()),
    }
}

fn buffer_offset_argument(text: &str) -> Result<usize, String> {
    match size_argument(text) {
        Ok(bytes @ 0..4096) if bytes.is_multiple_of(512) => Ok(bytes as usize),
        _ => Err("Invalid buffer offset specified. Must be a multiple of 512 below 4096.".to_owned()),
    }
}

fn pattern_argument(text: &str) -> Result<u8, String> {
    match size_argument(text) {
        Ok(byte @ 0..=255) => Ok(byte as u8),
        _ => Err("Invalid pattern byte specified. Must be between 0 and 255.".to_owned()),
    }
}

fn runtime_argument(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 1e9 => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds above 0".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs, context: &Context) -> Result<u8, Failure> {
    let plan = plan(args)?;
    let access = if args.write { Access::ReadWrite } else { Access::ReadOnly };
    let mut spec =
        args.inspect.image.resolve(context, &args.filename, args.format.as_ref(), args.cache, access)?;
    if args.inspect.force_share.is_given() && args.write {
        return Err(Failure::usage("-U (--force-share) is for reading only: it can't be used with -w"));
    }
    args.inspect.force_share.apply(&mut spec);
    spec.options.queues = args.queues;
    if args.no_extent_index {
        spec.options.extent_index = ExtentIndex::Off;
    }
    let session = Session::start_with_depth(context, &args.inspect.engine, spec.aio, plan.depth)?;
    let watch = Watch::start(ProgressMode::None)?;
    let (measured, stats) =
        session.with_image(&spec, |image| {
            if !args.quiet && args.inspect.output == OutputFormat::Human {
                stdout::print(&announcement(&plan))?;
            }
            let before = image.stats();
            let measured = run_load(&plan, image, session.worker(), session.config(), watch.cancel())
                .map_err(|error| match error.kind() {
                    ErrorKind::OutOfRange => Failure::from(error),
                    _ => Failure::during("Failed request", &error),
                })?;
            Ok((measured, Activity::between(&before, &image.stats())))
        })?;
    if watch.cancel().is_cancelled() {
        return Err(Failure::interrupted());
    }
    match args.inspect.output {
        OutputFormat::Json => {
            stdout::print(&json::to_text(context.dialect, &Report::new(&plan, &measured, stats))?)?;
        }
        OutputFormat::Human if !args.quiet => {
            stdout::print(&human_text(context.dialect, &plan, &measured, stats))?;
        }
        OutputFormat::Human => {}
    }
    Ok(0)
}

fn plan(args: &BenchArgs) -> Result<Plan, Failure> {
    let flush = args.flush_interval.map(|requests| FlushEvery {
        requests,
        drain: if args.no_drain { Drain::Overlap } else { Drain::Wait },
    });
    if let Some(flush) = flush {
        if !args.write {
            return Err(Failure::usage("--flush-interval is only available in write tests"));
        }
        if flush.requests < u64::from(args.depth) {
            return Err(Failure::usage(
                "Flush interval can't be smaller than depth (choose a larger one, or a smaller -d)",
            ));
        }
    }
    let count = match (args.count, args.runtime) {
        (None, None) => Some(DEFAULT_COUNT),
        (count, _) => count,
    };
    Ok(Plan {
        count,
        runtime: args.runtime,
        depth: args.depth,
        buffer_size: args.buffer_size,
        buffer_offset: args.buffer_offset,
        step: args.step_size.filter(|&step| step != 0).unwrap_or(args.buffer_size as u64),
        offset: args.offset,
        order: match args.random {
            Some(seed) => Order::Random { seed },
            None => Order::Sequential,
        },
        direction: if args.write { Direction::Write { pattern: args.pattern } } else { Direction::Read },
        flush,
        queues: args.queues,
    })
}

/// The lines before the run, as qemu-img words them.
fn announcement(plan: &Plan) -> String {
    let direction = match plan.direction {
        Direction::Read => "read",
        Direction::Write { .. } => "write",
    };
    let mut text = match plan.count {
        Some(count) => format!("Sending {count} {direction} requests"),
        None => format!("Sending {direction} requests"),
    };
    let _ = writeln!(
        text,
        ", {} bytes each, {} in parallel (starting at offset {}, step size {})",
        plan.buffer_size, plan.depth, plan.offset, plan.step
    );
    if let Some(flush) = plan.flush {
        let _ = writeln!(text, "Sending flush every {} requests", flush.requests);
    }
    text
}

/// Counters of the image's mapping during the run.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Activity {
    cache_hits: u64,
    cache_misses: u64,
    cache_loads: u64,
    cache_read_ahead: u64,
    cache_evictions: u64,
    cache_bytes: u64,
    cache_limit: u64,
    cache_miscounts: u64,
    table_bytes: u64,
    index_hits: u64,
    index_bytes: u64,
    commits: u64,
    clusters_allocated: u64,
}

impl Activity {
    fn between(before: &ImageStats, after: &ImageStats) -> Self {
        Self {
            cache_hits: after.cache_hits.saturating_sub(before.cache_hits),
            cache_misses: after.cache_misses.saturating_sub(before.cache_misses),
            cache_loads: after.cache_loads.saturating_sub(before.cache_loads),
            cache_evictions: after.cache_evictions.saturating_sub(before.cache_evictions),
            cache_read_ahead: after.cache_read_ahead.saturating_sub(before.cache_read_ahead),
            cache_bytes: after.cache_bytes,
            cache_limit: after.cache_limit,
            cache_miscounts: after.cache_miscounts.saturating_sub(before.cache_miscounts),
            table_bytes: after.table_bytes,
            index_hits: after.index_hits.saturating_sub(before.index_hits),
            index_bytes: after.index_bytes,
            commits: after.commits.saturating_sub(before.commits),
            clusters_allocated: after.clusters_allocated.saturating_sub(before.clusters_allocated),
        }
    }
}

/// The JSON report. Latencies are in microseconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    requests: u64,
    flushes: u64,
    seconds: f64,
    iops: f64,
    bytes_per_second: f64,
    latency_us: Latency,
    cpu_us_per_request: f64,
    syscalls_per_request: f64,
    io_per_request: f64,
    reads: u64,
    read_bytes: u64,
    writes: u64,
    write_bytes: u64,
    file_flushes: u64,
    fallocates: u64,
    misaligned: u64,
    depth: u32,
    queues: u32,
    buffer_size: usize,
    image: Activity,
}

#[derive(Debug, Serialize)]
struct Latency {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    #[serde(rename = "p99.9")]
    p999: f64,
    max: f64,
}

impl Latency {
    fn new(measured: &Measured) -> Self {
        let histogram = &measured.latency;
        let micros = |nanos: u64| rounded(nanos as f64 / 1000.0);
        Self {
            mean: rounded(histogram.mean() / 1000.0),
            p50: micros(histogram.percentile(500)),
            p90: micros(histogram.percentile(900)),
            p99: micros(histogram.percentile(990)),
            p999: micros(histogram.percentile(999)),
            max: micros(histogram.max()),
        }
    }
}

impl Report {
    fn new(plan: &Plan, measured: &Measured, image: Activity) -> Self {
        let seconds = measured.elapsed.as_secs_f64();
        let per_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let per_request = |amount: f64| {
            if measured.requests > 0 { rounded(amount / measured.requests as f64) } else { 0.0 }
        };
        let io = &measured.io;
        let operations = io.reads + io.writes + io.flushes + io.fallocates;
        Self {
            requests: measured.requests,
            flushes: measured.flushes,
            seconds,
            iops: rounded(per_second(measured.requests as f64)),
            bytes_per_second: rounded(per_second(measured.requests as f64 * plan.buffer_size as f64)),
            latency_us: Latency::new(measured),
            cpu_us_per_request: per_request(measured.cpu.as_secs_f64() * 1e6),
            syscalls_per_request: per_request(io.syscalls as f64),
            io_per_request: per_request(operations as f64),
            reads: io.reads,
            read_bytes: io.read_bytes,
            writes: io.writes,
            write_bytes: io.write_bytes,
            file_flushes: io.flushes,
            fallocates: io.fallocates,
            misaligned: io.misaligned,
            depth: plan.depth,
            queues: plan.queues,
            buffer_size: plan.buffer_size,
            image,
        }
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn human_text(dialect: Program, plan: &Plan, measured: &Measured, activity: Activity) -> String {
    let report = Report::new(plan, measured, activity);
    let latency = &report.latency_us;
    let mut text = format!("Run completed in {:.3} seconds.\n", report.seconds);
    if dialect.is_qemu() {
        return text;
    }
    let _ = writeln!(text, "{:.0} IOPS, {}/s", report.iops, size_exact(report.bytes_per_second));
    let _ = writeln!(
        text,
        "latency: p50 {:.1} us, p90 {:.1} us, p99 {:.1} us, p99.9 {:.1} us, max {:.1} us",
        latency.p50, latency.p90, latency.p99, latency.p999, latency.max
    );
    let _ = writeln!(
        text,
        "per request: {:.2} us of CPU, {:.3} system calls, {:.3} I/Os",
        report.cpu_us_per_request, report.syscalls_per_request, report.io_per_request
    );
    let _ = writeln!(
        text,
        "mapping: {} index hits, {} slice hits, {} misses, {} loads ({} ahead), {} evictions, {} of {} of cache",
        activity.index_hits,
        activity.cache_hits,
        activity.cache_misses,
        activity.cache_loads,
        activity.cache_read_ahead,
        activity.cache_evictions,
        size_exact(activity.cache_bytes as f64),
        size_exact(activity.cache_limit as f64)
    );
    text
}
