//! `zebu resize`: changes the size of a virtual disk.

use crate::arguments::{EngineArgs, ImageArgs};
use crate::failure::Failure;
use crate::output::stdout;
use crate::session::Session;
use crate::values::{NamedFormat, formats, preallocation_argument};
use crate::watch::{ProgressArg, Watch};
use std::ffi::OsString;
use zebu_disks::size::{SizeError, parse_size};
use zebu_disks::{Context, Program};
use zebu_engine::{Access, CacheMode, Preallocation, Shrink};

/// Arguments of `zebu resize`.
#[derive(Debug, clap::Args)]
pub(crate) struct ResizeArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the image [default: probed; a raw image needs it]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Allow the disk to become smaller: what lies past the new end is lost
    #[arg(long)]
    shrink: bool,

    /// How space is set aside for what is added
    #[arg(
        long,
        value_name = "off|metadata|falloc|full",
        value_parser = preallocation_argument,
        default_value = "off"
    )]
    preallocation: Preallocation,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,

    /// The new size, or the amount to add (+SIZE) or to take away (-SIZE)
    #[arg(value_name = "[+-]SIZE", value_parser = change_argument, allow_hyphen_values = true)]
    size: SizeChange,
}

/// A change of the size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SizeChange {
    To(u64),
    Grow(u64),
    Shrink(u64),
}

fn change_argument(text: &str) -> Result<SizeChange, SizeError> {
    if let Some(rest) = text.strip_prefix('+') {
        parse_size(rest).map(SizeChange::Grow)
    } else if let Some(rest) = text.strip_prefix('-') {
        parse_size(rest).map(SizeChange::Shrink)
    } else {
        parse_size(text).map(SizeChange::To)
    }
}

impl SizeChange {
    fn apply(self, dialect: Program, current: u64) -> Result<u64, Failure> {
        let size = match self {
            SizeChange::To(size) => Some(size),
            SizeChange::Grow(by) => current.checked_add(by),
            SizeChange::Shrink(by) => current.checked_sub(by),
        };
        // As QEMU's program; zebu has empty disks.
        let size = size.filter(|size| *size > 0 || !dialect.is_qemu());
        size.ok_or_else(|| Failure::new("New image size must be positive and below 2^63"))
    }
}

/// Runs the command.
pub(crate) fn run(args: &ResizeArgs, context: &Context) -> Result<u8, Failure> {
    let spec = args.image.resolve(
        context,
        &args.filename,
        args.format.as_ref(),
        CacheMode::Writeback,
        Access::ReadWrite,
    )?;

    let session = Session::start(context, &args.engine, spec.aio)?;
    session.with_image(&spec, |image| {
        let current = image.virtual_size();
        let new_size = args.size.apply(context.dialect, current)?;
        if new_size <= current && args.preallocation != Preallocation::Off {
            return Err(Failure::new("Preallocation can only be used for growing images"));
        }
        if new_size < current && !args.shrink {
            return Err(Failure::new(format!(
                "Use the --shrink option to perform a shrink operation. (All data past the new end of '{}' will be \
                 lost.)",
                spec.path.display()
            )));
        }
        let shrink = if args.shrink { Shrink::Allow } else { Shrink::Refuse };
        let worker = session.worker();
        let mut watch = Watch::start(args.progress.mode(args.quiet))?;
        let control = watch.control();
        let resize = image.resize_controlled(worker, new_size, shrink, args.preallocation, &control);
        let done = worker.block_on(resize);
        if done.is_ok() {
            watch.note("finishing", new_size, new_size);
        }
        watch.finish();
        done.map_err(|error| Failure::during("could not resize", &error))
    })?;
    if !args.quiet {
        stdout::print("Image resized.\n")?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        assert_eq!(change_argument("128M").unwrap().apply(Program::Zebu, 5).unwrap(), 128 << 20);
        assert_eq!(change_argument("+1k").unwrap().apply(Program::Zebu, 1024).unwrap(), 2048);
        assert_eq!(change_argument("-1k").unwrap().apply(Program::Zebu, 2048).unwrap(), 1024);
    }

    #[test]
    fn sizes_that_do_not_exist_are_refused() {
        assert!(change_argument("-1k").unwrap().apply(Program::Zebu, 512).is_err());
        assert!(change_argument("+15E").unwrap().apply(Program::Zebu, u64::MAX).is_err());
        assert!(change_argument("+1x").is_err());
        assert!(change_argument("+-1").is_err());
        assert!(change_argument("").is_err());
    }
}
