//! A store in a bucket. Objects are whole when they are there; conditional requests decide who was first.

use super::error::PointsErrorKind;
use super::object::{Document, Failed, Held, Holder, LARGEST_DOCUMENT, Wrote};
use super::pace::Pace;
use crate::access::Access;
use crate::environment::{Environment, of_process};
use crate::failure::{describe, is_denial, is_passing};
use crate::name::StoreName;
use crate::runtime::wait;
use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::path::Path as Key;
use object_store::{Error, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use zebu_remote::http::HttpOptions;
use zebu_storage::sync::Mutex;

/// Bytes of a part that is sent, and of a range that is read.
const PART: u64 = 8 << 20;
/// The most parts that stores take.
const MOST_PARTS: u64 = 10_000;
/// Parts sent at a time.
const AT_ONCE: usize = 4;
/// How often a request is tried.
const TRIES: u32 = 8;
/// Pauses between.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

pub(super) struct Objects {
    prefix: StoreName,
    http: HttpOptions,
    access: Mutex<Arc<Access>>,
    pub(super) pace: Pace,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

fn failed(error: &Error) -> Failed {
    let (errno, reason) = describe(error);
    let kind = if errno == libc::ENOENT { PointsErrorKind::NotFound } else { PointsErrorKind::Io };
    (kind, reason)
}

fn local(error: &std::io::Error) -> Failed {
    (PointsErrorKind::Io, error.to_string())
}

impl Objects {
    pub(super) fn new(prefix: &StoreName, http: &HttpOptions) -> Result<Self, Failed> {
        let access = Access::new(prefix, http, Environment(&of_process))
            .map_err(|error| (PointsErrorKind::Io, error.reason().to_owned()))?;
        Ok(Self {
            prefix: prefix.clone(),
            http: http.clone(),
            access: Mutex::new(Arc::new(access)),
            pace: Pace::default(),
        })
    }

    fn key(&self, key: &str) -> Key {
        Key::from(format!("{}/{key}", self.prefix.key()))
    }

    /// Does a request with patience; once, credentials are read again.
    fn ask<T>(&self, request: impl AsyncFn(&Access) -> Result<T, Error>) -> Result<Result<T, Error>, Failed> {
        let (mut pause, mut was_denied, mut tries) = (FIRST_PAUSE, false, 1);
        loop {
            let access = Arc::clone(&self.access.lock());
            let error = match wait(request(&access)).map_err(|error| local(&error))? {
                Ok(done) => return Ok(Ok(done)),
                Err(error) => error,
            };
            if is_denial(&error) && !was_denied {
                was_denied = true;
                match Access::new(&self.prefix, &self.http, Environment(&of_process)) {
                    Ok(access) => *self.access.lock() = Arc::new(access),
                    Err(_) => return Ok(Err(error)),
                }
            } else if is_passing(&error) && tries < TRIES {
                tries += 1;
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            } else {
                return Ok(Err(error));
            }
        }
    }

    pub(super) fn length(&self, key: &str) -> Result<Option<u64>, Failed> {
        let key = self.key(key);
        match self.ask(async |access| access.objects().head(&key).await)? {
            Ok(found) => Ok(Some(found.size)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(&error)),
        }
    }

    pub(super) fn get(&self, key: &str) -> Result<Option<Document>, Failed> {
        match self.length(key)? {
            None => return Ok(None),
            Some(0..=LARGEST_DOCUMENT) => {}
            Some(_) => {
                return Err((PointsErrorKind::Damaged, format!("it has more than {LARGEST_DOCUMENT} bytes")));
            }
        }
        let key = self.key(key);
        let read = self.ask(async |access| {
            let found = access.objects().get(&key).await?;
            let version = found.meta.e_tag.clone().unwrap_or_default();
            found.bytes().await.map(|bytes| (bytes, version))
        })?;
        match read {
            Ok((bytes, version)) => Ok(Some(Document { bytes: bytes.to_vec(), version })),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(&error)),
        }
    }

    fn write(&self, key: &str, bytes: &[u8], mode: &PutMode) -> Result<Wrote, Failed> {
        let (at, bytes) = (self.key(key), Bytes::copy_from_slice(bytes));
        let wrote = self.ask(async |access| {
            let options = PutOptions::from(mode.clone());
            access.objects().put_opts(&at, PutPayload::from_bytes(bytes.clone()), options).await
        })?;
        match wrote {
            Ok(_) => Ok(Wrote::Done),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                // Perhaps an earlier try was done whose answer was lost.
                let found = self.get(key)?;
                Ok(if found.is_some_and(|found| found.bytes == bytes) { Wrote::Done } else { Wrote::Lost })
            }
            Err(error @ Error::NotImplemented { .. }) => Err((
                PointsErrorKind::Refused,
                format!("the store has no conditional requests, which points need ({error})"),
            )),
            Err(error) => Err(failed(&error)),
        }
    }

    pub(super) fn create(&self, key: &str, bytes: &[u8]) -> Result<Wrote, Failed> {
        self.write(key, bytes, &PutMode::Create)
    }

    pub(super) fn put(&self, key: &str, bytes: &[u8]) -> Result<(), Failed> {
        self.write(key, bytes, &PutMode::Overwrite).map(drop)
    }

    pub(super) fn replace(&self, key: &str, version: &str, bytes: &[u8]) -> Result<Wrote, Failed> {
        let version = UpdateVersion { e_tag: Some(version.to_owned()), version: None };
        self.write(key, bytes, &PutMode::Update(version))
    }

    pub(super) fn delete(&self, key: &str) -> Result<(), Failed> {
        let key = self.key(key);
        match self.ask(async |access| access.objects().delete(&key).await)? {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    }

    pub(super) fn list(&self, part: &str) -> Result<Vec<(String, u64)>, Failed> {
        let prefix = self.key(part);
        let listed = self.ask(async |access| access.objects().list_with_delimiter(Some(&prefix)).await)?;
        let listed = listed.map_err(|error| failed(&error))?;
        let name = |key: &Key| key.filename().map(str::to_owned);
        let mut found: Vec<_> =
            listed.objects.iter().filter_map(|object| Some((name(&object.location)?, object.size))).collect();
        found.sort();
        Ok(found)
    }

    pub(super) fn take_in(&self, key: &str, path: &Path) -> Result<(), Failed> {
        let file = File::open(path).map_err(|error| local(&error))?;
        let len = file.metadata().map_err(|error| local(&error))?.len();
        let at = self.key(key);
        if len <= PART {
            let mut bytes = vec![0; len as usize];
            file.read_exact_at(&mut bytes, 0).map_err(|error| local(&error))?;
            self.pace.wait_for(len);
            self.write(key, &bytes, &PutMode::Overwrite)?;
        } else {
            let part = PART.max(len.div_ceil(MOST_PARTS).next_multiple_of(1 << 20));
            let id = self.ask(async |access| access.multipart().create_multipart(&at).await)?;
            let id = id.map_err(|error| failed(&error))?;
            let sent = self.send(&at, &id, &file, len, part).and_then(|parts| {
                let parts: Vec<PartId> = parts;
                self.ask(async |access| access.multipart().complete_multipart(&at, &id, parts.clone()).await)?
                    .map_err(|error| failed(&error))
            });
            if let Err(error) = sent {
                // If the store does not forget the parts, its own rules do.
                let _ = self.ask(async |access| access.multipart().abort_multipart(&at, &id).await);
                return Err(error);
            }
        }
        let _ = std::fs::remove_file(path);
        Ok(())
    }

    fn send(&self, at: &Key, id: &String, file: &File, len: u64, part: u64) -> Result<Vec<PartId>, Failed> {
        let count = len.div_ceil(part);
        let next = AtomicU64::new(0);
        let run = || {
            let mut sent = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    return Ok(sent);
                }
                let mut bytes = vec![0; part.min(len - index * part) as usize];
                file.read_exact_at(&mut bytes, index * part).map_err(|error| local(&error))?;
                self.pace.wait_for(bytes.len() as u64);
                let bytes = Bytes::from(bytes);
                let request = async |access: &Access| {
                    let payload = PutPayload::from_bytes(bytes.clone());
                    access.multipart().put_part(at, id, index as usize, payload).await
                };
                match self.ask(request) {
                    Ok(Ok(done)) => sent.push((index, done)),
                    Ok(Err(error)) => {
                        next.store(count, Ordering::Relaxed);
                        return Err(failed(&error));
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let gone = || (PointsErrorKind::Io, "a thread that sends ended".to_owned());
        let results: Vec<Result<Vec<(u64, PartId)>, Failed>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(run)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(gone()))).collect()
        });
        let mut parts = Vec::new();
        for sent in results {
            parts.extend(sent?);
        }
        parts.sort_by_key(|(index, _)| *index);
        Ok(parts.into_iter().map(|(_, id)| id).collect())
    }

    pub(super) fn read(
        &self,
        key: &str,
        tell: &mut dyn FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<bool, Failed> {
        let Some(len) = self.length(key)? else { return Ok(false) };
        let at = self.key(key);
        let mut offset = 0;
        while offset < len {
            let end = len.min(offset + PART);
            let read = self.ask(async |access| access.objects().get_range(&at, offset..end).await)?;
            let bytes = match read {
                Ok(bytes) if bytes.len() as u64 == end - offset => bytes,
                Ok(_) => return Err((PointsErrorKind::Io, "the store gave too few bytes".to_owned())),
                Err(Error::NotFound { .. }) => return Ok(false),
                Err(error) => return Err(failed(&error)),
            };
            tell(&bytes).map_err(|reason| (PointsErrorKind::Io, reason))?;
            offset = end;
        }
        Ok(true)
    }

    pub(super) fn hold(&self, key: &str, bytes: &[u8]) -> Result<Held, Failed> {
        match self.create(key, bytes)? {
            Wrote::Done => Ok(Held::new(key, None)),
            Wrote::Lost => Err((PointsErrorKind::Busy, "it is there already".to_owned())),
        }
    }

    pub(super) fn holder(&self, key: &str) -> Result<Holder, Failed> {
        Ok(if self.length(key)?.is_some() { Holder::Unknown } else { Holder::Gone })
    }

    #[expect(clippy::unused_self, reason = "as of a folder")]
    pub(super) fn work_directory(&self, id: &str) -> Result<PathBuf, Failed> {
        let path = std::env::temp_dir().join(format!("zebu-store-{id}"));
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|error| local(&error))?;
        Ok(path)
    }
}
