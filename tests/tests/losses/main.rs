//! Losses of power, of the process and of single writes.

mod amend_crash;
mod compressed_crash;
mod losses;
mod recorded;
