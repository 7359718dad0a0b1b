//! Block drivers below and above an image (`driver=blkdebug` and others), from the command line to open disks.
//!
//! [`plan()`] reads options with QEMU's names. Drivers below the image's format become a [`Node`], which is noted under a name
//! and opened by the engine under this name. Drivers above it become [`Filter`]s.

mod blkdebugs;
mod debug_options;
mod debugs;
mod description;
mod filter;
mod filters;
mod node;
mod open;
mod pairs;
mod plan;

pub(crate) use blkdebugs::Blkdebugs;
pub(crate) use description::Description;
pub(crate) use filter::Filter;
pub(crate) use filters::{Filtered, filtered};
pub(crate) use node::Node;
pub(crate) use open::open_node;
pub(crate) use plan::{is_graph_name, plan, plan_name, reference_node};
