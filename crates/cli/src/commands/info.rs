//! `zebu info`: what an image is, without looking at anything that it names.

mod nodes;

pub(crate) use nodes::protocol;
use nodes::{Nodes, chain_of, open_extents};

use crate::arguments::InspectArgs;
use crate::failure::Failure;
use crate::image_failure::image_failure;
use crate::output::info_human::image_text;
use crate::output::info_json::{Fragmentation, ImageNode};
use crate::output::info_node::InfoNode;
use crate::output::terminal::Terminal;
use crate::output::tree::tree_text;
use crate::output::verdict::{VerdictNode, verdict_text};
use crate::output::{json, stdout};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, formats};
use serde::Serialize;
use std::ffi::OsString;
use zebu_disks::{Context, ImageSpec, Program, Sources, describes_backing};
use zebu_engine::{Access, CacheMode, Chain, ExtentKind, Format, ImageInfo, Purpose};

/// Exit code of a verdict against the image.
const UNSAFE: u8 = 2;

/// Arguments of `zebu info`.
#[derive(Debug, clap::Args)]
pub(crate) struct InfoArgs {
    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Open the backing files and describe each of them too
    #[arg(short, long)]
    backing_chain: bool,

    /// Also walk the mapping and report in how many pieces the data lies
    #[arg(long)]
    fragmentation: bool,

    /// Tell whether the image may be handed to a tool that trusts it, and why not (exit code 2); opens no other file
    #[arg(long, conflicts_with_all = ["backing_chain", "fragmentation"])]
    verdict: bool,

    /// Show the chain as a tree: sizes, snapshots, bitmaps, and what is missing or refused (exit code 1)
    #[arg(long, conflicts_with_all = ["backing_chain", "fragmentation", "verdict"])]
    tree: bool,

