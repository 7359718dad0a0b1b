//! A backing chain: the places of its bytes, and reading them.

pub(crate) mod extents;
mod lookup;
pub(crate) mod map;
mod merge;
pub(crate) mod place;
mod read;

pub(crate) use read::{CutOff, extent, is_zero, read};
