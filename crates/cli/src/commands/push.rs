//! `zebu push`: an image of a registry, made of a file, or of an overlay and what it stands on.

mod chain;
mod pace;

use crate::arguments::InspectArgs;
use crate::failure::Failure;
use crate::output::{json, stdout};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, Rate, formats, rate_argument};
use crate::watch::{ProgressArg, Watch};
use pace::Pace;
use serde::Serialize;
use std::ffi::OsString;
use std::fs::File;
use std::num::NonZeroU64;
use zebu_disks::{Context, ImageSpec, printable};
use zebu_engine::{Access, CacheMode, Format, Image};
use zebu_oci::{OciName, PushAs, PushOptions, Pushed, PushedBlob, push, push_stack};

/// A raw disk ends with a whole one of them.
const SECTOR: u64 = 512;

/// Arguments of `zebu push`.
#[derive(Debug, clap::Args)]
pub(crate) struct PushArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    pub(crate) quiet: bool,

    #[command(flatten)]
    pub(crate) progress: ProgressArg,

    /// Format of the file [default: probed]
    #[arg(short = 'f', long, value_name = "FMT", value_parser = formats())]
    pub(crate) format: Option<NamedFormat>,

    /// Kind of image that is made [default: the file as it is, and the files that it stands on]
    #[arg(long = "as", value_enum, value_name = "KIND")]
    pub(crate) kind: Option<Kind>,

    /// Name of the file in the image [default: its own]
    #[arg(long, value_name = "NAME")]
    pub(crate) title: Option<String>,

    /// Annotation of the image; may be given more than once
    #[arg(long, value_name = "KEY=VALUE", value_parser = annotation)]
    pub(crate) annotation: Vec<(String, String)>,

    /// Send at most so many bytes a second; 0: no limit
    #[arg(short = 'r', long, value_name = "RATE", value_parser = rate_argument)]
    pub(crate) rate_limit: Option<Rate>,

    #[command(flatten)]
    pub(crate) inspect: InspectArgs,

    /// The file, a qcow2 or raw image. An overlay goes with the files that it stands on
    #[arg(value_name = "FILENAME")]
    pub(crate) file: OsString,

    /// oci://REGISTRY/NAME:TAG, or oci-layout:DIR:TAG
    #[arg(value_name = "IMAGE", value_parser = OciName::parse)]
    pub(crate) name: OciName,
}

/// `--as`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// The qcow2 image as it is.
    Qcow2,
    /// The raw disk as it is.
    Raw,
    /// A raw disk in zstd.
    RawZstd,
    /// The file in a container, for KubeVirt.
    ContainerDisk,
}

/// The JSON report.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Report {
    image: String,
    digest: String,
    length: u64,
    was_there: bool,
    blobs: Vec<BlobReport>,
}

/// A blob in the JSON report, of a chain the lowest first.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct BlobReport {
    digest: String,
    length: u64,
    was_there: bool,
}

fn annotation(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("an annotation is KEY=VALUE".to_owned()),
    }
}

/// The image of a registry that a file becomes.
pub(crate) struct Wanted {
    pub(crate) name: OciName,
    pub(crate) kind: Option<Kind>,
    /// Name of the file in the image; its own if it is not given.
    pub(crate) title: Option<String>,
    pub(crate) annotations: Vec<(String, String)>,
    /// The most bytes a second that are sent.
    pub(crate) rate: Option<NonZeroU64>,
}

/// Runs the command.
pub(crate) fn run(args: &PushArgs, context: &Context) -> Result<u8, Failure> {
    let format = args.format.as_ref();
    let mut spec =
        args.inspect.image.resolve(context, &args.file, format, CacheMode::Writeback, Access::ReadOnly)?;
    args.inspect.force_share.apply(&mut spec);
    let session = Session::start(context, &args.inspect.engine, spec.aio)?;
    let mut watch = Watch::start(args.progress.beside(args.inspect.output).mode(args.quiet))?;
    let wanted = Wanted {
        name: args.name.clone(),
        kind: args.kind,
        title: args.title.clone(),
        annotations: args.annotation.clone(),
        rate: args.rate_limit.and_then(|rate| rate.0),
    };
    let pushed = push_image(&session, &spec, &wanted, &watch)?;
    watch.finish();
    if !args.quiet {
        stdout::print(&match args.inspect.output {
            OutputFormat::Human => human_text(&args.name, &pushed),
            OutputFormat::Json => json::to_text(context.dialect, &json_report(&args.name, &pushed))?,
        })?;
    }
    Ok(0)
}

