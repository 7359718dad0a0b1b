//! Header extensions: typed where their meaning is known, kept byte for byte where it is not.

use crate::backup_id::{BackupMark, BitmapBases};
use crate::bytes::ZeroExtended;
use crate::error::{FormatError, Warning};
use crate::features::{Autoclear, Encryption, Incompatible};
use crate::geometry::Geometry;
use crate::limits;
use crate::luks::LuksPointer;
use crate::offsets::HostOffset;
use crate::version::Version;

const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_TABLE: u32 = 0x6803_f857;
pub(crate) const BITMAPS: u32 = 0x2385_2875;
const LUKS: u32 = 0x0537_be77;
const DATA_FILE_NAME: u32 = 0x4441_5441;
/// "ZBID"
pub(crate) const BACKUP_MARK: u32 = 0x5a42_4944;
/// "ZBBB"
pub(crate) const BITMAP_BASES: u32 = 0x5a42_4242;

/// "ZBSL"
pub(crate) const SEAL: u32 = 0x5a42_534c;

/// Bytes of an extension's type and length.
pub(crate) const PREAMBLE: usize = 8;

/// One header extension.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Extension {
    /// Name of the backing file's format.
    BackingFormat(Vec<u8>),
    /// Names of feature bits, for programs that do not know them.
    FeatureTable(FeatureTable),
    /// Where the persistent bitmaps are.
    Bitmaps(BitmapsExtension),
    /// A bitmaps extension that a program without bitmap support left behind: it says nothing about the guest
    /// data any more. Its data is kept as long as the image is only read.
    StaleBitmaps(Vec<u8>),
    /// Where the LUKS header is.
    Luks(LuksPointer),
    /// Name of the external data file.
    DataFileName(Vec<u8>),
    /// The backup that the image is, by zebu.
    BackupMark(BackupMark),
    /// The backups that the bitmaps go on from, by zebu: the data without its seal, so that a header that is written anew
    /// says nothing of them.
    BitmapBases(Vec<u8>),
    /// The seal of an image whose disk goes on in an overlay, by zebu: its data ([`crate::seal`]).
    Seal(Vec<u8>),
    /// An extension that is not known.
    Unknown {
        /// Its type.
        kind: u32,
        /// Its data, without padding.
        data: Vec<u8>,
    },
}

/// Facts that the meaning of extensions depends on.
pub(crate) struct Context<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) encryption: Encryption,
    pub(crate) autoclear: Autoclear,
}

impl Extension {
    /// The type on disk.
    pub fn kind(&self) -> u32 {
        match self {
            Self::BackingFormat(_) => BACKING_FORMAT,
            Self::FeatureTable(_) => FEATURE_TABLE,
            Self::Bitmaps(_) | Self::StaleBitmaps(_) => BITMAPS,
            Self::Luks(_) => LUKS,
            Self::DataFileName(_) => DATA_FILE_NAME,
            Self::BackupMark(_) => BACKUP_MARK,
            Self::BitmapBases(_) => BITMAP_BASES,
            Self::Seal(_) => SEAL,
            Self::Unknown { kind, .. } => *kind,
        }
    }

