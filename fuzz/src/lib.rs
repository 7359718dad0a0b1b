//! What the targets do with their bytes. Also called by the plain loop (`src/bin/steady.rs`), which needs
//! neither nightly nor libFuzzer.

#[path = "../../tests/src/hostile/base.rs"]
pub mod base;
pub mod clients;
pub mod image;
pub mod tables;
