//! `zebu clone`: a writable copy of an image, at once.

use crate::arguments::{BackingKeyArgs, CostsArgs, EngineArgs, NetworkArgs};
use crate::default_cache_mode::DefaultCacheMode;
use crate::failure::Failure;
use crate::image_failure::backing_key_remedy;
use crate::local_argument::path_argument;
use crate::output::{json, stderr, stdout};
use crate::secrets::{ENCRYPTION, SecretArgs};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, ReferenceRule, caches, formats, reference_argument};
use crate::watch::{ProgressMode, Watch};
use serde::Serialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use zebu_disks::{Context, ImageSpec, Sources, allowed_references, backing_argument, opener, printable};
use zebu_engine::jobs::{
    CloneMethod, CloneMode, CloneOptions, CloneReport, UnaskedWrites, clone_image, drop_pages,
};
use zebu_engine::{CacheMode, ErrorKind, Keys, OpenOptions};

/// Bytes of a cluster that direct writes suit.
const DEFAULT_CLUSTER: u64 = 64 << 10;

/// Arguments of `zebu clone`.
#[derive(Debug, clap::Args)]
pub(crate) struct CloneArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    /// How the copy is made: `auto` is a reflink where the file system can, else an overlay
    #[arg(long, value_enum, default_value_t = Mode::Auto, value_name = "MODE")]
    mode: Mode,

    /// Format of the source [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Cache mode of both files [default: none where their file systems can, else writeback without pages that stay]
    #[arg(short = 't', long, value_name = "CACHE", value_parser = caches())]
    cache: Option<CacheMode>,

    /// Which files that the source names may be opened; may be given more than once
    #[arg(long, value_name = "none|local|dir=PATH|prefix=URL|all", value_parser = reference_argument)]
    allow_refs: Vec<ReferenceRule>,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    secrets: SecretArgs,

    /// ID of the secret that is the passphrase of an encrypted source [default: asked for at the terminal]
    ///
    /// A reflink has the same key slots as the source. An overlay is encrypted with LUKS and this passphrase.
    #[arg(long, help_heading = ENCRYPTION, value_name = "ID")]
    key_secret: Option<String>,

    #[command(flatten)]
    backing_keys: BackingKeyArgs,

    #[command(flatten)]
    costs: CostsArgs,

    #[command(flatten)]
    network: NetworkArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image to copy: a file, or a disk over the network (an overlay then)
    #[arg(value_name = "SOURCE")]
    source: OsString,

    /// The copy; it must not exist
    #[arg(value_name = "TARGET", value_parser = path_argument())]
    target: PathBuf,
}

/// `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// A reflink where the file system can and the image stands alone, else an overlay.
    Auto,
    /// A reflink or an error.
    Reflink,
    /// An overlay: the source must not be written as long as the copy is used.
    Overlay,
}

/// The JSON report.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    filename: String,
    format: &'static str,
    virtual_size: u64,
    method: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: &CloneArgs, context: &Context) -> Result<u8, Failure> {
    args.network.apply(&context.disks);
    let source =
        context.image_path(&args.source).map_err(|reason| Failure::opening_name(&args.source, &reason))?;
    let given =
        backing_argument(&args.source).map_err(|reason| Failure::opening_name(&args.source, &reason))?;
    if given.is_some() && args.mode == Mode::Reflink {
        return Err(Failure::usage(
            "a disk over the network can't be cloned by reflink: --mode overlay makes an overlay",
        ));
    }
    let mut options = CloneOptions::default()
        .mode(match args.mode {
            Mode::Auto => CloneMode::Auto,
            Mode::Reflink => CloneMode::Reflink,
            Mode::Overlay => CloneMode::Overlay,
        })
        .format(args.format.as_ref().map(|named| named.format))
        .cache(args.cache.unwrap_or_default())
        .refs(allowed_references(context.dialect, &args.allow_refs)?)
        .remote(opener(context, &args.allow_refs)?)
        .backing_name(given.clone())
        .keys(keys(args, context)?);
    if args.target.symlink_metadata().is_ok() {
        return Err(Failure::new(format!(
            "'{}' exists already: remove it first, or give another name",
            args.target.display()
        )));
    }
    let session = Session::start(context, &args.engine, None)?;
    let cleaned_up = if args.cache.is_none() && given.is_none() {
        go_past_cache(args, &source, &session, &mut options)
    } else {
        None
    };
    let watch = Watch::start(ProgressMode::None)?;
    let job = clone_image(session.worker(), &source, &args.target, &options);
    let Some(result) = session.run_until_cancelled(watch.cancel(), job) else {
        // What was begun is gone with the job. A file of the target's name is complete, or another program's.
        return Err(Failure::interrupted());
    };
    let report = result.map_err(|error| {
        let no_reflink = args.mode == Mode::Reflink && error.kind() == ErrorKind::Unsupported;
        if error.image() == Some(&source) && !no_reflink {
            match source_key_remedy(&error) {
                Some(remedy) => Failure::opening_with_remedy(context, &source, &error, remedy),
                None => Failure::opening(context, &source, &error),
            }
        } else if let Some(remedy) = backing_key_remedy(context.dialect, &error) {
            Failure::opening_with_remedy(context, &source, &error, remedy)
        } else {
            Failure::during(&format!("Could not clone '{}'", source.display()), &error)
        }
    })?;
    if let Some(read) = cleaned_up {
        read.clean_up();
        drop_pages(&args.target);
    }
    if !args.quiet {
        stdout::print(&match args.output {
            OutputFormat::Human => human_text(args, &report),
            OutputFormat::Json => json::to_text(context.dialect, &json_report(args, report))?,
        })?;
    }
    Ok(0)
}

