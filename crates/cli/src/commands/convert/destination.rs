//! Where a conversion goes, read once from the command line.

use super::args::ConvertArgs;
use super::pipe;
use crate::create_opts::CreateOpts;
use crate::failure::Failure;
use crate::store_target::store_name;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use zebu_disks::Context;
use zebu_engine::Format;
use zebu_store::StoreName;

/// Where a conversion goes.
#[derive(Debug)]
pub(super) enum Destination {
    /// To standard output.
    Pipe,
    /// Into an object in a store.
    Object(StoreName),
    /// Into an image that is there (`-n`), or all of a disk on a server.
    Existing(OsString),
    /// Into a new image.
    New(PathBuf),
}

impl Destination {
    /// Reads the name of the target.
    ///
    /// # Errors
    /// It can't be read, or leads to what can't be written.
    pub(super) fn of(
        args: &ConvertArgs,
        opts: &CreateOpts,
        context: &Context,
        name: &OsStr,
    ) -> Result<Self, Failure> {
        if pipe::is_pipe(context.dialect, name) {
            return Ok(Self::Pipe);
        }
        if let Some(object) = store_name(name)? {
            return Ok(Self::Object(object));
        }
        if args.no_create {
            return Ok(Self::Existing(name.to_owned()));
        }
        let path = context.new_image_path(name).map_err(|reason| Failure::creating_name(name, &reason))?;
        // An image of RBD is made.
        let is_on_server = context.disks.names.driver(&path).is_some_and(|driver| driver != "rbd");
        let is_plain = args.target_format() == Format::Raw && *opts == CreateOpts::default();
        Ok(if is_on_server && is_plain { Self::Existing(path.into()) } else { Self::New(path) })
    }

    /// The name, for messages.
    pub(super) fn shown(&self) -> PathBuf {
        match self {
            Self::Pipe => PathBuf::from("-"),
            Self::Object(name) => PathBuf::from(name.to_string()),
            Self::Existing(name) => PathBuf::from(name),
            Self::New(path) => path.clone(),
        }
    }
}
