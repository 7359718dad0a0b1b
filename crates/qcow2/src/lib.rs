//! The qcow2 on-disk format as pure data: parse, validate, encode.
//!
//! Nothing here does I/O, and no input makes it panic or use memory without bound: bytes go in,
//! values or errors come out. Where a rule is QEMU's rather than the format document's, the item says so.
//!
//! | concept | module |
//! |---|---|
//! | guest and host offsets | [`offsets`] |
//! | sizes and shifts of one image | [`geometry`] |
//! | feature bits, compression type, encryption method | [`features`] |
//! | header, read and written whole | [`header`], [`extension`], [`luks`] |
//! | cluster mapping | [`l1`], [`l2`], [`compressed`] |
//! | refcounts | [`refcount`] |
//! | internal snapshots | [`snapshot`] |
//! | persistent dirty bitmaps | [`bitmap`] |
//! | what a new image looks like | [`layout`] |
//! | options at open | [`open_options`] |
//! | limits and errors | [`limits`], [`error`] |
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::panic
    )
)]

pub mod bitmap;
mod bytes;
pub mod compressed;
pub mod error;
pub mod extension;
pub mod features;
pub mod geometry;
pub mod header;
mod header_encode;
mod header_parse;
pub mod l1;
pub mod l2;
pub mod layout;
pub mod limits;
pub mod luks;
pub mod offsets;
pub mod open_options;
pub mod refcount;
pub mod snapshot;
mod table_bounds;
mod version;

pub use compressed::CompressedRange;
pub use error::{EntryError, FormatError, OutOfBounds, Warning};
pub use features::{Autoclear, Compatible, Compression, Encryption, Incompatible};
pub use geometry::{DataLocation, Geometry, L2Format};
pub use header::{Header, NewHeader, Prefix, Purpose};
pub use l1::L1Entry;
pub use l2::{L2Entry, Mapping};
pub use offsets::{GuestOffset, HostOffset};
pub use refcount::RefTableEntry;
pub use version::Version;
