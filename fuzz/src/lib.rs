//! The targets, as functions of bytes. Also called by the plain loop (`examples/steady.rs`), which needs
//! neither nightly nor libFuzzer.

#[path = "../../tests/src/hostile/base.rs"]
pub mod base;
pub mod clients;
pub mod foreign;
#[path = "../../crates/foreign/tests/samples/mod.rs"]
mod foreign_samples;
pub mod image;
mod limits;
pub mod luks;
pub mod tables;
pub mod words;
