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
//! | which backup is which | [`backup_id`] |
//! | whether the disk goes on in an overlay | [`seal`] |
//! | what a new image looks like | [`layout`] |
//! | options at open | [`open_options`] |
//! | limits and errors | [`limits`], [`error`] |
//!
//! A new image of 1 GiB, as bytes, and its header read back:
//!
//! ```
//! use zebu_qcow2::header::NewHeader;
//! use zebu_qcow2::layout::{FreshLayout, Preallocation};
//! use zebu_qcow2::{GuestOffset, Header, L1Entry, Purpose};
//!
//! let mut header = Header::new(&NewHeader::default().size(1 << 30))?;
//! let layout = FreshLayout::plan(header.size, &header.geometry(), Preallocation::Off)?;
//! layout.apply_to(&mut header);
//!
//! let mut file = header.encode()?;
//! file.resize(layout.reftable_offset.0 as usize, 0);
//! file.extend(layout.reftable());
//! for index in 0..layout.refcounts.blocks {
//!     file.extend(layout.refblock(index).expect("as many as the plan says"));
//! }
//!
//! let (header, warnings) = Header::parse(&file, Purpose::ReadWrite)?;
//! assert!(warnings.is_empty());
//! let index = header.geometry().l1_index(GuestOffset(600 << 20));
//! assert_eq!(index, 1);
//! // The file ends before the L1 table: what is missing reads as zero, which is an unallocated entry.
//! assert!(file.len() as u64 <= header.l1_table_offset.0);
//! assert_eq!(L1Entry::UNALLOCATED.table(), None);
//! # Ok::<(), zebu_qcow2::FormatError>(())
//! ```
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

pub mod backup_id;
pub mod bitmap;
mod bytes;
pub mod cluster_set;
pub mod compressed;
pub mod error;
pub mod extension;
pub mod features;
pub mod geometry;
pub mod header;
pub mod header_edit;
mod header_encode;
mod header_parse;
pub mod l1;
pub mod l2;
pub mod layout;
pub mod limits;
pub mod luks;
pub mod offsets;
pub mod open_options;
pub mod piped;
pub mod refcount;
pub mod seal;
pub mod snapshot;
pub mod stream;
mod table_bounds;
mod version;

pub use backup_id::{BackupId, BackupMark};
pub use compressed::CompressedRange;
pub use error::{EntryError, FormatError, OutOfBounds, Warning};
pub use features::{Autoclear, Compatible, Compression, Encryption, Incompatible};
pub use geometry::{DataLocation, Geometry, L2Format};
pub use header::{Header, NewHeader, Prefix, Purpose};
pub use l1::L1Entry;
pub use l2::{L2Entry, Mapping};
pub use offsets::{GuestOffset, HostOffset};
pub use refcount::RefTableEntry;
pub use seal::{ForkSeal, SealState};
pub use version::Version;
