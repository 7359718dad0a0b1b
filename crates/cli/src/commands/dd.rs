//! `zebu dd`: copies a part of a disk into a new image.

use crate::arguments::{EngineArgs, ForceShareArg, ImageArgs};
use crate::default_cache_mode::DefaultCacheMode;
use crate::encrypted_file::refuse_plain_text;
use crate::failure::Failure;
use crate::lock_patience::lock_wait;
use crate::new_file::{ForceArg, settle_format};
use crate::output::stderr;
use crate::sector_size::warn_of_lost;
use crate::session::Session;
use crate::values::{NamedFormat, formats, target_formats};
use crate::watch::{ProgressArg, Watch};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use zebu_disks::size::parse_size;
use zebu_disks::{Context, Program, given_only};
use zebu_engine::jobs::{
    ConvertOptions, ConvertTarget, NewTarget, PlaceOrder, UnaskedWrites, convert, drop_pages,
};
use zebu_engine::{Access, CacheMode, CreateOptions, Format, OpenOptions};

/// Arguments of `zebu dd`.
#[derive(Debug, clap::Args)]
pub(crate) struct DdArgs {
    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the input [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Format of the output [default: by the name's suffix]
    #[arg(short = 'O', long, value_name = "FMT", value_parser = target_formats())]
    output_format: Option<NamedFormat>,

    #[command(flatten)]
    force: ForceArg,

    #[command(flatten)]
    force_share: ForceShareArg,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// if=INPUT and of=OUTPUT; bs=SIZE: bytes of a block [default: 512]; skip=N: blocks of the input to leave out;
    /// count=N: blocks to copy after those [default: up to the end]
    #[arg(value_name = "OPERANDS", num_args = 1..)]
    operands: Vec<OsString>,
}

/// The operands, understood.
#[derive(Debug, PartialEq, Eq)]
struct Operands<'a> {
    input: &'a OsStr,
    output: &'a OsStr,
    block: u64,
    count: Option<u64>,
    skip: u64,
}

impl<'a> Operands<'a> {
    fn parse(dialect: Program, operands: &'a [OsString]) -> Result<Self, Failure> {
        let (mut input, mut output, mut block, mut count, mut skip) = (None, None, 512, None, 0);
        for operand in operands {
            let bytes = operand.as_bytes();
            let unknown = || Failure::usage(format!("unrecognized operand {}", operand.display()));
            let equals = bytes.iter().position(|&byte| byte == b'=').ok_or_else(unknown)?;
            let value = OsStr::from_bytes(&bytes[equals + 1..]);
            match &bytes[..equals] {
                b"if" => input = Some(value),
                b"of" => output = Some(value),
                b"bs" => block = number("bs", value, 1, u64::from(i32::MAX.unsigned_abs()))?,
                b"count" => count = Some(blocks(dialect, "count", value)?),
                b"skip" => skip = blocks(dialect, "skip", value)?,
                _ => return Err(unknown()),
            }
        }
        match (input, output) {
            (Some(input), Some(output)) => Ok(Self { input, output, block, count, skip }),
            _ => Err(Failure::usage("Must specify both input and output files")),
        }
    }
}

fn number(name: &str, value: &OsStr, least: u64, most: u64) -> Result<u64, Failure> {
    let text = value.to_string_lossy();
    match parse_size(&text) {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        Ok(_) => {
            Err(Failure::usage(format!("Invalid {name} specified. Must be between {least} and {most}.")))
        }
        Err(_) => Err(Failure::usage(format!("Invalid {name} specified: '{text}'."))),
    }
}

/// A number of blocks. QEMU's has no suffix.
fn blocks(dialect: Program, name: &str, value: &OsStr) -> Result<u64, Failure> {
    let text = value.to_string_lossy();
    let is_number = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => text.bytes().all(|byte| byte.is_ascii_digit()),
    };
    if dialect.is_qemu() && !is_number {
        return Err(Failure::usage(format!("Invalid {name} specified: '{text}'.")));
    }
    number(name, value, 0, i64::MAX.unsigned_abs())
}

