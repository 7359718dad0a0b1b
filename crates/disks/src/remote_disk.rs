//! Disks on servers: how the command line describes them, and those that this command has opened.

use crate::local_name::is_on_server;
use crate::notices::{Notice, Notices};
use crate::open_disk::{OpenDisk, added};
use crate::points_disk::{PointChain, open_point};
use crate::remote_cache::{CacheChoice, RemoteCache};
use crate::stack_disk::{StackBlob, open_stack};
use crate::uploads::Uploads;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use zebu_drivers::FileDisk;
use zebu_engine::storage::{Access, Engine, File, IoError, IoErrorKind, Op, OpenFlags, Storage};
use zebu_oci::{FramesDisk, HashedDisk, Lazy, OciName, OciOptions, Opened, Readers, StackLayer};
use zebu_rbd::{RbdDisk, RbdName, RbdOptions};
use zebu_remote::http::{HttpDisk, HttpOptions, HttpUrl, Redirects};
use zebu_remote::nbd::{Endpoint, NbdAddress, NbdDisk, NbdOptions};
use zebu_remote::{Afresh, Network, RemoteError, RemoteRemedy, StatsSnapshot};
use zebu_storage::sync::Mutex;
use zebu_store::points::{Layer, PointName, PointStore};
use zebu_store::{StoreName, signed_urls};

/// A disk over the network, as the command line describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemoteName {
    /// A disk on an NBD server.
    Nbd {
        /// The server and its export.
        address: NbdAddress,
        /// How it is connected to.
        options: NbdOptions,
    },
    /// A file on a web server.
    Http {
        /// The file.
        url: HttpUrl,
        /// How it is fetched.
        options: Box<HttpOptions>,
    },
    /// An object in a store.
    Object {
        /// The object.
        name: StoreName,
        /// How it is fetched.
        options: Box<HttpOptions>,
    },
    /// An image of Ceph RBD.
    Rbd {
        /// The image.
        name: Box<RbdName>,
    },
    /// An image in a registry, or in a layout.
    Oci {
        /// The image.
        name: OciName,
        /// How it is fetched.
        options: Box<OciOptions>,
    },
    /// A point in time of a disk, on a store of them.
    Point {
        /// The store and the point.
        name: PointName,
        /// How objects are fetched.
        options: Box<HttpOptions>,
    },
}

impl RemoteName {
    /// Whether `name` has a protocol of these.
    pub fn is_name(name: &str) -> bool {
        is_on_server(name)
    }

    /// Reads a name, with the options of the command line for all disks.
    pub fn parse(name: &str, all: &RemoteDisks) -> Result<Self, String> {
        if NbdAddress::is_name(name) {
            return Ok(Self::Nbd { address: NbdAddress::parse(name)?, options: all.nbd_options() });
        }
        if StoreName::is_name(name) {
            return Ok(Self::Object { name: StoreName::parse(name)?, options: Box::new(all.http_options()) });
        }
        if RbdName::is_name(name) {
            return Ok(Self::Rbd { name: Box::new(RbdName::parse(name)?) });
        }
        if OciName::is_name(name) {
            return Ok(Self::Oci { name: OciName::parse(name)?, options: Box::new(all.oci_options()) });
        }
        if PointName::is_name(name) {
            return Ok(Self::Point { name: PointName::parse(name)?, options: Box::new(all.http_options()) });
        }
        Ok(Self::Http { url: HttpUrl::parse(name)?, options: Box::new(all.http_options()) })
    }

    /// The URL without secrets.
    pub fn shown(&self) -> String {
        match self {
            Self::Nbd { address, .. } => address.to_string(),
            Self::Http { url, .. } => url.to_string(),
            Self::Object { name, .. } => name.to_string(),
            Self::Rbd { name } => name.to_string(),
            Self::Oci { name, .. } => name.to_string(),
            Self::Point { name, .. } => name.to_string(),
        }
    }

    /// The name that QEMU has for it in reports: with the port, and no slash where an export's name is missing.
    pub fn reported(&self) -> String {
        let Self::Nbd { address: NbdAddress { endpoint, export, tls: None, .. }, .. } = self else {
            return self.shown();
        };
        let export = if export.is_empty() { String::new() } else { format!("/{export}") };
        match endpoint {
            Endpoint::Unix(path) => format!("nbd+unix://{export}?socket={}", path.display()),
            Endpoint::Tcp { host, port } if host.contains(':') => format!("nbd://[{host}]:{port}{export}"),
            Endpoint::Tcp { host, port } => format!("nbd://{host}:{port}{export}"),
            _ => self.shown(),
        }
    }

