//! Block drivers below and above an image (`driver=blkdebug` and others), from the command line to open disks.
//!
//! `plan` reads options with QEMU's names. Drivers below the image's format become a [`Node`], which is noted under a name
//! and opened by the engine under this name. Drivers above it become [`Filter`]s.

mod blkdebugs;
mod debug_options;
mod description;
mod filter;
mod filters;
mod images_below;
mod node;
mod open;
mod pairs;
mod plan;

pub use blkdebugs::Blkdebugs;
pub use description::Description;
pub use filter::Filter;
pub use filters::{Filtered, filtered};
pub(crate) use images_below::ImagesBelow;
pub use node::Node;
pub use open::open_node;
pub use plan::{is_graph_name, reference_node};
pub(crate) use plan::{name_node, plan};
