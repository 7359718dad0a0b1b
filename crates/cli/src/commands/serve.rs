//! `zebu serve`: images as block devices for others.

use crate::arguments::{EngineArgs, ImageArgs};
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::local_name::path_argument;
use crate::output::printable::printable;
use crate::output::stdout;
use crate::program;
use crate::remote_disk;
use crate::secrets::Sources;
use crate::serve::accept::Door;
use crate::serve::address::{
    Address, Bound, SocketAccess, SocketFile, bind_unix, group_argument, mode_argument, numbered_path,
};
use crate::serve::backups::Backups;
use crate::serve::control::Controlled;
use crate::serve::hydrations::Hydrations;
use crate::serve::opened::{Layers, Opened};
use crate::serve::signals::{Counted, Signals};
use crate::serve::unmounter::Unmounter;
use crate::serve::{connector, control, descriptors, isolate, log_lines, metrics, sandbox};
use crate::session::Session;
use crate::size::size_argument;
use crate::snapshot_name::snapshot_name;
use crate::values::{Discard, caches, discard_argument, formats};
use futures_util::future::Either;
use std::convert::Infallible;
use std::ffi::OsString;
use std::fmt;
use std::future::{pending, poll_fn};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};
use zebu::jobs::read_tables_ahead;
use zebu::storage::{Background, Worker, WorkerKind};
use zebu::{Access, CacheMode, Format, ZeroMode};
use zebu_export::fuse::{FuseConfig, FuseMount};
use zebu_export::nbd::{Listener, NbdConfig, NbdServer, TlsConfig, WhenFull};
use zebu_export::vhost::{VhostConfig, VhostUserBlk};
use zebu_export::{
    Discards, Export, ExportError, Exports, Level, Log, MIN_MEMORY, MemoryBudget, PoolConfig, WorkerPool,
};
use zebu_storage::refuse_descriptors;

/// How often is looked whether an idle image holds memory that it does not use.
const TIDY_INTERVAL: Duration = Duration::from_secs(5);

/// Backups at once whose targets have a ring each in the sandbox; those of further ones make do with threads.
const BACKUPS_WITH_RINGS: usize = 4;

/// The most bytes of tables of remote images that are fetched before requests need them.
const MOST_TABLES: u64 = 32 << 20;

/// Heading of options about clients, in the help.
const CLIENTS: &str = "Clients";