    /// QEMU's name for its driver, or the scheme of a store, which QEMU has not.
    pub fn driver(&self) -> &'static str {
        match self {
            Self::Nbd { .. } => "nbd",
            Self::Http { url, .. } if url.is_secure() => "https",
            Self::Http { .. } => "http",
            Self::Object { name, .. } => name.kind().scheme(),
            Self::Rbd { .. } => "rbd",
            Self::Oci { name, .. } => name.scheme(),
            Self::Point { .. } => "store",
        }
    }

    pub(crate) fn is_place_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nbd { address: a, .. }, Self::Nbd { address: b, .. }) => a == b,
            (Self::Http { url: a, .. }, Self::Http { url: b, .. }) => a == b,
            (Self::Object { name: a, .. }, Self::Object { name: b, .. }) => a == b,
            (Self::Oci { name: a, .. }, Self::Oci { name: b, .. }) => a == b,
            (Self::Point { name: a, .. }, Self::Point { name: b, .. }) => a == b,
            (Self::Rbd { name: a }, Self::Rbd { name: b }) => a.is_place_of(b),
            _ => false,
        }
    }
}

/// Disks on servers that a command has opened, and the way there.
#[derive(Default)]
pub struct RemoteDisks {
    /// They stay open: a server may take no second connection.
    opened: Mutex<Vec<(RemoteName, OpenDisk)>>,
    /// Images of RBD that are made when they are opened first.
    new: Mutex<Vec<RemoteName>>,
    /// The way to all servers.
    network: Network,
    /// Options of the command line for all names.
    given: Mutex<NetworkOptions>,
    /// Failures to look at images that are opened next.
    failed: Mutex<Vec<(RemoteName, IoError)>>,
    /// How much of blobs that are opened from now on will be read.
    readers: Mutex<Readers>,
    /// The cache on this machine.
    pub cache: RemoteCache,
    /// The listener to what the disks have to say.
    notices: Notices,
}

/// Options for all disks over the network that nothing else is said of.
#[derive(Debug, Clone, Default)]
pub struct NetworkOptions {
    /// Certificates of the authorities that sign those of web servers.
    pub authorities: Option<PathBuf>,
    /// Bytes of memory of each disk on a web server.
    pub memory: Option<u64>,
    /// Redirects that are followed.
    pub redirects: Redirects,
    /// The cache on this machine.
    pub cache: Option<CacheChoice>,
    /// How registries are talked to.
    pub oci: OciOptions,
}

impl RemoteDisks {
    /// Disks that say what a user should know of.
    pub(crate) fn new(notices: Notices) -> Self {
        Self { notices, ..Self::default() }
    }

    fn tell(&self, fact: &str) {
        self.notices.say(Notice::Fact(fact));
    }

    /// Has everything stored in the cache that was fetched.
    pub fn finish_cache(&self) {
        if self.cache.finish() {
            self.notices.say(Notice::CacheFinished);
        }
    }

    /// From now on, names are read with these.
    pub fn use_options(&self, options: NetworkOptions) {
        *self.given.lock() = options;
    }

    fn given(&self) -> NetworkOptions {
        self.given.lock().clone()
    }

    /// Options of a disk on an NBD server that nothing else is said of.
    pub(crate) fn nbd_options(&self) -> NbdOptions {
        NbdOptions::default().network(self.network.clone())
    }

    /// Options of a file on a web server that nothing else is said of.
    pub fn http_options(&self) -> HttpOptions {
        let given = self.given();
        let options = HttpOptions::default()
            .authorities(given.authorities)
            .redirects(given.redirects)
            .network(self.network.clone());
        match given.memory {
            Some(memory) => options.memory(memory),
            None => options,
        }
    }

    /// Options of images of registries.
    pub fn oci_options(&self) -> OciOptions {
        self.given().oci.http(self.http_options())
    }

    /// Says how much will be read of blobs of registries that are opened from now on.
    pub fn expect(&self, readers: Readers) {
        *self.readers.lock() = readers;
    }

    /// Compares the digests of all blobs of registries that were read by ranges and have no hashes; what nobody has read of them
    /// is read now. `on` hears of bytes that are done and of how many there are, and may end the work (`false`).
    ///
    /// # Errors
    /// A blob has another digest, or can't be read. ECANCELED if `on` ended the work.
    pub fn compare_digests(&self, on: &dyn Fn(u64, u64) -> bool) -> Result<(), RemoteError> {
        let all: Vec<_> = self.opened.lock().iter().flat_map(|(_, disk)| disk.hashed()).collect();
        for (name, disk) in all {
            disk.compare_rest(on).map_err(|reason| match reason {
                Some(reason) => RemoteError::new(&name, libc::EIO, reason),
                None => RemoteError::new(&name, libc::ECANCELED, "interrupted"),
            })?;
        }
        Ok(())
    }

