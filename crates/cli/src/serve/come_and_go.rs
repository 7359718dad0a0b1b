//! Exports that are added and removed while others are served.

use super::config_file::Loaded;
use super::control_request::ExportAdd;
use super::images::Images;
use super::jobs::Jobs;
use super::limits::Groups;
use super::opened::Opened;
use super::opener::{Handed, Opener};
use super::serve_args::ServeArgs;
use crate::image_failure::image_failure;
use crate::lock_patience::no_lock_wait;
use crate::session::Session;
use crate::values::NamedFormat;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_disks::{Program, Sources};
use zebu_engine::storage::{CacheChoice, File, IoErrorKind, LockMode, OpenFlags, Worker};
use zebu_engine::{Access, Format, Image, OpenOptions, OpenedFile, Remedy, probe};
use zebu_export::nbd::NbdServer;
use zebu_export::{Export, Exports, Level, Log};

/// How often it is looked whether the last client of a removed export has left.
const LOOK: Duration = Duration::from_millis(5);
/// How often it is looked whether the writes of a program that is gone have landed.
const LOOK_FOR_WRITES: Duration = Duration::from_millis(50);
/// A disk that works needs less; it is told if an image is waited for longer.
const SILENT: Duration = Duration::from_secs(1);
/// The most exports of a server.
const MOST_EXPORTS: usize = 10_000;

/// Whether a server may open files by their names.
pub(crate) enum Files {
    /// It may.
    Free,
    /// It is in its sandbox. With a configuration file, another process opens what that names.
    Sandboxed(Option<Opener>),
}

/// The origin of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    CommandLine,
    File,
    Ctl,
}

/// All that is served, as far as it may change.
pub(crate) struct Served<'a> {
    pub(crate) args: &'a ServeArgs,
    pub(crate) session: &'a Session,
    pub(crate) log: Log,
    pub(crate) server: &'a NbdServer,
    pub(crate) exports: Exports,
    pub(crate) images: &'a Images,
    pub(crate) groups: Groups,
    /// Names of exports that are devices or files as well, which end with the server.
    pub(crate) fixed: Vec<String>,
    pub(crate) files: Files,
    /// The origins of the exports, by their names.
    pub(crate) origins: RefCell<BTreeMap<String, Origin>>,
    pub(crate) config: Option<Loaded>,
    /// Whether something is being added, removed or reloaded: one at a time.
    pub(crate) is_changing: Cell<bool>,
}

/// The clients of an export that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clients {
    /// They keep it.
    Kept,
    /// They are disconnected.
    Disconnected,
}

/// A file that is to be exported.
pub(crate) struct NewExport<'a> {
    pub(crate) name: &'a str,
    /// The path or name of the image.
    pub(crate) file: &'a Path,
    /// The file, if somebody else has opened it.
    pub(crate) handed: Option<OwnedFd>,
    pub(crate) format: Option<&'a str>,
    pub(crate) access: Access,
    /// The turn that others may have while its image is waited for.
    pub(crate) turn: Option<&'a Turn<'a>>,
}

/// Writes of a program that is gone, which an image is waited for.
struct LeftWrites {
    since: Instant,
    is_told: bool,
}

impl LeftWrites {
    fn new() -> Self {
        Self { since: Instant::now(), is_told: false }
    }
}

