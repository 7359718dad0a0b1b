//! The qcow2 on-disk format as pure data.
#![forbid(unsafe_code)]
