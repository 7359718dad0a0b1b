//! librados and librbd: all that is not safe, behind types that are.
//!
//! Errors are errno values, positive.

mod cluster;
mod image;
mod library;

pub(crate) use cluster::{Cluster, Pool};
pub(crate) use image::{Call, Facts, Image, Run};
pub(crate) use library::{Library, NoLibrary};

use std::ffi::{CString, c_int};

/// The result of a call: 0 or more, or a negative errno.
fn checked(result: impl Into<i64>) -> Result<u64, i32> {
    let result = result.into();
    u64::try_from(result).map_err(|_| i32::try_from(result.unsigned_abs()).unwrap_or(libc::EIO))
}

/// The same of a call that only succeeds or fails.
fn done(result: c_int) -> Result<(), i32> {
    checked(result).map(drop)
}

/// A text for C.
fn text(text: &str) -> Result<CString, i32> {
    CString::new(text).map_err(|_| libc::EINVAL)
}
