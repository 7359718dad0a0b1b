//! `zebu serve`: images as block devices for others.

use crate::failure::Failure;
use crate::output::stdout;
use crate::serve::address::{Address, Bound, SocketFile, bind_unix, numbered_path, told_address};
use crate::serve::backups::Backups;
use crate::serve::checkpoints::Checkpoints;
use crate::serve::come_and_go::{Files, Origin, Served};
use crate::serve::config_file::{self, ConfigFile, FileExport, Loaded};
use crate::serve::controlled::Controlled;
use crate::serve::footprint::Footprint;
use crate::serve::hydrations::Hydrations;
use crate::serve::images::Images;
use crate::serve::kernel_devices::{self, KernelDevices};
use crate::serve::limits::Groups;
use crate::serve::log_lines::LogLines;
use crate::serve::opened::{Layers, Opened};
use crate::serve::opener::Opener;
use crate::serve::reload;
use crate::serve::serve_args::{Announce, READY, ServeArgs};
use crate::serve::service_manager::{Message, ServiceManager};
use crate::serve::side_doors::{side_doors, until_signal};
use crate::serve::signals::{Counted, Hangup, Signals};
use crate::serve::{connector, isolate, sandbox};
use crate::session::Session;
use crate::snapshot_name::snapshot_name;
use crate::values::NamedFormat;
use futures_util::lock::Mutex;
use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use zebu_disks::{Context, ImageSpec, Program, Sources};
use zebu_engine::Access;
use zebu_engine::jobs::read_tables_ahead;
use zebu_engine::storage::{Background, Commands, WorkerKind};
use zebu_export::nbd::{CertificateFiles, Listener, NbdConfig, NbdServer, TlsConfig, WhenFull};
use zebu_export::vhost::{VhostConfig, VhostUserBlk};
use zebu_export::{
    Export, ExportError, Exports, Level, Log, MIN_MEMORY, MemoryBudget, PoolConfig, WorkerPool,
};

/// Backups at once whose targets have a ring each in the sandbox; those of further ones make do with threads.
const BACKUPS_WITH_RINGS: usize = 4;

/// The most bytes of tables of remote images that are fetched before requests need them.
const MOST_TABLES: u64 = 32 << 20;
/// Bytes of the number of a process, and of white space around it.
const LONGEST_PID: u64 = 32;

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Self {
        Failure::new(error.to_string())
    }
}

/// Runs the command.
pub(crate) fn run(args: &ServeArgs, context: &Context) -> Result<u8, Failure> {
    let mut specs = specs(args, context)?;
    let mut names = names(args, &specs)?;
    if let Some(path) = &args.config {
        let (args, loaded) = with_config(args, path)?;
        for export in &loaded.in_effect.borrow().exports {
            specs.push(spec_of(&args, context, export)?);
            names.push(export.name.clone());
        }
        return serve_images(&args, context, &specs, &names, Counted::Own, Some(loaded));
    }
    if !args.isolate {
        return serve_images(args, context, &specs, &names, Counted::Own, None);
    }
    let Some(number) = args.only_image else {
        each_has_an_address(args, &names)?;
        if context.disks.have_drained_pipes() {
            return Err(Failure::new(
                "a secret from a pipe can't be read again by the processes of --isolate: give file= with a file",
            ));
        }
        return isolate::run(&names);
    };
    let (Some(spec), Some(name)) = (specs.get(number), names.get(number)) else {
        return Err(Failure::usage(format!("there is no image {number}")));
    };
    let own = only(args, number)?;
    serve_images(
        &own,
        context,
        std::slice::from_ref(spec),
        std::slice::from_ref(name),
        Counted::FromStarter,
        None,
    )
}