/// Arguments of `zebu serve`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ServeArgs {
    /// Serve NBD clients at this address, or at the sockets of a systemd socket unit; may be given more than once
    #[arg(long, value_name = "unix:PATH|HOST:PORT|systemd", help_heading = CLIENTS, required_unless_present_any = ["vhost_user_blk", "fuse"])]
    nbd: Vec<Address>,

    /// Attach an image to a virtual machine monitor as a vhost-user-blk device with this socket; may be given more than
    /// once, in the order of the images
    #[arg(long, value_name = "PATH", help_heading = CLIENTS)]
    vhost_user_blk: Vec<PathBuf>,

    /// Mount an image over this file, which then has the bytes of the disk; may be given more than once, in the order of
    /// the images
    #[arg(long, value_name = "PATH", help_heading = CLIENTS)]
    fuse: Vec<PathBuf>,

    /// Name of an image for clients, in the order of the images [default: empty for one image, else the file name]
    #[arg(long, value_name = "NAME", help_heading = CLIENTS)]
    export_name: Vec<String>,

    /// Text for people that NBD clients are told about the images
    #[arg(long, value_name = "TEXT", help_heading = CLIENTS)]
    description: Option<String>,

    /// End when the last NBD client has left, as on SIGTERM
    #[arg(long, help_heading = CLIENTS, requires = "nbd", conflicts_with = "isolate")]
    until_last_client: bool,

    /// Let NBD clients beyond --max-clients wait instead of closing their connections
    #[arg(long, help_heading = CLIENTS)]
    queue_clients: bool,

    /// Write the number of the server's process into this file when clients can connect
    #[arg(long, value_name = "FILE", conflicts_with = "isolate")]
    pid_file: Option<PathBuf>,

    /// Treatment of trims by NBD clients
    #[arg(long, value_name = "ignore|unmap", value_parser = discard_argument, default_value = "unmap", help_heading = CLIENTS)]
    discard: Discard,

    /// Look for zeroes in what NBD clients write, and zero the range instead (unmap: giving its space back)
    #[arg(long, value_enum, value_name = "off|on|unmap", hide_possible_values = true, default_value_t, help_heading = CLIENTS)]
    detect_zeroes: DetectZeroes,

    /// Let NBD clients look at this persistent dirty bitmap (qemu:dirty-bitmap:NAME); may be given more than once
    #[arg(long, value_name = "NAME", help_heading = CLIENTS, conflicts_with = "snapshot")]
    bitmap: Vec<String>,

    /// Serve NBD clients over TLS only, with the certificate (and its chain) in this PEM file
    #[arg(long, value_name = "FILE", help_heading = CLIENTS, requires = "tls_key")]
    tls_certificate: Option<PathBuf>,

    /// The certificate's key, a PEM file
    #[arg(long, value_name = "FILE", help_heading = CLIENTS, requires = "tls_certificate")]
    tls_key: Option<PathBuf>,

    /// Serve only clients with a certificate that an authority in this PEM file signed
    #[arg(long, value_name = "FILE", help_heading = CLIENTS, requires = "tls_certificate")]
    tls_client_ca: Option<PathBuf>,

    /// Permissions of the Unix sockets that are made for clients and for --metrics, in octal, whatever the umask is; the
    /// socket of --control is for the server's user alone
    #[arg(long, value_name = "MODE", help_heading = CLIENTS, value_parser = mode_argument, default_value = "0600")]
    socket_mode: u32,

    /// Group of these sockets, a number or a name in /etc/group [default: the server's]
    #[arg(long, value_name = "GROUP", help_heading = CLIENTS, value_parser = group_argument)]
    socket_group: Option<u32>,

    /// Clients can't write
    #[arg(short, long)]
    read_only: bool,

    /// Write what clients write into this overlay of the image, a qcow2 file that is made if it is not there; may be given
    /// more than once, in the order of the images
    ///
    /// The image itself is only read, so it can be a disk on a web server. An overlay that is there must stand on it.
    #[arg(long, value_name = "PATH", value_parser = path_argument(), conflicts_with_all = ["read_only", "snapshot", "image_opts"])]
    overlay: Vec<PathBuf>,

    /// Compare what is read of an image with this manifest of `zebu backup`, and fail reads of anything else; may be
    /// given more than once, in the order of the images. With --overlay, it is of the base, else clients can't write
    #[arg(long, value_name = "MANIFEST", value_parser = path_argument())]
    verify: Vec<PathBuf>,

    /// Copy what clients read from backing images into the images
    #[arg(long, conflicts_with_all = ["read_only", "snapshot"])]
    copy_on_read: bool,

    /// Show this internal snapshot (id or name, snapshot.id=ID, snapshot.name=NAME) instead of the active state; clients can't write
    #[arg(short = 'l', long, value_name = "NAME")]
    snapshot: Option<String>,

    /// Threads that serve clients, each with an I/O worker of its own; a connection belongs to one of them, and a
    /// vhost-user-blk device has a ring on each
    #[arg(long, value_name = "NUM", value_parser = clap::value_parser!(u32).range(1..=256), default_value = "1")]
    queues: u32,

    /// Connections at the same time; further ones are closed immediately
    #[arg(long, value_name = "NUM", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..=1_000_000), default_value = "1024")]
    max_clients: u32,

    /// Connections of one user (at Unix sockets) or from one address (TCP; IPv6: one /64 network) at the same time; further
    /// ones are closed immediately [default: all but a sixteenth of --max-clients]
    #[arg(long, value_name = "NUM", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..=1_000_000), conflicts_with = "queue_clients")]
    max_clients_per_peer: Option<u32>,

    /// Requests of one connection under way at once; further ones wait in the socket
    #[arg(long, value_name = "NUM", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..=65536), default_value = "512")]
    max_requests: u32,

    /// Memory for the data of these requests, per connection
    #[arg(long, value_name = "SIZE", help_heading = CLIENTS, value_parser = size_argument, default_value = "32M")]
    max_request_memory: u64,

    /// Memory for all clients and their requests: connections of NBD, rings of vhost-user-blk, files; divided fairly, at
    /// least 64M
    #[arg(long, value_name = "SIZE", help_heading = CLIENTS, value_parser = size_argument, default_value = "512M")]
    max_memory: u64,

    /// Close connections that have not chosen an export after so long
    #[arg(long, value_name = "SECONDS", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..), default_value = "10")]
    handshake_timeout: u32,

    /// Close connections that send nothing for so long [default: never]
    #[arg(long, value_name = "SECONDS", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..))]
    idle_timeout: Option<u32>,

    /// Serve counters to Prometheus, over HTTP, at this address
    #[arg(long, value_name = "unix:PATH|HOST:PORT")]
    metrics: Option<Address>,

    /// Take commands of `zebu ctl` on this socket
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Serve each image by a process of its own. The addresses of --nbd are in the order of the images then, too; the
    /// sockets of --control and --metrics get .1, .2 and so on behind their paths, or the ports from the given one on
    #[arg(long)]
    isolate: bool,

    /// The image that this process serves, of those that --isolate has
    #[arg(long = isolate::ONLY_IMAGE, value_name = "NUM", hide = true, requires = "isolate")]
    only_image: Option<usize>,

    /// Keep the right to open files and to connect to others while clients are served
    #[arg(long)]
    no_sandbox: bool,

    /// Take secrets from the text of the command line (--object secret,data=...), which other users of the machine can see
    #[arg(long)]
    allow_secret_data: bool,

    /// Amount of messages on standard error
    #[arg(
        long,
        value_enum,
        value_name = "error|warning|info|debug",
        hide_possible_values = true,
        default_value_t
    )]
    log_level: LogLevel,

    /// Format of the images [default: probed; writing to a raw image needs it]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    format: Option<Format>,

    /// Cache mode of the images
    #[arg(
        short = 't',
        long,
        value_name = "CACHE",
        value_parser = caches(),
        default_value = "writeback"
    )]
    cache: CacheMode,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image files (or options with --image-opts)
    #[arg(value_name = "FILENAME", required = true)]
    filenames: Vec<OsString>,

    /// The line on standard output when clients can connect
    #[arg(skip)]
    pub(crate) announce: Announce,
}

