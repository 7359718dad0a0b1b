//! Programs that read the source of zebu: circles of imports, fields that are open to all, how doc comments begin, links
//! between documents, and a source in which changes of it can be chosen when it runs.

mod attributes;
mod calls;
mod fields;
pub mod prose;
pub mod schema;
pub mod structure;