    /// Whether an image of a registry or layout is the disk of a chain of blobs, which is raw whatever it begins with. Why it
    /// can't be opened is told by who opens it next.
    pub(crate) fn is_stack(&self, name: &RemoteName) -> bool {
        if !matches!(name, RemoteName::Oci { .. }) {
            return false;
        }
        match self.disk(name.clone(), Access::ReadOnly) {
            Ok(disk) => matches!(disk, OpenDisk::Stack(..)),
            Err(error) => {
                self.failed.lock().push((name.clone(), error));
                false
            }
        }
    }

    /// The failure to look at a disk, which is told once.
    fn take_failure(&self, name: &RemoteName) -> Option<IoError> {
        let mut failed = self.failed.lock();
        failed.iter().position(|(one, _)| one == name).map(|at| failed.swap_remove(at).1)
    }

    /// The way to all servers.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Has an image of RBD be made when it is opened first. Its size is 0 then.
    pub(crate) fn make_first(&self, name: RemoteName) {
        self.new.lock().push(name);
    }

    /// Whether an image is to be made, which is told once.
    fn take_new(&self, name: &RemoteName) -> bool {
        let mut new = self.new.lock();
        new.iter().position(|one| one == name).map(|at| new.swap_remove(at)).is_some()
    }

    /// Whether a disk is open whose library connects to machines as it sees fit, which a sandbox does not let it.
    pub fn needs_network(&self) -> bool {
        let opened = self.opened.lock();
        opened.iter().any(|(_, disk)| matches!(disk, OpenDisk::Rbd(_)))
    }

    /// A disk on a server, to be used for `access`; one that is known stays connected.
    pub(crate) fn open(&self, name: RemoteName, access: Access) -> Result<Arc<dyn Storage>, IoError> {
        self.disk(name, access).map(OpenDisk::storage)
    }

    fn disk(&self, name: RemoteName, access: Access) -> Result<OpenDisk, IoError> {
        if let RemoteName::Point { name: point, options } = &name {
            return self.point(point, options);
        }
        let mut opened = self.opened.lock();
        if let Some(known) = known(&opened, &name, access) {
            return Ok(known);
        }
        if let Some(error) = self.take_failure(&name) {
            return Err(error);
        }
        let disk = self.connect(&name, access)?;
        opened.push((name, disk.clone()));
        Ok(disk)
    }

    /// A point of a store. Its layers are disks of their own, so that the list of open ones is not held meanwhile.
    fn point(&self, point: &PointName, options: &HttpOptions) -> Result<OpenDisk, IoError> {
        let name = RemoteName::Point { name: point.clone(), options: Box::new(options.clone()) };
        if let Some(known) = known(&self.opened.lock(), &name, Access::ReadOnly) {
            return Ok(known);
        }
        let layers = Arc::new(Mutex::new(Vec::new()));
        let opened = open_point(
            point,
            options,
            &self.notices,
            |object| {
                let name = RemoteName::Object { name: object, options: Box::new(options.clone()) };
                let disk = self.disk(name, Access::ReadOnly)?;
                layers.lock().push(disk.clone());
                Ok(disk.storage())
            },
            {
                let layers = Arc::clone(&layers);
                move || layers.lock().iter().flat_map(OpenDisk::reads_afresh).collect::<Vec<_>>()
            },
        )?;
        let disk = OpenDisk::Point(point.clone(), Arc::new(opened));
        self.opened.lock().push((name, disk.clone()));
        Ok(disk)
    }

    /// Layers of a store, as images that can be opened.
    ///
    /// # Errors
    /// An object can't be opened.
    pub fn point_chain(&self, store: &PointStore, layers: &[Layer]) -> Result<PointChain, IoError> {
        PointChain::new(store, layers, |object| {
            let name = RemoteName::Object { name: object, options: Box::new(self.http_options()) };
            self.open(name, Access::ReadOnly)
        })
    }

    /// Says goodbye to all servers; a disk that is still in use stays connected, unless it is an image of RBD, whose lock would stay,
    /// too.
    pub(crate) fn close_all(&self) {
        let opened = std::mem::take(&mut *self.opened.lock());
        for (_, disk) in &opened {
            if let OpenDisk::Rbd(disk) = disk {
                disk.close();
            }
        }
        drop(opened);
    }

