//! `zebu snapshot`: internal snapshots of an image that no other program uses.

use crate::arguments::{EngineArgs, ForceShareArg, ImageArgs};
use crate::failure::Failure;
use crate::output::{info_human, info_json, json, stderr, stdout};
use crate::session::Session;
use crate::suggestion::meant;
use crate::values::{NamedFormat, OutputFormat, formats};
use std::ffi::OsString;
use zebu_disks::{Context, Program, errno_text};
use zebu_engine::{Access, CacheMode, Chain, ErrorKind, Image, NewSnapshot, Purpose, Remedy, SnapshotRef};

/// Arguments of `zebu snapshot`.
#[derive(Debug, clap::Args)]
pub(crate) struct SnapshotArgs {
    /// List the snapshots (the default)
    #[arg(short, long)]
    list: bool,

    /// Take a snapshot of this name; its id is chosen
    #[arg(short, long, value_name = "SNAPSHOT")]
    create: Option<String>,

    /// Make the disk hold what it held in this snapshot (an id or, failing that, a name); what it holds now is lost
    #[arg(short, long, value_name = "SNAPSHOT")]
    apply: Option<String>,

    /// Delete the first snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT")]
    delete: Option<String>,

    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<NamedFormat>,

    /// How the list is printed
    #[arg(long, value_name = "human|json", value_enum, default_value_t)]
    output: OutputFormat,

    #[command(flatten)]
    force_share: ForceShareArg,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME")]
    filename: OsString,
}

/// The action.
enum Action<'a> {
    List,
    Create(&'a str),
    Apply(&'a str),
    Delete(&'a str),
}

impl SnapshotArgs {
    fn action(&self) -> Result<Action<'_>, Failure> {
        let actions = [
            self.list.then_some(Action::List),
            self.create.as_deref().map(Action::Create),
            self.apply.as_deref().map(Action::Apply),
            self.delete.as_deref().map(Action::Delete),
        ];
        let mut chosen = actions.into_iter().flatten();
        let action = chosen.next().unwrap_or(Action::List);
        match chosen.next() {
            None => Ok(action),
            Some(_) => Err(Failure::usage("Cannot mix '-l', '-a', '-c', '-d'")),
        }
    }
}

/// A snapshot that could not be deleted. Under QEMU's name, a disk that fails is told of in QEMU's words, as its layers say them.
fn not_deleted(dialect: Program, name: &str, error: &zebu_engine::Error) -> Failure {
    if dialect.is_qemu() && error.kind() == ErrorKind::Io {
        let why = errno_text(error.errno());
        stderr::warn(&format!("qcow2_free_clusters failed: {why}"));
        return Failure::new(format!(
            "Could not delete snapshot '{name}': Failed to free the cluster and L1 table: {why}"
        ));
    }
    if error.remedy() == Some(&Remedy::RepairLeaks) {
        return Failure::during(&format!("Snapshot '{name}'"), error);
    }
    Failure::during(&format!("Could not delete snapshot '{name}'"), error)
}

/// The snapshot that was probably meant, where there is none of the name.
fn snapshot_meant(dialect: Program, image: &Image, name: &str, error: &zebu_engine::Error) -> String {
    if dialect.is_qemu() || error.kind() != ErrorKind::NotFound {
        return String::new();
    }
    meant(name, "snapshots", image.snapshots().iter().map(|snapshot| snapshot.name.as_str()))
}

/// Runs the command.
pub(crate) fn run(args: &SnapshotArgs, context: &Context) -> Result<u8, Failure> {
    let action = args.action()?;
    let access = if matches!(action, Action::List) { Access::ReadOnly } else { Access::ReadWrite };
    let mut spec =
        args.image.resolve(context, &args.filename, args.format.as_ref(), CacheMode::Writeback, access)?;
    args.force_share.apply(&mut spec);
    spec.called_raw = "-f raw; but a raw image has no snapshots: convert it to qcow2 first";
    // What the image stands on plays no part.
    spec.options.chain = Chain::TopOnly;
    if matches!(action, Action::List) {
        spec.options.purpose = Purpose::Inspect;
    }
    let session = Session::start(context, &args.engine, spec.aio)?;
    let worker = session.worker();
    session.with_image(&spec, |image| match action {
        Action::List => {
            let snapshots = image.snapshots();
            match args.output {
                OutputFormat::Json => {
                    stdout::print(&json::to_text(context.dialect, &info_json::snapshot_list(&snapshots))?)
                }
                OutputFormat::Human if args.quiet => Ok(()),
                OutputFormat::Human => stdout::print(&info_human::snapshot_list(&snapshots)),
            }
        }
        Action::Create(name) => {
            // What qemu-img stores for a machine that does not run.
            let new = NewSnapshot::named(name).icount(Some(0));
            worker
                .block_on(image.create_snapshot(worker, new))
                .map(drop)
                .map_err(|error| Failure::during(&format!("Could not create snapshot '{name}'"), &error))
        }
        Action::Apply(name) => worker
            .block_on(image.apply_snapshot(worker, &SnapshotRef::IdOrName(name.to_owned())))
            .map_err(|error| {
                Failure::during(&format!("Could not apply snapshot '{name}'"), &error)
                    .adding(&snapshot_meant(context.dialect, image, name, &error))
            }),
        Action::Delete(name) => worker
            .block_on(image.delete_snapshot(worker, &SnapshotRef::Name(name.to_owned())))
            .map_err(|error| {
                not_deleted(context.dialect, name, &error).adding(&snapshot_meant(
                    context.dialect,
                    image,
                    name,
                    &error,
                ))
            }),
    })?;
    Ok(0)
}
