//! An object as a storage, and how it is opened.

use super::connection::{Connection, Patience};
use super::options::{HttpOptions, LEAST_MEMORY, ServersWithoutRanges};
use super::ranged::Ranged;
use super::signed::SignedUrls;
use super::source::{Reply, Source, Trouble};
use super::streamed::Streamed;
use super::url::HttpUrl;
use crate::afresh::Afresh;
use crate::error::RemoteError;
use crate::stats::StatsSnapshot;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::{Alignment, Completer, Storage, StorageAbilities, StorageDone, StorageOp};

/// The longest that opening tries again where the server is busy.
const LONGEST_OPENING: Duration = Duration::from_secs(15);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Bytes that opening asks for. An object that has no more needs no ranges.
const HEAD: u64 = 64 << 10;

/// A file on a web server, for reading.
///
/// The version of the object that was opened is the only one that is read. Once the server has another, every read fails.
pub struct HttpDisk {
    mode: Mode,
}

enum Mode {
    Ranged(Arc<Ranged>),
    Streamed(Arc<Streamed>),
}

/// The server's first answer.
struct Found {
    source: Source,
    connection: Connection,
    reply: Reply,
}

impl HttpDisk {
    /// Asks the server for the object's length and version.
    ///
    /// # Errors
    /// The name without its secrets, an errno and the reason: nobody listens, there is no such object, a redirect that is
    /// not followed, TLS that fails, a server without ranges, one that does not tell the length.
    pub fn open(url: HttpUrl, options: HttpOptions) -> Result<Self, RemoteError> {
        let name = url.to_string();
        Self::open_source(&name, options, |options| Ok(Source::new(url.clone(), options)))
    }

    /// Opens an object of a store, whose URLs `signed` signs.
    ///
    /// # Errors
    /// As [`Self::open`]; also that no URL can be signed, and what the store says of the bucket, the object and the
    /// credentials.
    pub fn open_signed(signed: SignedUrls, options: HttpOptions) -> Result<Self, RemoteError> {
        let name = signed.name().to_owned();
        Self::open_source(&name, options, |options| Source::of_store(signed.clone(), options))
    }

    fn open_source(
        name: &str,
        options: HttpOptions,
        source: impl Fn(HttpOptions) -> Result<Source, Trouble>,
    ) -> Result<Self, RemoteError> {
        let fail = |errno, reason: String| RemoteError::new(name, errno, reason);
        if options.memory < LEAST_MEMORY || options.connections == 0 {
            return Err(fail(
                libc::EINVAL,
                format!("it needs {} MiB of memory and a connection", LEAST_MEMORY >> 20),
            ));
        }
        let options = options.bounded();
        let without_ranges = options.without_ranges;
        let until = Instant::now() + options.timeout;
        let found = source(options).and_then(|source| ask_first(source, until)).map_err(|trouble| {
            fail(trouble.errno(), trouble.reason().to_owned()).with_remedy(trouble.remedy())
        })?;
        let Found { source, mut connection, reply } = found;
        let patience = Patience { until, silence: source.options.timeout, is_cancelled: &|| false };
        let len = source.len();
        match reply {
            Reply::Part { range, .. } => {
                let is_whole = range.end == len.min(HEAD);
                let first = is_whole.then(|| receive(&mut connection, range.end, &source, &patience)).flatten();
                let spare = Some(connection).filter(Connection::is_ready);
                let ranged = Ranged::new(source, spare);
                if let Some(first) = first {
                    ranged.put_first(&first);
                }
                Ok(Self { mode: Mode::Ranged(ranged) })
            }
            Reply::Empty => Ok(Self { mode: Mode::Ranged(Ranged::new(source, None)) }),
            // All of it is here, and ranges are not needed.
            Reply::Whole { .. } if len <= HEAD => {
                let first = receive(&mut connection, len, &source, &patience);
                let first = first.ok_or_else(|| fail(libc::EIO, "the body of the response is too short".to_owned()))?;
                let ranged = Ranged::new(source, None);
                ranged.put_first(&first);
                Ok(Self { mode: Mode::Ranged(ranged) })
            }
            Reply::Whole { .. } => match without_ranges {
                ServersWithoutRanges::Refuse => Err(fail(
                    libc::EOPNOTSUPP,
                    "the server has no ranges: it answers a request for a part with all of the object. Download it first, or \
                     convert it (which reads it once)"
                        .to_owned(),
                )),
                ServersWithoutRanges::Stream => {
                    let streamed = Streamed::start(source, connection)
                        .map_err(|error| fail(libc::EAGAIN, format!("no thread could be made: {error}")))?;
                    Ok(Self { mode: Mode::Streamed(streamed) })
                }
            },
        }
    }

    fn source(&self) -> &Source {
        match &self.mode {
            Mode::Ranged(ranged) => &ranged.source,
            Mode::Streamed(streamed) => &streamed.source,
        }
    }

    /// Its name, which has no secrets.
    pub fn name(&self) -> String {
        self.source().name()
    }

    /// Counters since it was opened.
    pub fn stats(&self) -> StatsSnapshot {
        self.source().stats.snapshot()
    }

    /// Why a request failed last, if that ever happened.
    pub fn last_failure(&self) -> Option<String> {
        self.source().last_failure()
    }

