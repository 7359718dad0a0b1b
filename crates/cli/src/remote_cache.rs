//! The cache of disks over the network that the command line asks for (`--cache-dir`).

use crate::output::printable::printable;
use crate::output::stderr;
use crate::program::Program;
use crate::serve::log_lines;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu::storage::Storage;
use zebu_remote::RemoteError;
use zebu_remote::http::HttpDisk;
use zebu_remote::range_cache::{CacheStats, CachedDisk, RangeCache, RangeCacheOptions};
use zebu_storage::sync::Mutex;

/// Bytes of a cache whose size is not given.
const DEFAULT_SIZE: u64 = 10 << 30;

/// The place and the bound of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheChoice {
    pub(crate) directory: PathBuf,
    /// Bytes.
    pub(crate) size: Option<u64>,
}

/// Errors of a local disk that has no place for what is to be kept: reads go on without it.
const NO_PLACE: [i32; 3] = [libc::ENOSPC, libc::EDQUOT, libc::EFBIG];

/// The cache that is open.
#[derive(Default)]
pub(crate) struct RemoteCache(Mutex<Option<(CacheChoice, Arc<RangeCache>)>>);

impl RemoteCache {
    /// A file on a web server with the cache before it; `Err` within `Ok`: why it can't be cached.
    pub(crate) fn cached(
        &self,
        dialect: Program,
        choice: &CacheChoice,
        disk: &Arc<HttpDisk>,
        memory: u64,
    ) -> Result<Result<Arc<CachedDisk>, &'static str>, RemoteError> {
        match self.with_cache(dialect, choice, disk, memory) {
            Err(error) if NO_PLACE.contains(&error.errno()) => {
                let words =
                    format!("nothing of '{}' is kept: '{}': {}", disk.name(), error.name(), error.reason());
                log_lines::say(format!("{}: {}\n", dialect.name(), printable(&words)));
                Ok(Err("the cache has no place for it"))
            }
            cached => cached,
        }
    }

    fn with_cache(
        &self,
        dialect: Program,
        choice: &CacheChoice,
        disk: &Arc<HttpDisk>,
        memory: u64,
    ) -> Result<Result<Arc<CachedDisk>, &'static str>, RemoteError> {
        let cache = self.cache(dialect, choice)?;
        let version = match disk.version() {
            Ok(version) => version,
            Err(reason) => return Ok(Err(reason)),
        };
        let below: Arc<dyn Storage> = disk.clone();
        let cached = cache.disk(below, &version, memory / 2)?;
        disk.leave_caching();
        Ok(Ok(Arc::new(cached)))
    }

    /// The directory of what is in the cache, if there is one.
    pub(crate) fn objects(&self) -> Option<PathBuf> {
        let open = self.0.lock();
        open.as_ref().map(|(choice, _)| RangeCache::objects_in(&choice.directory))
    }

    /// Has everything stored that was fetched.
    pub(crate) fn finish(&self) {
        let open = self.0.lock();
        if let Some((_, cache)) = &*open {
            cache.settle();
            log_lines::finish();
        }
    }

    /// Counters of the cache, as JSON; null if there is none.
    pub(crate) fn counters(&self) -> Value {
        let open = self.0.lock();
        let Some((_, cache)) = &*open else { return Value::Null };
        let CacheStats { hits, fetched, stored, not_stored, evicted, bad_blocks, .. } = cache.stats();
        json!({
            "hit-bytes": hits,
            "fetched-bytes": fetched,
            "stored-bytes": stored,
            "not-stored-bytes": not_stored,
            "evicted-bytes": evicted,
            "bad-blocks": bad_blocks,
        })
    }

    /// Says what the cache did (`-v`), if there is one.
    pub(crate) fn tell(&self, dialect: Program) {
        let open = self.0.lock();
        let Some((CacheChoice { directory, .. }, cache)) = &*open else { return };
        tell_of(dialect, directory, cache.stats());
    }

    fn cache(&self, dialect: Program, choice: &CacheChoice) -> Result<Arc<RangeCache>, RemoteError> {
        let mut open = self.0.lock();
        if let Some((known, cache)) = &*open
            && known == choice
        {
            return Ok(Arc::clone(cache));
        }
        // Whoever reads the messages may take none for as long as they like, and reads are not to wait for that.
        let options = RangeCacheOptions::new(choice.size.unwrap_or(DEFAULT_SIZE), move |message| {
            log_lines::say(format!("{}: {}\n", dialect.name(), printable(message)));
        });
        let cache = RangeCache::open(&choice.directory, options)?;
        *open = Some((choice.clone(), Arc::clone(&cache)));
        Ok(cache)
    }
}

fn tell_of(dialect: Program, directory: &Path, stats: CacheStats) {
    let CacheStats { hits, fetched, stored, not_stored, evicted, bad_blocks, .. } = stats;
    stderr::tell(
        dialect,
        &format!(
            "cache '{}': {hits} bytes read from it, {fetched} bytes fetched, {stored} stored, {not_stored} not stored, {evicted} \
         evicted, {bad_blocks} blocks with wrong bytes",
            directory.display()
        ),
    );
}
