//! URLs of an object in a store, which are good for a while: the process that has the credentials signs them.

use super::url::HttpUrl;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The reason to sign a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Signing {
    /// There is none yet, or the one that there is ends soon.
    InTime,
    /// The store denied the last one: credentials should be read again.
    AfterDenial,
}

/// A URL that reads the object.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SignedUrl {
    /// The URL.
    pub url: HttpUrl,
    /// How long it is good.
    pub good_for: Duration,
}

impl SignedUrl {
    /// A URL and how long it is good.
    pub fn new(url: HttpUrl, good_for: Duration) -> Self {
        Self { url, good_for }
    }
}

/// Why no URL could be signed: an errno, and the reason in words without secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SigningError {
    /// The errno that it amounts to.
    pub errno: i32,
    /// The reason.
    pub reason: String,
}

impl SigningError {
    /// A failure.
    pub fn new(errno: i32, reason: impl Into<String>) -> Self {
        Self { errno, reason: reason.into() }
    }
}

type Sign = dyn Fn(Signing) -> Result<SignedUrl, SigningError> + Send + Sync;

/// The object's name, and the one who signs. Two of one name are the same.
#[derive(Clone)]
pub struct SignedUrls {
    name: String,
    sign: Arc<Sign>,
}

impl SignedUrls {
    /// The object `name`, which has no secrets. `sign` is called from any thread, and may wait.
    pub fn new(
        name: impl Into<String>,
        sign: impl Fn(Signing) -> Result<SignedUrl, SigningError> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), sign: Arc::new(sign) }
    }

    /// The object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A URL.
    ///
    /// # Errors
    /// There are no credentials, or what has them does not answer.
    pub fn sign(&self, why: Signing) -> Result<SignedUrl, SigningError> {
        (self.sign)(why)
    }
}

impl PartialEq for SignedUrls {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for SignedUrls {}

impl fmt::Debug for SignedUrls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SignedUrls").field(&self.name).finish()
    }
}
