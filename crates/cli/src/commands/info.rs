//! `zebu info`: what an image is, without looking at anything that it names.

use crate::arguments::{EngineArgs, ForceShareArg, ImageArgs, ImageSpec, OutputFormat, format_argument};
use crate::backing::resolve;
use crate::failure::Failure;
use crate::output::info_human::image_text;
use crate::output::info_json::ImageNode;
use crate::output::{json, stdout};
use crate::session::Session;
use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use zebu::{Access, CacheMode, Chain, Format, Image, ImageInfo, Purpose};

/// Arguments of `zebu info`.
#[derive(Debug, clap::Args)]
pub(crate) struct InfoArgs {
    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = format_argument)]
    format: Option<Format>,

    /// Open the backing files and tell about each of them too
    #[arg(short, long)]
    backing_chain: bool,

    #[command(flatten)]
    force_share: ForceShareArg,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

/// Runs the command.
pub(crate) fn run(args: &InfoArgs) -> Result<u8, Failure> {
    let mut spec = args.image.resolve(&args.filename, args.format, CacheMode::Writeback, Access::ReadOnly)?;
    if args.force_share.force_share {
        spec.options.sharing = args.force_share.sharing();
    }
    let session = Session::start(&args.engine, spec.aio)?;
    let infos = if args.backing_chain { chain(&session, spec)? } else { vec![inspect(&session, spec)?] };
    let text = match args.output {
        OutputFormat::Human => {
            infos.iter().map(|info| image_text(info, protocol(&info.filename))).collect::<Vec<_>>().join("\n")
        }
        OutputFormat::Json => {
            let nodes: Vec<ImageNode> =
                infos.iter().map(|info| ImageNode::new(info, protocol(&info.filename))).collect();
            match (args.backing_chain, nodes.as_slice()) {
                (false, [node]) => json::to_text(node)?,
                _ => json::to_text(&nodes)?,
            }
        }
    };
    stdout::print(&text)?;
    Ok(0)
}

/// Looks at the header alone.
fn inspect(session: &Session, mut spec: ImageSpec) -> Result<ImageInfo, Failure> {
    spec.options.purpose = Purpose::Inspect;
    spec.options.chain = Chain::TopOnly;
    session.with_image(&spec, |image| Ok(image.info()?))
}

/// Opens the whole chain, as the policy allows, top first.
fn chain(session: &Session, spec: ImageSpec) -> Result<Vec<ImageInfo>, Failure> {
    session.with_image(&spec, |image| {
        let mut infos: Vec<ImageInfo> = Vec::new();
        let mut next: Option<Image> = Some(image.clone());
        while let Some(image) = next {
            let mut info = image.info()?;
            if let Some(above) = infos.last() {
                info.filename = name_below(above);
            }
            infos.push(info);
            next = image.backing();
        }
        Ok(infos)
    })
}

/// The name of the backing file of an image, from where the image itself was opened.
fn name_below(above: &ImageInfo) -> PathBuf {
    above.backing_file.as_deref().map(|name| resolve(&above.filename, name)).unwrap_or_default()
}

/// QEMU's name for what an image lies in.
fn protocol(path: &Path) -> &'static str {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.file_type().is_block_device() => "host_device",
        _ => "file",
    }
}
