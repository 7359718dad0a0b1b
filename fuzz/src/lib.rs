//! The targets, as functions of bytes. Also called by the plain loop (`examples/steady.rs`), which needs
//! neither nightly nor libFuzzer.

#[path = "../../tests/src/hostile/base.rs"]
pub mod base;
pub mod clients;
pub mod foreign;
pub mod image;
mod limits;
pub mod luks;
pub mod tables;
pub mod words;