impl Served<'_> {
    /// The origin of an export, if there is one of that name.
    pub(crate) fn origin(&self, name: &str) -> Option<Origin> {
        self.origins.borrow().get(name).copied()
    }

    /// Adds an export, as a request asks for it.
    pub(crate) async fn add(
        &self,
        worker: &Worker,
        request: &ExportAdd,
        handed: Option<OwnedFd>,
        turn: &Turn<'_>,
    ) -> Result<Value, String> {
        let is_read_only = request.read_only || self.args.read_only || self.args.snapshot.is_some();
        let new = NewExport {
            name: &request.name,
            file: &request.file,
            handed,
            format: request.format.as_deref(),
            access: if is_read_only { Access::ReadOnly } else { Access::ReadWrite },
            turn: Some(turn),
        };
        let opened = self.open(worker, new).await?;
        let export = self.announce(worker, &request.name, opened, Origin::Ctl).await?;
        Ok(json!({
            "name": export.name(),
            "virtual-size": export.image().virtual_size(),
            "read-only": export.access() == Access::ReadOnly,
        }))
    }

    /// Opens the image of a new export.
    pub(crate) async fn open(&self, worker: &Worker, mut new: NewExport<'_>) -> Result<Opened, String> {
        if new.name.is_empty() {
            return Err("an export that is added needs a name: the empty one is that of the first".to_owned());
        }
        if self.exports.iter().any(|export| export.name() == new.name) {
            return Err(format!("there is an export '{}' already: give another name", new.name));
        }
        if self.exports.len() >= MOST_EXPORTS {
            return Err(format!("there are {MOST_EXPORTS} exports already: remove one (export-remove)"));
        }
        let format = new.format.map(|name| NamedFormat::parse(Program::Zebu, name)).transpose()?;
        let access = new.access;
        let (image, options) = match &self.files {
            Files::Free => self.open_by_name(worker, &new, format.as_ref()).await?,
            Files::Sandboxed(_) => {
                let handed = new.handed.take().ok_or_else(|| {
                    format!(
                        "'{}' is no file that came with the request, and in its sandbox the server can't \
                         open files or connect by itself: start the server with this image, or with \
                         --no-sandbox",
                        new.file.display()
                    )
                })?;
                self.open_handed(worker, &new, handed, format.map(|named| named.format)).await?
            }
        };
        Ok(Opened { image, access, base: None, options })
    }

    /// Lets clients find it.
    pub(crate) async fn announce(
        &self,
        worker: &Worker,
        name: &str,
        opened: Opened,
        origin: Origin,
    ) -> Result<Arc<Export>, String> {
        let export = Export::new(name, &opened.image, opened.access).with_waits_told(&self.log);
        match self.exports.add(self.args.configured(export)) {
            Ok(export) => {
                self.images.add(name, Rc::new(opened));
                self.origins.borrow_mut().insert(name.to_owned(), origin);
                self.log.write(Level::Info, format_args!("the export '{name}' was added"));
                Ok(export)
            }
            Err(error) => {
                close(worker, &opened).await?;
                Err(error.to_string())
            }
        }
    }

    /// Opens it as those of the command line. Writes of a program that is gone are waited for beside all else.
    async fn open_by_name(
        &self,
        worker: &Worker,
        new: &NewExport<'_>,
        format: Option<&NamedFormat>,
    ) -> Result<(Image, OpenOptions), String> {
        let (args, context, file) = (self.args, self.session.context(), new.file);
        let text = |failure: crate::failure::Failure| failure.message.unwrap_or_default();
        let name: &OsStr = file.as_os_str();
        let mut plain = args.image.clone();
        plain.image_opts = false;
        let spec = plain
            .resolve_with(context, name, format, args.cache, new.access, Sources::Files)
            .map_err(text)?;
        if !spec.filters.is_empty() || spec.detect_zeroes.is_some() {
            return Err(format!(
                "'{}' has drivers above its image: give it when the server is started",
                file.display()
            ));
        }
        let options = spec.options.clone().queues(args.queues);
        let at_once = options.clone().lock_wait(no_lock_wait(context.dialect));
        let mut left = LeftWrites::new();
        loop {
            match Image::open(worker, &spec.path, &at_once).await {
                Ok(image) => return Ok((image, options)),
                Err(error) if error.remedy() == Some(&Remedy::WaitForWrites) => {
                    self.wait_for(worker, &mut left, new).await;
                }
                Err(error) => return Err(text(image_failure(&spec, context, &error))),
            }
        }
    }

    /// Waits a moment for the writes of a program that is gone.
    async fn wait_for(&self, worker: &Worker, left: &mut LeftWrites, new: &NewExport<'_>) {
        if !left.is_told && left.since.elapsed() >= SILENT {
            left.is_told = true;
            let what = format_args!(
                "waiting for '{}': writes of a process that has ended are still under way, and may land until the disk has \
                 answered",
                new.file.display()
            );
            self.log.write(Level::Warning, what);
        }
        match new.turn {
            Some(turn) => turn.give_way(worker, LOOK_FOR_WRITES).await,
            None => worker.sleep(LOOK_FOR_WRITES).await,
        }
    }

    /// Opens a file that was handed over: one without a backing file, since nothing else can be opened.
    async fn open_handed(
        &self,
        worker: &Worker,
        new: &NewExport<'_>,
        handed: OwnedFd,
        format: Option<Format>,
    ) -> Result<(Image, OpenOptions), String> {
        let (path, access) = (new.file, new.access);
        let fail = |error: zebu_engine::Error| error.to_string();
        let lock = if access == Access::ReadWrite { LockMode::Write } else { LockMode::Read };
        let wait = no_lock_wait(self.session.context().dialect);
        let flags = OpenFlags::default().access(access).lock(lock).lock_wait(wait);
        let open = |handed| {
            if self.args.cache.is_direct() {
                let opened = File::from_descriptor_past_cache(handed, path, &flags, CacheChoice::Direct);
                opened.map(|(file, _)| file)
            } else {
                File::from_descriptor(handed, path, &flags)
            }
        };
        let mut left = LeftWrites::new();
        let file = loop {
            let again = handed.try_clone().map_err(|error| format!("'{}': {error}", path.display()))?;
            match open(again) {
                Ok(file) => break file,
                Err(error) if error.kind == IoErrorKind::LockedByWrites => {
                    self.wait_for(worker, &mut left, new).await;
                }
                Err(error) => return Err(error.to_string()),
            }
        };
        // It would keep the file open when that is closed.
        drop(handed);
        let format = match format {
            Some(format) => format,
            None => match probe(worker, &file).await.map_err(fail)? {
                Format::Raw if access == Access::ReadWrite => {
                    return Err(format!(
                        "'{}': it does not look like an image, and writing to a raw one needs its format: -f \
                         raw (or another)",
                        path.display()
                    ));
                }
                format => format,
            },
        };
        let options = OpenOptions::default().access(access).cache(self.args.cache).queues(self.args.queues);
        let opened = Image::open_files(worker, vec![OpenedFile::new(file, format)], &options).await;
        let image = opened.map_err(|error| format!("{error}{}", remedy(&error)))?;
        let backing = image.info().ok().and_then(|info| info.backing_file);
        if let Some(backing) = backing.filter(|backing| !backing.is_empty()) {
            // It was not written.
            let _ = image.close(worker).await;
            return Err(format!(
                "'{}' has the backing file '{backing}', which the server can't open in its sandbox: start it with this \
                 image, or with --no-sandbox",
                path.display()
            ));
        }
        Ok((image, options))
    }

    /// Removes an export: flushed and closed when this returns.
    pub(crate) async fn remove(
        &self,
        worker: &Worker,
        export: Arc<Export>,
        clients: Clients,
        jobs: Jobs<'_>,
    ) -> Result<(), String> {
        let name = export.name().to_owned();
        if self.fixed.contains(&name) {
            return Err(format!(
                "the export '{name}' is a device or a file as well (--vhost-user-blk, --fuse, --ublk, --nbd-device), which \
                 ends with the server only"
            ));
        }
        let in_use = |number: u64| {
            let clients = if number == 1 { "client uses" } else { "clients use" };
            format!(
                "{number} {clients} the export '{name}': wait for their end, or give --force to disconnect them"
            )
        };
        let copied = || {
            let kinds = jobs.running(&export).join(", a ");
            format!(
                "a {kinds} of the export '{name}' is running: wait for its end, end it (zebu ctl SOCKET), or give --force"
            )
        };
        let number = export.metrics().clients();
        if clients == Clients::Kept && number > 0 {
            return Err(in_use(number));
        }
        match (clients, &jobs.running(&export)[..]) {
            (Clients::Kept, [_, ..]) => return Err(copied()),
            _ => jobs.cancel_all(worker, &export).await,
        }
        if !self.exports.remove(&export) {
            return Err(format!("the export '{name}' is being removed already"));
        }
        // Whoever found it before has it still.
        loop {
            let number = export.metrics().clients();
            let is_copied = !jobs.running(&export).is_empty();
            if Arc::strong_count(&export) == 1 && !is_copied {
                break;
            }
            match clients {
                Clients::Kept if number > 0 || is_copied => {
                    self.exports.take_back(&export).map_err(|error| error.to_string())?;
                    return Err(if number > 0 { in_use(number) } else { copied() });
                }
                Clients::Kept => {}
                Clients::Disconnected => {
                    self.server.disconnect(&export);
                    export.end_limits();
                    jobs.cancel_all(worker, &export).await;
                }
            }
            worker.sleep(LOOK).await;
        }
        drop(export);
        self.origins.borrow_mut().remove(&name);
        self.groups.remove_empty();
        jobs.forget(&name);
        let Some(opened) = self.images.take(&name) else { return Ok(()) };
        let closed = close(worker, &opened).await;
        self.log.write(Level::Info, format_args!("the export '{name}' was removed"));
        closed
    }
}

