//! The commands of `zebu io`, which are those of qemu-io.

pub(crate) mod async_requests;
mod breakpoints;
mod call;
pub(crate) mod inspect;
pub(crate) mod numbers;
pub(crate) mod open_commands;
pub(crate) mod report;
pub(crate) mod requests;
pub(crate) mod shell;
pub(crate) mod state;
pub(crate) mod table;
pub(crate) mod words;
