//! `zebu io`: qemu-io's commands on an image.

use crate::arguments::{EngineArgs, ForceShareArg, ImageArgs};
use crate::failure::{EXIT_FAILURE, Failure};
use crate::io::open_commands::add_copy_on_read;
use crate::io::shell::{run_commands, run_prompt};
use crate::io::state::{OpenDefaults, State};
use crate::session::Session;
use crate::values::{Discard, NamedFormat, caches, discard_argument, formats};
use crate::watch::{ProgressMode, Watch};
use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::rc::Rc;
use zebu_disks::Context;
use zebu_engine::{Access, CacheMode};

/// Bytes past an aligned address at which `--misalign` puts buffers.
const MISALIGNMENT: usize = 16;

/// Arguments of `zebu io`.
#[derive(Debug, clap::Args)]
pub(crate) struct IoArgs {
    /// Run this command, as 'read 0 4k'; may be given more than once ('help' lists the commands)
    #[arg(short, long, value_name = "COMMAND")]
    cmd: Vec<String>,

    /// Format of the image [default: probed; writing to a raw image needs it]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// Open for reading only
    #[arg(short, long)]
    read_only: bool,

    /// Write into a temporary image over this one, which is gone in the end
    #[arg(short, long)]
    snapshot: bool,

    /// Keep in the image what is read from its backing files
    #[arg(short = 'C', long)]
    copy_on_read: bool,

    /// Open without the page cache, as with -t none
    #[arg(short, long, conflicts_with = "cache")]
    nocache: bool,

    /// Cache mode of the image [default: writethrough]
    #[arg(short = 't', long, value_name = "CACHE", value_parser = caches())]
    cache: Option<CacheMode>,

    /// Treatment of discards
    #[arg(short, long, value_name = "ignore|unmap", value_parser = discard_argument, default_value = "unmap")]
    discard: Discard,

    /// Put buffers past aligned addresses, to see what that costs under O_DIRECT
    #[arg(short, long)]
    misalign: bool,

    /// Use kernel AIO, which here is io_uring
    #[arg(short = 'k', long, conflicts_with = "aio")]
    native_aio: bool,

    #[command(flatten)]
    force_share: ForceShareArg,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts); 'open' opens one if it is left out
    #[arg(value_name = "FILENAME")]
    filename: Option<OsString>,
}

/// Runs the command.
pub(crate) fn run(args: &IoArgs, context: &Context) -> Result<u8, Failure> {
    let defaults = OpenDefaults {
        context: context.clone(),
        image: args.image.clone(),
        format: args.format.clone(),
        cache: if args.nocache { CacheMode::None } else { args.cache.unwrap_or(CacheMode::Writethrough) },
        access: if args.read_only { Access::ReadOnly } else { Access::ReadWrite },
        force_share: args.force_share,
        discard: args.discard,
        misalign: if args.misalign { MISALIGNMENT } else { 0 },
    };
    if args.force_share.is_given() && !args.read_only {
        return Err(Failure::usage("-U (--force-share) is for reading only: add -r"));
    }
    let spec = args.filename.as_deref().map(|name| defaults.spec(name)).transpose()?;
    let session = Session::start(context, &args.engine, spec.as_ref().and_then(|spec| spec.aio))?;
    // Images that `open` opens have their names, not options.
    let defaults = OpenDefaults { image: ImageArgs { image_opts: false, ..defaults.image }, ..defaults };
    let mut state = State {
        session,
        watch: Watch::start(ProgressMode::None)?,
        defaults,
        open: None,
        overlay: None,
        pending: RefCell::new(Vec::new()),
        output_failed: Rc::new(Cell::new(false)),
    };
    if let Some(spec) = spec {
        let mut spec = spec;
        if args.copy_on_read {
            add_copy_on_read(&mut spec)?;
        }
        if args.snapshot {
            state.open_snapshot(spec)?;
        } else {
            state.open(spec)?;
        }
    }
    let result =
        if args.cmd.is_empty() { run_prompt(&mut state) } else { run_commands(&mut state, &args.cmd) };
    let closed = state.close();
    let all_done = result?;
    closed?;
    Ok(if all_done { 0 } else { EXIT_FAILURE })
}
