//! The header of an open image: its first block, and the changes of it.

pub(crate) mod block;
mod corrupt_mark;
pub(crate) mod preparation;
mod rewrite;
