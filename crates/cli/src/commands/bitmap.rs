//! `zebu bitmap`: changes the persistent dirty bitmaps of an image that no other program uses.

use crate::arguments::{EngineArgs, ImageArgs};
use crate::failure::Failure;
use crate::session::Session;
use crate::suggestion::meant;
use crate::values::{NamedFormat, formats};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::ffi::OsString;
use zebu_disks::size::size_argument;
use zebu_disks::{Context, ImageSpec};
use zebu_engine::{Access, BitmapRecording, CacheMode, Chain, ErrorKind, Image, NewBitmap};

/// Arguments of `zebu bitmap`.
#[derive(Debug, clap::Args)]
pub(crate) struct BitmapArgs {
    #[command(flatten)]
    actions: Actions,

    /// Bytes that a bit of a new bitmap stands for, a power of two from 512 [default: the cluster size, but 4k to 64k]
    #[arg(short, long, value_name = "SIZE", value_parser = size_argument)]
    granularity: Option<u64>,

    /// The image whose bitmap is merged [default: FILENAME]
    #[arg(short = 'b', long, value_name = "FILE")]
    source_file: Option<OsString>,

    /// Format of the image whose bitmap is merged [default: probed]
    #[arg(short = 'F', long, value_name = "FMT", value_parser = formats(), requires = "source_file")]
    source_format: Option<NamedFormat>,

    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,

    /// The bitmap; left out with --remove-all alone
    #[arg(value_name = "BITMAP")]
    bitmap: Option<String>,
}

/// One thing to do with the bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Add,
    Remove,
    RemoveAll,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

/// The actions in the order in which they are given; each may come more than once.
#[derive(Debug, Clone, Default)]
struct Actions(Vec<Action>);

const FLAGS: [(&str, Action, &str); 6] = [
    ("add", Action::Add, "Add an empty bitmap, which records writes unless --disable follows"),
    ("remove", Action::Remove, "Remove the bitmap, whatever its state"),
    ("remove-all", Action::RemoveAll, "Remove all bitmaps of the image, whatever their state"),
    ("clear", Action::Clear, "Clear all bits of the bitmap"),
    ("enable", Action::Enable, "Have the bitmap record writes"),
    ("disable", Action::Disable, "Have the bitmap stay as it is"),
];

