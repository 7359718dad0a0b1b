//! Jobs on whole images, with QEMU's tools as the oracle.

mod convert;
mod measure;
mod support;
