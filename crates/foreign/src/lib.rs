//! Disk image formats of other programs as pure data: their headers and tables, parsed to a map from the guest's disk to
//! places in files.
//!
//! Nothing here does I/O. A caller gives the bytes of files through [`Files`]; where some are missing, a function returns
//! [`Error::Missing`], and is called again once they are there. So the same parser serves files, networks and memory, and
//! tables are read as they are needed. No input makes it panic, and memory follows the bytes that were really read.
//!
//! | format | module |
//! |---|---|
//! | VDI of VirtualBox | [`vdi`] |
//! | VHD of Virtual PC, Hyper-V and Azure ("vpc" in QEMU) | [`vpc`] |
//! | VHDX of Hyper-V | [`vhdx`] |
//! | VMDK of VMware | [`vmdk`] |
//! | QED, and version 1 of qcow, of QEMU | [`qed`], [`qcow1`] |
//! | HDD of Parallels | [`parallels`] |
//! | cloop, DMG | [`cloop`], [`dmg`] |
//!
//! ```
//! use zebu_foreign::{Disk, Error, FileIndex, Files, Format, Missing};
//!
//! /// A file in memory.
//! struct Memory(Vec<u8>);
//!
//! impl Files for Memory {
//!     fn len(&self, _: FileIndex) -> u64 {
//!         self.0.len() as u64
//!     }
//!     fn read(&self, _: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
//!         let start = offset as usize;
//!         out.copy_from_slice(&self.0[start..start + out.len()]);
//!         Ok(())
//!     }
//! }
//!
//! let error = Disk::open(Format::Vdi, &Memory(vec![0; 4096])).unwrap_err();
//! assert!(matches!(error, Error::Damaged { .. }));
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

mod bytes;
pub mod cloop;
mod crc32c;
pub mod disk;
pub mod dmg;
pub mod error;
pub mod files;
pub mod limits;
mod opened;
pub mod parallels;
pub mod parallels_bundle;
pub mod parent;
mod place;
pub mod qcow1;
pub mod qed;
pub mod run;
mod units;
pub mod vdi;
pub mod vhdx;
pub mod vmdk;
pub mod vpc;
pub mod write;

pub use disk::{Disk, Format, Opening, extent_files};
pub use error::{Error, Result};
pub use files::{FileIndex, Files, Missing};
pub use parent::{Identity, Parent, ParentFormat};
pub use run::{Kind, Packed, Packing, Run};
