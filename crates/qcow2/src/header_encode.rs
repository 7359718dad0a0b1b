//! Writing the header: the bytes of the first cluster up to the end of what it holds.

use crate::error::FormatError;
use crate::extension;
use crate::features::{Compression, Incompatible};
use crate::header::{Header, MAGIC};
use crate::limits;
use crate::version::Version;

impl Header {
    /// The first cluster from its start: header, extensions, end marker, backing file name, filled with zeroes
    /// to a multiple of 512 bytes and at most a cluster. What follows in the cluster has no meaning.
    ///
    /// Extensions keep the order in which they were read; new ones go where QEMU's writer puts them. The backing
    /// file name keeps its place while it fits there, and follows the end marker otherwise.
    ///
    /// # Errors
    /// [`FormatError::HeaderDoesNotFit`] if a cluster is too small for it all; fields that contradict each other
    /// or the version ([`FormatError::NeedsVersion3`], [`FormatError::CompressionBitSet`],
    /// [`FormatError::CompressionBitClear`]).
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        self.check_version_fields()?;
        match (self.compression(), self.incompatible.contains(Incompatible::COMPRESSION_TYPE)) {
            (Compression::Zlib, true) => return Err(FormatError::CompressionBitSet),
            (Compression::Zstd, false) => return Err(FormatError::CompressionBitClear),
            _ => {}
        }
        let cluster_size = self.geometry.cluster_size();
        let mut area = Vec::new();
        for extension in &self.extensions {
            extension.append_to(&mut area)?;
        }
        let header_length = self.header_length() as u64;
        let extensions_end = header_length.saturating_add(area.len() as u64);
        let place = self.backing_name_place(extensions_end);
        // Only a name or the end of the cluster right behind the last extension can stand in for the end marker.
        let bounded_by = if place == 0 { cluster_size } else { place };
        if extensions_end != bounded_by {
            extension::append_end(&mut area);
        }

        let area_end = header_length.saturating_add(area.len() as u64);
        let name_end = place.saturating_add(self.backing_name.len() as u64);
        let needed = area_end.max(name_end);
        if needed > cluster_size {
            return Err(FormatError::HeaderDoesNotFit { needed, cluster_size });
        }
        if self.backing_name.len() > limits::MAX_BACKING_NAME as usize {
            return Err(FormatError::BackingNameTooLong { len: self.backing_name.len() as u64 });
        }

        let mut out = Vec::with_capacity(needed.next_multiple_of(limits::SECTOR_SIZE) as usize);
        self.append_fields(place, &mut out);
        out.extend_from_slice(&area);
        if place != 0 {
            out.resize(place as usize, 0);
            out.extend_from_slice(&self.backing_name);
        }
        out.resize(out.len().next_multiple_of(limits::SECTOR_SIZE as usize), 0);
        Ok(out)
    }

    /// Where the backing file name goes; 0 if there is none.
    fn backing_name_place(&self, extensions_end: u64) -> u64 {
        let after_marker = extensions_end.saturating_add(extension::PREAMBLE as u64);
        let kept = self.backing_name_offset;
        let kept_end = kept.saturating_add(self.backing_name.len() as u64);
        let keeps_place = kept == extensions_end || kept >= after_marker;
        if kept != 0 && keeps_place && kept_end <= self.geometry.cluster_size() {
            kept
        } else if self.backing_name.is_empty() {
            0
        } else {
            after_marker
        }
    }

    fn append_fields(&self, backing_offset: u64, out: &mut Vec<u8>) {
        let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
        put(&MAGIC.to_be_bytes());
        put(&self.geometry.version.number().to_be_bytes());
        put(&backing_offset.to_be_bytes());
        put(&(self.backing_name.len() as u32).to_be_bytes());
        put(&self.geometry.cluster_bits.to_be_bytes());
        put(&self.size.to_be_bytes());
        put(&self.encryption.code().to_be_bytes());
        put(&self.l1_size.to_be_bytes());
        put(&self.l1_table_offset.0.to_be_bytes());
        put(&self.refcount_table_offset.0.to_be_bytes());
        put(&self.refcount_table_clusters.to_be_bytes());
        put(&self.nb_snapshots.to_be_bytes());
        put(&self.snapshots_offset.0.to_be_bytes());
        if self.geometry.version == Version::V2 {
            return;
        }
        put(&self.incompatible.bits().to_be_bytes());
        put(&self.compatible.bits().to_be_bytes());
        put(&self.autoclear.bits().to_be_bytes());
        put(&self.geometry.refcount_order.to_be_bytes());
        put(&self.header_length().to_be_bytes());
        put(&self.tail);
    }
}
