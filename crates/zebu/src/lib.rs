#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[doc(inline)]
pub use zebu_engine::*;

#[cfg(feature = "disks")]
#[doc(inline)]
pub use zebu_disks as disks;

/// The example on the first page compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