    /// Figures of all disks over the network that this command opened, added up; `None` if there was none.
    pub fn transfers(&self, uploads: &Uploads) -> Option<RemoteTransfers> {
        let opened = self.opened.lock();
        let all = opened.iter().map(|(_, disk)| disk.stats()).reduce(added);
        let all = match (all, uploads.stats()) {
            (all, None) => all,
            (all, Some(sent)) => {
                let mut all = all.unwrap_or_default();
                all.requests += sent.sent + sent.retries;
                all.written_bytes += sent.sent_bytes;
                all.retries += sent.retries;
                Some(all)
            }
        };
        all.map(|all| RemoteTransfers {
            requests: all.requests,
            read_bytes: all.read_bytes,
            written_bytes: all.written_bytes,
            retries: all.retries,
            reconnections: all.reconnects,
        })
    }

    /// Says what went over the network (`-v`), if anything did.
    pub fn tell_transfers(&self, uploads: &Uploads) {
        self.cache.tell(&self.notices);
        let opened = self.opened.lock();
        for (_, disk) in opened.iter() {
            let StatsSnapshot { requests, read_bytes, written_bytes, retries, reconnects, .. } = disk.stats();
            let name = disk.name();
            self.tell(&format!(
                "{name}: {requests} requests, {read_bytes} bytes read, {written_bytes} bytes written, {retries} retries, \
                 {reconnects} reconnections"
            ));
            let uncached = match disk {
                OpenDisk::Nbd(_) => {
                    self.given().cache.map(|_| "an NBD server does not mark versions of its disks")
                }
                OpenDisk::Http { uncached, .. } => *uncached,
                OpenDisk::Rbd(_) => self.given().cache.map(|_| "images of RBD are read from their cluster"),
                OpenDisk::Whole(..) | OpenDisk::Point(..) | OpenDisk::Stack(..) => None,
            };
            if let Some(reason) = uncached {
                self.tell(&format!("{name}: not cached: {reason}"));
            }
            if let Some(failure) = disk.last_failure() {
                let what = if matches!(disk, OpenDisk::Nbd(_)) {
                    "the connection broke"
                } else {
                    "a request failed"
                };
                self.tell(&format!("{name}: {what}: {failure}"));
            }
        }
        uploads.tell(&self.notices);
    }

    /// Has reads of all disks over the network go past all copies, while what is returned lives.
    pub fn reads_afresh(&self) -> Vec<Afresh> {
        let opened = self.opened.lock();
        let mut all = Vec::new();
        for (_, disk) in opened.iter() {
            all.extend(disk.reads_afresh());
        }
        all
    }

    /// Has all disks end what is under way soon, also where servers are silent.
    pub fn hurry(&self) {
        let opened = self.opened.lock();
        opened.iter().for_each(|(_, disk)| disk.hurry());
    }

    /// Says why requests over the network were given up, if any were: the errors of images say only that it was so.
    pub fn tell_given_up(&self) {
        let opened = self.opened.lock();
        for (_, disk) in opened.iter() {
            if let Some(reason) = disk.given_up() {
                self.tell(&format!("{}: {reason}", disk.name()));
            }
        }
    }

    fn connect(&self, name: &RemoteName, access: Access) -> Result<OpenDisk, IoError> {
        let connected = match name {
            RemoteName::Nbd { address, options } => {
                NbdDisk::open(address.clone(), options.clone()).map(|disk| OpenDisk::Nbd(Arc::new(disk)))
            }
            RemoteName::Http { url, options } => HttpDisk::open(url.clone(), (**options).clone())
                .and_then(|disk| self.with_cache(disk, options.memory)),
            RemoteName::Object { name, options } => {
                let urls = signed_urls(name.clone(), (**options).clone());
                HttpDisk::open_signed(urls, (**options).clone())
                    .and_then(|disk| self.with_cache(disk, options.memory))
            }
            RemoteName::Oci { name: image, options } => {
                return match zebu_oci::open(image, options).map_err(with_option)? {
                    Opened::Stack(layers) => self.stack(image, layers, options.http.memory),
                    opened => self.image(image, opened, options.http.memory),
                };
            }
            RemoteName::Point { name, options } => return self.point(name, options),
            RemoteName::Rbd { name: image } => {
                let (image, options) = ((**image).clone(), RbdOptions::default());
                let disk = if self.take_new(name) {
                    RbdDisk::create(image, 0, &options)?
                } else {
                    RbdDisk::open(image, access, &options)?
                };
                return Ok(OpenDisk::Rbd(Arc::new(disk)));
            }
        };
        connected.map_err(with_option)
    }

