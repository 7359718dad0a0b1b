//! Points of stores as disks: a chain of layers, of which only what their hashes say is read.

use crate::notices::{Notice, Notices};
use std::collections::HashMap;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_drivers::{ImageDisk, Verified, VerifiedHooks};
use zebu_engine::jobs::{Cancel, ManifestIndex};
use zebu_engine::storage::{
    Access, Engine, File, IoError, IoErrorKind, Op, OpenFlags, Storage, Worker, WorkerConfig,
};
use zebu_engine::{Format, Image, OpenOptions, OpenRemote, RefPolicy, Remote, RemoteRefs};
use zebu_remote::http::HttpOptions;
use zebu_store::StoreName;
use zebu_store::points::{Layer, Layered, PointName, PointStore, PointsError, PointsErrorKind};

/// Names that are tried for a directory.
const MOST_NAMES: u32 = 1000;

/// The layers of a point, as images: each is opened above the next, whatever it names itself.
#[derive(Debug, Clone)]
pub struct PointChain {
    /// The image of the top.
    pub top: PathBuf,
    /// The images below it, the next one first.
    pub below: Vec<PathBuf>,
    /// The opener of both.
    pub remote: Remote,
}

/// Opens layers, and nothing else.
pub(crate) struct Layers(pub(crate) HashMap<PathBuf, Option<Arc<dyn Storage>>>);

impl OpenRemote for Layers {
    fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        Some(match self.0.get(name)? {
            None => open_layer(name, flags),
            Some(disk) => File::from_storage(Arc::clone(disk), &name.to_string_lossy(), flags),
        })
    }

    fn is_name(&self, _name: &str) -> bool {
        false
    }

    fn open_reference(&self, name: &str, _flags: &OpenFlags) -> Result<File, IoError> {
        Err(IoError::of_file(Op::Open, IoErrorKind::Os(libc::EACCES), name))
    }
}

/// Opens a layer in a folder for reading; a link could lead out of the store.
fn open_layer(name: &Path, flags: &OpenFlags) -> Result<File, IoError> {
    let fail = |errno| IoError::of_file(Op::Open, IoErrorKind::Os(errno), name);
    if flags.access != Access::ReadOnly {
        return Err(fail(libc::EROFS));
    }
    let direct = if flags.direct { libc::O_DIRECT } else { 0 };
    let mut open = std::fs::OpenOptions::new();
    open.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | direct);
    let opened = open.open(name).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let detail = (errno == libc::ELOOP).then_some("it is a link, and a store has none");
        detail.into_iter().fold(fail(errno), IoError::with_detail)
    })?;
    File::from_descriptor(opened.into(), name, flags)
}

impl PointChain {
    /// The chain of `layers`, from the top to the lowest; `open` opens objects.
    pub(crate) fn new(
        store: &PointStore,
        layers: &[Layer],
        mut open: impl FnMut(StoreName) -> Result<Arc<dyn Storage>, IoError>,
    ) -> Result<Self, IoError> {
        let mut all = HashMap::new();
        let mut paths = Vec::with_capacity(layers.len());
        for layer in layers {
            let (path, disk) = match store.image(layer) {
                Layered::File(path) => (path, None),
                Layered::Object(name) => (PathBuf::from(name.to_string()), Some(open(name)?)),
            };
            paths.push(path.clone());
            all.insert(path, disk);
        }
        let remote = Remote::new(Arc::new(Layers(all)), RemoteRefs::None);
        let mut paths = paths.into_iter();
        Ok(Self { top: paths.next().unwrap_or_default(), below: paths.collect(), remote })
    }

    /// How the top is opened, for reading.
    pub fn options(&self) -> OpenOptions {
        let mut below: Vec<_> =
            self.below.iter().map(|path| Some((path.clone(), Some(Format::Qcow2)))).collect();
        // Below the lowest there is nothing.
        below.push(Some((PathBuf::new(), None)));
        let mut options = OpenOptions::default()
            .format(Format::Qcow2)
            .access(Access::ReadOnly)
            .refs(RefPolicy::None)
            .remote(self.remote.clone());
        let mut below = below.into_iter();
        options.backing = below.next().flatten();
        options.backing_below = below.collect();
        options
    }
}

/// The failure of a store as that of a disk.
pub fn of_point(name: &PointName, error: &PointsError) -> IoError {
    let errno = match error.kind() {
        PointsErrorKind::NotFound => libc::ENOENT,
        PointsErrorKind::Busy => libc::EBUSY,
        PointsErrorKind::Refused => libc::EINVAL,
        _ => libc::EIO,
    };
    IoError::of_file(Op::Open, IoErrorKind::Os(errno), name.to_string()).with_detail(error.to_string())
}

/// A directory that goes when this does.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> std::io::Result<Self> {
        let mut number = 0;
        loop {
            let path = std::env::temp_dir().join(format!(".zebu-point-{}-{number}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && number < MOST_NAMES => {
                    number += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Opens the disk of a point, or of the newest one of a store; `open` opens objects, and `afresh` has their reads go past copies.
pub(crate) fn open_point<G: Send + 'static>(
    name: &PointName,
    http: &HttpOptions,
    notices: &Notices,
    open: impl FnMut(StoreName) -> Result<Arc<dyn Storage>, IoError>,
    afresh: impl Fn() -> G + Send + Sync + 'static,
) -> Result<Verified, IoError> {
    let fail = |error: PointsError| of_point(name, &error);
    let told = |reason: String| {
        IoError::of_file(Op::Open, IoErrorKind::Os(libc::EIO), name.to_string()).with_detail(reason)
    };
    let store = PointStore::open(name, http).map_err(fail)?;
    let point = store.point(name.point()).map_err(fail)?;
    let Some(top) = point.top() else { return Err(told("the point has no layers".to_owned())) };
    let scratch = Scratch::new().map_err(|error| told(error.to_string()))?;
    let hashes = store.hashes_file(top, &scratch.0).map_err(fail)?;
    let index = ManifestIndex::open(&hashes, &Cancel::default()).map_err(|error| told(error.to_string()))?;
    drop(scratch);
    if index.virtual_size() != point.disk_size {
        return Err(told(format!(
            "the hashes are of a disk of {} bytes, the point of {}",
            index.virtual_size(),
            point.disk_size
        )));
    }
    let chain = PointChain::new(&store, &point.layers, open)?;
    let worker = Worker::new(&WorkerConfig::default())?;
    let opened = worker.block_on(Image::open(&worker, &chain.top, &chain.options()));
    let image = opened.map_err(|error| told(error.to_string()))?;
    let failed = notices.clone();
    let disk = ImageDisk::new(image, Access::ReadOnly, Engine::Auto)?
        .closing(move |error| failed.say(Notice::Fact(&error.to_string())));
    let notices = notices.clone();
    let report = move |told: &str| notices.say(Notice::Fact(told));
    let hooks = VerifiedHooks::new(report, afresh);
    Verified::new(Arc::new(disk), &name.to_string(), index, hooks).map_err(told)
}