/// Runs the command.
pub(crate) fn run(args: &mut DdArgs, context: &Context) -> Result<u8, Failure> {
    let operands = Operands::parse(context.dialect, &args.operands)?;
    let is_named = args.output_format.is_some();
    settle_format(context.dialect, &mut args.output_format, operands.output, "-O")?;
    let output_format = args.output_format.as_ref().map(|named| named.format);
    if output_format == Some(Format::Luks) {
        // QEMU's program has no option for it either.
        return Err(Failure::new(
            "dd takes no key for a new LUKS disk: use convert -O luks -o key-secret=ID",
        ));
    }
    if let Some(named) = &args.output_format {
        named.check_new(operands.output).map_err(Failure::new)?;
    }
    if !is_named {
        refuse_plain_text(Path::new(operands.output))?;
    }
    let output = context
        .new_image_path(operands.output)
        .map_err(|reason| Failure::creating_name(operands.output, &reason))?;
    args.force.check(context.dialect, &output)?;
    let mut spec = args.image.resolve(
        context,
        operands.input,
        args.format.as_ref(),
        CacheMode::Writeback,
        Access::ReadOnly,
    )?;
    args.force_share.apply(&mut spec);
    let mut session = Session::start(context, &args.engine, spec.aio)?;
    session.read_uncached();
    DefaultCacheMode::for_source(&session, &mut spec);
    let mut watch = Watch::start(args.progress.mode(false))?;
    let source = session.open(&spec)?;
    let size = source.virtual_size();
    let first = operands.skip.saturating_mul(operands.block);
    if first > size {
        stderr::tell(
            context.dialect,
            &format!("{}: cannot skip to specified offset", operands.input.display()),
        );
    }
    let first = first.min(size);
    let end = match operands.count {
        // QEMU's program counts from the beginning of the input, whatever it skips.
        Some(count) if context.dialect.is_qemu() => count.saturating_mul(operands.block).min(size).max(first),
        Some(count) => first.saturating_add(count.saturating_mul(operands.block)).min(size),
        None => size,
    };
    // Tables in the order of the disk take a cluster, which `check` finds unused where there is no disk.
    let order = if first < end { PlaceOrder::OfDisk } else { PlaceOrder::AsTheyCome };
    let mut options = ConvertOptions::default().range(Some(first..end)).order(order).control(watch.control());
    let mut target = NewTarget::new(output)
        .create(
            CreateOptions::default()
                .format(output_format.unwrap_or(Format::Raw))
                .lock_wait(lock_wait(context.dialect)),
        )
        .open(OpenOptions::default());
    let path = target.path.clone();
    let unasked = (!context.disks.names.is_remote(&path))
        .then(|| UnaskedWrites::of(&target.path, target.create.cluster_size));
    if let Some(unasked) = unasked {
        unasked.apply(&mut target);
    } else {
        (target.create.remote, target.open.remote) = (given_only(context), given_only(context));
    }
    if unasked == Some(UnaskedWrites::OneBuffered) {
        options.requests = 1;
    }
    let worker = session.worker();
    let target = ConvertTarget::New(Box::new(target));
    let result = worker.block_on(convert(worker, std::slice::from_ref(&source), target, &options));
    watch.finish();
    session.close(&source, Access::ReadOnly)?;
    let report = result.map_err(|error| {
        Failure::during(&format!("could not copy to '{}'", operands.output.display()), &error)
    })?;
    warn_of_lost(report.lost_logical_sector, operands.output);
    if unasked == Some(UnaskedWrites::OneBuffered) {
        drop_pages(&path);
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(operands: &[&str]) -> Result<(u64, Option<u64>, u64), Failure> {
        let operands: Vec<OsString> = operands.iter().map(OsString::from).collect();
        Operands::parse(Program::Zebu, &operands).map(|found| (found.block, found.count, found.skip))
    }

    #[test]
    fn operands_are_those_of_dd() {
        assert_eq!(parse(&["if=a=b", "of=c"]), Ok((512, None, 0)));
        assert_eq!(parse(&["of=c", "bs=1M", "count=2k", "skip=3", "if=a"]), Ok((1 << 20, Some(2048), 3)));
    }

    #[test]
    fn wrong_operands_are_named() {
        for (operands, word) in [
            (vec!["if=a"], "both"),
            (vec!["if=a", "of=b", "seek=1"], "seek"),
            (vec!["if=a", "of=b", "bs=0"], "bs"),
            (vec!["if=a", "of=b", "bs=4G"], "bs"),
            (vec!["if=a", "of=b", "count=1x"], "count"),
            (vec!["if=a", "of=b", "skip=-1"], "skip"),
            (vec!["if=a", "of=b", "count"], "count"),
        ] {
            let failure = parse(&operands).unwrap_err();
            assert!(failure.message.unwrap().contains(word), "{operands:?}");
        }
    }
}