    /// An image of a registry or layout that is one blob.
    fn image(&self, name: &OciName, opened: Opened, memory: u64) -> Result<OpenDisk, IoError> {
        match opened {
            Opened::Lazy(blob) => self.blob(*blob, memory).map_err(with_option),
            Opened::Whole(file) => {
                let path = PathBuf::from(name.to_string());
                let file = File::from_descriptor(file.into(), &path, &OpenFlags::default())?;
                Ok(OpenDisk::Whole(name.clone(), Arc::new(FileDisk::new(file, Engine::Auto)?)))
            }
            Opened::Stack(layers) => self.stack(name, layers, memory),
        }
    }

    /// The disk that a chain of blobs shows.
    fn stack(&self, name: &OciName, layers: Vec<StackLayer>, memory: u64) -> Result<OpenDisk, IoError> {
        let memory = memory / layers.len().max(1) as u64;
        let (mut blobs, mut disks) = (Vec::new(), Vec::new());
        for StackLayer { digest, format, opened } in layers {
            let disk = self.image(name, opened, memory)?;
            blobs.push(StackBlob { digest, format, storage: disk.clone().storage() });
            disks.push(disk);
        }
        let disk = open_stack(name, blobs, &self.notices)?;
        Ok(OpenDisk::Stack(name.clone(), Arc::new(disk), disks))
    }

    /// A blob that is read by ranges, which are compared.
    fn blob(&self, blob: Lazy, memory: u64) -> Result<OpenDisk, RemoteError> {
        let Lazy { disk, digest, hashes, is_in_frames, .. } = blob;
        let mut opened = self.with_cache(disk, memory)?;
        let OpenDisk::Http { disk, cached, hashed, frames, .. } = &mut opened else { return Ok(opened) };
        let below: Arc<dyn Storage> = match &cached {
            Some(cached) => Arc::clone(cached) as _,
            None => Arc::clone(disk) as _,
        };
        let (own, own_cache) = (Arc::clone(disk), cached.clone());
        let afresh = move || (own.reads_afresh(), own_cache.as_ref().map(|cached| cached.reads_afresh()));
        let compared = Arc::new(match hashes {
            Some(hashes) => HashedDisk::new(below, hashes, afresh),
            None => HashedDisk::without_hashes(below, digest, *self.readers.lock(), afresh),
        });
        if is_in_frames {
            let below = Arc::clone(&compared);
            let opened = FramesDisk::open(below, &disk.name()).map_err(|error| match compared.failure() {
                Some(reason) => RemoteError::new(error.name(), error.errno(), reason),
                None => error,
            });
            *frames = Some(Arc::new(opened?));
        }
        *hashed = Some(compared);
        Ok(opened)
    }

    /// An object, with the cache before it that the command line asks for.
    fn with_cache(&self, disk: HttpDisk, memory: u64) -> Result<OpenDisk, RemoteError> {
        let disk = Arc::new(disk);
        // What is read in one piece is of one version.
        if !disk.has_versions() && !disk.is_streamed() {
            self.notices.say(Notice::Unversioned(&format!(
                "{}: the server marks no versions (ETag, Last-Modified): if the object changes meanwhile, what is read of it \
                 may be put together of two versions",
                disk.name()
            )));
        }
        let (cached, uncached) = match self.given().cache {
            None => (None, None),
            Some(choice) => match self.cache.cached(&self.notices, &choice, &disk, memory)? {
                Ok(cached) => (Some(cached), None),
                Err(reason) => (None, Some(reason)),
            },
        };
        Ok(OpenDisk::Http { disk, cached, uncached, hashed: None, frames: None })
    }
}

/// A disk that is open already.
fn known(opened: &[(RemoteName, OpenDisk)], name: &RemoteName, access: Access) -> Option<OpenDisk> {
    let is_known = |(known, disk): &&(RemoteName, OpenDisk)| known == name && disk.is_open_for(access);
    opened.iter().find(is_known).map(|(_, disk)| disk.clone())
}

/// The failure to open a disk, with the option that lets it be opened.
fn with_option(error: RemoteError) -> IoError {
    match error.remedy() {
        Some(RemoteRemedy::FollowAnyRedirect) => {
            let reason = format!("{} (--redirects any follows it)", error.reason());
            IoError::of_file(Op::Open, IoErrorKind::Os(error.errno()), error.name()).with_detail(reason)
        }
        _ => error.into(),
    }
}

/// Transfers over the network, for reports in JSON.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RemoteTransfers {
    requests: u64,
    read_bytes: u64,
    written_bytes: u64,
    retries: u64,
    reconnections: u64,
}
