//! The C interface of zebu: the functions that `include/zebu.h` declares.
//!
//! A handle is no address but a number that is never given out twice (`handles.rs`): one that was closed, or that belongs to
//! another process or thread, is told from those in use, and nothing is followed that is gone. A panic ends in the function that
//! was called (`failure.rs`). What the header says of pointers and lengths is all that a caller has to keep to.

mod arguments;
pub mod disk;
pub mod failure;
mod handles;
pub mod job;
mod of_thread;
mod options;
pub mod queue;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_int};

/// The version, as C has it.
const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no NUL"),
};

/// The version of the library in words.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_version() -> *const c_char {
    VERSION.as_ptr()
}

/// The version of the library as a number that grows.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_version_number() -> c_int {
    let parts =
        [env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"), env!("CARGO_PKG_VERSION_PATCH")];
    parts.iter().fold(0, |number, part| number * 1000 + part.parse::<c_int>().unwrap_or_default())
}
