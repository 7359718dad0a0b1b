//! Disks by their names: what a user writes becomes an open image.
//!
//! | what | where |
//! |---|---|
//! | a path, a URL (`nbd://`, `http://`, `s3://`, `rbd:`), `json:`, `blkdebug:` and other drivers | [`Context::image_path`] |
//! | a list of options with QEMU's names | [`ImageOpts`] |
//! | files in gzip, xz, zstd, bzip2, lz4, and disks in tar files | [`packed`] |
//! | stacks of drivers | [`graph`] |
//! | secrets and certificates | [`Secrets`], [`tls_objects`] |
//! | which files and URLs an image may name | [`allowed_references`], [`opener`] |
//!
//! A [`Context`] opens any of them with [`Context::open`]. Its [`Disks`] own what is open: connections, caches, uploads,
//! unpacked files.
//!
//! ```no_run
//! use zebu_engine::OpenOptions;
//! use zebu_engine::storage::{Worker, WorkerConfig};
//! use zebu_disks::Context;
//!
//! let (context, worker) = (Context::default(), Worker::new(&WorkerConfig::default())?);
//! let image = context.open(&worker, "nbd://localhost/disk".as_ref(), OpenOptions::default())?;
//! println!("{} bytes", image.virtual_size());
//! worker.block_on(image.close(&worker))?;
//! context.disks.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backing_opts;
mod context;
mod disks;
mod drained_pipes;
mod errno_text;
mod error;
mod file_driver;
pub mod graph;
mod http_opts;
mod image_opts;
mod image_spec;
mod json_name;
mod key_opts;
pub mod keyval;
mod local_name;
mod named_disks;
mod nbd_opts;
mod notices;
pub mod objects;
mod open;
mod open_disk;
pub mod packed;
mod points_disk;
mod printable;
mod program;
pub mod qemu_json;
mod rbd_opts;
mod reference;
mod reference_defaults;
mod remote_cache;
mod remote_disk;
mod remote_names;
mod remote_opts;
mod secrets;
mod secrets_in_names;
pub mod size;
mod stack_disk;
pub mod tls_objects;
mod uploads;
mod verified_disks;
mod watch;
pub mod words;

pub use backing_opts::describes_backing;
pub use context::Context;
pub use disks::Disks;
pub use errno_text::errno_text;
pub use error::DiskError;
pub use image_opts::ImageOpts;
pub use image_spec::{ForceShare, ImageSpec};
pub use key_opts::{with_backing_keys, with_names};
pub use local_name::{is_on_server, local_name, local_path};
pub use named_disks::NamedDisks;
pub use notices::{Notice, Notices};
pub use points_disk::{PointChain, of_point};
pub use printable::{is_control, printable};
pub use program::Program;
pub use reference::{OpenedFile, Reference, SharedDisk};
pub use reference_defaults::allowed_references;
pub use remote_cache::{CacheChoice, RemoteCache};
pub use remote_disk::{NetworkOptions, RemoteDisks, RemoteName, RemoteTransfers};
pub use remote_names::{backing_argument, given_only, is_server_name, opener};
pub use secrets::{Secrets, Sources};
pub use secrets_in_names::without_secrets;
pub use uploads::Uploads;
pub use verified_disks::VerifiedDisks;
pub use watch::Watch;
