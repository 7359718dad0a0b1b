//! What `zebu serve` is made of.

pub(crate) mod address;
pub(crate) mod signals;
