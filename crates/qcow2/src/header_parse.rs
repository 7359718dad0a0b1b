//! Reading the header: the checks made when an image is opened, in QEMU's order.

use crate::bytes::ZeroExtended;
use crate::error::{FormatError, Warning};
use crate::extension::{self, Context};
use crate::features::{Autoclear, Compatible, Compression, Encryption, Incompatible};
use crate::header::{Header, Purpose, V3_MIN_LENGTH, geometry_of};
use crate::limits;
use crate::offsets::HostOffset;
use crate::table_bounds::{self, TableFault};
use crate::version::Version;

/// Feature bits and the other fields that only version 3 stores.
struct Version3Fields {
    incompatible: Incompatible,
    compatible: Compatible,
    autoclear: Autoclear,
    refcount_order: u32,
    tail: Vec<u8>,
}

impl Version3Fields {
    fn parse(version: Version, bytes: ZeroExtended<'_>, header_length: u32) -> Self {
        match version {
            Version::V2 => Self {
                incompatible: Incompatible::empty(),
                compatible: Compatible::empty(),
                autoclear: Autoclear::empty(),
                refcount_order: limits::DEFAULT_REFCOUNT_ORDER,
                tail: Vec::new(),
            },
            Version::V3 => Self {
                incompatible: Incompatible::from_bits_retain(bytes.u64(72)),
                compatible: Compatible::from_bits_retain(bytes.u64(80)),
                autoclear: Autoclear::from_bits_retain(bytes.u64(88)),
                refcount_order: bytes.u32(96),
                tail: bytes.vec(V3_MIN_LENGTH as usize, header_length.saturating_sub(V3_MIN_LENGTH) as usize),
            },
        }
    }
}

impl Header {
    /// Reads the first cluster: header, extensions, backing file name.
    ///
    /// `first_cluster` may be shorter than a cluster where the file is: what is missing reads as zero. The
    /// checks are those of the list in [`crate::error`] that need nothing but these bytes, in QEMU's order: 2 to
    /// 6, 8 to 15, 17 to 25, 44, 29 to 40, 42, 43, 45.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn parse(first_cluster: &[u8], purpose: Purpose) -> Result<(Self, Vec<Warning>), FormatError> {
        let prefix = Self::prefix(first_cluster)?;
        let cluster_size = prefix.cluster_size();
        let bytes = ZeroExtended(first_cluster.get(..cluster_size as usize).unwrap_or(first_cluster));

        let backing_offset = bytes.u64(8);
        if backing_offset > cluster_size {
            return Err(FormatError::BackingOffsetInvalid { offset: backing_offset });
        }
        let extensions_start = prefix.header_length as usize;
        let extensions_end = if backing_offset == 0 { cluster_size } else { backing_offset } as usize;

        let fields = Version3Fields::parse(prefix.version, bytes, prefix.header_length);
        check_compression(&fields)?;
        let unsupported = fields.incompatible.difference(Incompatible::KNOWN);
        if !unsupported.is_empty() {
            let table = extension::find_feature_table(bytes, extensions_start, extensions_end);
            return Err(table.describe(unsupported));
        }
        if fields.incompatible.contains(Incompatible::CORRUPT) && purpose == Purpose::ReadWrite {
            return Err(FormatError::CorruptImage);
        }
        let geometry =
            geometry_of(prefix.version, prefix.cluster_bits, fields.refcount_order, fields.incompatible)?;

        let mut header = Self {
            geometry,
            size: bytes.u64(24),
            encryption: Encryption::from_code(bytes.u32(32)),
            l1_size: bytes.u32(36),
            l1_table_offset: HostOffset(bytes.u64(40)),
            refcount_table_offset: HostOffset(bytes.u64(48)),
            refcount_table_clusters: bytes.u32(56),
            nb_snapshots: bytes.u32(60),
            snapshots_offset: HostOffset(bytes.u64(64)),
            incompatible: fields.incompatible,
            compatible: fields.compatible,
            autoclear: fields.autoclear,
            tail: fields.tail,
            extensions: Vec::new(),
            backing_name: Vec::new(),
            backing_name_offset: backing_offset,
        };
        header.check_tables(purpose)?;
        if let Encryption::Unknown(method) = header.encryption {
            return Err(FormatError::UnsupportedEncryption { method });
        }

