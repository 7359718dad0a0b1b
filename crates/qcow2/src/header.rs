//! The header in memory.

use crate::bytes::ZeroExtended;
use crate::error::{FormatError, Version3Field};
use crate::extension::{self, BitmapsExtension, Extension, FeatureTable};
use crate::features::{Autoclear, Compatible, Compression, Encryption, Incompatible};
use crate::geometry::{DataLocation, Geometry, L2Format};
use crate::limits;
use crate::luks::LuksPointer;
use crate::offsets::HostOffset;
use crate::seal::SealState;
use crate::version::Version;

/// The magic number at the start of the image: "QFI" and 0xfb.
pub const MAGIC: u32 = 0x5146_49fb;
/// Bytes of a version 2 header.
pub(crate) const V2_LENGTH: u32 = 72;
/// Bytes of the shortest version 3 header; the optional fields start here.
pub(crate) const V3_MIN_LENGTH: u32 = 104;
/// Bytes of the optional fields that this crate writes: compression type and padding.
const KNOWN_TAIL: usize = 8;

/// The purpose of opening an image. It decides which damage is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Purpose {
    /// Reading guest data.
    ReadOnly,
    /// Reading and writing guest data.
    ReadWrite,
    /// Checking and repairing: damage that a repair can mend is let through.
    Check,
    /// Describing the image without touching guest data or files that it names.
    Inspect,
}

/// The first fields of the header: what must be known to read the rest of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Prefix {
    /// Version of the format.
    pub version: Version,
    /// log2 of the cluster size in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// Bytes of the header without its extensions, at most a cluster.
    pub header_length: u32,
}

impl Prefix {
    /// Bytes that [`Header::parse`] wants: the first cluster.
    pub fn cluster_size(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits)
    }
}

/// Parameters of a new image. See [`Header::new`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NewHeader {
    /// Version of the format.
    pub version: Version,
    /// log2 of the cluster size in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// log2 of the refcount width in bits, 0 to 6; 4 in version 2.
    pub refcount_order: u32,
    /// Virtual size in bytes.
    pub size: u64,
    /// Form of L2 entries.
    pub l2_format: L2Format,
    /// Where guest data lies.
    pub data: DataLocation,
    /// Compression type of compressed clusters.
    pub compression: Compression,
    /// Compatible feature bits.
    pub compatible: Compatible,
    /// Autoclear feature bits.
    pub autoclear: Autoclear,
}

impl Default for NewHeader {
    /// An empty disk with QEMU's defaults: version 3, 64 KiB clusters, 16-bit refcounts, zlib.
    fn default() -> Self {
        Self {
            version: Version::V3,
            cluster_bits: 16,
            refcount_order: limits::DEFAULT_REFCOUNT_ORDER,
            size: 0,
            l2_format: L2Format::Standard,
            data: DataLocation::InImage,
            compression: Compression::Zlib,
            compatible: Compatible::empty(),
            autoclear: Autoclear::empty(),
        }
    }
}

macro_rules! setters {
    ($($field:ident: $given:ty),*) => {
        impl NewHeader {$(
            #[doc = concat!("Sets [`", stringify!($field), "`](#structfield.", stringify!($field), ").")]
            #[must_use]
            pub fn $field(mut self, $field: $given) -> Self {
                self.$field = $field;
                self
            }
        )*}
    };
}

setters!(
    version: Version,
    cluster_bits: u32,
    refcount_order: u32,
    size: u64,
    l2_format: L2Format,
    data: DataLocation,
    compression: Compression,
    compatible: Compatible,
    autoclear: Autoclear
);

/// The header with its extensions and the backing file name: all that the first cluster holds.
///
/// Fields and extensions without a meaning to this crate are kept and written back byte for byte.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Header {
    pub(crate) geometry: Geometry,
    /// Virtual size in bytes as stored; [`Self::virtual_size`] is what the guest sees.
    pub size: u64,
    /// Encryption of guest data.
    pub encryption: Encryption,
    /// Entries of the active L1 table.
    pub l1_size: u32,
    /// Host offset of the active L1 table, a cluster boundary.
    pub l1_table_offset: HostOffset,
    /// Host offset of the refcount table, a cluster boundary.
    pub refcount_table_offset: HostOffset,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// Internal snapshots.
    pub nb_snapshots: u32,
    /// Host offset of the snapshot table, a cluster boundary.
    pub snapshots_offset: HostOffset,
    pub(crate) incompatible: Incompatible,
    /// Compatible feature bits, unknown ones included.
    pub compatible: Compatible,
    /// Autoclear feature bits, unknown ones included.
    pub autoclear: Autoclear,
    /// Bytes from 104 up to the header length. The first, if there, is the code of a known compression type.
    pub(crate) tail: Vec<u8>,
    pub(crate) extensions: Vec<Extension>,
    pub(crate) backing_name: Vec<u8>,
    /// Where the backing file name was found, 0 for none: kept on writing as long as it fits there.
    pub(crate) backing_name_offset: u64,
}

