//! Errors of headers, keys and ciphers: one variant for each thing that can be wrong.

use std::io;

/// Why a header, a key or a request is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LuksError {
    /// The magic number is missing.
    #[error("not a LUKS header: the magic number is missing")]
    NotLuks,
    /// Neither version 1 nor 2.
    #[error("LUKS version {version} is not supported; versions 1 and 2 are")]
    UnsupportedVersion {
        /// The version in the header.
        version: u16,
    },
    /// The bytes end before the header does.
    #[error("the LUKS header is cut short: {needed} bytes are needed, {present} are there")]
    Truncated {
        /// Bytes that the header needs.
        needed: u64,
        /// Bytes that were given.
        present: u64,
    },
    /// A field of the header that can't be right.
    #[error("LUKS header: field {field}: {problem}")]
    Field {
        /// The field's name in the format document; for LUKS2, its path in the JSON.
        field: String,
        /// The value, and what is wrong with it.
        problem: String,
    },
    /// A field that asks for more than a limit of [`Limits`](crate::Limits).
    #[error(
        "LUKS header: field {field} is {value}, more than the limit of {limit}; raise it only for a header that you trust"
    )]
    OverLimit {
        /// The field's name, as in [`LuksError::Field`].
        field: String,
        /// The value in the header.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// A cipher, a mode, a hash or a feature that is not implemented.
    #[error("LUKS: {kind} \"{name}\" is not supported; supported: {supported}")]
    Unsupported {
        /// The kind of thing, such as "cipher" or "hash".
        kind: &'static str,
        /// The name in the header, with control characters escaped.
        name: String,
        /// The names that are supported.
        supported: &'static str,
    },
    /// A LUKS2 header whose two copies are both damaged.
    #[error("both copies of the LUKS2 header are damaged; the first: {first}")]
    BothCopiesDamaged {
        /// The fault of the first copy.
        first: Box<LuksError>,
    },
    /// A key slot's number that the header does not have.
    #[error("LUKS: there is no key slot {slot}")]
    NoSuchSlot {
        /// The number.
        slot: u32,
    },
    /// A key slot that should be used, and is not active.
    #[error("LUKS: key slot {slot} is not active")]
    SlotInactive {
        /// The number.
        slot: u32,
    },
    /// A key slot that should be filled, and is active.
    #[error("LUKS: key slot {slot} is in use; remove its key first, or choose another slot")]
    SlotInUse {
        /// The number.
        slot: u32,
    },
    /// All key slots are active.
    #[error("LUKS: all {slots} key slots are in use; remove a key first")]
    NoFreeSlot {
        /// Number of key slots.
        slots: u32,
    },
    /// The last key, without which nobody can read the data again.
    #[error(
        "LUKS: key slot {slot} holds the last key; without it the data is lost. Add another key first, or force it"
    )]
    LastSlot {
        /// The number.
        slot: u32,
    },
    /// A master key that is not that of the header.
    #[error("LUKS: the master key is not the one of this header")]
    WrongMasterKey,
    /// Key material of another length than the key slot has.
    #[error("LUKS: key slot {slot} has {expected} bytes of key material, {given} were given")]
    MaterialLength {
        /// The slot's number.
        slot: u32,
        /// Bytes that the slot has.
        expected: u64,
        /// Bytes that were given.
        given: u64,
    },
    /// A key of a length that its cipher does not have.
    #[error("cipher {cipher} has no key of {len} bytes")]
    KeyLength {
        /// The cipher, as in "aes-xts-plain64".
        cipher: String,
        /// Bytes of the key.
        len: usize,
    },
    /// Data that is no whole number of the cipher's blocks.
    #[error("{len} bytes are no whole number of the cipher's blocks of 16 bytes")]
    PartialBlock {
        /// Bytes of the data.
        len: usize,
    },
    /// No memory for a key, or for the memory that a hash of passphrases needs.
    #[error("no memory for {purpose} ({bytes} bytes): {source}")]
    Memory {
        /// The use of the memory.
        purpose: &'static str,
        /// Bytes.
        bytes: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// The source of random bytes failed.
    #[error("no random bytes for a key: {source}")]
    Random {
        /// The system's answer.
        source: io::Error,
    },
}

impl LuksError {
    pub(crate) fn field(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { field: field.into(), problem: problem.into() }
    }

    pub(crate) fn unsupported(kind: &'static str, name: &str, supported: &'static str) -> Self {
        Self::Unsupported { kind, name: printable(name), supported }
    }

    pub(crate) fn key_memory(bytes: usize, source: io::Error) -> Self {
        Self::Memory { purpose: "a key", bytes: bytes as u64, source }
    }
}

/// Text from an image, with control characters escaped: an image must not write to a user's terminal. Cut after 64.
pub(crate) fn printable(text: &str) -> String {
    text.chars().take(64).flat_map(|c| c.escape_debug()).collect()
}
