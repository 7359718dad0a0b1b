//! The requests of an upload.

use super::creation;
use super::filling::{Full, Rest};
use super::options::{Existing, UploadStats};
use super::resume::{self, Interrupted, MARK};
use crate::access::Access;
use crate::environment::{Environment, of_process};
use crate::failure::{describe, is_denial, is_passing};
use crate::name::{StoreKind, StoreName};
use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{Error, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::OnceCell;
use zebu_remote::RemoteError;
use zebu_remote::http::{HttpClient, HttpOptions};
use zebu_storage::sync::Mutex;

/// How often a request is tried, beside the tries that `object_store` makes of each.
const MOST_TRIES: u32 = 8;
/// Pauses between them.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// The reason why an object stays as it is.
const OTHER_BYTES: &str = "exists already, with other bytes: remove it first, or give another name";
/// The same, of one that was not there at the beginning.
const MADE_MEANWHILE: &str =
    "another object of that name was made meanwhile, and stays: remove it first, or give another name";

/// Sends parts to one object.
pub(super) struct Sender {
    name: StoreName,
    http: HttpOptions,
    part_size: u64,
    access: Mutex<Arc<Access>>,
    client: Arc<HttpClient>,
    begun: OnceCell<Begun>,
    /// Parts that the store has, by index: their names there and, where they are known, their ETags.
    parts: Mutex<BTreeMap<u64, String>>,
    /// The ETag of an object that is only compared with: nothing is sent.
    compared: OnceLock<String>,
    /// Nothing may be replaced.
    is_new: AtomicBool,
    counters: Counters,
}

/// An upload that the store knows.
struct Begun {
    id: String,
    /// Parts of an earlier try.
    kept: std::collections::HashMap<u64, resume::Kept>,
}

#[derive(Default)]
struct Counters {
    sent: AtomicU64,
    sent_bytes: AtomicU64,
    kept: AtomicU64,
    retries: AtomicU64,
}

impl Sender {
    pub(super) fn new(name: StoreName, http: HttpOptions, part_size: u64) -> Result<Self, RemoteError> {
        let access = Access::new(&name, &http, Environment(&of_process))?;
        Ok(Self {
            client: Arc::new(HttpClient::new(http.clone())),
            access: Mutex::new(Arc::new(access)),
            begun: OnceCell::new(),
            parts: Mutex::default(),
            compared: OnceLock::new(),
            is_new: AtomicBool::new(false),
            counters: Counters::default(),
            name,
            http,
            part_size,
        })
    }

    pub(super) fn stats(&self) -> UploadStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { sent, sent_bytes, kept, retries } = &self.counters;
        UploadStats { sent: get(sent), sent_bytes: get(sent_bytes), kept: get(kept), retries: get(retries) }
    }

    fn access(&self) -> Arc<Access> {
        Arc::clone(&self.access.lock())
    }

    /// Does a request with patience; once, credentials are read again.
    async fn with_patience<T>(&self, request: impl AsyncFn(&Access) -> Result<T, Error>) -> Result<T, Error> {
        let mut pause = FIRST_PAUSE;
        let mut was_denied = false;
        let mut tries = 1;
        loop {
            let error = match request(&self.access()).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            if is_denial(&error) && !was_denied {
                was_denied = true;
                match Access::new(&self.name, &self.http, Environment(&of_process)) {
                    Ok(access) => *self.access.lock() = Arc::new(access),
                    Err(_) => return Err(error),
                }
            } else if is_passing(&error) && tries < MOST_TRIES {
                tries += 1;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            } else {
                return Err(error);
            }
            self.counters.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Looks for an object of that name, which is no longer than `most` bytes if an interrupted run made it.
    pub(super) async fn existing(&self, most: u64) -> Result<Existing, (i32, String)> {
        let found = self.with_patience(async |access| access.objects().head(self.name.key()).await).await;
        let found = match found {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(Existing::Nothing),
            Err(error) => return Err(describe(&error)),
        };
        let etag = found.e_tag.as_deref().map(etag_in).unwrap_or_default();
        let parts = etag.split_once('-').map_or(Some(1), |(_, count)| count.parse().ok());
        let is_divided_so = parts == Some(found.size.div_ceil(self.part_size).max(1));
        if self.name.kind() == StoreKind::S3 && is_divided_so && found.size <= most {
            return Ok(Existing::PerhapsTheSame { etag: etag.to_owned() });
        }
        Ok(Existing::Another)
    }

    /// Sends nothing from now on: the end succeeds if the object with this ETag has the same bytes.
    pub(super) fn only_compare(&self, etag: String) {
        let _ = self.compared.set(etag);
    }

    /// The end fails if another object has the name by then.
    pub(super) fn must_be_new(&self) {
        self.is_new.store(true, Ordering::Relaxed);
    }

    fn is_new(&self) -> bool {
        self.is_new.load(Ordering::Relaxed)
    }

    /// The upload, which is begun or found when it is needed first.
    async fn begun(&self) -> Result<&Begun, Error> {
        self.begun.get_or_try_init(|| self.begin()).await
    }

    async fn begin(&self) -> Result<Begun, Error> {
        let is_s3 = self.name.kind() == StoreKind::S3;
        if is_s3
            && let Some(found) = resume::find(&self.access(), &self.client, &self.name, self.part_size).await
        {
            let Interrupted { id, parts } = found;
            return Ok(Begun { id, kept: parts });
        }
        let key = self.name.key();
        let id = self.with_patience(async |access| access.multipart().create_multipart(key).await).await?;
        if is_s3 {
            let mark = Bytes::from(resume::mark(self.part_size));
            self.with_patience(async |access| {
                let mark = PutPayload::from_bytes(mark.clone());
                access.multipart().put_part(key, &id, MARK, mark).await
            })
            .await?;
        }
        Ok(Begun { id, kept: std::collections::HashMap::new() })
    }

    /// Sends a part, unless the store has it.
    pub(super) async fn send(&self, index: u64, part: Bytes) -> Result<(), Error> {
        if self.compared.get().is_some() {
            let etag = etag_of(&part).await?;
            self.note_kept(index, &etag);
            return Ok(());
        }
        let begun = self.begun().await?;
        if let Some(kept) = begun.kept.get(&index).filter(|kept| kept.len == part.len() as u64) {
            let etag = etag_of(&part).await?;
            if etag == kept.etag {
                self.note_kept(index, &etag);
                return Ok(());
            }
        }
        let sent = self
            .with_patience(async |access| {
                let part = PutPayload::from_bytes(part.clone());
                access.multipart().put_part(self.name.key(), &begun.id, index as usize, part).await
            })
            .await?;
        self.counters.sent.fetch_add(1, Ordering::Relaxed);
        self.counters.sent_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
        self.parts.lock().insert(index, sent.content_id);
        Ok(())
    }

    /// The store has this part already.
    fn note_kept(&self, index: u64, etag: &str) {
        self.counters.kept.fetch_add(1, Ordering::Relaxed);
        self.parts.lock().insert(index, format!("\"{etag}\""));
    }

    /// Sends the last parts, and has the store make the object of all.
    pub(super) async fn finish(&self, rest: Rest) -> Result<(), (i32, String)> {
        let Rest { parts, full } = rest;
        let compared = self.compared.get();
        if parts == 1 && self.begun.get().is_none() && compared.is_none() {
            return self.put(full).await.map_err(|error| told(&error));
        }
        // The first one at last: what makes an image of the file stands there.
        for (index, part) in full.into_iter().rev() {
            self.send(index, part).await.map_err(|error| describe(&error))?;
        }
        let ids: Vec<String> = self.parts.lock().values().cloned().collect();
        if ids.len() as u64 != parts {
            return Err((libc::EIO, "a part of the object was never written".to_owned()));
        }
        if let Some(compared) = compared {
            return if is_object_of(compared, &ids) {
                Ok(())
            } else {
                Err((libc::EEXIST, OTHER_BYTES.to_owned()))
            };
        }
        let begun = self.begun().await.map_err(|error| describe(&error))?;
        match self.complete(&begun.id, &ids).await {
            Ok(()) => Ok(()),
            // Perhaps an earlier try was done whose answer was lost.
            Err(error) if self.is_complete(&ids).await => {
                let _ = error;
                Ok(())
            }
            Err(error) => Err(told(&error)),
        }
    }

    /// Has the store make the object of its parts.
    async fn complete(&self, id: &String, ids: &[String]) -> Result<(), Error> {
        if self.is_new() {
            if self.name.kind() == StoreKind::S3 {
                let made = self
                    .with_patience(async |access| {
                        creation::complete(access, &self.client, &self.name, id, ids).await
                    })
                    .await;
                if !matches!(made, Err(Error::NotImplemented { .. })) {
                    return made;
                }
            }
            self.check_absence().await?;
        }
        self.with_patience(async |access| {
            let ids = ids.iter().map(|id| PartId { content_id: id.clone() }).collect();
            access.multipart().complete_multipart(self.name.key(), id, ids).await
        })
        .await
        .map(drop)
    }

    /// Fails if an object has the name.
    async fn check_absence(&self) -> Result<(), Error> {
        match self.with_patience(async |access| access.objects().head(self.name.key()).await).await {
            Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => {
                Err(Error::AlreadyExists { path: self.name.key().to_string(), source: MADE_MEANWHILE.into() })
            }
        }
    }

    /// One that fits into a part needs no others.
    async fn put(&self, full: Vec<Full>) -> Result<(), Error> {
        let bytes = full.into_iter().next().map(|(_, bytes)| bytes).unwrap_or_default();
        let put = async |mode: PutMode| {
            self.with_patience(async |access| {
                let (bytes, options) = (bytes.clone(), PutOptions::from(mode.clone()));
                access.objects().put_opts(self.name.key(), PutPayload::from_bytes(bytes), options).await
            })
            .await
        };
        let sent = if self.is_new() { put(PutMode::Create).await } else { put(PutMode::Overwrite).await };
        match sent {
            Ok(_) => {}
            Err(error) if is_unknown(&error) => {
                self.check_absence().await?;
                put(PutMode::Overwrite).await?;
            }
            // Perhaps an earlier try was done whose answer was lost.
            Err(error @ Error::AlreadyExists { .. }) => {
                let etag = etag_of(&bytes).await?;
                if !self.is_complete(&[etag]).await {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
        self.counters.sent.fetch_add(1, Ordering::Relaxed);
        self.counters.sent_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the object is made of these parts, as far as its ETag says.
    async fn is_complete(&self, ids: &[String]) -> bool {
        if self.name.kind() != StoreKind::S3 {
            return false;
        }
        let found = self.with_patience(async |access| access.objects().head(self.name.key()).await).await;
        found.is_ok_and(|found| found.e_tag.is_some_and(|etag| is_object_of(etag_in(&etag), ids)))
    }

    /// Has the store forget the parts.
    pub(super) async fn abort(&self) {
        let Some(begun) = self.begun.get() else { return };
        let key = self.name.key();
        // If it does not, the next try goes on with them.
        let _ =
            self.with_patience(async |access| access.multipart().abort_multipart(key, &begun.id).await).await;
    }
}

/// The errno and the reason of a failed end.
fn told(error: &Error) -> (i32, String) {
    match error {
        Error::AlreadyExists { .. } => (libc::EEXIST, MADE_MEANWHILE.to_owned()),
        error => describe(error),
    }
}

/// Whether the store has no conditional requests.
fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::NotImplemented { .. }) || error.to_string().contains("<Code>NotImplemented")
}

/// The ETag of a part's bytes, on a thread that may compute.
async fn etag_of(part: &Bytes) -> Result<String, Error> {
    let bytes = part.clone();
    Ok(tokio::task::spawn_blocking(move || resume::etag(&bytes)).await?)
}

/// Whether an object with this ETag is made of parts with these names: put together, or sent as one.
fn is_object_of(etag: &str, ids: &[String]) -> bool {
    if let [only] = ids
        && etag_in(only) == etag
    {
        return true;
    }
    let etags: Vec<&str> = ids.iter().map(|id| etag_in(id)).collect();
    resume::etag_of_parts(etags.into_iter()).is_some_and(|expected| expected == etag)
}

/// The ETag in the name of a part.
fn etag_in(id: &str) -> &str {
    id.trim_matches('"')
}