/// The passphrases of an encrypted source, and of what it stands on.
fn keys(args: &CloneArgs, context: &Context) -> Result<Keys, Failure> {
    let secrets = args.secrets.read(&context.disks, Sources::All)?;
    let mut keys = args.costs.keys(context.dialect, &secrets);
    if let Some(id) = &args.key_secret {
        keys = keys.with(0, secrets.get(id).map_err(Failure::new)?);
    }
    args.backing_keys.over(keys, 1, &secrets)
}

/// The option that gives the key of the source, where it is missing or wrong.
fn source_key_remedy(error: &zebu_engine::Error) -> Option<&'static str> {
    let is_one =
        matches!(error.kind(), ErrorKind::KeyMissing | ErrorKind::WrongKey) && error.remedy().is_none();
    is_one.then_some(" (--object secret,id=KEY,file=PATH gives a key, and --key-secret KEY names it)")
}

/// Chooses the cache mode where none was asked for; what is to be cleaned up at the end.
fn go_past_cache(
    args: &CloneArgs,
    source: &Path,
    session: &Session,
    options: &mut CloneOptions,
) -> Option<DefaultCacheMode> {
    let open = OpenOptions::default()
        .format(args.format.as_ref().map(|named| named.format))
        .refs(options.refs.clone())
        .keys(options.keys.clone());
    let mut spec = ImageSpec::new(source.to_owned(), open);
    let source = DefaultCacheMode::unless_asked(None, CacheMode::default(), session, &mut spec)?;
    let target = UnaskedWrites::of(&args.target, DEFAULT_CLUSTER);
    if args.engine.verbose {
        source.tell(session.dialect(), "the source");
        stderr::tell(session.dialect(), &format!("writes to the target: {target}"));
    }
    if source.mode == CacheMode::None && target == UnaskedWrites::Direct {
        options.cache = CacheMode::None;
        return None;
    }
    Some(source)
}

fn human_text(args: &CloneArgs, report: &CloneReport) -> String {
    let target = args.target.to_string_lossy();
    let target = printable(&target);
    match &report.method {
        CloneMethod::Reflink => format!("Cloned to '{target}' by reflink: the files are independent.\n"),
        CloneMethod::Overlay { backing, reason } => format!(
            "Cloned to '{target}' as an overlay ({reason}): '{}' must not be changed or moved while it is used.\n",
            printable(&backing.to_string_lossy())
        ),
        other => format!("Cloned to '{target}' ({other:?}).\n"),
    }
}

fn json_report(args: &CloneArgs, report: CloneReport) -> Report {
    let (method, backing_filename, reason) = match report.method {
        CloneMethod::Reflink => ("reflink", None, None),
        CloneMethod::Overlay { backing, reason } => {
            ("overlay", Some(json::path_text(&backing)), Some(reason))
        }
        _ => ("other", None, None),
    };
    Report {
        filename: json::path_text(&args.target),
        format: report.format.name(),
        virtual_size: report.virtual_size,
        method,
        backing_filename,
        reason,
    }
}