/// The line on standard output when clients can connect.
pub(crate) const READY: &str = "ready";

/// Whether standard output is told that clients can connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Announce {
    /// It is, by the line [`READY`].
    #[default]
    Ready,
    /// It is not.
    Nothing,
}

/// Whether zeroes are looked for in writes, and what becomes of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum DetectZeroes {
    /// They are not.
    #[default]
    Off,
    /// They are; the space stays allocated.
    On,
    /// They are; the space is given back.
    Unmap,
}

/// How much is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum LogLevel {
    Error,
    #[default]
    Warning,
    Info,
    Debug,
}

impl LogLevel {
    fn level(self) -> Level {
        match self {
            LogLevel::Error => Level::Error,
            LogLevel::Warning => Level::Warning,
            LogLevel::Info => Level::Info,
            LogLevel::Debug => Level::Debug,
        }
    }
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Self {
        Failure::new(error.to_string())
    }
}

/// Runs the command.
pub(crate) fn run(args: &ServeArgs) -> Result<u8, Failure> {
    let specs = specs(args)?;
    let names = names(args, &specs)?;
    if !args.isolate {
        return serve_images(args, &specs, &names, Counted::Own);
    }
    let Some(number) = args.only_image else {
        each_has_an_address(args, &names)?;
        return isolate::run(&names);
    };
    let (Some(spec), Some(name)) = (specs.get(number), names.get(number)) else {
        return Err(Failure::usage(format!("there is no image {number}")));
    };
    let own = only(args, number)?;
    serve_images(&own, std::slice::from_ref(spec), std::slice::from_ref(name), Counted::FromStarter)
}