/// The arguments with the sockets of a configuration, and the configuration.
fn with_config(args: &ServeArgs, path: &Path) -> Result<(ServeArgs, Loaded), Failure> {
    let path = std::path::absolute(path)
        .map_err(|error| Failure::new(format!("could not find '{}': {error}", path.display())))?;
    let text = config_file::read(&path).map_err(Failure::new)?;
    let config = ConfigFile::parse(&path, &text).map_err(Failure::new)?;
    let mut args = args.clone();
    let given = [
        ("control", args.control.is_some()),
        ("metrics", args.metrics.is_some()),
        ("tls-certificate", args.tls_certificate.is_some() || args.tls_psk_file.is_some()),
        ("tls-psk-file", args.tls_certificate.is_some() || args.tls_psk_file.is_some()),
    ];
    for (key, is_given) in given {
        if let Some(line) = config.server.lines.get(key).filter(|_| is_given) {
            return Err(Failure::usage(format!(
                "'{}', line {line}: {key}: the command line has it, too: give it in one of them",
                path.display()
            )));
        }
    }
    let server = &config.server;
    args.nbd.extend(server.nbd.iter().cloned());
    args.control = args.control.or(server.control.clone());
    args.metrics = args.metrics.or(server.metrics.clone());
    args.tls_certificate = args.tls_certificate.or(server.tls_certificate.clone());
    args.tls_key = args.tls_key.or(server.tls_key.clone());
    args.tls_client_ca = args.tls_client_ca.or(server.tls_client_ca.clone());
    args.tls_client_crl = args.tls_client_crl.or(server.tls_client_crl.clone());
    args.tls_psk_file = args.tls_psk_file.or(server.tls_psk_file.clone());
    let doors = [args.vhost_user_blk.len(), args.fuse.len(), args.ublk.len(), args.nbd_device.len()];
    if args.nbd.is_empty() && doors == [0; 4] {
        return Err(Failure::usage(format!(
            "nothing serves clients: give nbd in [server] of '{}', or --nbd",
            path.display()
        )));
    }
    Ok((args, Loaded { path, in_effect: RefCell::new(config) }))
}