        let context =
            Context { geometry: &geometry, encryption: header.encryption, autoclear: header.autoclear };
        let (extensions, warnings) =
            extension::parse_area(bytes, extensions_start, extensions_end, &context)?;
        header.extensions = extensions;
        header.check_data_and_encryption(purpose)?;

        if backing_offset != 0 {
            let len = bytes.u32(16) as u64;
            let room = cluster_size.saturating_sub(backing_offset);
            if len > room.min(limits::MAX_BACKING_NAME as u64) {
                return Err(FormatError::BackingNameTooLong { len });
            }
            header.backing_name = bytes.vec(backing_offset as usize, len as usize);
        }
        Ok((header, warnings))
    }

    /// Checks 17 to 25: the tables that the header points at.
    fn check_tables(&self, purpose: Purpose) -> Result<(), FormatError> {
        let geometry = &self.geometry;
        let repairing = purpose == Purpose::Check;

        let clusters = self.refcount_table_clusters;
        if clusters == 0 && !repairing {
            return Err(FormatError::NoReftable);
        }
        let offset = self.refcount_table_offset.0;
        let max_clusters = limits::MAX_REFTABLE_SIZE.wrapping_shr(geometry.cluster_bits);
        table_bounds::check(clusters as u64, geometry.cluster_size(), max_clusters, offset, geometry)
            .map_err(|fault| match fault {
                TableFault::TooLarge => FormatError::ReftableTooLarge { clusters },
                TableFault::OffsetInvalid => FormatError::ReftableOffsetInvalid { offset },
            })?;

        if !repairing {
            let count = self.nb_snapshots;
            let offset = self.snapshots_offset.0;
            table_bounds::check(
                count as u64,
                limits::MIN_SNAPSHOT_ENTRY,
                limits::MAX_SNAPSHOTS as u64,
                offset,
                geometry,
            )
            .map_err(|fault| match fault {
                TableFault::TooLarge => FormatError::TooManySnapshots { count },
                TableFault::OffsetInvalid => FormatError::SnapshotTableOffsetInvalid { offset },
            })?;
        }

        let entries = self.l1_size;
        let offset = self.l1_table_offset.0;
        table_bounds::check(entries as u64, 8, limits::MAX_L1_ENTRIES, offset, geometry).map_err(
            |fault| match fault {
                TableFault::TooLarge => FormatError::L1TooLarge { entries },
                TableFault::OffsetInvalid => FormatError::L1OffsetInvalid { offset },
            },
        )?;
        let needed =
            geometry.l1_entries_for(self.size).ok_or(FormatError::ImageTooBig { size: self.size })?;
        if (entries as u64) < needed {
            return Err(FormatError::L1TooSmall { entries, needed });
        }
        Ok(())
    }

    /// Checks 42 and 43. QEMU leaves out the one on the data file where it will not open that file.
    fn check_data_and_encryption(&self, purpose: Purpose) -> Result<(), FormatError> {
        if self.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA)
            && !self.geometry.external_data
            && purpose != Purpose::Inspect
        {
            return Err(FormatError::DataFileRawWithoutDataFile);
        }
        if self.encryption == Encryption::Luks && self.luks().is_none() {
            return Err(FormatError::LuksPointerMissing { method: self.encryption.code() });
        }
        Ok(())
    }
}

/// Checks 9 to 11.
fn check_compression(fields: &Version3Fields) -> Result<(), FormatError> {
    let code = fields.tail.first().copied().unwrap_or(0);
    let compression = Compression::from_code(code).ok_or(FormatError::UnknownCompression { code })?;
    match (compression, fields.incompatible.contains(Incompatible::COMPRESSION_TYPE)) {
        (Compression::Zlib, true) => Err(FormatError::CompressionBitSet),
        (Compression::Zstd, false) => Err(FormatError::CompressionBitClear),
        _ => Ok(()),
    }
}
