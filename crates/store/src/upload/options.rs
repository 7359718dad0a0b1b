//! How an object is written, and what was done.

use zebu_remote::http::HttpOptions;

/// How an object is written.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UploadOptions {
    /// Bytes of memory for parts.
    pub memory: u64,
    /// Bytes of the object, at most.
    pub most: u64,
    /// Whether its length is `most`, or known at the end.
    pub length: Length,
    /// Certificates, timeouts, proxies and network.
    pub http: HttpOptions,
}

/// When the length of an object is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Before.
    Fixed,
    /// At the end. Until then, the first part is kept: what makes an image of the file is written last.
    Growing,
}

impl UploadOptions {
    /// An object of up to `most` bytes, by way of `memory`.
    pub fn new(memory: u64, most: u64, length: Length, http: HttpOptions) -> Self {
        Self { memory, most, length, http }
    }
}

/// Counters of an upload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UploadStats {
    /// Parts that were sent.
    pub sent: u64,
    /// Bytes of these.
    pub sent_bytes: u64,
    /// Parts that the store had of an upload that was interrupted.
    pub kept: u64,
    /// Requests that were sent again.
    pub retries: u64,
}

/// An object that has the name before an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existing {
    /// There is none.
    Nothing,
    /// There is one, which this upload would not make.
    Another,
    /// There is one of a length and of parts that this upload may have: perhaps a run made it that was killed before its own end.
    PerhapsTheSame {
        /// Its ETag, without quotes.
        etag: String,
    },
}
