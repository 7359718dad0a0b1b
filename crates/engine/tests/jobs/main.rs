//! Jobs on whole images, with QEMU's tools as the oracle.

mod measure;
mod support;