/// With a process for each image, each must be found by clients, and by its own.
fn each_has_an_address(args: &ServeArgs, names: &[String]) -> Result<(), Failure> {
    if args.nbd.contains(&Address::Passed) {
        return Err(Failure::usage(
            "--isolate does not take the sockets of a systemd unit (--nbd systemd): use a unit for each image",
        ));
    }
    if args.nbd.len() > names.len() {
        return Err(Failure::usage(format!(
            "--isolate has an address of --nbd for each image, in their order: {} are given, but {} images",
            args.nbd.len(),
            names.len()
        )));
    }
    let most = args.nbd.len().max(args.vhost_user_blk.len()).max(args.fuse.len());
    if let Some(name) = names.get(most) {
        return Err(Failure::usage(format!(
            "--isolate needs an address for each image, in their order: '{name}' has no --nbd, --vhost-user-blk or --fuse"
        )));
    }
    Ok(())
}

/// The arguments of the process that serves one image.
fn only(args: &ServeArgs, number: usize) -> Result<ServeArgs, Failure> {
    fn nth<T: Clone>(list: &[T], number: usize) -> Vec<T> {
        list.get(number).cloned().into_iter().collect()
    }
    Ok(ServeArgs {
        nbd: nth(&args.nbd, number),
        vhost_user_blk: nth(&args.vhost_user_blk, number),
        fuse: nth(&args.fuse, number),
        overlay: nth(&args.overlay, number),
        verify: nth(&args.verify, number),
        filenames: nth(&args.filenames, number),
        metrics: args.metrics.as_ref().map(|address| address.numbered(number)).transpose()?,
        control: args.control.as_ref().map(|path| numbered_path(path, number)),
        ..args.clone()
    })
}

/// Serves images by this process.
fn serve_images(
    args: &ServeArgs,
    specs: &[ImageSpec],
    names: &[String],
    counted: Counted,
) -> Result<u8, Failure> {
    // Before anything that is to be undone in good order.
    let signals = Signals::watch(counted)?;
    descriptors::raise_limit();
    let session = Session::start(&args.engine, specs[0].aio)?;
    let mut opened = Vec::new();
    let mut result = Ok(());
    for (number, spec) in specs.iter().enumerate() {
        match Opened::open(&session, spec, layers(args, number)) {
            Ok(one) => opened.push(one),
            Err(failure) => {
                result = Err(failure);
                break;
            }
        }
    }
    if result.is_ok() {
        result = serve(args, &session, &signals, names, &opened);
    }
    for image in &opened {
        result = result.and(image.close(&session));
    }
    log_lines::finish();
    result.map(|()| 0)
}

/// The disks above the image of this number.
fn layers(args: &ServeArgs, number: usize) -> Layers<'_> {
    let log = log(args);
    Layers {
        overlay: args.overlay.get(number).zip(args.filenames.get(number)),
        manifest: args.verify.get(number),
        report: Box::new(move |wrong| log.write(Level::Warning, format_args!("{wrong}"))),
    }
}

fn specs(args: &ServeArgs) -> Result<Vec<ImageSpec>, Failure> {
    let images = args.filenames.len();
    for (option, count) in [
        ("--vhost-user-blk", args.vhost_user_blk.len()),
        ("--fuse", args.fuse.len()),
        ("--overlay", args.overlay.len()),
        ("--verify", args.verify.len()),
    ] {
        if count > images {
            return Err(Failure::usage(format!(
                "{count} paths are given with {option}, but {images} images"
            )));
        }
    }
    if args.verify.len() > args.overlay.len() && !args.read_only && args.snapshot.is_none() {
        return Err(Failure::usage(
            "an image of --verify is only read: give --read-only, or an overlay for what clients write (--overlay)",
        ));
    }
    let access = if args.read_only || args.snapshot.is_some() { Access::ReadOnly } else { Access::ReadWrite };
    let open = |name: &OsString| {
        let sources =
            if args.allow_secret_data || program::called().is_qemu() { Sources::All } else { Sources::Files };
        let mut spec = args.image.resolve_with(name, args.format, args.cache, access, sources)?;
        spec.options.queues = args.queues;
        if let Some(snapshot) = &args.snapshot {
            spec.options.snapshot = Some(snapshot_name(snapshot)?);
        }
        Ok(spec)
    };
    args.filenames.iter().map(open).collect()
}

