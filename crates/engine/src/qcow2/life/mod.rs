//! The life of an image: making it, opening it, changing its size, closing it, and what is said of it.

pub(crate) mod close;
pub(crate) mod create;
pub(crate) mod info;
pub(crate) mod open;
pub(crate) mod preallocate;
pub(crate) mod resize;
pub(crate) mod unlock;
