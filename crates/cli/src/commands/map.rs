//! `zebu map`: what each range of a disk is made of.

mod picture;

use crate::arguments::InspectArgs;
use crate::failure::Failure;
use crate::output::map::{LinePosition, TABLE_HEADER, json_end, json_line, table_row};
use crate::output::stdout;
use crate::session::Session;
use crate::values::{NamedFormat, OutputFormat, formats};
use std::ffi::OsString;
use std::path::Path;
use zebu_disks::size::size_argument;
use zebu_disks::{Context, printable};
use zebu_engine::jobs::{MapEntry, MapOptions, Mapper};
use zebu_engine::{Access, CacheMode};

/// Text is handed to standard output in pieces of about so many bytes: a map has a line per extent.
const PIECE: usize = 64 << 10;

/// Arguments of `zebu map`.
#[derive(Debug, clap::Args)]
pub(crate) struct MapArgs {
    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Begin at this offset
    #[arg(short, long, value_name = "OFFSET", value_parser = size_argument, default_value = "0")]
    start_offset: u64,

    /// Map at most so many bytes [default: to the end of the disk]
    #[arg(short = 'l', long, value_name = "LENGTH", value_parser = size_argument)]
    max_length: Option<u64>,

    #[command(flatten)]
    picture: picture::PictureArgs,

    #[command(flatten)]
    inspect: InspectArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

/// Runs the command.
pub(crate) fn run(args: &MapArgs, context: &Context) -> Result<u8, Failure> {
    context.disks.names.allow_bitmaps();
    let mut spec = args.inspect.image.resolve(
        context,
        &args.filename,
        args.format.as_ref(),
        CacheMode::Writeback,
        Access::ReadOnly,
    )?;
    args.inspect.force_share.apply(&mut spec);
    let session = Session::start(context, &args.inspect.engine, spec.aio)?;
    session.with_unfiltered(&spec, |image| {
        if args.picture.is_asked_for() {
            let end = args.max_length.map_or(u64::MAX, |length| args.start_offset.saturating_add(length));
            let end = end.min(image.virtual_size());
            return args.picture.draw(&session, image, args.start_offset.min(end)..end);
        }
        let options = MapOptions::default().start(args.start_offset).max_length(args.max_length);
        let mut mapper = Mapper::new(image, options);
        match args.inspect.output {
            OutputFormat::Human => print_table(&session, &mut mapper),
            OutputFormat::Json => {
                print_json(&session, &mut mapper, holes(context, &spec.path), args.start_offset)
            }
        }
    })?;
    Ok(0)
}

/// The meaning of holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holes {
    Zeroes,
    /// The clusters that a dirty bitmap marks (`x-dirty-bitmap`).
    Marks,
}

fn holes(context: &Context, path: &Path) -> Holes {
    if context.disks.names.shows_bitmap(path) { Holes::Marks } else { Holes::Zeroes }
}

fn print_table(session: &Session, mapper: &mut Mapper) -> Result<(), Failure> {
    let mut out = TABLE_HEADER.to_owned();
    while let Some(entry) = session.worker().block_on(mapper.map_next(session.worker()))? {
        let file = mapper.file(entry.depth).map(shown_name).unwrap_or_default();
        if table_row(&mut out, &entry, &file).is_none() {
            stdout::print(&out)?;
            return Err(Failure::new(
                "File contains external, encrypted or compressed clusters. (--output=json shows them)",
            ));
        }
        print_piece(&mut out)?;
    }
    stdout::print(&out)
}

/// A file name as the user would write it: without the `./` of names in the directory itself.
pub(super) fn shown_name(path: &Path) -> String {
    printable(&path.strip_prefix(".").unwrap_or(path).to_string_lossy()).into_owned()
}

/// Prints the extents from `start` on. If `holes` are marks, they are not said to be zero.
fn print_json(session: &Session, mapper: &mut Mapper, holes: Holes, start: u64) -> Result<(), Failure> {
    let mut out = String::new();
    let mut position = LinePosition::First;
    while let Some(mut entry) = session.worker().block_on(mapper.map_next(session.worker()))? {
        if holes == Holes::Marks && !entry.data {
            (entry.present, entry.zero, entry.offset) = (false, false, None);
        }
        json_line(&mut out, &entry, position);
        position = LinePosition::Later;
        print_piece(&mut out)?;
    }
    if position == LinePosition::First && session.dialect().is_qemu() {
        // QEMU's has an entry for nothing.
        let mut nothing = MapEntry::default();
        nothing.start = start;
        json_line(&mut out, &nothing, position);
        position = LinePosition::Later;
    }
    out.push_str(json_end(position));
    stdout::print(&out)
}

fn print_piece(out: &mut String) -> Result<(), Failure> {
    if out.len() >= PIECE {
        stdout::print(out)?;
        out.clear();
    }
    Ok(())
}
