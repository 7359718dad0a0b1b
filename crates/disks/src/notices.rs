//! Messages of open disks, and their listener.

use std::fmt;
use std::sync::Arc;

/// A fact that a user should know of, though work goes on. It is one line, without its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice<'a> {
    /// A warning, or an answer to a question such as [`RemoteDisks::tell_transfers`](crate::RemoteDisks::tell_transfers).
    Fact(&'a str),
    /// The server of a disk marks no versions of it.
    Unversioned(&'a str),
    /// The directory of a cache has no place, or wrong bytes. It comes on any thread, whose reads wait for who hears it.
    Cache(&'a str),
    /// All that there is to say of the cache has been said: whoever hears it has time to show it.
    CacheFinished,
    /// A driver stopped a request, or lets it go on.
    Stopped(&'a str),
    /// Two disks that must be the same are not: nothing of this process can be believed.
    Differs(&'a str),
}

/// The way to who hears of it. By default nobody does.
#[derive(Clone, Default)]
pub struct Notices(Option<Arc<Hear>>);

type Hear = dyn Fn(Notice<'_>) + Send + Sync;

impl Notices {
    /// Has `hear` called for each, on any thread.
    pub fn to(hear: impl Fn(Notice<'_>) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hear)))
    }

    /// Says it.
    pub(crate) fn say(&self, notice: Notice<'_>) {
        if let Some(hear) = &self.0 {
            hear(notice);
        }
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Notices").field(&self.0.is_some()).finish()
    }
}
