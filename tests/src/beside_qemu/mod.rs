//! The command under QEMU's names beside QEMU's programs: command lines that are made of QEMU's own help, and stacks of drivers that a
//! seed chooses. Differences that are meant are rows of a page of the guide; any other is a mistake.

pub mod help;
pub mod judge;
pub mod lines;
pub mod named;
pub mod run;
pub mod stacks;
pub mod states;
pub mod values;
