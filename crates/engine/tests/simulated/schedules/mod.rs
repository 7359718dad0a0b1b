//! The whole engine under chosen schedules, on the simulated disk.
//!
//! Shuttle's threads each drive one worker of a simulated world, one more lets the disk's operations take effect, and every
//! lock and atomic of the engine is a place where another of them may go on. What is tested, how to run more of it and how
//! to repeat a schedule is described in `docs/testing.md`.

mod beside;
mod caught;
mod explore;
mod ground;
mod pairs;
mod plan;
mod report;
mod run;
mod snapshots;
mod stage;