    /// Place in a newly written header, the same as in QEMU's.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::BackingFormat(_) => 0,
            Self::DataFileName(_) => 1,
            Self::Luks(_) => 2,
            Self::FeatureTable(_) => 3,
            Self::Bitmaps(_) | Self::StaleBitmaps(_) => 4,
            Self::BackupMark(_) => 5,
            Self::BitmapBases(_) => 6,
            Self::Seal(_) => 7,
            Self::Unknown { .. } => 8,
        }
    }

    fn parse(
        kind: u32,
        data: Vec<u8>,
        context: &Context<'_>,
    ) -> Result<(Self, Option<Warning>), FormatError> {
        let len = data.len() as u32;
        let extension = match kind {
            BACKING_FORMAT if len > limits::MAX_BACKING_FORMAT => {
                return Err(FormatError::BackingFormatTooLong { len });
            }
            BACKING_FORMAT => Self::BackingFormat(data),
            FEATURE_TABLE => Self::FeatureTable(FeatureTable(data)),
            LUKS if context.encryption != Encryption::Luks => return Err(FormatError::LuksPointerUnexpected),
            LUKS => Self::Luks(LuksPointer::parse(&data, context.geometry)?),
            BITMAPS if data.len() != BitmapsExtension::SIZE => {
                return Err(FormatError::BitmapsLength { len });
            }
            BITMAPS if !context.autoclear.contains(Autoclear::BITMAPS) => {
                let warning = Warning::BitmapsInconsistent { version: context.geometry.version };
                return Ok((Self::StaleBitmaps(data), Some(warning)));
            }
            BITMAPS => Self::Bitmaps(BitmapsExtension::parse(&data, context.geometry)?),
            DATA_FILE_NAME => Self::DataFileName(data),
            BITMAP_BASES if data.len() == BitmapBases::SIZE => Self::BitmapBases(data),
            SEAL => Self::Seal(data),
            BACKUP_MARK => match BackupMark::parse(&data) {
                Some(mark) => Self::BackupMark(mark),
                None => Self::Unknown { kind, data },
            },
            kind => Self::Unknown { kind, data },
        };
        Ok((extension, None))
    }

    /// Bytes that [`Self::append_to`] appends.
    pub(crate) fn encoded_len(&self) -> u64 {
        let len = match self {
            Self::BackingFormat(data)
            | Self::StaleBitmaps(data)
            | Self::DataFileName(data)
            | Self::BitmapBases(data)
            | Self::Seal(data)
            | Self::FeatureTable(FeatureTable(data))
            | Self::Unknown { data, .. } => data.len(),
            Self::BackupMark(_) => BackupMark::SIZE,
            Self::Bitmaps(_) => BitmapsExtension::SIZE,
            Self::Luks(pointer) => pointer.encode().len(),
        };
        (PREAMBLE as u64).saturating_add(len as u64).saturating_add(padding(len) as u64)
    }

    /// Appends type, length, data and padding.
    pub(crate) fn append_to(&self, out: &mut Vec<u8>) -> Result<(), FormatError> {
        let fixed;
        let data: &[u8] = match self {
            Self::BackingFormat(data)
            | Self::StaleBitmaps(data)
            | Self::DataFileName(data)
            | Self::BitmapBases(data)
            | Self::Seal(data)
            | Self::FeatureTable(FeatureTable(data))
            | Self::Unknown { data, .. } => data,
            Self::BackupMark(mark) => {
                fixed = mark.encode().to_vec();
                &fixed
            }
            Self::Bitmaps(bitmaps) => {
                fixed = bitmaps.encode();
                &fixed
            }
            Self::Luks(pointer) => {
                fixed = pointer.encode().to_vec();
                &fixed
            }
        };
        let len = data.len();
        if matches!(self, Self::BackingFormat(_)) && len > limits::MAX_BACKING_FORMAT as usize {
            return Err(FormatError::BackingFormatTooLong { len: len as u32 });
        }
        let len_field = u32::try_from(len).map_err(|_| FormatError::ExtensionTooLong { len: len as u64 })?;
        out.extend_from_slice(&self.kind().to_be_bytes());
        out.extend_from_slice(&len_field.to_be_bytes());
        out.extend_from_slice(data);
        out.resize(out.len().saturating_add(padding(len)), 0);
        Ok(())
    }
}

/// Appends the end marker.
pub(crate) fn append_end(out: &mut Vec<u8>) {
    out.extend_from_slice(&[0; PREAMBLE]);
}

fn padding(len: usize) -> usize {
    len.wrapping_neg() & 7
}

/// Type, length and data of the extensions in `area`, each bounded by `end`. Ends at the end marker.
pub(crate) struct Walk<'a> {
    pub(crate) area: ZeroExtended<'a>,
    pub(crate) at: usize,
    pub(crate) end: usize,
}

