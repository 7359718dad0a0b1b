//! The page cache of commands that change an image that exists, where no cache mode is given: they go past it.

use crate::image_spec::ImageSpec;
use crate::named_disks::is_remote;
use crate::output::stderr;
use crate::session::Session;
use std::path::PathBuf;
use zebu::jobs::drop_pages;
use zebu::{Access, CacheMode, Image, Purpose, Sharing};

/// Clusters of less than a block of most file systems are better written together, by the page cache.
const LEAST_CLUSTER: u64 = 4096;

/// The way that was chosen for an image and everything that it stands on.
#[derive(Debug)]
pub(crate) struct UnaskedCache {
    pub(crate) mode: CacheMode,
    /// Files whose pages go at the end.
    files: Vec<PathBuf>,
}

impl UnaskedCache {
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
        if is_remote(&spec.path) {
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
        let look = |cache| {
            let options = spec
                .options
                .clone()
                .access(Access::ReadOnly)
                .sharing(Sharing::Unlocked)
                .purpose(Purpose::Inspect)
                .cache(cache);
            let worker = session.worker();
            worker.block_on(async {
                let image = Image::open(worker, &spec.path, &options).await.ok()?;
                let chain: Vec<Image> = std::iter::successors(Some(image.clone()), Image::backing).collect();
                let found =
                    chain.iter().map(|image| (image.cluster_size(), image.path().to_owned())).collect();
                let _ = image.close(worker).await;
                Some(found)
            })
        };
        let chain: Option<Vec<(u64, PathBuf)>> = look(CacheMode::None);
        let can_be_direct =
            chain.as_ref().is_some_and(|chain| chain.iter().all(|(size, _)| *size >= LEAST_CLUSTER));
        if can_be_direct {
            return Self { mode: CacheMode::None, files: Vec::new() };
        }
        let chain = chain.or_else(|| look(CacheMode::Writeback)).unwrap_or_default();
        Self { mode: CacheMode::Writeback, files: chain.into_iter().map(|(_, path)| path).collect() }
    }

    /// Says on standard error what was chosen.
    pub(crate) fn tell(&self, what: &str) {
        let how = match self.mode {
            CacheMode::None => "O_DIRECT",
            _ => "through the page cache, whose pages are dropped at the end",
        };
        stderr::tell(&format!("I/O of {what}: {how}"));
    }

    /// Drops what is durable of the files from the page cache.
    pub(crate) fn clean_up(&self) {
        for file in &self.files {
            drop_pages(file);
        }
    }
}