    /// Why a read was given up first, if that ever happened.
    pub fn given_up(&self) -> Option<String> {
        self.source().given_up()
    }

    /// Has reads end soon: from now on, each fails when its server has sent nothing for a few seconds. For programs that are
    /// told to end.
    pub fn hurry(&self) {
        self.source().hurry();
    }

    /// Whether a change of the object would be noticed by more than its length.
    pub fn has_versions(&self) -> bool {
        self.source().has_validators()
    }

    /// The version that was opened, as a key for a [`RangeCache`](crate::range_cache::RangeCache).
    ///
    /// # Errors
    /// The reason why two equal marks would not mean equal bytes, in words.
    #[cfg(feature = "cache")]
    pub fn version(&self) -> Result<crate::range_cache::ObjectVersion, &'static str> {
        let source = self.source();
        if self.is_streamed() {
            return Err("the server has no ranges");
        }
        let mark =
            source.strong_mark().ok_or("the server does not mark versions of the object (a strong ETag)")?;
        let (url, trust) = (source.url(), source.trust()?);
        let place = format!("{trust} {}", url.for_request());
        Ok(crate::range_cache::ObjectVersion::new(&url.to_string(), &place, mark, source.len()))
    }

    /// From now on, each read is fetched as it is: no more is fetched around it, nor kept, because a cache above does so.
    #[cfg(feature = "cache")]
    pub fn leave_caching(&self) {
        if let Mode::Ranged(ranged) = &self.mode {
            ranged.is_below_cache.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }

    /// Has reads go past what is kept in memory, while the value lives. A disk that is read in order has nothing else.
    pub fn reads_afresh(&self) -> Option<Afresh> {
        match &self.mode {
            Mode::Ranged(ranged) => Some(ranged.afresh.add()),
            Mode::Streamed(_) => None,
        }
    }

    /// Whether it is read in order, because the server has no ranges.
    pub fn is_streamed(&self) -> bool {
        matches!(self.mode, Mode::Streamed(_))
    }
}

/// Asks for the beginning, and pins the object.
fn ask_first(source: Source, until: Instant) -> Result<Found, Trouble> {
    let last_try = Instant::now() + LONGEST_OPENING.min(source.options.timeout);
    let patience = Patience { until, silence: source.options.connect_timeout, is_cancelled: &|| false };
    let mut pause = FIRST_PAUSE;
    loop {
        match source.find(Some(&(0..HEAD)), &patience) {
            Ok((url, connection, reply, validators)) => {
                let len = match &reply {
                    Reply::Part { total, .. } => *total,
                    Reply::Whole { len } => *len,
                    Reply::Empty => Some(0),
                };
                let len = len.filter(|len| i64::try_from(*len).is_ok()).ok_or(Trouble::Refused {
                    errno: libc::EOPNOTSUPP,
                    reason: "the server does not tell the length of the object".to_owned(),
                })?;
                source.pin(url, len, validators);
                return Ok(Found { source, connection, reply });
            }
            Err(Trouble::Passing { reason, pause: asked }) => {
                let again = Instant::now() + asked.unwrap_or(pause);
                if again >= last_try {
                    return Err(Trouble::Passing { reason, pause: None });
                }
                source.stats.count_retries(1);
                std::thread::sleep(again.saturating_duration_since(Instant::now()));
                pause *= 2;
            }
            Err(trouble) => return Err(trouble),
        }
    }
}

/// Receives the beginning of the object; `None` if it does not come whole.
fn receive(
    connection: &mut Connection,
    len: u64,
    source: &Source,
    patience: &Patience<'_>,
) -> Option<Arc<[u8]>> {
    let mut bytes = vec![0; len as usize];
    let mut done = 0;
    while done < bytes.len() {
        match connection.read(&mut bytes[done..], patience) {
            Ok(0) | Err(_) => return None,
            Ok(read) => done += read,
        }
    }
    source.stats.count_read(len);
    // The end of the body, which is where the next response begins.
    let _ = connection.read(&mut [0], patience);
    Some(bytes.into())
}

impl Drop for HttpDisk {
    fn drop(&mut self) {
        match &self.mode {
            Mode::Ranged(ranged) => ranged.close(),
            Mode::Streamed(streamed) => streamed.close(),
        }
    }
}

impl Storage for HttpDisk {
    fn len(&self) -> u64 {
        self.source().len()
    }

    fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.source().name(), self.source().url()).hash(&mut hasher);
        hasher.finish()
    }

    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: 1, length: 1 }
    }

    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::empty()
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let range = match op {
            StorageOp::Read { offset, len } => offset..offset.saturating_add(len),
            StorageOp::Flush => {
                done.finish(Ok(StorageDone::Done));
                return;
            }
            _ => {
                done.finish(Err(libc::EOPNOTSUPP));
                return;
            }
        };
        if range.is_empty() {
            done.finish(Ok(StorageDone::Moved(0)));
        } else if range.end > self.source().len() {
            done.finish(Err(libc::EINVAL));
        } else {
            match &self.mode {
                Mode::Ranged(ranged) => ranged.read(range, done),
                Mode::Streamed(streamed) => streamed.read(&range, done),
            }
        }
    }
}