impl Iterator for Walk<'_> {
    type Item = Result<(u32, Vec<u8>), FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let offset = self.at;
        let kind = self.area.u32(offset);
        let len = self.area.u32(offset.saturating_add(4)) as usize;
        let data_at = offset.saturating_add(PREAMBLE);
        if self.end.checked_sub(data_at).is_none_or(|room| len > room) {
            self.at = self.end;
            return Some(Err(FormatError::ExtensionTooLarge { offset: offset as u64 }));
        }
        if kind == END {
            self.at = self.end;
            return None;
        }
        self.at = data_at.saturating_add(len).saturating_add(padding(len));
        Some(Ok((kind, self.area.vec(data_at, len))))
    }
}

/// The extensions between `start` and `end` of the header, in the order in which they lie there.
pub(crate) fn parse_area(
    header: ZeroExtended<'_>,
    start: usize,
    end: usize,
    context: &Context<'_>,
) -> Result<(Vec<Extension>, Vec<Warning>), FormatError> {
    let mut extensions = Vec::new();
    let mut warnings = Vec::new();
    for item in (Walk { area: header, at: start, end }) {
        let (kind, data) = item?;
        let (extension, warning) = Extension::parse(kind, data, context)?;
        extensions.push(extension);
        // One is enough: a hostile header has room for many thousands.
        warnings.extend(warning.filter(|new| !warnings.contains(new)));
    }
    Ok((extensions, warnings))
}

/// The feature name table of a header whose other extensions may not make sense to this crate.
pub(crate) fn find_feature_table(header: ZeroExtended<'_>, start: usize, end: usize) -> FeatureTable {
    let mut found = FeatureTable::default();
    for (kind, data) in (Walk { area: header, at: start, end }).map_while(Result::ok) {
        if kind == FEATURE_TABLE {
            found = FeatureTable(data);
        }
    }
    found
}

/// The set of feature bits that an entry of the feature name table is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum FeatureSet {
    /// Incompatible features.
    Incompatible,
    /// Compatible features.
    Compatible,
    /// Autoclear features.
    Autoclear,
    /// A set that the format does not define.
    Unknown(u8),
}

/// One named feature bit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FeatureName {
    /// The set of the bit.
    pub set: FeatureSet,
    /// Its number, 0 to 63 in a sound table.
    pub bit: u8,
    /// Its name, at most 46 bytes; what is not UTF-8 is replaced.
    pub name: String,
}

/// The feature name table, its bytes kept as they are.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FeatureTable(Vec<u8>);

impl FeatureTable {
    const ENTRY: usize = 48;

    /// The names of all bits that the format defines, in QEMU's order.
    pub fn standard() -> Self {
        const NAMES: [(u8, u8, &str); 8] = [
            (0, 0, "dirty bit"),
            (0, 1, "corrupt bit"),
            (0, 2, "external data file"),
            (0, 3, "compression type"),
            (0, 4, "extended L2 entries"),
            (1, 0, "lazy refcounts"),
            (2, 0, "bitmaps"),
            (2, 1, "raw external data"),
        ];
        let mut table = Vec::with_capacity(NAMES.len().saturating_mul(Self::ENTRY));
        for (set, bit, name) in NAMES {
            let end = table.len().saturating_add(Self::ENTRY);
            table.extend_from_slice(&[set, bit]);
            table.extend_from_slice(name.as_bytes());
            table.resize(end, 0);
        }
        Self(table)
    }

