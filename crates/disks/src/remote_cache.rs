//! The cache of disks over the network in a directory of this machine.

use crate::notices::{Notice, Notices};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_engine::storage::Storage;
use zebu_remote::RemoteError;
use zebu_remote::http::HttpDisk;
use zebu_remote::range_cache::{CacheStats, CachedDisk, RangeCache, RangeCacheOptions};
use zebu_storage::sync::Mutex;

/// Bytes of a cache whose size is not given.
const DEFAULT_SIZE: u64 = 10 << 30;

/// The place and the bound of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheChoice {
    /// The directory, which is made if it is not there.
    pub directory: PathBuf,
    /// Bytes.
    pub size: Option<u64>,
}

/// Errors of a local disk that has no place for what is to be kept: reads go on without it.
const NO_PLACE: [i32; 3] = [libc::ENOSPC, libc::EDQUOT, libc::EFBIG];

/// The cache that is open.
#[derive(Default)]
pub struct RemoteCache(Mutex<Option<(CacheChoice, Arc<RangeCache>)>>);

impl RemoteCache {
    /// A file on a web server with the cache before it; `Err` within `Ok`: why it can't be cached.
    pub(crate) fn cached(
        &self,
        notices: &Notices,
        choice: &CacheChoice,
        disk: &Arc<HttpDisk>,
        memory: u64,
    ) -> Result<Result<Arc<CachedDisk>, &'static str>, RemoteError> {
        match self.with_cache(notices, choice, disk, memory) {
            Err(error) if NO_PLACE.contains(&error.errno()) => {
                let words =
                    format!("nothing of '{}' is kept: '{}': {}", disk.name(), error.name(), error.reason());
                notices.say(Notice::Cache(&words));
                Ok(Err("the cache has no place for it"))
            }
            cached => cached,
        }
    }

    fn with_cache(
        &self,
        notices: &Notices,
        choice: &CacheChoice,
        disk: &Arc<HttpDisk>,
        memory: u64,
    ) -> Result<Result<Arc<CachedDisk>, &'static str>, RemoteError> {
        let cache = self.cache(notices, choice)?;
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
    pub fn objects(&self) -> Option<PathBuf> {
        let open = self.0.lock();
        open.as_ref().map(|(choice, _)| RangeCache::objects_in(&choice.directory))
    }

    /// Has everything stored that was fetched. False if there is no cache.
    pub(crate) fn finish(&self) -> bool {
        let open = self.0.lock();
        let Some((_, cache)) = &*open else { return false };
        cache.settle();
        true
    }

    /// Counters of the cache, as JSON; null if there is none.
    pub fn counters(&self) -> Value {
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
    pub(crate) fn tell(&self, notices: &Notices) {
        let open = self.0.lock();
        let Some((CacheChoice { directory, .. }, cache)) = &*open else { return };
        tell_of(notices, directory, cache.stats());
    }

    fn cache(&self, notices: &Notices, choice: &CacheChoice) -> Result<Arc<RangeCache>, RemoteError> {
        let mut open = self.0.lock();
        if let Some((known, cache)) = &*open
            && known == choice
        {
            return Ok(Arc::clone(cache));
        }
        let notices = notices.clone();
        let options = RangeCacheOptions::new(choice.size.unwrap_or(DEFAULT_SIZE), move |message| {
            notices.say(Notice::Cache(message));
        });
        let cache = RangeCache::open(&choice.directory, options)?;
        *open = Some((choice.clone(), Arc::clone(&cache)));
        Ok(cache)
    }
}

fn tell_of(notices: &Notices, directory: &Path, stats: CacheStats) {
    let CacheStats { hits, fetched, stored, not_stored, evicted, bad_blocks, .. } = stats;
    notices.say(Notice::Fact(&format!(
        "cache '{}': {hits} bytes read from it, {fetched} bytes fetched, {stored} stored, {not_stored} not stored, {evicted} \
         evicted, {bad_blocks} blocks with wrong bytes",
        directory.display()
    )));
}
