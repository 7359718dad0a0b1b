//! The commands, one file each.

pub(crate) mod amend;
pub(crate) mod attach;
pub(crate) mod backup;
pub(crate) mod bench;
pub(crate) mod bitmap;
pub(crate) mod check;
pub(crate) mod clone;
pub(crate) mod commit;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod ctl;
pub(crate) mod dd;
pub(crate) mod devices;
pub(crate) mod info;
pub(crate) mod install_names;
pub(crate) mod io;
pub(crate) mod map;
pub(crate) mod measure;
pub(crate) mod mount;
pub(crate) mod rebase;
pub(crate) mod resize;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod verify;