/// The image of an export of the configuration.
fn spec_of(args: &ServeArgs, context: &Context, export: &FileExport) -> Result<ImageSpec, Failure> {
    let format = export.format.as_deref().map(|name| NamedFormat::parse(Program::Zebu, name)).transpose();
    let format = format.map_err(Failure::new)?;
    let access = if export.read_only || args.read_only { Access::ReadOnly } else { Access::ReadWrite };
    let mut image = args.image.clone();
    image.image_opts = false;
    let name = export.file.as_os_str();
    let mut spec = image.resolve_with(context, name, format.as_ref(), args.cache, access, Sources::Files)?;
    spec.options.queues = args.queues;
    Ok(spec)
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
    let addresses =
        [args.nbd.len(), args.vhost_user_blk.len(), args.fuse.len(), args.ublk.len(), args.nbd_device.len()];
    let most = addresses.into_iter().max().unwrap_or(0);
    if let Some(name) = names.get(most) {
        return Err(Failure::usage(format!(
            "--isolate needs an address for each image, in their order: '{name}' has no --nbd, --vhost-user-blk, --fuse, --ublk or --nbd-device"
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
        ublk: nth(&args.ublk, number),
        nbd_device: nth(&args.nbd_device, number),
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
    context: &Context,
    specs: &[ImageSpec],
    names: &[String],
    counted: Counted,
    loaded: Option<Loaded>,
) -> Result<u8, Failure> {
    let lines = LogLines::default();
    if !args.ublk.is_empty() || !args.nbd_device.is_empty() {
        // Before there are threads, which have it from this one.
        kernel_devices::prepare_process(&args.log(context.dialect, &lines));
    }
    // Before anything that is to be undone in good order.
    let hangup = if loaded.is_some() { Hangup::Reloads } else { Hangup::Ends };
    let signals = Signals::watch(context.dialect, &lines, counted, hangup)?;
    let session = Session::start(context, &args.engine, specs.first().and_then(|spec| spec.aio))?;
    let images = Images::default();
    let mut result = Ok(());
    for (number, spec) in specs.iter().enumerate() {
        match Opened::open(&session, spec, layers(args, context.dialect, &lines, number)) {
            Ok(one) => images.add(&names[number], Rc::new(one)),
            Err(failure) => {
                result = Err(failure);
                break;
            }
        }
    }
    if result.is_ok() {
        result = serve(args, &session, &lines, &signals, names, &images, loaded);
    }
    for image in images.take_all() {
        result = result.and(image.close(&session));
    }
    lines.finish();
    result.map(|()| 0)
}

/// The disks above the image of this number.
fn layers<'a>(args: &'a ServeArgs, dialect: Program, lines: &LogLines, number: usize) -> Layers<'a> {
    let log = args.log(dialect, lines);
    Layers {
        overlay: args.overlay.get(number).zip(args.filenames.get(number)),
        manifest: args.verify.get(number),
        report: Box::new(move |wrong| log.write(Level::Warning, format_args!("{wrong}"))),
        lines: lines.clone(),
    }
}

fn specs(args: &ServeArgs, context: &Context) -> Result<Vec<ImageSpec>, Failure> {
    let images = args.filenames.len();
    for (option, count) in [
        ("--vhost-user-blk", args.vhost_user_blk.len()),
        ("--fuse", args.fuse.len()),
        ("--ublk", args.ublk.len()),
        ("--nbd-device", args.nbd_device.len()),
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
            if args.allow_secret_data || context.dialect.is_qemu() { Sources::All } else { Sources::Files };
        let mut spec =
            args.image.resolve_with(context, name, args.format.as_ref(), args.cache, access, sources)?;
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
    lines: &LogLines,
    signals: &Signals,
    names: &[String],
    images: &Images,
    loaded: Option<Loaded>,
) -> Result<(), Failure> {
    let log = args.log(session.dialect(), lines);
    let opened = images.all();
    let bitmaps = bitmaps(args, session, &opened)?;
    let mut exports = Vec::new();
    for ((one, name), bitmaps) in opened.iter().zip(names).zip(bitmaps) {
        let Opened { image, access, base, .. } = &**one;
        let export = Export::new(name, image, *access).with_waits_told(&log).with_bitmaps(bitmaps);
        exports.push(args.configured(export));
        if args.image.network.keeps_reads() {
            let (on, image) = (session.worker().clone(), base.as_ref().unwrap_or(image).clone());
            // Nobody waits for it: what it can't read, requests find.
            drop(session.worker().spawn(async move { read_tables_ahead(&on, &image, MOST_TABLES).await }));
        }
    }
    let exports = Exports::new(exports)?;
    let groups = Groups::default();
    if let Some(loaded) = &loaded {
        reload::begin(loaded, &log, &groups, &exports);
    }
    if !args.cache.is_writethrough() {
        signals.tell_of(&exports);
    }
    let config = config(args, &log)?;
    let (listeners, mut sockets) = listen(args)?;
    if listeners.is_empty() && (args.tls_certificate.is_some() || args.tls_psk_file.is_some()) {
        return Err(Failure::usage("TLS is for NBD clients, and nothing listens for them (--nbd)"));
    }
    tell_of_descriptors(args, &log, &listeners);
    let (device_listeners, device_sockets) = listen_for_front_ends(args)?;
    let (side, side_sockets) = side_doors(args)?;
    sockets.extend(device_sockets.into_iter().chain(side_sockets));
    let mut footprint = Footprint::start(args, &log, sockets, &exports, &config.memory)?;
    let commands = if args.ublk.is_empty() { Commands::Refused } else { Commands::Taken };
    let worker = session.config().clone().commands(commands);
    let pool = WorkerPool::start(&PoolConfig::default().threads(args.queues as usize).worker(worker))?;
    let mut kernel_devices = KernelDevices::start(args, &log, session, &pool, &exports, &config.memory)?;
    write_pid_file(args)?;
    let manager = ServiceManager::of_environment()?;
    let mut files = Files::Free;
    if !args.no_sandbox && !stays_outside(session.context(), &log)? {
        let opener = loaded.as_ref().map(|loaded| Opener::start(&loaded.path)).transpose()?;
        files = Files::Sandboxed(opener);
        start_image_workers(args, session, &opened)?;
        connector::start(&session.context().disks.remote)?;
        footprint.leave_to_cleaner()?;
        // All that is to be opened is open, all rings are there. The threads that are there enter as well.
        enter_sandbox(session.context(), &log, &kernel_devices);
    }
    let memory = config.memory.clone();
    let listens = listeners.iter().map(|listener| told_address(listener.name())).collect();
    let server = NbdServer::start(&pool, exports.clone(), listeners, config)?;
    kernel_devices.connect(&server)?;
    let devices = devices(args, &log, device_listeners, &pool, &exports, &memory)?;
    // Dropped before the pool, whose threads wait for what they serve.
    let mut footprint = footprint;
    footprint.serve(&pool)?;
    if args.announce == Announce::Ready {
        kernel_devices.announce()?;
        stdout::print(&format!("{READY}\n"))?;
    }
    manager.tell(Message::Ready);
    let doors = [args.vhost_user_blk.len(), args.fuse.len(), args.ublk.len(), args.nbd_device.len()];
    let with_doors = doors.into_iter().max().unwrap_or(0);
    let origin =
        |number: usize| if number < args.filenames.len() { Origin::CommandLine } else { Origin::File };
    let origins = names.iter().enumerate().map(|(number, name)| (name.clone(), origin(number)));
    let served = Served {
        args,
        session,
        log: log.clone(),
        server: &server,
        exports: exports.clone(),
        images,
        groups,
        fixed: names.iter().take(with_doors).cloned().collect(),
        files,
        origins: RefCell::new(origins.collect()),
        config: loaded,
        is_changing: Cell::new(false),
    };
    let controlled = Controlled {
        served,
        disks: Arc::clone(&session.context().disks),
        exports,
        backups: Backups::default(),
        checkpoints: Checkpoints::default(),
        listens,
        hydrations: Hydrations::default(),
        memory,
        resizing: RefCell::default(),
        forking: Mutex::default(),
    };
    // Of an export that is removed, nothing is to stay open.
    drop(opened);
    let worker = session.worker();
    let clients = args.until_last_client.then_some(&server);
    let signal =
        worker.block_on(until_signal(worker, signals, clients, &side, &controlled, (&manager, &pool)));
    manager.tell(Message::Ending);
    footprint.remove_sockets();
    // What waits for limits is answered first.
    controlled.exports.end_limits();
    // Servers may be silent, and so may what opens files; the end waits for what is under way.
    session.context().disks.remote.hurry();
    if let Files::Sandboxed(Some(opener)) = &controlled.served.files {
        opener.leave();
    }
    // First, so that no request of a client waits for a copy any more.
    worker.block_on(controlled.backups.stop(worker));
    worker.block_on(controlled.checkpoints.stop(worker, &controlled.exports));
    worker.block_on(controlled.hydrations.stop(worker));
    // What they end with is served still.
    kernel_devices.stop(&log);
    server.stop();
    // All have the same time.
    devices.iter().for_each(VhostUserBlk::begin_to_stop);
    drop(devices);
    drop(footprint);
    pool.join();
    signal
}

/// The bitmaps that clients may look at, by image; all of them are in memory then.
fn bitmaps(args: &ServeArgs, session: &Session, opened: &[Rc<Opened>]) -> Result<Vec<Vec<String>>, Failure> {
    let mut by_image = vec![Vec::new(); opened.len()];
    for name in &args.bitmap {
        let mut is_there = false;
        for (one, bitmaps) in opened.iter().zip(&mut by_image) {
            if let Some(owner) = one.image.with_bitmap(name) {
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

/// Listens on all addresses; the files of Unix sockets.
fn listen(args: &ServeArgs) -> Result<(Vec<Listener>, Vec<SocketFile>), Failure> {
    let (mut listeners, mut files) = (Vec::new(), Vec::new());
    for address in &args.nbd {
        for bound in address.bind(args.socket_access())? {
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
fn tell_of_descriptors(args: &ServeArgs, log: &Log, listeners: &[Listener]) {
    let for_others = args.socket_mode & 0o077;
    let level = if for_others == 0 { Level::Info } else { Level::Warning };
    for listener in listeners.iter().filter(|listener| !listener.refuses_descriptors()) {
        let what = "clients can block a thread of the server by descriptors that they send (Linux 6.16 \
                    refuses them)";
        log.write(level, format_args!("{}: {what}", listener.name()));
    }
}

/// The sockets of vhost-user-blk devices, and their files.
fn listen_for_front_ends(args: &ServeArgs) -> Result<(Vec<UnixListener>, Vec<SocketFile>), Failure> {
    let access = args.socket_access();
    let bound = args.vhost_user_blk.iter().map(|path| bind_unix(path, access));
    let bound = bound.collect::<Result<Vec<_>, _>>()?;
    Ok(bound.into_iter().unzip())
}

fn devices(
    args: &ServeArgs,
    log: &Log,
    listeners: Vec<UnixListener>,
    pool: &WorkerPool,
    exports: &Exports,
    memory: &MemoryBudget,
) -> Result<Vec<VhostUserBlk>, Failure> {
    let mut devices = Vec::new();
    for (listener, export) in listeners.into_iter().zip(exports.iter()) {
        let config =
            VhostConfig::default().queues(args.queues as u16).memory(memory.clone()).log(log.clone());
        devices.push(VhostUserBlk::start(pool, &export, listener, config)?);
    }
    Ok(devices)
}

/// Starts what images begin with their first change, and targets of backups: no ring can be made in the sandbox.
fn start_image_workers(args: &ServeArgs, session: &Session, opened: &[Rc<Opened>]) -> Result<(), Failure> {
    if session.worker().kind() != WorkerKind::IoUring {
        return Ok(());
    }
    let changing = opened.iter().filter(|opened| opened.access == Access::ReadWrite).count();
    let targets = if args.control.is_some() { opened.len().min(BACKUPS_WITH_RINGS) } else { 0 };
    Background::start_ahead(session.worker(), changing + targets)
        .map_err(|error| Failure::during("could not start the workers of the images", &error.into()))
}

/// Whether the sandbox is left out because of an image of RBD: librbd connects to the cluster's machines as long as it runs.
///
/// # Errors
/// There is such an image, and the sandbox is not given up by the command line. (QEMU's program has none.)
fn stays_outside(context: &Context, log: &Log) -> Result<bool, Failure> {
    if !context.disks.remote.needs_network() {
        return Ok(false);
    }
    if !context.dialect.is_qemu() {
        return Err(Failure::usage(
            "an image of RBD can't be served from the sandbox, where librbd can't connect to its cluster: give --no-sandbox",
        ));
    }
    let why = "an image of RBD is served without the sandbox, where librbd could not connect to its cluster";
    log.write(Level::Info, format_args!("{why}"));
    Ok(true)
}

/// Gives up what serving does not need. What the kernel can't keep the server from is told.
fn enter_sandbox(context: &Context, log: &Log, devices: &KernelDevices) {
    let cache = context.disks.remote.cache.objects();
    let sandbox::Outcome { failures, missing } = sandbox::enter(cache.as_deref(), &devices.paths());
    for failure in failures {
        log.write(Level::Warning, format_args!("the sandbox is incomplete (--no-sandbox): {failure}"));
    }
    for what in missing {
        log.write(Level::Info, format_args!("the sandbox of this kernel does not refuse {what}"));
    }
}

fn write_pid_file(args: &ServeArgs) -> Result<(), Failure> {
    let Some(path) = &args.pid_file else { return Ok(()) };
    if holds_something_else(path) {
        return Err(Failure::new(format!(
            "could not write the pid file '{}': there is a file with other content. Give another name, or \
             remove it first",
            path.display()
        )));
    }
    std::fs::write(path, format!("{}\n", std::process::id()))
        .map_err(|error| Failure::new(format!("could not write the pid file '{}': {error}", path.display())))
}

/// Whether there is a file at `path` that holds more than the number of a process.
fn holds_something_else(path: &Path) -> bool {
    let Ok(found) = std::fs::metadata(path) else { return false };
    if !found.is_file() {
        return found.file_type().is_block_device();
    }
    let is_number = |text: String| text.trim().bytes().all(|byte| byte.is_ascii_digit());
    found.len() > LONGEST_PID || !std::fs::read_to_string(path).is_ok_and(is_number)
}

fn config(args: &ServeArgs, log: &Log) -> Result<NbdConfig, Failure> {
    let tls = match (&args.tls_certificate, &args.tls_key, &args.tls_psk_file) {
        (Some(certificate), Some(key), _) => {
            let files = CertificateFiles::new(certificate, key)
                .client_ca(args.tls_client_ca.clone())
                .client_crl(args.tls_client_crl.clone());
            Some(TlsConfig::from_files(&files)?)
        }
        (.., Some(keys)) => Some(TlsConfig::from_psk_file(keys)?),
        _ => None,
    };
    let tls = match (tls, &args.tls_authorization) {
        (Some(tls), Some(rules)) => Some(tls.authorization(rules.clone())),
        (tls, _) => tls,
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
        .log(log.clone()))
}
