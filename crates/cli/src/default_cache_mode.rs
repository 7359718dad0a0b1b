//! The page cache where no cache mode is given: commands that change an image go past it, and so do those that read one
//! once, if little of it is there.

use crate::output::stderr;
use crate::session::Session;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use zebu_disks::{ImageSpec, Program};
use zebu_engine::jobs::{drop_pages, reads_best_direct};
use zebu_engine::{Access, CacheMode, Image, Keys, OpenOptions, Purpose, Remote, Sharing};

/// Clusters of less than a block of most file systems are better written together, by the page cache.
const LEAST_CLUSTER: u64 = 4096;

/// The way that was chosen for an image and everything that it stands on.
#[derive(Debug)]
pub(crate) struct DefaultCacheMode {
    pub(crate) mode: CacheMode,
    /// Files whose pages go at the end.
    files: Vec<PathBuf>,
}

impl DefaultCacheMode {
    /// The choice for an image whose cache mode nothing names: neither `asked`, nor its image options, so that it is
    /// `default`. The command is to open it in that way.
    pub(crate) fn unless_asked(
        asked: Option<CacheMode>,
        default: CacheMode,
        session: &Session,
        spec: &mut ImageSpec,
    ) -> Option<Self> {
        if asked.is_some() || spec.options.cache != default {
            return None;
        }
        if session.context().disks.names.is_remote(&spec.path) {
            // A server's disk is not in this machine's page cache. What the server acknowledged is durable after a flush.
            if default == CacheMode::Unsafe {
                spec.options.cache = CacheMode::Writeback;
            }
            return None;
        }
        let chosen = Self::of(session, spec);
        spec.options.cache = chosen.mode;
        Some(chosen)
    }

    /// O_DIRECT, if all files of the chain can be opened with it; else the page cache, which is cleaned up at the end.
    /// What else is wrong with the image shows when it is opened for the command.
    fn of(session: &Session, spec: &ImageSpec) -> Self {
        let look = |cache| chain(session, spec, cache).or_else(|| top(session, spec, cache));
        let chain = look(CacheMode::None);
        if chain.as_ref().is_some_and(|chain| can_be_direct(chain)) {
            return Self { mode: CacheMode::None, files: Vec::new() };
        }
        let chain = chain.or_else(|| look(CacheMode::Writeback)).unwrap_or_default();
        Self { mode: CacheMode::Writeback, files: chain.into_iter().map(|(_, path)| path).collect() }
    }

    /// Has a source that nothing names a cache mode for be read by O_DIRECT, if that is the fast way for its chain.
    /// A pipe is left alone: it can be opened once.
    pub(crate) fn for_source(session: &Session, spec: &mut ImageSpec) {
        if spec.options.cache == CacheMode::default()
            && !session.context().disks.names.is_remote(&spec.path)
            && spec.path.is_file()
            && let Some(chain) = chain(session, spec, CacheMode::None)
            && can_be_direct(&chain)
            && reads_best_direct(chain.iter().map(|(_, path)| path.as_path()))
        {
            spec.options.cache = CacheMode::None;
            if session.verbose {
                stderr::tell(
                    session.dialect(),
                    "reads of the source: O_DIRECT, since little of it is in the page cache",
                );
            }
        }
    }

    /// Has a source that nothing names a cache mode for, and whose unreadable parts are passed over, be read by O_DIRECT, if
    /// its chain can be. The page cache reads around what is asked for, and fails for all of that.
    pub(crate) fn for_damaged_source(session: &Session, spec: &mut ImageSpec) {
        let can_be_direct = || {
            // A chain that can't be opened either way needs a key.
            chain(session, spec, CacheMode::None).is_some()
                || chain(session, spec, CacheMode::Writeback).is_none()
                    && top(session, spec, CacheMode::None).is_some()
        };
        if spec.options.cache == CacheMode::default()
            && !session.context().disks.names.is_remote(&spec.path)
            && is_file_or_device(&spec.path)
            && can_be_direct()
        {
            spec.options.cache = CacheMode::None;
            if session.verbose {
                stderr::tell(
                    session.dialect(),
                    "reads of the source: O_DIRECT, to lose no more than what can't be read",
                );
            }
        }
    }

    /// Says on standard error what was chosen.
    pub(crate) fn tell(&self, dialect: Program, what: &str) {
        let how = match self.mode {
            CacheMode::None => "O_DIRECT",
            _ => "through the page cache, whose pages are dropped at the end",
        };
        stderr::tell(dialect, &format!("I/O of {what}: {how}"));
    }

    /// Drops what is durable of the files from the page cache.
    pub(crate) fn clean_up(&self) {
        for file in &self.files {
            drop_pages(file);
        }
    }
}

/// The image and those that it stands on, opened so: their clusters' sizes, and their files. `None` if they can't be opened
/// so, if one is no local file, or if one needs a key.
fn chain(session: &Session, spec: &ImageSpec, cache: CacheMode) -> Option<Vec<(u64, PathBuf)>> {
    // Nothing is fetched for this, and nobody asked for a passphrase.
    let options = spec.options.clone().cache(cache).remote(Remote::default()).keys(Keys::default());
    looked_at(session, spec, options)
}

/// The image alone.
fn top(session: &Session, spec: &ImageSpec, cache: CacheMode) -> Option<Vec<(u64, PathBuf)>> {
    looked_at(session, spec, spec.options.clone().cache(cache).purpose(Purpose::Inspect))
}

fn looked_at(session: &Session, spec: &ImageSpec, options: OpenOptions) -> Option<Vec<(u64, PathBuf)>> {
    let options = options.access(Access::ReadOnly).sharing(Sharing::Unlocked);
    let worker = session.worker();
    worker.block_on(async {
        let image = Image::open(worker, &spec.path, &options).await.ok()?;
        let chain: Vec<Image> = std::iter::successors(Some(image.clone()), Image::backing).collect();
        let found = chain.iter().map(|image| (image.cluster_size(), image.path().to_owned())).collect();
        let _ = image.close(worker).await;
        Some(found)
    })
}

fn is_file_or_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.is_file() || found.file_type().is_block_device())
}

fn can_be_direct(chain: &[(u64, PathBuf)]) -> bool {
    chain.iter().all(|(size, _)| *size >= LEAST_CLUSTER)
}