/// Names of the exports, in the order of the images.
fn names(args: &ServeArgs, specs: &[ImageSpec]) -> Result<Vec<String>, Failure> {
    if args.export_name.len() > specs.len() {
        return Err(Failure::usage(format!(
            "{} names are given with --export-name, but {} images",
            args.export_name.len(),
            specs.len()
        )));
    }
    let default = |path: &Path| match path.file_name() {
        Some(name) if specs.len() > 1 => name.to_string_lossy().into_owned(),
        _ => String::new(),
    };
    let given = args.export_name.iter().map(Some).chain(std::iter::repeat(None));
    Ok(specs
        .iter()
        .zip(given)
        .enumerate()
        .map(|(number, (spec, name))| {
            let path = args.overlay.get(number).unwrap_or(&spec.path);
            name.cloned().unwrap_or_else(|| default(path))
        })
        .collect())
}

/// Serves until a signal comes; all clients are gone then.
fn serve(
    args: &ServeArgs,
    session: &Session,
    signals: &Signals,
    names: &[String],
    opened: &[Opened],
) -> Result<(), Failure> {
    let bitmaps = bitmaps(args, session, opened)?;
    let mut exports = Vec::new();
    for ((Opened { image, access, base }, name), bitmaps) in opened.iter().zip(names).zip(bitmaps) {
        let export = Export::new(name, image, *access).with_bitmaps(bitmaps);
        exports.push(configured(args, export));
        if args.image.network.keeps_reads() {
            let (on, image) = (session.worker().clone(), base.as_ref().unwrap_or(image).clone());
            // Nobody waits for it: what it can't read, requests find.
            drop(session.worker().spawn(async move { read_tables_ahead(&on, &image, MOST_TABLES).await }));
        }
    }
    let exports = Exports::new(exports)?;
    if !args.cache.is_writethrough() {
        signals.tell_of(&exports);
    }
    let config = config(args)?;
    let (listeners, files) = listen(args)?;
    tell_of_descriptors(args, &listeners);
    let (device_listeners, _device_files) = listen_for_front_ends(args)?;
    let side = side_doors(args)?;
    let mounted = Mounted::start(args, &exports, &config.memory)?;
    let pool = WorkerPool::start(
        &PoolConfig::default().threads(args.queues as usize).worker(session.config().clone()),
    )?;
    write_pid_file(args)?;
    if !args.no_sandbox {
        start_image_workers(args, session, opened)?;
        connector::start()?;
        // All that is to be opened is open, all rings are there. The threads that are there enter as well.
        enter_sandbox(args);
    }
    let memory = config.memory.clone();
    let server = NbdServer::start(&pool, exports.clone(), listeners, config)?;
    let devices = devices(args, device_listeners, &pool, &exports, &memory)?;
    // Dropped before the pool, whose threads wait for what they serve.
    let mut mounted = mounted;
    mounted.files.iter_mut().try_for_each(|file| file.serve(&pool))?;
    if args.announce == Announce::Ready {
        stdout::print(&format!("{READY}\n"))?;
    }
    let controlled =
        Controlled { exports, backups: Backups::default(), hydrations: Hydrations::default(), memory };
    let worker = session.worker();
    let clients = args.until_last_client.then_some(&server);
    let signal = worker.block_on(until_signal(worker, signals, clients, &side, &controlled));
    // No client finds the way to a server that ends.
    drop(files);
    // Servers may be silent, and the end waits for what is under way.
    remote_disk::hurry();
    // First, so that no request of a client waits for a copy any more.
    worker.block_on(controlled.backups.stop(worker));
    worker.block_on(controlled.hydrations.stop(worker));
    server.stop();
    // All have the same time.
    devices.iter().for_each(VhostUserBlk::begin_to_stop);
    drop(devices);
    drop(mounted);
    pool.join();
    signal
}

