//! Jobs on whole images, with QEMU's tools as the oracle.

mod clone;
mod compare;
mod convert;
mod file_systems;
mod hydrate;
mod live_backup;
mod matrix;
mod measure;
mod mounted;
mod source_end;
mod support;
mod targets;
mod turns;
mod variants;
