//! The engine on the simulated disk (`zebu-sim`): power failures, failing operations, every state at every step, and the
//! deliberate faults that these tests must catch.
//!
//! `docs/testing.md` describes the tests, and how to run more of them. A module can be run alone:
//! `cargo test -p zebu-engine --test simulated crash::`.

mod crash;
mod faults;
mod mutants;
#[cfg(shuttle)]
mod schedules;
mod torture;