/// The export with what the command line says of all of them.
fn configured(args: &ServeArgs, mut export: Export) -> Export {
    if args.cache.is_direct() {
        export = export.without_page_cache();
    }
    if args.copy_on_read {
        export = export.with_copy_on_read();
    }
    if args.discard == Discard::Ignore {
        export = export.with_discards(Discards::Ignore);
    }
    export = match args.detect_zeroes {
        DetectZeroes::Off => export,
        DetectZeroes::On => export.with_zero_detection(ZeroMode::Keep),
        DetectZeroes::Unmap => export.with_zero_detection(ZeroMode::Unmap),
    };
    match &args.description {
        Some(text) => export.with_description(text),
        None => export,
    }
}

/// The bitmaps that clients may look at, by image; all of them are in memory then.
fn bitmaps(args: &ServeArgs, session: &Session, opened: &[Opened]) -> Result<Vec<Vec<String>>, Failure> {
    let mut by_image = vec![Vec::new(); opened.len()];
    for name in &args.bitmap {
        let mut is_there = false;
        for (Opened { image, .. }, bitmaps) in opened.iter().zip(&mut by_image) {
            if let Some(owner) = image.with_bitmap(name) {
                session.worker().block_on(owner.bitmap_bits(session.worker(), name))?;
                bitmaps.push(name.clone());
                is_there = true;
            }
        }
        if !is_there {
            return Err(Failure::new(format!(
                "Bitmap '{name}' is not found in any image (zebu info lists them)"
            )));
        }
    }
    Ok(by_image)
}

fn socket_access(args: &ServeArgs) -> SocketAccess {
    SocketAccess { mode: args.socket_mode, group: args.socket_group }
}

/// Listens on all addresses. The files of Unix sockets are removed when the second value is dropped.
fn listen(args: &ServeArgs) -> Result<(Vec<Listener>, Vec<SocketFile>), Failure> {
    let (mut listeners, mut files) = (Vec::new(), Vec::new());
    for address in &args.nbd {
        for bound in address.bind(socket_access(args))? {
            listeners.push(match bound {
                Bound::Tcp(listener) => Listener::tcp(listener)?,
                Bound::Unix(listener, file) => {
                    files.extend(file);
                    Listener::unix(listener)?
                }
            });
        }
    }
    Ok((listeners, files))
}

/// Tells of sockets at which the kernel can't refuse descriptors, louder where others than the server's user are let in.
fn tell_of_descriptors(args: &ServeArgs, listeners: &[Listener]) {
    let for_others = args.socket_mode & 0o077;
    let level = if for_others == 0 { Level::Info } else { Level::Warning };
    for listener in listeners.iter().filter(|listener| !listener.refuses_descriptors()) {
        let what = "clients can hold up a thread of the server by descriptors that they hand over (Linux 6.16 refuses them)";
        log(args).write(level, format_args!("{}: {what}", listener.name()));
    }
}

/// The sockets of vhost-user-blk devices, and their files.
fn listen_for_front_ends(args: &ServeArgs) -> Result<(Vec<UnixListener>, Vec<SocketFile>), Failure> {
    let access = socket_access(args);
    let bound = args.vhost_user_blk.iter().map(|path| bind_unix(path, access));
    let bound = bound.collect::<Result<Vec<_>, _>>()?;
    Ok(bound.into_iter().unzip())
}

fn devices(
    args: &ServeArgs,
    listeners: Vec<UnixListener>,
    pool: &WorkerPool,
    exports: &Exports,
    memory: &MemoryBudget,
) -> Result<Vec<VhostUserBlk>, Failure> {
    let mut devices = Vec::new();
    for (listener, export) in listeners.into_iter().zip(exports.iter()) {
        let config = VhostConfig::default().queues(args.queues as u16).memory(memory.clone()).log(log(args));
        devices.push(VhostUserBlk::start(pool, export, listener, config)?);
    }
    Ok(devices)
}