impl clap::Args for Actions {
    fn augment_args(mut command: Command) -> Command {
        for (name, _, help) in FLAGS {
            let flag = Arg::new(name).long(name).help(help).action(ArgAction::Append);
            command = command.arg(flag.num_args(0).default_missing_value(""));
        }
        let merge = Arg::new("merge").long("merge").value_name("SOURCE").action(ArgAction::Append);
        command.arg(merge.help("Set all bits that are set in this bitmap, of the same image or that of -b"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Actions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found: Vec<(usize, Action)> = Vec::new();
        let is_given = |name| matches.value_source(name) == Some(ValueSource::CommandLine);
        for (name, action, _) in FLAGS {
            if is_given(name) {
                let indices = matches.indices_of(name).into_iter().flatten();
                found.extend(indices.map(|index| (index, action.clone())));
            }
        }
        if let (Some(indices), Some(values)) =
            (matches.indices_of("merge"), matches.get_many::<String>("merge"))
        {
            found.extend(indices.zip(values).map(|(index, value)| (index, Action::Merge(value.clone()))));
        }
        found.sort_by_key(|(index, _)| *index);
        Ok(Self(found.into_iter().map(|(_, action)| action).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Action {
    fn name(&self) -> &'static str {
        match self {
            Action::Add => "add",
            Action::Remove => "remove",
            Action::RemoveAll => "remove-all",
            Action::Clear => "clear",
            Action::Enable => "enable",
            Action::Disable => "disable",
            Action::Merge(_) => "merge",
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &BitmapArgs, context: &Context) -> Result<u8, Failure> {
    let actions = &args.actions.0;
    if actions.is_empty() {
        return Err(Failure::usage(
            "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge",
        ));
    }
    if args.granularity.is_some() && !actions.contains(&Action::Add) {
        return Err(Failure::usage("granularity only supported with --add"));
    }
    if args.source_file.is_some() && !actions.iter().any(|action| matches!(action, Action::Merge(_))) {
        return Err(Failure::usage("Merge bitmap source file only supported with --merge"));
    }
    let needs_name = actions.iter().any(|action| *action != Action::RemoveAll);
    match &args.bitmap {
        None if needs_name => return Err(Failure::usage("Expecting filename and bitmap name")),
        Some(_) if !needs_name => return Err(Failure::usage("Expecting filename")),
        _ => {}
    }
    let mut spec = args.image.resolve(
        context,
        &args.filename,
        args.format.as_ref(),
        CacheMode::Writeback,
        Access::ReadWrite,
    )?;
    spec.called_raw = "-f raw; but a raw image has no bitmaps: convert it to qcow2 first";
    // What the image stands on plays no part.
    spec.options.chain = Chain::TopOnly;
    let source = match &args.source_file {
        Some(name) => {
            let image = ImageArgs { image_opts: false, ..args.image.clone() };
            let mut spec = image.resolve(
                context,
                name,
                args.source_format.as_ref(),
                CacheMode::Writeback,
                Access::ReadOnly,
            )?;
            spec.options.chain = Chain::TopOnly;
            Some(spec)
        }
        None => None,
    };
    let session = Session::start(context, &args.engine, spec.aio)?;
    session.with_image(&spec, |image| {
        actions.iter().try_for_each(|action| act(args, &session, image, source.as_ref(), action))
    })?;
    Ok(0)
}

fn act(
    args: &BitmapArgs,
    session: &Session,
    image: &Image,
    source: Option<&ImageSpec>,
    action: &Action,
) -> Result<(), Failure> {
    let (worker, name) = (session.worker(), args.bitmap.as_deref().unwrap_or_default());
    let result = match action {
        Action::Add => {
            let new = NewBitmap::named(name).granularity(args.granularity);
            worker.block_on(image.add_bitmap(worker, &new))
        }
        Action::Remove => worker.block_on(image.remove_bitmap(worker, name)),
        Action::RemoveAll => {
            for bitmap in image.bitmaps() {
                worker.block_on(image.remove_bitmap(worker, &bitmap.name)).map_err(|error| {
                    Failure::during(&format!("Operation remove-all on bitmap {} failed", bitmap.name), &error)
                })?;
            }
            Ok(())
        }
        Action::Clear => worker.block_on(image.clear_bitmap(worker, name)),
        Action::Enable => worker.block_on(image.set_bitmap_recording(worker, name, BitmapRecording::On)),
        Action::Disable => worker.block_on(image.set_bitmap_recording(worker, name, BitmapRecording::Off)),
        Action::Merge(other) => {
            let merge = |source: &Image| {
                worker.block_on(async {
                    let bits = source.bitmap_bits(worker, other).await?;
                    image.merge_bitmap(worker, name, &bits).await
                })
            };
            match source {
                Some(spec) => session.with_image(spec, |source| Ok(merge(source)))?,
                None => merge(image),
            }
        }
    };
    result.map_err(|error| {
        let failure =
            Failure::during(&format!("Operation {} on bitmap {name} failed", action.name()), &error);
        if session.dialect().is_qemu() || error.kind() != ErrorKind::NotFound || source.is_some() {
            return failure;
        }
        let unknown = match action {
            Action::Merge(other) if error.message().contains(&format!("'{other}'")) => other,
            _ => name,
        };
        failure.adding(&meant(unknown, "bitmaps", image.bitmaps().iter().map(|bitmap| bitmap.name.as_str())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: BitmapArgs,
    }

    #[test]
    fn actions_keep_their_order() {
        let line = "x --clear --merge a --add --merge b --clear disk name";
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        let names: Vec<_> = line.args.actions.0.iter().map(Action::name).collect();
        assert_eq!(names, ["clear", "merge", "add", "merge", "clear"]);
        assert_eq!(line.args.actions.0[3], Action::Merge("b".to_owned()));
        assert!(Line::try_parse_from(["x", "disk", "name"]).unwrap().args.actions.0.is_empty());
    }
}
