//! `zebu create`: makes an image.

use crate::arguments::{CostsArgs, EngineArgs};
use crate::backing::{self, CheckName};
use crate::create_opts::{CreateOpts, ParsedOpts};
use crate::encrypted_file::warn_of_plain_overlay;
use crate::failure::Failure;
use crate::new_file::{ForceArg, settle_format};
use crate::output::stdout;
use crate::qemu_names::option_lists::{self, FileOptions};
use crate::secrets::SecretArgs;
use crate::session::Session;
use crate::values::{NamedFormat, ReferenceRule, formats, reference_argument, target_formats};
use crate::watch::{ProgressArg, ProgressMode, Watch};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use zebu_disks::size::parse_size;
use zebu_disks::{Context, Program, Sources, allowed_references, given_only, without_secrets};
use zebu_engine::{CreateOptions, ErrorKind, Format, Image};

/// Arguments of `zebu create`.
#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    force: ForceArg,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the image [default: by the name's suffix]
    #[arg(short, long, value_name = "FMT", value_parser = target_formats())]
    format: Option<NamedFormat>,

    /// Options of the format, as key=value,... (-o help lists them)
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,

    /// Make the image an overlay of this one
    #[arg(short, long, value_name = "FILENAME")]
    backing: Option<String>,

    /// Format of the backing file
    #[arg(short = 'F', long, value_name = "FMT", value_parser = formats())]
    backing_format: Option<NamedFormat>,

    /// Do not look at the backing file; it need not exist, and SIZE must be given
    #[arg(short = 'u', long)]
    backing_unsafe: bool,

    /// Which files that the backing file names may be looked at, so that none of them is emptied; may be given more than once
    #[arg(long, value_name = "none|local|dir=PATH|prefix=URL|all", value_parser = reference_argument)]
    allow_refs: Vec<ReferenceRule>,

    #[command(flatten)]
    secrets: SecretArgs,

    #[command(flatten)]
    costs: CostsArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The file to make
    #[arg(value_name = "FILENAME", required_unless_present = "options")]
    filename: Option<OsString>,

    /// Size of the disk [default: that of the backing file]
    #[arg(value_name = "SIZE")]
    size: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: &mut CreateArgs, context: &Context) -> Result<u8, Failure> {
    option_lists::check(context.dialect, &args.options)?;
    if let Some(name) = &args.filename {
        check_order(args, context.dialect)?;
        settle_format(context.dialect, &mut args.format, name, "-f")?;
    }
    let args = &*args;
    let of_file = args.filename.as_ref().map_or(FileOptions::NotKnown, |_| FileOptions::Listed);
    let filename = args.filename.clone().unwrap_or_default();
    let fail = |reason: String| Failure::new(format!("{}: {reason}", filename.display()));
    let opts =
        match CreateOpts::parse(context.dialect, &args.options, args.format(), of_file).map_err(fail)? {
            ParsedOpts::Help(text) => {
                stdout::print(&text)?;
                return Ok(0);
            }
            ParsedOpts::Use(opts) => opts,
        };
    if args.filename.is_none() {
        return Err(Failure::usage("Expecting image file name"));
    }
    let path =
        context.new_image_path(&filename).map_err(|reason| Failure::creating_name(&filename, &reason))?;
    args.force.check(context.dialect, &path)?;
    if let Some(name) = &opts.data_file {
        args.force.check(context.dialect, &backing::resolve(&path, name))?;
    }
    let session = Session::start(context, &args.engine, None)?;
    let create = create_options(args, &opts, &session, &filename, &path)?;
    if !args.quiet {
        stdout::print(&format!("{}\n", opts.formatting_line(&filename.to_string_lossy(), &create)))?;
    }
    make(&session, &path, &create, args.progress.mode(args.quiet))?;
    Ok(0)
}

impl CreateArgs {
    /// The format of the image, asked for or not.
    fn format(&self) -> Format {
        self.format.as_ref().map_or(Format::Raw, |named| named.format)
    }
}