/// Starts what images begin with their first change, and targets of backups: no ring can be made in the sandbox.
fn start_image_workers(args: &ServeArgs, session: &Session, opened: &[Opened]) -> Result<(), Failure> {
    if session.worker().kind() != WorkerKind::IoUring {
        return Ok(());
    }
    let changing = opened.iter().filter(|opened| opened.access == Access::ReadWrite).count();
    let targets = if args.control.is_some() { opened.len().min(BACKUPS_WITH_RINGS) } else { 0 };
    Background::start_ahead(session.worker(), changing + targets)
        .map_err(|error| Failure::during("could not start the workers of the images", &error.into()))
}

/// Gives up what serving does not need. What the kernel can't keep the server from is told.
fn enter_sandbox(args: &ServeArgs) {
    let unix = args.nbd.iter().chain(&args.metrics).filter_map(Address::unix_path);
    let sockets = unix.chain(args.vhost_user_blk.iter().chain(&args.control).map(PathBuf::as_path));
    let sandbox::Outcome { failures, missing } = sandbox::enter(sockets);
    for failure in failures {
        log(args).write(Level::Warning, format_args!("the sandbox is not whole (--no-sandbox): {failure}"));
    }
    for what in missing {
        log(args).write(Level::Info, format_args!("the sandbox of this kernel does not refuse {what}"));
    }
}

/// The images that are mounted as files, until this is dropped.
struct Mounted<'a> {
    args: &'a ServeArgs,
    files: Vec<FuseMount>,
    /// The process that unmounts them, if the server itself may not in the end.
    unmounter: Option<Unmounter>,
}

impl<'a> Mounted<'a> {
    fn start(args: &'a ServeArgs, exports: &Exports, memory: &MemoryBudget) -> Result<Self, Failure> {
        let mut mounted = Self { args, files: Vec::new(), unmounter: None };
        for (path, export) in args.fuse.iter().zip(exports.iter()) {
            // To look at what is mounted there already would wait for it to be served.
            let is_there = |real: PathBuf| mounted.files.iter().any(|file| file.path() == real);
            if std::fs::canonicalize(path).is_ok_and(is_there) {
                return Err(Failure::usage(format!("'{}' is given twice with --fuse", path.display())));
            }
            let config = FuseConfig::default().memory(memory.clone()).log(log(args));
            mounted.files.push(FuseMount::over(path, export, config)?);
        }
        if !args.no_sandbox && !mounted.files.is_empty() {
            let started = Unmounter::start(&mounted.files);
            mounted.unmounter = Some(started.map_err(|error| {
                let why = format!("could not start what unmounts in the end: {error}");
                Failure::new(format!("{why} (--no-sandbox does without)"))
            })?);
        }
        Ok(mounted)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let files = std::mem::take(&mut self.files);
        if let Some(unmounter) = self.unmounter.take() {
            for line in unmounter.unmount() {
                log(self.args).write(Level::Warning, format_args!("{line}"));
            }
            files.into_iter().for_each(FuseMount::stop_unmounted);
        }
    }
}

/// Sockets beside those for clients.
struct SideDoors {
    metrics: Option<Door>,
    control: Option<Door>,
    _files: Vec<SocketFile>,
}

fn side_doors(args: &ServeArgs) -> Result<SideDoors, Failure> {
    let mut files = Vec::new();
    let metrics = match &args.metrics {
        Some(Address::Passed) => {
            return Err(Failure::usage("--metrics needs an address of its own: unix:PATH or HOST:PORT"));
        }
        Some(address) => match address.bind(socket_access(args))?.pop() {
            Some(Bound::Tcp(listener)) => Some(Door::new(listener)?),
            Some(Bound::Unix(listener, file)) => {
                // Older kernels: `tell_of_descriptors` has told it.
                let _ = refuse_descriptors(&listener);
                files.extend(file);
                Some(Door::new(listener)?)
            }
            None => None,
        },
        None => None,
    };
    let control = match &args.control {
        Some(path) => {
            let (listener, file) = bind_unix(path, SocketAccess::OWNER)?;
            files.push(file);
            Some(Door::new(listener)?)
        }
        None => None,
    };
    Ok(SideDoors { metrics, control, _files: files })
}

