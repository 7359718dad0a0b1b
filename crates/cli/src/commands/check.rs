//! `zebu check`: whether an image's metadata is consistent, and repairs.

use crate::arguments::InspectArgs;
use crate::failure::Failure;
use crate::image_failure::image_failure;
use crate::output::{check as report_text, stderr, stdout};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, caches, formats};
use crate::watch::{ProgressArg, Watch};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write;
use zebu_disks::{Context, ImageSpec, Program, describes_backing};
use zebu_engine::check::{CheckOptions, CheckReport, Repair, check};
use zebu_engine::storage::{LockMode, OpenFlags};
use zebu_engine::{Access, CacheMode, ErrorKind, Format, OpenOptions, ZeroPolicy, probe_by};

/// The format has nothing to check.
const EXIT_NOT_SUPPORTED: u8 = 63;

/// Most bytes that counting takes if --cache-size doesn't say otherwise.
const DEFAULT_MEMORY: usize = 256 << 20;

/// Findings that are told under QEMU's names, whose programs tell of all.
const QEMU_FINDINGS: usize = 100_000;

/// Arguments of `zebu check`.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Print the findings only, not the summary
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Cache mode of the image
    #[arg(
        short = 'T',
        long,
        value_name = "CACHE",
        value_parser = caches(),
        default_value = "writeback"
    )]
    cache: CacheMode,

    /// Repair what is found: leaked space only, or everything
    #[arg(short, long, value_enum, value_name = "leaks|all", hide_possible_values = true)]
    repair: Option<RepairArg>,

    #[command(flatten)]
    inspect: InspectArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

/// `-r`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RepairArg {
    /// Space that nothing uses.
    Leaks,
    /// Everything that can be repaired.
    All,
}

/// Runs the command.
pub(crate) fn run(args: &CheckArgs, context: &Context) -> Result<u8, Failure> {
    if args.inspect.force_share.is_given() && args.repair.is_some() {
        return Err(Failure::usage("-U (--force-share) is for reading only: it can't be used with -r"));
    }
    let access = if args.repair.is_some() { Access::ReadWrite } else { Access::ReadOnly };
    let mut spec =
        args.inspect.image.resolve(context, &args.filename, args.format.as_ref(), args.cache, access)?;
    args.inspect.force_share.apply(&mut spec);
    refuse_what_a_check_never_uses(context.dialect, &spec)?;
    let session = Session::start(context, &args.inspect.engine, spec.aio)?;
    let format = format_of(&session, &spec)?;
    if format != Format::Qcow2 {
        let mut message = "This image format does not support checks".to_owned();
        if !context.dialect.is_qemu() && spec.options.format.is_none() {
            let _ = write!(message, ": '{}' was taken for {}", spec.path.display(), format.name());
        }
        return Err(Failure::new(message).with_exit(EXIT_NOT_SUPPORTED));
    }
    let mut watch = Watch::start(args.progress.beside(args.inspect.output).mode(args.quiet))?;
    let options = CheckOptions::default()
        .repair(match args.repair {
            None => Repair::None,
            Some(RepairArg::Leaks) => Repair::Leaks,
            Some(RepairArg::All) => Repair::All,
        })
        .cache(spec.options.cache)
        .sharing(spec.options.sharing)
        .lock_wait(spec.options.lock_wait.clone())
        .remote(spec.options.remote.clone())
        .memory(
            spec.options
                .cache_size
                .map_or(DEFAULT_MEMORY, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
        )
        .max_findings(if context.dialect.is_qemu() {
            QEMU_FINDINGS
        } else {
            CheckOptions::default().max_findings
        })
        .control(watch.control());
    let result = session.worker().block_on(check(session.worker(), &spec.path, &options));
    let report = result.map_err(|error| Failure::opening(session.context(), &spec.path, &error))?;
    watch.finish();
    let findings = report_text::findings_text(context.dialect, &report);
    // Findings are told beside the report; that nobody listens to them changes nothing.
    let _ = std::io::stderr().write_all(findings.as_bytes());
    match args.inspect.output {
        OutputFormat::Json => {
            stdout::print(&report_text::json_text(context.dialect, &report, &spec.path.to_string_lossy())?)?;
        }
        OutputFormat::Human if !args.quiet => {
            stdout::print(&report_text::human_text(&report))?;
            if let Some(remedy) = remedy(context.dialect, &report) {
                stderr::tell(context.dialect, remedy);
            }
        }
        OutputFormat::Human => {}
    }
    Ok(report.exit_code())
}

/// The command for an image that was found damaged, and not repaired.
fn remedy(dialect: Program, report: &CheckReport) -> Option<&'static str> {
    let counts = &report.counts;
    if dialect.is_qemu() || report.repair.is_some() {
        return None;
    }
    match (counts.corruptions, counts.leaks) {
        (0, 0) => None,
        (0, _) => Some("`zebu check -r leaks` frees the leaked clusters"),
        _ => Some("`zebu check -r all` repairs what it can: copy the file first"),
    }
}

/// A check reads the metadata of one file whole: options about guest data and slices of it would do nothing.
fn refuse_what_a_check_never_uses(dialect: Program, spec: &ImageSpec) -> Result<(), Failure> {
    let OpenOptions { slice_size, data_file, zero_policy, .. } = &spec.options;
    let unused = [
        (slice_size.is_some(), "a slice size"),
        (data_file.is_some(), "a data file"),
        // QEMU takes it, and looks for nothing in it either.
        (describes_backing(&spec.options) && !dialect.is_qemu(), "a backing file"),
        (*zero_policy != ZeroPolicy::Auto, "a zero policy"),
    ];
    match unused.iter().find(|(given, _)| *given) {
        Some((_, what)) => Err(Failure::usage(format!("check has no use for {what}: leave that option out"))),
        None => Ok(()),
    }
}

/// The format as given, or as the first and last bytes of the file tell. Nothing but these is looked at: a header that
/// is damaged behind them can still be checked.
fn format_of(session: &Session, spec: &ImageSpec) -> Result<Format, Failure> {
    if let Some(format) = spec.options.format {
        return Ok(format);
    }
    let worker = session.worker();
    let flags = OpenFlags::default().lock(LockMode::None);
    let opened = spec
        .options
        .remote
        .open(&spec.path, &flags)
        .map_err(|error| zebu_engine::Error::from(error).on(&spec.path));
    opened.and_then(|file| worker.block_on(probe_by(worker, &file, spec.options.probe))).map_err(|error| {
        let failure = image_failure(spec, session.context(), &error);
        if error.kind() == ErrorKind::ForeignFormat { failure.with_exit(EXIT_NOT_SUPPORTED) } else { failure }
    })
}
