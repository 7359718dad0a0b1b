//! The command `zebu` beside QEMU's programs, and its own promises: a module for each command or kind of promise.

mod backup;
mod bad_input;
mod bench;
mod bitmap;
mod check;
mod clone;
mod common;
mod compare;
mod convert;
mod create;
mod cut_short;
mod help;
mod info;
mod io;
mod map_and_measure;
mod new_files;
mod overwriting;
mod pictures;
mod pieces;
mod qemu_lines;
mod qemu_names;
mod resize;
mod stacks;
mod usage;
mod verdict;
