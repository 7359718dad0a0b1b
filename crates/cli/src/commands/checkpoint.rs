//! `zebu checkpoint`: begins a dirty bitmap in several images that no other program uses, in all of them or in none.
//!
//! A crash in between leaves the bitmap in some of the images. Nothing is lost then: images get it first, with no bit set, and only
//! when all have it are those cleared that had it before. The next run completes what is missing, and says where it was.

use crate::arguments::{EngineArgs, ImageArgs};
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, formats};
use crate::watch::{ProgressMode, Watch};
use serde_json::json;
use std::ffi::OsString;
use zebu_disks::size::size_argument;
use zebu_disks::{Context, ImageSpec};
use zebu_engine::{Access, CacheMode, Chain, Image, NewBitmap};

/// Arguments of `zebu checkpoint`.
#[derive(Debug, clap::Args)]
pub(crate) struct CheckpointArgs {
    /// The bitmap, which records what is written from now on; it is added where it is missing, and cleared elsewhere
    #[arg(long, value_name = "NAME")]
    bitmap: String,

    /// Bytes that a bit of a new bitmap stands for, a power of two from 512 [default: the cluster size, but 4k to 64k]
    #[arg(short, long, value_name = "SIZE", value_parser = size_argument)]
    granularity: Option<u64>,

    /// Format of the images [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image files (or options with --image-opts)
    #[arg(value_name = "FILENAME", required = true)]
    filenames: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn run(args: &CheckpointArgs, context: &Context) -> Result<u8, Failure> {
    let specs = args.filenames.iter().map(|name| {
        let mut spec = args.image.resolve(
            context,
            name,
            args.format.as_ref(),
            CacheMode::Writeback,
            Access::ReadWrite,
        )?;
        spec.called_raw = "-f raw; but a raw image has no bitmaps: convert it to qcow2 first";
        // What the image stands on plays no part.
        spec.options.chain = Chain::TopOnly;
        Ok(spec)
    });
    let specs = specs.collect::<Result<Vec<ImageSpec>, Failure>>()?;
    let session = Session::start(context, &args.engine, specs.first().and_then(|spec| spec.aio))?;
    // A signal that came between would leave images without their last tables and bitmaps.
    let _watch = Watch::start(ProgressMode::None)?;
    // All are locked before the first one is changed.
    let mut images = Vec::with_capacity(specs.len());
    let mut opened = Ok(());
    for spec in &specs {
        match session.open(spec) {
            Ok(image) => images.push(image),
            Err(failure) => {
                opened = Err(failure);
                break;
            }
        }
    }
    let begun = opened.and_then(|()| begin(args, &session, &images));
    let closed = images.iter().map(|image| session.close(image, Access::ReadWrite));
    let closed = closed.fold(Ok(()), Result::and);
    let begun = begun?;
    closed?;
    tell(args, context, &images, &begun)?;
    Ok(0)
}

/// The change of an image's bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begun {
    Added,
    Cleared,
}

/// Begins the bitmap in all images.
fn begin(args: &CheckpointArgs, session: &Session, images: &[Image]) -> Result<Vec<Begun>, Failure> {
    let (worker, name) = (session.worker(), args.bitmap.as_str());
    let mut plan = Vec::with_capacity(images.len());
    for image in images {
        let found = image.bitmaps().into_iter().find(|bitmap| bitmap.name == name);
        if found.as_ref().is_some_and(|bitmap| bitmap.in_use || !bitmap.auto) {
            let path = image.path().display();
            return Err(Failure::new(format!(
                "bitmap '{name}' of '{path}' is inconsistent or disabled, so nothing was begun: remove it (zebu bitmap --remove) \
                 or enable it, or give another name"
            )));
        }
        plan.push(if found.is_some() { Begun::Cleared } else { Begun::Added });
    }
    let paths = |which: Begun| {
        let paths = images.iter().zip(&plan).filter(|(_, begun)| **begun == which);
        paths.map(|(image, _)| format!("'{}'", image.path().display())).collect::<Vec<_>>().join(", ")
    };
    if plan.contains(&Begun::Added) && plan.contains(&Begun::Cleared) {
        let (had, had_not) = (paths(Begun::Cleared), paths(Begun::Added));
        let told = format!(
            "bitmap '{name}' was in {had}, and not in {had_not}, as after an interrupted run: it begins anew \
             in all"
        );
        stderr::tell(session.dialect(), &told);
    }
    let mut added: Vec<&Image> = Vec::new();
    for (image, _) in images.iter().zip(&plan).filter(|(_, begun)| **begun == Begun::Added) {
        let new = NewBitmap::named(name).granularity(args.granularity);
        if let Err(error) = worker.block_on(image.add_bitmap(worker, &new)) {
            let mut message = format!("{error}; bitmap '{name}' was begun in no image");
            for image in added {
                if let Err(error) = worker.block_on(image.remove_bitmap(worker, name)) {
                    message += &format!("; but it is still there, empty ({error})");
                }
            }
            return Err(Failure::new(message));
        }
        added.push(image);
    }
    let mut left: Vec<&Image> = images
        .iter()
        .zip(&plan)
        .filter(|(_, begun)| **begun == Begun::Cleared)
        .map(|(image, _)| image)
        .collect();
    while let Some(image) = left.pop() {
        if let Err(error) = worker.block_on(image.clear_bitmap(worker, name)) {
            left.push(image);
            let left: Vec<_> = left.iter().map(|image| format!("'{}'", image.path().display())).collect();
            return Err(Failure::new(format!(
                "{error}; bitmap '{name}' still has its earlier bits in {}, and begins anew in the others: \
                 run this again",
                left.join(", ")
            )));
        }
    }
    Ok(plan)
}

fn tell(args: &CheckpointArgs, context: &Context, images: &[Image], begun: &[Begun]) -> Result<(), Failure> {
    if args.output == OutputFormat::Human {
        return Ok(());
    }
    let files = images.iter().zip(begun).map(|(image, begun)| {
        let done = match begun {
            Begun::Added => "added",
            Begun::Cleared => "cleared",
        };
        json!({ "filename": json::path_text(image.path()), "bitmap": done })
    });
    let told = json!({ "bitmap": args.bitmap, "files": files.collect::<Vec<_>>() });
    stdout::print(&json::to_text(context.dialect, &told)?)
}
