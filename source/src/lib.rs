//! Programs that read the source of zebu: circles of imports, how doc comments begin, links between documents, and a
//! source in which changes of it can be chosen when it runs.

mod attributes;
mod calls;
pub mod prose;
pub mod schema;
pub mod structure;
