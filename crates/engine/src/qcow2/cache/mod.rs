//! Parts of tables held in memory: the slices of a chain under one budget, and tables that are held whole.

pub(crate) mod budget;
pub(crate) mod cleared_in_place;
pub(crate) mod in_flight;
pub(crate) mod inflated_clusters;
pub(crate) mod resident_table;
pub(crate) mod shard;
pub(crate) mod slice_cache;
pub(crate) mod slice_store;