/// Makes an image of a registry of a file of this machine.
pub(crate) fn push_image(
    session: &Session,
    spec: &ImageSpec,
    wanted: &Wanted,
    watch: &Watch,
) -> Result<Pushed, Failure> {
    let Wanted { name, kind, annotations, rate, .. } = wanted;
    let context = session.context();
    let fail = |reason: &str| Failure::new(format!("could not push '{}': {reason}", spec.path.display()));
    if context.disks.names.named(&spec.path).is_some() {
        return Err(fail("it must be a local file: convert it into one first"));
    }
    let own = || spec.path.file_name().map(|name| name.to_string_lossy().into_owned());
    let title = wanted.title.clone().or_else(own).unwrap_or_else(|| "disk".to_owned());
    // While it is open, nobody writes it.
    session.with_image(spec, |image| {
        let chain = if kind.is_none() && image.backing().is_some() {
            Some(chain::files(context, image, &title).map_err(|reason| fail(&reason))?)
        } else {
            None
        };
        let kind = match chain {
            Some(_) => PushAs::Qcow2,
            None => kind_of(*kind, image).map_err(|reason| fail(&reason))?,
        };
        let options = PushOptions::new(kind, title.clone()).annotations(annotations.clone());
        let pace = Pace::begin(*rate);
        let on = |done: u64, total: u64| {
            watch.note("pushing", done, total);
            pace.keep(done, watch.cancel());
            !watch.cancel().is_cancelled()
        };
        let oci = context.disks.remote.oci_options();
        let pushed = if let Some(files) = &chain {
            push_stack(files, name, &options, &oci, &on)
        } else {
            let file = File::open(&spec.path).map_err(|error| fail(&error.to_string()))?;
            push(&file, name, &options, &oci, &on)
        };
        pushed.map_err(|error| {
            if watch.cancel().is_cancelled() {
                return Failure::interrupted();
            }
            Failure::new(format!("could not push to '{name}': {}", printable(error.reason())))
        })
    })
}

/// The report for people.
pub(crate) fn human_text(name: &OciName, pushed: &Pushed) -> String {
    let Pushed { digest, len, was_there, blobs, .. } = pushed;
    if let [_] = blobs[..] {
        let before = if *was_there { ", which was there" } else { "" };
        return format!("{name}: {digest}, a blob of {len} bytes{before}\n");
    }
    let sent: u64 = blobs.iter().filter(|blob| !blob.was_there).map(|blob| blob.len).sum();
    format!("{name}: {digest}, {} blobs of {len} bytes, {sent} of them sent\n", blobs.len())
}

/// The report for programs.
pub(crate) fn json_report(name: &OciName, pushed: &Pushed) -> Report {
    let blob = |blob: &PushedBlob| BlobReport {
        digest: blob.digest.to_string(),
        length: blob.len,
        was_there: blob.was_there,
    };
    Report {
        image: name.to_string(),
        digest: pushed.digest.to_string(),
        length: pushed.len,
        was_there: pushed.was_there,
        blobs: pushed.blobs.iter().map(blob).collect(),
    }
}

/// The kind of image that is made of a file.
///
/// # Errors
/// The file alone is not the disk, or is of another format than the kind needs.
fn kind_of(wanted: Option<Kind>, image: &Image) -> Result<PushAs, String> {
    let info = image.info().map_err(|error| error.to_string())?;
    let has_data_file = info.qcow2.as_ref().is_some_and(|qcow2| qcow2.data_file.is_some());
    if info.backing_file.is_some() || has_data_file {
        return Err("it has a backing file or a data file: convert it, which makes one file of its chain, or omit --as, \
                    which pushes each file of the chain"
            .to_owned());
    }
    let format = image.format();
    if format == Format::Raw && info.virtual_size.abs_diff(info.file_length) >= SECTOR {
        return Err(
            "the disk is only a part of its file: convert it, which makes a file of that part".to_owned()
        );
    }
    match (wanted, format) {
        (None | Some(Kind::Qcow2), Format::Qcow2) => Ok(PushAs::Qcow2),
        (None | Some(Kind::Raw), Format::Raw) => Ok(PushAs::Raw),
        (Some(Kind::RawZstd), Format::Raw) => Ok(PushAs::RawZstd),
        (Some(Kind::ContainerDisk), Format::Raw | Format::Qcow2) => Ok(PushAs::ContainerDisk),
        (Some(Kind::Qcow2), _) => {
            Err("it is no qcow2 image: zebu convert -c -O qcow2 makes one of it".to_owned())
        }
        (Some(Kind::Raw | Kind::RawZstd), _) => {
            Err("it is no raw image: zebu convert -O raw makes one of it".to_owned())
        }
        (None | Some(Kind::ContainerDisk), _) => {
            Err("images of registries hold qcow2 and raw: zebu convert -c -O qcow2 makes one of it"
                .to_owned())
        }
    }
}