impl Header {
    /// The header of a new image, without tables: the caller sets their offsets.
    ///
    /// # Errors
    /// Parameters that do not go together: see [`Geometry::new`] and [`FormatError::NeedsVersion3`].
    pub fn new(new: &NewHeader) -> Result<Self, FormatError> {
        let geometry =
            Geometry::new(new.version, new.cluster_bits, new.refcount_order, new.l2_format, new.data)?;
        let mut incompatible = Incompatible::empty();
        incompatible.set(Incompatible::EXTENDED_L2, geometry.extended_l2);
        incompatible.set(Incompatible::EXTERNAL_DATA, geometry.external_data);
        incompatible.set(Incompatible::COMPRESSION_TYPE, new.compression != Compression::Zlib);
        let mut header = Self {
            geometry,
            size: new.size,
            encryption: Encryption::None,
            l1_size: 0,
            l1_table_offset: HostOffset(0),
            refcount_table_offset: HostOffset(0),
            refcount_table_clusters: 0,
            nb_snapshots: 0,
            snapshots_offset: HostOffset(0),
            incompatible,
            compatible: new.compatible,
            autoclear: new.autoclear,
            tail: Vec::new(),
            extensions: Vec::new(),
            backing_name: Vec::new(),
            backing_name_offset: 0,
        };
        if new.version == Version::V3 {
            header.tail = vec![0; KNOWN_TAIL];
        }
        header.store_compression(new.compression);
        if extension::wants_feature_table(&geometry) {
            header.extensions.push(Extension::FeatureTable(FeatureTable::standard()));
        }
        header.check_version_fields()?;
        Ok(header)
    }

    /// Sizes and shifts of the image.
    #[inline]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Version of the format.
    pub fn version(&self) -> Version {
        self.geometry.version
    }

    /// Bytes of the disk that the guest sees: the stored size in whole sectors of 512 bytes.
    pub fn virtual_size(&self) -> u64 {
        self.size & !limits::SECTOR_SIZE.wrapping_sub(1)
    }

    /// Bytes of the header without its extensions.
    pub fn header_length(&self) -> u32 {
        match self.geometry.version {
            Version::V2 => V2_LENGTH,
            Version::V3 => V3_MIN_LENGTH.saturating_add(self.tail.len() as u32),
        }
    }

    /// The header fields past those that this crate knows, byte for byte.
    pub fn unknown_fields(&self) -> &[u8] {
        self.tail.get(KNOWN_TAIL..).unwrap_or_default()
    }

    /// Incompatible feature bits, unknown ones included.
    pub fn incompatible(&self) -> Incompatible {
        self.incompatible
    }

    /// Replaces the incompatible feature bits; the geometry follows them.
    ///
    /// # Errors
    /// Extended L2 entries with clusters below 16 KiB; any bit in version 2.
    pub fn set_incompatible(&mut self, bits: Incompatible) -> Result<(), FormatError> {
        let geometry = geometry_of(
            self.geometry.version,
            self.geometry.cluster_bits,
            self.geometry.refcount_order,
            bits,
        )?;
        if geometry.version == Version::V2 && !bits.is_empty() {
            return Err(FormatError::NeedsVersion3 { field: Version3Field::Features });
        }
        self.geometry = geometry;
        self.incompatible = bits;
        Ok(())
    }

    /// Replaces the refcount width by `1 << order` bits.
    ///
    /// # Errors
    /// [`FormatError::RefcountWidthTooLarge`]; a width other than 16 bits in version 2.
    pub fn set_refcount_order(&mut self, order: u32) -> Result<(), FormatError> {
        let geometry =
            geometry_of(self.geometry.version, self.geometry.cluster_bits, order, self.incompatible)?;
        if geometry.version == Version::V2 && order != limits::DEFAULT_REFCOUNT_ORDER {
            return Err(FormatError::NeedsVersion3 { field: Version3Field::RefcountOrder });
        }
        self.geometry = geometry;
        Ok(())
    }

