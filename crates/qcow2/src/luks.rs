//! The pointer to a LUKS header. The header itself is the business of other crates.

use crate::bytes;
use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::offsets::HostOffset;

/// Where the LUKS header of an encrypted image lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LuksPointer {
    /// Host offset of the LUKS header, a cluster boundary.
    pub offset: HostOffset,
    /// Bytes of the LUKS header with its key material.
    pub len: u64,
}

impl LuksPointer {
    /// Bytes of the extension's data.
    pub const SIZE: usize = 16;

    /// Parses the extension's data.
    ///
    /// # Errors
    /// [`FormatError::LuksPointerLength`], [`FormatError::LuksOffsetUnaligned`].
    pub fn parse(data: &[u8], geometry: &Geometry) -> Result<Self, FormatError> {
        let fields = (bytes::u64_at(data, 0), bytes::u64_at(data, 8));
        let (Some(offset), Some(len), Self::SIZE) = (fields.0, fields.1, data.len()) else {
            return Err(FormatError::LuksPointerLength { len: data.len() as u32 });
        };
        if !geometry.is_cluster_aligned(offset) {
            return Err(FormatError::LuksOffsetUnaligned { offset, cluster_size: geometry.cluster_size() });
        }
        Ok(Self { offset: HostOffset(offset), len })
    }

    /// The extension's data.
    pub fn encode(self) -> [u8; Self::SIZE] {
        ((self.offset.0 as u128) << 64 | self.len as u128).to_be_bytes()
    }
}
