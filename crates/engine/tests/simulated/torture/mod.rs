//! Long runs on the simulated disk: random operations, all crash states at every step, crash states one by one, and
//! every step of a commit with every kind of failure.
//!
//! `docs/testing.md` tells what is tested, and how to run more of it.

mod encrypted_data;
mod invariants;
mod large_sectors;
mod length;
mod notices;
mod plan;
mod possible_image;
mod runs;
mod shrink;
mod steps;
mod whole;
