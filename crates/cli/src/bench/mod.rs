//! The load that `zebu bench` puts on an image, and what it measures.

pub(crate) mod histogram;
pub(crate) mod load;
pub(crate) mod plan;
