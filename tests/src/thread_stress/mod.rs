//! Threads that share one image, on real files: what each of them sees must be explained by some order of their requests,
//! and what was flushed must survive a kill.
//!
//! A case is run by a process of its own ([`threads`]), which writes down what it begins and what has ended. Another one
//! watches it, stops or kills it, and judges what it saw and what it left ([`runner`]).

pub mod checker;
pub mod copies;
pub mod disk;
mod hands;
pub mod history;
pub mod journal;
pub mod judge;
pub mod operator;
pub mod plan;
pub mod process;
pub mod recorder;
pub mod report;
pub mod runner;
pub mod scenarios;
pub mod sector;
pub mod threads;