fn remedy(error: &zebu_engine::Error) -> &'static str {
    match error.kind() {
        zebu_engine::ErrorKind::KeyMissing => {
            " (keys are read at the start: start the server with this image)"
        }
        _ => "",
    }
}

/// Closes an image and what is below.
pub(crate) async fn close(worker: &Worker, opened: &Opened) -> Result<(), String> {
    let closed = opened.image.close(worker).await;
    if let Some(base) = &opened.base {
        // It was only read.
        let _ = base.close(worker).await;
    }
    match opened.access {
        Access::ReadWrite => closed.map_err(|error| format!("could not finish writing: {error}")),
        Access::ReadOnly => Ok(()),
    }
}

/// A turn to change what is served: one at a time.
pub(crate) struct Turn<'a> {
    is_changing: &'a Cell<bool>,
    is_held: Cell<bool>,
}

impl<'a> Turn<'a> {
    /// Waits for the end of the one before.
    pub(crate) async fn wait(worker: &Worker, is_changing: &'a Cell<bool>) -> Self {
        let turn = Self { is_changing, is_held: Cell::new(false) };
        turn.take(worker).await;
        turn
    }

    async fn take(&self, worker: &Worker) {
        while self.is_changing.replace(true) {
            worker.sleep(LOOK).await;
        }
        self.is_held.set(true);
    }

    fn give_up(&self) {
        if self.is_held.replace(false) {
            self.is_changing.set(false);
        }
    }

    /// Lets others have it for some time.
    async fn give_way(&self, worker: &Worker, time: Duration) {
        self.give_up();
        worker.sleep(time).await;
        self.take(worker).await;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// The file of an export of the configuration, as the other process gives it.
pub(crate) fn handed_file(handed: Handed) -> Result<OwnedFd, String> {
    match handed {
        Handed::File(file) => Ok(file),
        Handed::Refused(why) => Err(why),
    }
}
