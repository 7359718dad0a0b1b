//! The disks of a program: each part of what it knows of them has an owner.

use crate::drained_pipes::DrainedPipes;
use crate::error::DiskError;
use crate::graph::{Blkdebugs, ImagesBelow};
use crate::named_disks::NamedDisks;
use crate::notices::{Notice, Notices};
use crate::packed::UnpackedFiles;
use crate::remote_disk::RemoteDisks;
use crate::tls_objects::TlsObjects;
use crate::uploads::Uploads;
use crate::verified_disks::VerifiedDisks;
use std::sync::Arc;
use zebu_drivers::{Blkdebug, BlkdebugConfig, ImageDisk};
use zebu_engine::storage::{Engine, IoError, Storage};

/// The disks that a program names and opens.
#[derive(Default)]
pub struct Disks {
    /// Disks behind names that are no local files.
    pub names: NamedDisks,
    /// Disks on servers, and the way there.
    pub remote: RemoteDisks,
    /// Objects in stores that are written.
    pub uploads: Uploads,
    /// Contents of packed files.
    pub(crate) unpacked: UnpackedFiles,
    /// Disks that are compared with a manifest.
    pub verified: VerifiedDisks,
    /// Drivers that stop requests.
    pub blkdebugs: Blkdebugs,
    /// Images that drivers lie above.
    pub(crate) below: ImagesBelow,
    /// Certificates and keys that image options name.
    pub tls: TlsObjects,
    /// Secrets that came from pipes.
    pub(crate) pipes: DrainedPipes,
    /// The listener to what the disks have to say.
    pub(crate) notices: Notices,
}

impl Disks {
    /// Disks that say what a user should know of.
    pub fn new(notices: Notices) -> Self {
        Self { remote: RemoteDisks::new(notices.clone()), notices, ..Self::default() }
    }

    /// Whether a secret came from a pipe, which gives it to no other process any more.
    pub fn have_drained_pipes(&self) -> bool {
        self.pipes.have_given_any()
    }

    /// A driver that fails and stops requests on purpose, over `below`.
    pub(crate) fn open_blkdebug(
        &self,
        below: Arc<dyn Storage>,
        config: &BlkdebugConfig,
    ) -> Result<Arc<Blkdebug>, IoError> {
        let notices = self.notices.clone();
        let tell = move |line: &str| notices.say(Notice::Stopped(line));
        Ok(self.blkdebugs.keep(Blkdebug::new(below, config.clone(), tell, Engine::Auto)?))
    }

    /// An image that a driver lies above. It is closed when nobody has it any more, at the latest by [`Disks::close`].
    pub(crate) fn keep_below(&self, disk: ImageDisk) -> Arc<ImageDisk> {
        let notices = self.notices.clone();
        self.below.keep(disk.closing(move |error| notices.say(Notice::Fact(&error.to_string()))))
    }

    /// Closes the images below drivers, says goodbye to all servers, and wipes secrets. Images above drivers are closed before, by
    /// who opened them.
    ///
    /// # Errors
    /// An image below a driver can't be closed. The rest is done all the same.
    pub fn close(&self) -> Result<(), DiskError> {
        let closed = self.below.close();
        self.remote.close_all();
        self.pipes.forget();
        Ok(closed?)
    }
}
