//! Output of commands: the formats, apart from the commands that fill them.

pub(crate) mod check;
pub(crate) mod encryption;
pub(crate) mod info_human;
pub(crate) mod info_json;
pub(crate) mod info_node;
pub(crate) mod json;
pub(crate) mod map;
pub(crate) mod notices;
pub(crate) mod picture;
pub(crate) mod stderr;
pub(crate) mod stdout;
pub(crate) mod summary;
pub(crate) mod terminal;
pub(crate) mod tree;
pub(crate) mod units;
pub(crate) mod verdict;