    /// The entries, up to the first without a name.
    pub fn entries(&self) -> impl Iterator<Item = FeatureName> + '_ {
        self.0.chunks_exact(Self::ENTRY).map_while(|entry| {
            let (&[set, bit], name) = entry.split_first_chunk::<2>()?;
            let name = name.split(|byte| *byte == 0).next().filter(|name| !name.is_empty())?;
            let set = match set {
                0 => FeatureSet::Incompatible,
                1 => FeatureSet::Compatible,
                2 => FeatureSet::Autoclear,
                other => FeatureSet::Unknown(other),
            };
            Some(FeatureName { set, bit, name: String::from_utf8_lossy(name).into_owned() })
        })
    }

    /// The names of the given incompatible bits in table order, and the bits that it does not name.
    pub(crate) fn describe(&self, unsupported: Incompatible) -> FormatError {
        let mut unnamed = unsupported.bits();
        let mut names = Vec::new();
        for entry in self.entries().filter(|entry| entry.set == FeatureSet::Incompatible) {
            let bit = 1u64.checked_shl(entry.bit as u32).unwrap_or(0);
            if unsupported.bits() & bit != 0 {
                names.push(entry.name);
                unnamed &= !bit;
            }
        }
        FormatError::UnsupportedFeatures { names, unnamed }
    }
}

/// The bitmaps extension: where the bitmap directory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BitmapsExtension {
    /// Bitmaps in the directory, 1 to 65535.
    pub bitmap_count: u32,
    /// Bytes of the directory, exactly.
    pub directory_size: u64,
    /// Host offset of the directory, a cluster boundary.
    pub directory_offset: HostOffset,
}

impl BitmapsExtension {
    /// Bytes of the extension's data.
    pub const SIZE: usize = 24;

    fn parse(data: &[u8], geometry: &Geometry) -> Result<Self, FormatError> {
        let data = ZeroExtended(data);
        let (bitmap_count, reserved) = (data.u32(0), data.u32(4));
        let (directory_size, directory_offset) = (data.u64(8), data.u64(16));
        if reserved != 0 {
            return Err(FormatError::BitmapsReserved);
        }
        if bitmap_count > limits::MAX_BITMAPS {
            return Err(FormatError::TooManyBitmaps { count: bitmap_count });
        }
        if bitmap_count == 0 {
            return Err(FormatError::NoBitmaps);
        }
        if !geometry.is_cluster_aligned(directory_offset) {
            return Err(FormatError::BitmapDirectoryOffset { offset: directory_offset });
        }
        if directory_size > limits::MAX_BITMAP_DIRECTORY_SIZE {
            return Err(FormatError::BitmapDirectorySize { size: directory_size });
        }
        Ok(Self { bitmap_count, directory_size, directory_offset: HostOffset(directory_offset) })
    }

    pub(crate) fn encode(self) -> Vec<u8> {
        let count = self.bitmap_count.to_be_bytes();
        let (size, offset) = (self.directory_size.to_be_bytes(), self.directory_offset.0.to_be_bytes());
        [count.as_slice(), &[0; 4], &size, &offset].concat()
    }
}

/// Whether a new header has the feature name table: version 3 with room for it, as QEMU decides.
pub(crate) fn wants_feature_table(geometry: &Geometry) -> bool {
    geometry.version == Version::V3 && geometry.cluster_size() > 4096
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_table_names_each_defined_bit() {
        let table = FeatureTable::standard();
        assert_eq!(table.0.len(), 384);
        let entries: Vec<_> = table.entries().collect();
        assert_eq!(entries.len(), 8);
        assert_eq!(
            entries.last(),
            Some(&FeatureName { set: FeatureSet::Autoclear, bit: 1, name: "raw external data".into() })
        );
        let incompatible = entries.iter().filter(|e| e.set == FeatureSet::Incompatible);
        let bits = incompatible.fold(0u64, |bits, e| bits | 1 << e.bit);
        assert_eq!(bits, Incompatible::KNOWN.bits());
    }

    #[test]
    fn damaged_tables_are_read_as_far_as_they_go() {
        assert_eq!(FeatureTable(vec![0; 47]).entries().count(), 0);
        let mut bytes = FeatureTable::standard().0;
        bytes[48 + 2] = 0;
        assert_eq!(FeatureTable(bytes.clone()).entries().count(), 1);
        bytes[0] = 9;
        bytes[1] = 200;
        bytes[2..48].fill(b'x');
        let first = FeatureTable(bytes).entries().next().unwrap();
        assert_eq!((first.set, first.bit, first.name.len()), (FeatureSet::Unknown(9), 200, 46));
    }
}
