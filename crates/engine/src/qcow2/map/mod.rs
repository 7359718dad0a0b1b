//! Guest offsets to host offsets: the L1 table, L2 tables and their slices.

pub(crate) mod active_map;
pub(crate) mod frozen_map;
pub(crate) mod mapping;
mod read_ahead;
