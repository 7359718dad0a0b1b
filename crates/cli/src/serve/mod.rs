//! Parts of `zebu serve`.

pub(crate) mod accept;
pub(crate) mod address;
pub(crate) mod backups;
pub(crate) mod checkpoints;
pub(crate) mod cleaner;
pub(crate) mod connector;
pub(crate) mod control;
pub(crate) mod control_request;
pub(crate) mod device_number;
pub(crate) mod find_export;
pub(crate) mod footprint;
pub(crate) mod forks;
pub(crate) mod hydrations;
pub(crate) mod isolate;
pub(crate) mod kernel_devices;
pub(crate) mod log_lines;
pub(crate) mod metrics;
pub(crate) mod opened;
pub(crate) mod overlay;
pub(crate) mod sandbox;
mod sealed;
pub(crate) mod serve_args;
pub(crate) mod service_manager;
pub(crate) mod side_doors;
pub(crate) mod signals;
mod system_calls;
pub(crate) mod verified;