    /// Changes the version. From 3 to 2, compatible and autoclear bits and the feature name table are dropped.
    /// That no L2 entry is a zero cluster is the caller's business.
    ///
    /// # Errors
    /// [`FormatError::NeedsVersion3`] for an incompatible bit, a refcount width, a compression type or header
    /// fields that version 2 cannot express; nothing is changed then.
    pub fn set_version(&mut self, version: Version) -> Result<(), FormatError> {
        let mut changed = self.clone();
        changed.geometry.version = version;
        changed.extensions.retain(|extension| !matches!(extension, Extension::FeatureTable(_)));
        match version {
            Version::V2 => {
                changed.compatible = Compatible::empty();
                changed.autoclear = Autoclear::empty();
                // What is left of the tail is found below to need version 3.
                if self.tail.iter().all(|byte| *byte == 0) {
                    changed.tail.clear();
                }
            }
            Version::V3 => {
                changed.tail.resize(self.tail.len().max(KNOWN_TAIL), 0);
                if extension::wants_feature_table(&changed.geometry) {
                    changed.set_extension(Extension::FeatureTable(FeatureTable::standard()));
                }
            }
        }
        changed.check_version_fields()?;
        *self = changed;
        Ok(())
    }

    /// The rule that version 2 has no fields past byte 72, except for what they imply by default.
    pub(crate) fn check_version_fields(&self) -> Result<(), FormatError> {
        if self.geometry.version == Version::V3 {
            return Ok(());
        }
        let field = if self.compression() != Compression::Zlib {
            Version3Field::Compression
        } else if !(self.incompatible.is_empty() && self.compatible.is_empty() && self.autoclear.is_empty()) {
            Version3Field::Features
        } else if self.geometry.refcount_order != limits::DEFAULT_REFCOUNT_ORDER {
            Version3Field::RefcountOrder
        } else if !self.tail.is_empty() {
            Version3Field::UnknownFields
        } else {
            return Ok(());
        };
        Err(FormatError::NeedsVersion3 { field })
    }

    /// Compression type of compressed clusters.
    pub fn compression(&self) -> Compression {
        self.tail.first().copied().and_then(Compression::from_code).unwrap_or_default()
    }

    /// Changes the compression type; only sound while the image has no compressed cluster.
    ///
    /// # Errors
    /// Any type but zlib in version 2.
    pub fn set_compression(&mut self, compression: Compression) -> Result<(), FormatError> {
        if self.geometry.version == Version::V2 && compression != Compression::Zlib {
            return Err(FormatError::NeedsVersion3 { field: Version3Field::Compression });
        }
        self.store_compression(compression);
        self.incompatible.set(Incompatible::COMPRESSION_TYPE, compression != Compression::Zlib);
        Ok(())
    }

    /// Writes the compression type into its field, which zlib can do without.
    fn store_compression(&mut self, compression: Compression) {
        if compression != Compression::Zlib && self.tail.is_empty() {
            self.tail = vec![0; KNOWN_TAIL];
        }
        if let Some(code) = self.tail.first_mut() {
            *code = compression.code();
        }
    }

    /// Name of the backing file, or `None`.
    pub fn backing_file(&self) -> Option<&[u8]> {
        (!self.backing_name.is_empty()).then_some(self.backing_name.as_slice())
    }

    /// Whether the image may only be read, since its disk goes on in an overlay. Of several seals, one is enough.
    pub fn seal(&self) -> SealState {
        let mut seals = self.extensions.iter().filter_map(|extension| match extension {
            Extension::Seal(data) => Some(SealState::parse(data)),
            _ => None,
        });
        seals.rfind(SealState::is_sealed).unwrap_or(SealState::Open)
    }

    /// Removes the mark of the backup that the image was.
    pub fn forget_backup_mark(&mut self) {
        self.extensions.retain(|extension| !matches!(extension, Extension::BackupMark(_)));
    }

    /// Sets or removes the name of the backing file.
    ///
    /// # Errors
    /// [`FormatError::BackingNameTooLong`] above 1023 bytes.
    pub fn set_backing_file(&mut self, name: Option<&[u8]>) -> Result<(), FormatError> {
        let name = name.unwrap_or_default();
        if name.len() > limits::MAX_BACKING_NAME as usize {
            return Err(FormatError::BackingNameTooLong { len: name.len() as u64 });
        }
        if name.is_empty() || self.backing_name.is_empty() {
            self.backing_name_offset = 0;
        }
        self.backing_name = name.to_vec();
        Ok(())
    }

    /// Bytes from the start of the file to just past the end marker of the extensions, as [`Self::encode`] writes them.
    pub fn extensions_end(&self) -> u64 {
        let area: u64 = self.extensions.iter().map(Extension::encoded_len).fold(0, u64::saturating_add);
        u64::from(self.header_length()).saturating_add(area).saturating_add(extension::PREAMBLE as u64)
    }

