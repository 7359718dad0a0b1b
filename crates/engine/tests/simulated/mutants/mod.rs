//! Tests of the tests: each defence is taken away in turn, and the random streams must notice.
//!
//! `docs/testing.md` tells what is tested, and how to run more of it.

mod bases;
mod encrypted;
mod hostile;
mod killed;
mod marks;
mod plain_text;
mod recovered;
mod snapshot_lives;
mod streams;
mod undone;
mod unfinished;