    #[command(flatten)]
    inspect: InspectArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

/// Runs the command.
pub(crate) fn run(args: &InfoArgs, context: &Context) -> Result<u8, Failure> {
    let mut spec = args.inspect.image.resolve_with(
        context,
        &args.filename,
        args.format.as_ref(),
        CacheMode::Writeback,
        Access::ReadOnly,
        Sources::Unneeded,
    )?;
    args.inspect.force_share.apply(&mut spec);
    if context.dialect.is_qemu() && describes_backing(&spec.options) {
        let message = "Block format 'qcow2' does not support the option 'backing': no backing file is opened";
        return Err(Failure::opening_name(&args.filename, message));
    }
    let key_of_top = spec.secrets.key_of_top.clone().filter(|_| context.dialect.is_qemu());
    let session = Session::start(context, &args.inspect.engine, spec.aio)?;
    if args.verdict {
        return assess(&session, &spec, args.inspect.output);
    }
    if args.tree {
        return tree(&session, &spec, args.inspect.output);
    }
    let fragmentation = args.fragmentation.then(|| walk(&session, spec.clone())).transpose()?;
    let infos = if args.backing_chain {
        chain(&session, spec.clone()).map_err(|failure| loop_alone(context.dialect, failure))?
    } else {
        vec![inspect(&session, spec.clone())?]
    };
    let name = key_of_top.zip(infos.first()).map(|(key, info)| name_with_key(context, info, &key));
    let nodes = nodes_of(&session, &spec, &infos, name)?;
    let of_first = |index: usize| fragmentation.filter(|_| index == 0);
    let text = match args.inspect.output {
        OutputFormat::Human => {
            let text = |(index, node): (usize, &InfoNode)| image_text(context.dialect, node, of_first(index));
            nodes.iter().enumerate().map(text).collect::<Vec<_>>().join("\n")
        }
        OutputFormat::Json => {
            let told =
                |(index, node): (usize, &InfoNode)| ImageNode::new(context.dialect, node, of_first(index));
            let told: Vec<ImageNode> = nodes.iter().enumerate().map(told).collect();
            match (args.backing_chain, told.as_slice()) {
                (false, [node]) => json::to_text(context.dialect, node)?,
                _ => json::to_text(context.dialect, &told)?,
            }
        }
    };
    stdout::print(&text)?;
    Ok(0)
}

/// The nodes to tell of, each with those below it.
fn nodes_of(
    session: &Session,
    spec: &ImageSpec,
    infos: &[ImageInfo],
    name: Option<String>,
) -> Result<Vec<InfoNode>, Failure> {
    let nodes = Nodes { session, spec };
    let Some((first, below)) = infos.split_first() else { return Ok(Vec::new()) };
    let mut first = first.clone();
    if session.dialect().is_qemu() {
        open_extents(session, spec.clone(), &mut first)?;
    }
    let top = nodes.top(&first, name)?;
    // Below a driver the chain was told already.
    let below = if top.image().is_some() { below } else { &[] };
    let below = below.iter().map(|info| nodes.image(info));
    std::iter::once(Ok(top)).chain(below).collect()
}

/// The name by which QEMU calls an image that was opened with a key: its path alone would not open it.
fn name_with_key(context: &Context, info: &ImageInfo, key: &str) -> String {
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let file = format!(
        "\"file\": {{\"driver\": {}, \"filename\": {}}}",
        text(protocol(&context.disks, &info.filename)),
        text(&json::path_text(&info.filename))
    );
    let (driver, key) = (text(info.format.name()), text(key));
    match info.format {
        Format::Luks => format!("json:{{\"driver\": {driver}, {file}, \"key-secret\": {key}}}"),
        _ => format!("json:{{\"encrypt.key-secret\": {key}, \"driver\": {driver}, {file}}}"),
    }
}

/// Prints the verdict. The exit code says whether the image is safe.
fn assess(session: &Session, spec: &ImageSpec, output: OutputFormat) -> Result<u8, Failure> {
    let worker = session.worker();
    let verdict = worker
        .block_on(zebu_engine::verdict::assess(worker, &spec.path, &spec.options))
        .map_err(|error| Failure::opening(session.context(), &spec.path, &error))?;
    let text = match output {
        OutputFormat::Human => verdict_text(&verdict),
        OutputFormat::Json => json::to_text(session.dialect(), &VerdictNode::new(&verdict))?,
    };
    stdout::print(&text)?;
    Ok(if verdict.is_safe() { 0 } else { UNSAFE })
}

/// Prints the chain as far as it can be looked at, and fails where it breaks off.
fn tree(session: &Session, spec: &ImageSpec, output: OutputFormat) -> Result<u8, Failure> {
    let (context, worker) = (session.context(), session.worker());
    let chain = worker
        .block_on(zebu_engine::Image::look_down(worker, &spec.path, &spec.options))
        .map_err(|error| image_failure(spec, context, &error))?;
    let end = chain.end.map(|error| Failure::opening(context, &spec.path, &error));
    let reason = end.as_ref().and_then(|failure| failure.message.as_deref());
    let text = match output {
        OutputFormat::Human => tree_text(&chain.images, reason, Terminal::of_standard_output().charset),
        OutputFormat::Json => {
            let nodes = nodes_of(session, spec, &chain.images, None)?;
            let images = nodes.iter().map(|node| ImageNode::new(context.dialect, node, None)).collect();
            json::to_text(context.dialect, &TreeNode { images, end: reason })?
        }
    };
    stdout::print(&text)?;
    end.map_or(Ok(0), Err)
}

/// A chain as JSON.
#[derive(Debug, Serialize)]
struct TreeNode<'a> {
    /// The images, top first.
    images: Vec<ImageNode>,
    /// Why the image below the last one can't be looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<&'a str>,
}

/// Looks at the header alone.
fn inspect(session: &Session, mut spec: ImageSpec) -> Result<ImageInfo, Failure> {
    spec.options.purpose = Purpose::Inspect;
    spec.options.chain = Chain::TopOnly;
    session.with_unfiltered(&spec, |image| Ok(image.info()?))
}

/// Opens the whole chain, as the policy allows, top first.
fn chain(session: &Session, spec: ImageSpec) -> Result<Vec<ImageInfo>, Failure> {
    session.with_unfiltered(&spec, |image| chain_of(session.context(), image))
}

/// The failure in the words of qemu-img, which tells of a loop without naming the image again.
fn loop_alone(dialect: Program, failure: Failure) -> Failure {
    let told = failure
        .message
        .as_deref()
        .filter(|text| dialect.is_qemu() && text.ends_with("' creates an infinite loop."));
    match told.and_then(|text| text.rfind("Backing file '").map(|at| text[at..].to_owned())) {
        Some(message) => Failure::new(message),
        None => failure,
    }
}

/// Walks the mapping of the image alone, without its backing files.
fn walk(session: &Session, mut spec: ImageSpec) -> Result<Fragmentation, Failure> {
    spec.options.chain = Chain::TopOnly;
    session.with_unfiltered(&spec, |image| {
        let worker = session.worker();
        let mut found = Fragmentation::default();
        let (mut extents, mut expected) = (image.extents(0..image.virtual_size()), None);
        while let Some(extent) = worker.block_on(extents.next(worker))? {
            if let ExtentKind::Data { host } = extent.kind {
                found.data_bytes += extent.len;
                found.extents += u64::from(expected != Some(host));
                expected = Some(host + extent.len);
            }
        }
        Ok(found)
    })
}
