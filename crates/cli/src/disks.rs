//! The disks of a command: each part of what it knows of them has an owner.

use crate::drained_pipes::DrainedPipes;
use crate::graph::Blkdebugs;
use crate::named_disks::NamedDisks;
use crate::packed::UnpackedFiles;
use crate::remote_disk::RemoteDisks;
use crate::serve::verified_disks::VerifiedDisks;
use crate::tls_objects::TlsObjects;
use crate::uploads::Uploads;

/// The disks that a command line names and opens.
#[derive(Default)]
pub(crate) struct Disks {
    /// Disks behind names that are no local files.
    pub(crate) names: NamedDisks,
    /// Disks on servers, and the way there.
    pub(crate) remote: RemoteDisks,
    /// Objects in stores that are written.
    pub(crate) uploads: Uploads,
    /// Contents of packed files.
    pub(crate) unpacked: UnpackedFiles,
    /// Disks that are compared with a manifest.
    pub(crate) verified: VerifiedDisks,
    /// Drivers that stop requests.
    pub(crate) blkdebugs: Blkdebugs,
    /// Certificates and keys that image options name.
    pub(crate) tls: TlsObjects,
    /// Secrets that came from pipes.
    pub(crate) pipes: DrainedPipes,
}

impl Disks {
    /// Says goodbye to all servers, and wipes secrets.
    pub(crate) fn close(&self) {
        self.remote.close_all();
        self.pipes.forget();
    }
}
