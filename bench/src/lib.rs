//! Measurements of zebu beside QEMU and others, and the programs that every measurement runs.
//!
//! A table (`tables`) is a list of rows; a row is one load and everyone who serves it; the runner (`run`) lets them take
//! turns; the recorder (`record`) keeps their figures; the page (`page`), the README (`front`) and
//! `docs/threads.md` (`threads`) are written from these.

pub mod ab;
pub mod bench;
pub mod demo;
pub mod front;
pub mod lazy_boot;
pub mod process;
pub mod table;
pub mod workspace;

mod fio;
mod images;
mod lab;
mod metric;
mod mount;
mod page;
mod peers;
mod plot;
mod programs;
mod qmp;
mod record;
mod run;
mod servers;
mod stats;
mod system_calls;
mod tables;
mod threads;
#[cfg(test)]
mod threads_items;
mod web;

/// The outcome of what can fail; an error is a text that says what to do.
pub type Outcome<T = ()> = Result<T, String>;