/// Refuses a size in the place of the name, which would be that of a file.
fn check_order(args: &CreateArgs, dialect: Program) -> Result<(), Failure> {
    let (Some(name), Some(size)) = (&args.filename, &args.size) else { return Ok(()) };
    let is_size = |text: &str| parse_size(text).is_ok();
    if dialect.is_qemu() || is_size(size) || !name.to_str().is_some_and(is_size) {
        return Ok(());
    }
    let (name, size) = (without_secrets(size.as_ref()), name.display());
    Err(Failure::usage(format!(
        "'{size}' is a size: the name comes first, as in `zebu create {name} {size}`"
    )))
}

/// Settles the size and the backing file.
fn create_options(
    args: &CreateArgs,
    opts: &CreateOpts,
    session: &Session,
    filename: &OsStr,
    path: &Path,
) -> Result<CreateOptions, Failure> {
    let disks = &session.context().disks;
    let secrets = args.secrets.read(disks, Sources::All)?;
    let mut create = opts
        .create_options_with(session.dialect(), args.format(), Some(&secrets))
        .map_err(|reason| Failure::new(format!("{}: {reason}", filename.display())))?;
    if let Some(encryption) = &mut create.encryption {
        encryption.costs = args.costs.bounds();
    }
    let given = args
        .size
        .as_deref()
        .map(|text| {
            let number = match text.strip_prefix('+') {
                Some(number) if session.dialect().is_qemu() => number,
                _ => text,
            };
            parse_size(number)
                .map_err(|error| Failure::new(format!("Invalid image size specified: '{text}': {error}")))
        })
        .transpose()?;
    if given.is_some() && opts.size.is_some() {
        return Err(Failure::new(format!(
            "{}: The image size must be specified only once",
            filename.display()
        )));
    }
    create.size = given.or(opts.size);
    if disks.names.is_remote(path) && create.data_file.is_some() {
        return Err(Failure::creating_name(
            filename,
            "an image on a server can't have an external data file",
        ));
    }
    create.remote = given_only(session.context());
    create.refs = allowed_references(session.dialect(), &args.allow_refs)?;
    let backing = backing::join(
        session.context(),
        args.backing.as_deref(),
        args.backing_format.as_ref(),
        opts.backing_file.as_deref(),
        opts.backing_format.as_deref(),
        if args.backing_unsafe { CheckName::Unsafe } else { CheckName::AnyPlace },
    )?;
    if let Some(backing) = backing {
        if args.format() != Format::Qcow2 {
            return Err(Failure::new(format!(
                "{}: Backing file not supported for file format '{}'",
                filename.display(),
                args.format().name()
            )));
        }
        let format = backing::required_format(session, path, &backing)?;
        let found = backing::resolve_given(session.context(), path, &backing.name);
        if !args.backing_unsafe {
            let size = backing::virtual_size(session, found.as_deref().map_err(Failure::clone)?, format)?;
            create.size = create.size.or(Some(size));
        }
        if create.encryption.is_none() && !session.dialect().is_qemu() {
            warn_of_plain_overlay(session.dialect(), &found?);
        }
        create.backing = Some((backing.name, format));
    }
    if create.size.is_none() {
        let example = if session.dialect().is_qemu() { "" } else { " (such as 20G behind the name)" };
        let name = filename.display();
        return Err(Failure::new(format!("{name}: Image creation needs a size parameter{example}")));
    }
    Ok(create)
}

/// Creates the image. When it fails or a signal stops it, the engine removes the files that it made.
fn make(
    session: &Session,
    path: &Path,
    create: &CreateOptions,
    progress: ProgressMode,
) -> Result<(), Failure> {
    let mut watch = Watch::start(progress)?;
    let control = watch.control();
    let job = Image::create_controlled(session.worker(), path, create, &control);
    let done = session.run_until_cancelled(watch.cancel(), job);
    if let Some(Ok(())) = done {
        let size = create.size.unwrap_or(0);
        watch.note("finishing", size, size);
    }
    watch.finish();
    match done {
        Some(Err(error)) if error.kind() == ErrorKind::Cancelled => {}
        Some(created) => return created.map_err(|error| Failure::creating(session.context(), path, &error)),
        None => {}
    }
    let data_file = create.data_file.as_deref().map(|name| backing::resolve(path, name));
    let files = std::iter::once(path).chain(data_file.as_deref());
    let stays: Vec<&Path> = files.filter(|file| file.metadata().is_ok()).collect();
    Err(Failure::interrupted_leaving(&stays))
}
