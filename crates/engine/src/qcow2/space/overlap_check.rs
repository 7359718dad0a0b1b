//! The overlap check: what is about to be written, handed out or given back holds no metadata that it should not.
//!
//! Every data write asks first ([`HostSpace::check_overlap`]). A hit means that the image is corrupt: a mapping points into a
//! table. The write is refused.

use crate::qcow2::space::HostSpace;
use crate::qcow2::space::metadata_map::Metadata;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_storage::sabotage::{self, Fault};

impl HostSpace {
    /// Refuses a write of host bytes that would hit metadata: the image is corrupt.
    pub(crate) fn check_overlap(&self, host: u64, len: u64, guest: u64) -> Result<()> {
        if self.files.data_file().is_some() || len == 0 || sabotage::is(Fault::SkipOverlapCheck) {
            return Ok(());
        }
        let bits = self.geometry.cluster_bits;
        match self.metadata.first_of(host >> bits..((host + len - 1) >> bits) + 1) {
            // Nothing was written, and whose entry leads here is the one concerned.
            Some((cluster, what)) => Err(self.overlap_found(cluster, what).at_guest(guest)),
            None => Ok(()),
        }
    }

    /// Refuses host clusters that were found free if they hold metadata: the refcounts are wrong, which concerns everybody.
    pub(super) fn check_free(&self, clusters: &Range<u64>, wanted: &str) -> Result<()> {
        match self.metadata.first_of(clusters.clone()) {
            Some((cluster, what)) if !sabotage::is(Fault::SkipOverlapCheck) => {
                let error = match cluster {
                    0 => {
                        let message =
                            format!("Preventing invalid allocation of {wanted} at offset 0; run zebu check");
                        Error::new(ErrorKind::Corrupt, message).on(self.files.path())
                    }
                    _ => self.overlap_found(cluster, what),
                };
                self.files.poison(&error);
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn overlap_found(&self, cluster: u64, what: Metadata) -> Error {
        let message =
            format!("preventing invalid write on metadata (overlaps with {}); run zebu check", what.name());
        Error::new(ErrorKind::Corrupt, message)
            .on(self.files.path())
            .at_host(cluster << self.geometry.cluster_bits)
    }

    /// Refuses a table whose cluster something else lies in, too: changing it would change that.
    pub(crate) fn check_own(&self, host: u64, what: Metadata) -> Result<()> {
        if !self.metadata.is_shared(host >> self.geometry.cluster_bits) {
            return Ok(());
        }
        Err(self.not_its_own(host, what.name()))
    }

    /// Refuses an L2 table, of the disk or of a snapshot, that lies where something else is, too: rewriting it would change
    /// that.
    pub(crate) fn check_own_l2_table(&self, host: u64) -> Result<()> {
        let cluster = host >> self.geometry.cluster_bits;
        let found = self.metadata.first_of(cluster..cluster + 1);
        let is_other = found.is_some_and(|(_, what)| what != Metadata::ActiveL2);
        if (is_other || self.metadata.is_shared(cluster)) && !sabotage::is(Fault::TakeMetadata) {
            return Err(self.not_its_own(host, "L2 table"));
        }
        Ok(())
    }

    /// Refuses a table of which a cluster holds anything but `what`: giving it back would give that back.
    pub(crate) fn check_own_table(&self, offset: u64, len: u64, what: Metadata) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let end = offset.saturating_add(len).div_ceil(self.geometry.cluster_size());
        let clusters = if len == 0 { 0..0 } else { offset >> bits..end };
        for cluster in clusters {
            let found = self.metadata.first_of(cluster..cluster + 1);
            if found.is_none_or(|(_, found)| found != what) && !sabotage::is(Fault::TakeMetadata) {
                return Err(self.not_its_own(cluster << bits, what.name()));
            }
            self.check_own(cluster << bits, what)?;
        }
        Ok(())
    }

    fn not_its_own(&self, host: u64, what: &str) -> Error {
        let message = format!("the {what} lies where something else is, too; run zebu check");
        Error::new(ErrorKind::Corrupt, message).on(self.files.path()).at_host(host)
    }
}