    /// Where the name of the backing file lies, in bytes from the start of the file; 0 if there is none or it has no
    /// place yet.
    pub fn backing_name_offset(&self) -> u64 {
        self.backing_name_offset
    }

    /// Has the name of the backing file written at `offset`, if it fits there behind the extensions.
    pub fn place_backing_name(&mut self, offset: u64) {
        self.backing_name_offset = offset;
    }

    /// Leaves out the names of feature bits, which serve programs that do not know them, and nobody else.
    pub fn drop_feature_table(&mut self) {
        self.extensions.retain(|extension| !matches!(extension, Extension::FeatureTable(_)));
    }

    /// The extensions in the order in which they are stored.
    pub fn extensions(&self) -> &[Extension] {
        &self.extensions
    }

    /// Format of the backing file (`raw`, `qcow2`), or `None` where the image does not say.
    pub fn backing_format(&self) -> Option<&[u8]> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::BackingFormat(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// Name of the external data file, or `None` where the image does not say.
    pub fn data_file_name(&self) -> Option<&[u8]> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::DataFileName(name) => Some(name.as_slice()),
            _ => None,
        })
    }

    /// Where the persistent bitmaps are, if there are any that can be trusted.
    pub fn bitmaps(&self) -> Option<BitmapsExtension> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::Bitmaps(bitmaps) => Some(*bitmaps),
            _ => None,
        })
    }

    /// Where the LUKS header is.
    pub fn luks(&self) -> Option<LuksPointer> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::Luks(pointer) => Some(*pointer),
            _ => None,
        })
    }

    /// The feature name table.
    pub fn feature_table(&self) -> Option<&FeatureTable> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::FeatureTable(table) => Some(table),
            _ => None,
        })
    }

    /// Sets or removes the format name of the backing file.
    ///
    /// # Errors
    /// [`FormatError::BackingFormatTooLong`] above 15 bytes.
    pub fn set_backing_format(&mut self, name: Option<&[u8]>) -> Result<(), FormatError> {
        let Some(name) = name else {
            self.extensions.retain(|extension| !matches!(extension, Extension::BackingFormat(_)));
            return Ok(());
        };
        if name.len() > limits::MAX_BACKING_FORMAT as usize {
            return Err(FormatError::BackingFormatTooLong { len: name.len() as u32 });
        }
        self.set_extension(Extension::BackingFormat(name.to_vec()));
        Ok(())
    }

    /// Sets or removes the name of the external data file.
    pub fn set_data_file_name(&mut self, name: Option<&[u8]>) {
        match name {
            Some(name) => self.set_extension(Extension::DataFileName(name.to_vec())),
            None => self.extensions.retain(|extension| !matches!(extension, Extension::DataFileName(_))),
        }
    }

    /// Says that guest data is encrypted with AES as before LUKS: the passphrase itself is the key.
    pub fn set_aes(&mut self) {
        self.encryption = Encryption::Aes;
    }

    /// Says that guest data is encrypted with LUKS, whose header lies at `pointer`.
    pub fn set_luks(&mut self, pointer: LuksPointer) {
        self.encryption = Encryption::Luks;
        self.set_extension(Extension::Luks(pointer));
    }

    /// Sets or removes the bitmaps extension, and the autoclear bit that makes it valid with it.
    pub fn set_bitmaps(&mut self, bitmaps: Option<BitmapsExtension>) {
        self.autoclear.set(Autoclear::BITMAPS, bitmaps.is_some());
        match bitmaps {
            Some(bitmaps) => self.set_extension(Extension::Bitmaps(bitmaps)),
            None => self
                .extensions
                .retain(|extension| !matches!(extension, Extension::Bitmaps(_) | Extension::StaleBitmaps(_))),
        }
    }

    /// Makes the changes that the first write to an image needs: unknown autoclear
    /// bits go, and a stale bitmaps extension with them. Its clusters are leaked then, as in QEMU.
    ///
    /// Returns whether anything changed.
    pub fn clear_for_writing(&mut self) -> HeaderChange {
        let before = (self.autoclear, self.extensions.len());
        self.autoclear &= Autoclear::KNOWN;
        self.extensions.retain(|extension| !matches!(extension, Extension::StaleBitmaps(_)));
        if before == (self.autoclear, self.extensions.len()) {
            HeaderChange::Unchanged
        } else {
            HeaderChange::MustBeWritten
        }
    }

    /// Puts an extension in the place of the one of its kind, or where a new header has it.
    fn set_extension(&mut self, new: Extension) {
        let rank = new.rank();
        if let Some(at) = self.extensions.iter().position(|old| old.rank() == rank) {
            let mut index = 0usize;
            self.extensions.retain(|old| {
                let keep = old.rank() != rank || index == at;
                index = index.saturating_add(1);
                keep
            });
            if let Some(slot) = self.extensions.get_mut(at) {
                *slot = new;
            }
        } else {
            let at = self.extensions.iter().position(|old| old.rank() > rank);
            self.extensions.insert(at.unwrap_or(self.extensions.len()), new);
        }
    }

    /// The rules about the external data file that need to know what the user gave.
    ///
    /// # Errors
    /// [`FormatError::DataFileRequired`], [`FormatError::DataFileUnexpected`].
    pub fn check_data_file(&self, given: DataFileOption) -> Result<(), FormatError> {
        match (self.geometry.external_data, given) {
            (true, DataFileOption::NotGiven) if self.data_file_name().is_none_or(<[u8]>::is_empty) => {
                Err(FormatError::DataFileRequired)
            }
            (false, DataFileOption::Given) => Err(FormatError::DataFileUnexpected),
            _ => Ok(()),
        }
    }

    /// That guest data is not encrypted: this crate's users cannot decrypt it, and must not write plain text.
    ///
    /// # Errors
    /// [`FormatError::AesEncrypted`], [`FormatError::LuksEncrypted`], [`FormatError::UnsupportedEncryption`].
    pub fn check_not_encrypted(&self) -> Result<(), FormatError> {
        match self.encryption {
            Encryption::None => Ok(()),
            Encryption::Aes => Err(FormatError::AesEncrypted),
            Encryption::Luks => Err(FormatError::LuksEncrypted),
            Encryption::Unknown(method) => Err(FormatError::UnsupportedEncryption { method }),
        }
    }
}