/// Serves the side doors until a signal comes, or until the last one of `clients` has left.
async fn until_signal(
    worker: &Worker,
    signals: &Signals,
    clients: Option<&NbdServer>,
    side: &SideDoors,
    controlled: &Controlled,
) -> Result<(), Failure> {
    let mut signal = pin!(signals.wait(worker));
    let mut last_client = pin!(async {
        match clients {
            None => pending().await,
            Some(server) => server.all_left().await,
        }
    });
    let mut metrics = pin!(side.metrics.as_ref().map_or_else(
        || Either::Right(pending()),
        |door| Either::Left(
            door.serve(worker, |client, place| { metrics::answer(worker, client, place, controlled) })
        )
    ));
    let mut control = pin!(side.control.as_ref().map_or_else(
        || Either::Right(pending()),
        |door| Either::Left(
            door.serve(worker, |client, place| control::converse(worker, client, place, controlled))
        )
    ));
    let mut tidying = pin!(tidy_now_and_then(worker, controlled));
    poll_fn(|cx| {
        if let Poll::Ready(never) = tidying.as_mut().poll(cx) {
            match never {}
        }
        if let Poll::Ready(Err(failure)) = metrics.as_mut().poll(cx) {
            return Poll::Ready(Err(failure));
        }
        if let Poll::Ready(Err(failure)) = control.as_mut().poll(cx) {
            return Poll::Ready(Err(failure));
        }
        if last_client.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        signal.as_mut().poll(cx)
    })
    .await
}

/// Gives memory back that the mapping of idle images does not use: requests do so by the way, but there are none then.
async fn tidy_now_and_then(worker: &Worker, controlled: &Controlled) -> Infallible {
    loop {
        worker.sleep(TIDY_INTERVAL).await;
        for export in controlled.exports.iter() {
            export.image().tidy(Instant::now());
        }
    }
}

fn write_pid_file(args: &ServeArgs) -> Result<(), Failure> {
    let Some(path) = &args.pid_file else { return Ok(()) };
    std::fs::write(path, format!("{}\n", std::process::id()))
        .map_err(|error| Failure::new(format!("could not write the pid file '{}': {error}", path.display())))
}

fn log(args: &ServeArgs) -> Log {
    Log::new(args.log_level.level(), write_log)
}

fn config(args: &ServeArgs) -> Result<NbdConfig, Failure> {
    let tls = match (&args.tls_certificate, &args.tls_key) {
        (Some(certificate), Some(key)) => {
            Some(TlsConfig::from_files(certificate, key, args.tls_client_ca.as_deref())?)
        }
        _ => None,
    };
    if args.max_memory < MIN_MEMORY {
        return Err(Failure::usage(format!(
            "--max-memory needs at least {} MiB: half of it for the largest request",
            MIN_MEMORY >> 20
        )));
    }
    Ok(NbdConfig::default()
        .memory(MemoryBudget::new(args.max_memory))
        .max_clients(args.max_clients as usize)
        .max_clients_per_peer(args.max_clients_per_peer.map(|most| most as usize))
        .when_full(if args.queue_clients { WhenFull::Wait } else { WhenFull::SendAway })
        .max_requests(args.max_requests as usize)
        .max_bytes(args.max_request_memory)
        .handshake_timeout(args.handshake_timeout)
        .idle_timeout(args.idle_timeout)
        .tls(tls)
        .log(log(args)))
}

fn write_log(level: Level, message: fmt::Arguments<'_>) {
    // Names in it may be a client's; a message stays one line.
    let message = message.to_string();
    log_lines::say(format!("{}: {}: {}\n", program::called().name(), level.name(), printable(&message)));
}