/// Whether the user named a data file when opening the image.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DataFileOption {
    /// Named.
    Given,
    /// Not named: the image's own name counts.
    NotGiven,
}

/// Whether a header must be written back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
#[non_exhaustive]
pub enum HeaderChange {
    /// It is as it was.
    Unchanged,
    /// It differs from what is on disk.
    MustBeWritten,
}

/// The geometry that header fields and feature bits amount to.
pub(crate) fn geometry_of(
    version: Version,
    cluster_bits: u32,
    refcount_order: u32,
    incompatible: Incompatible,
) -> Result<Geometry, FormatError> {
    let l2_format = if incompatible.contains(Incompatible::EXTENDED_L2) {
        L2Format::Extended
    } else {
        L2Format::Standard
    };
    let data = if incompatible.contains(Incompatible::EXTERNAL_DATA) {
        DataLocation::External
    } else {
        DataLocation::InImage
    };
    Geometry::new(version, cluster_bits, refcount_order, l2_format, data)
}

impl Header {
    /// The fields that must be known to read the rest. 512 bytes are enough; what is missing reads as zero.
    ///
    /// # Errors
    /// Checks 2 to 6: [`FormatError::NotQcow2`], [`FormatError::UnsupportedVersion`],
    /// [`FormatError::UnsupportedClusterSize`], [`FormatError::HeaderTooShort`],
    /// [`FormatError::HeaderExceedsCluster`].
    pub fn prefix(first_bytes: &[u8]) -> Result<Prefix, FormatError> {
        let bytes = ZeroExtended(first_bytes);
        if bytes.u32(0) != MAGIC {
            return Err(FormatError::NotQcow2);
        }
        let version = match bytes.u32(4) {
            2 => Version::V2,
            3 => Version::V3,
            version => return Err(FormatError::UnsupportedVersion { version }),
        };
        let cluster_bits = bytes.u32(20);
        if !(limits::MIN_CLUSTER_BITS..=limits::MAX_CLUSTER_BITS).contains(&cluster_bits) {
            return Err(FormatError::UnsupportedClusterSize { cluster_bits });
        }
        let header_length = match version {
            Version::V2 => V2_LENGTH,
            Version::V3 => bytes.u32(100),
        };
        if version == Version::V3 && header_length < V3_MIN_LENGTH {
            return Err(FormatError::HeaderTooShort { header_length });
        }
        let prefix = Prefix { version, cluster_bits, header_length };
        if u64::from(header_length) > prefix.cluster_size() {
            return Err(FormatError::HeaderExceedsCluster { header_length });
        }
        Ok(prefix)
    }
}
