//! The header of LUKS2: two copies, each a binary part with a checksum and an area of JSON ("LUKS2 On-Disk Format Specification").

use crate::bytes::{array, text, u16_at, u64_at};
use crate::error::LuksError;
use crate::hash::HashName;
use crate::limits::Limits;
use crate::luks1::MAGIC;
use crate::luks2_metadata::Luks2Metadata;
use sha2::{Digest, Sha256, Sha512};

/// Bytes from the device's begin that hold both copies of the largest header: 8 MiB.
pub const LUKS2_HEADERS_MAX: u64 = 8 << 20;
const SECOND_MAGIC: [u8; 6] = *b"SKUL\xba\xbe";
/// Bytes of the binary part.
const BINARY: usize = 4096;
const CHECKSUM_AT: usize = 448;
/// Sizes of one copy that the format allows. Where the first copy can't be read, the second begins at one of them.
const SIZES: [usize; 9] =
    [0x4000, 0x8000, 0x10000, 0x20000, 0x40000, 0x80000, 0x10_0000, 0x20_0000, 0x40_0000];

/// A copy of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderCopy {
    /// The one at the device's begin.
    First,
    /// The one after it.
    Second,
}

/// A valid LUKS2 header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Luks2Header {
    sequence: u64,
    copy: HeaderCopy,
    copy_len: u64,
    uuid: String,
    label: String,
    metadata: Luks2Metadata,
}

impl Luks2Header {
    /// Parses and validates a header. `bytes` are the first of the device: [`LUKS2_HEADERS_MAX`] of them, or all if it is shorter.
    /// The copy with the higher sequence number counts; the second stands in for a damaged first, whose magic number and version
    /// may be lost too.
    ///
    /// # Errors
    /// What is wrong with the first copy, if the second is no better. A valid copy with things that are not supported is
    /// refused by their names.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, LuksError> {
        let first = binary_part(bytes, 0, HeaderCopy::First);
        let second = match &first {
            Ok(binary) => binary_part(bytes, binary.len, HeaderCopy::Second).ok(),
            Err(_) => SIZES
                .iter()
                .filter_map(|&size| binary_part(bytes, size, HeaderCopy::Second).ok())
                .max_by_key(|binary| binary.sequence),
        };
        let binary = match (first, second) {
            (Ok(first), Some(second)) if second.sequence > first.sequence => second,
            (Ok(first), _) => first,
            (Err(_), Some(second)) => second,
            (
                Err(
                    first @ (LuksError::NotLuks
                    | LuksError::Truncated { .. }
                    | LuksError::UnsupportedVersion { .. }),
                ),
                None,
            ) => return Err(first),
            (Err(first), None) => return Err(LuksError::BothCopiesDamaged { first: Box::new(first) }),
        };
        let metadata = Luks2Metadata::parse(binary.json, binary.len as u64, limits)?;
        Ok(Self {
            sequence: binary.sequence,
            copy: binary.copy,
            copy_len: binary.len as u64,
            uuid: binary.uuid,
            label: binary.label,
            metadata,
        })
    }

    /// Number of changes of the header.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The copy that was read. [`HeaderCopy::Second`]: the first is damaged or older.
    pub fn copy(&self) -> HeaderCopy {
        self.copy
    }

    /// Bytes of one copy with its JSON area.
    pub fn copy_len(&self) -> u64 {
        self.copy_len
    }

    /// The UUID, as text.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The label; empty if it has none. An image's text: it may hold control characters.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Key slots, segment and digests.
    pub fn metadata(&self) -> &Luks2Metadata {
        &self.metadata
    }
}

struct Binary<'a> {
    copy: HeaderCopy,
    len: usize,
    sequence: u64,
    uuid: String,
    label: String,
    json: &'a [u8],
}

fn binary_part(bytes: &[u8], at: usize, copy: HeaderCopy) -> Result<Binary<'_>, LuksError> {
    let magic = if copy == HeaderCopy::First { MAGIC } else { SECOND_MAGIC };
    let bytes_here = bytes.get(at..).unwrap_or_default();
    if bytes_here.len() >= magic.len() && !bytes_here.starts_with(&magic) {
        return Err(LuksError::NotLuks);
    }
    let cut_short =
        |needed: usize| LuksError::Truncated { needed: (at + needed) as u64, present: bytes.len() as u64 };
    if bytes_here.len() < BINARY {
        return Err(cut_short(BINARY));
    }
    let version = u16_at(bytes_here, 6);
    if version != 2 {
        return Err(LuksError::UnsupportedVersion { version });
    }
    let declared = u64_at(bytes_here, 8);
    let Some(len) = SIZES.into_iter().find(|&size| size as u64 == declared) else {
        return Err(LuksError::field("hdr_size", format!("{declared} is no size that the format allows")));
    };
    let offset = u64_at(bytes_here, 256);
    if offset != at as u64 || (copy == HeaderCopy::Second && len != at) {
        return Err(LuksError::field("hdr_offset", format!("{offset}, for the header at byte {at}")));
    }
    let whole = bytes_here.get(..len).ok_or_else(|| cut_short(len))?;
    check_sum(whole)?;
    Ok(Binary {
        copy,
        len,
        sequence: u64_at(whole, 16),
        label: label(whole),
        uuid: text::<40>(whole, 168, "uuid")?,
        json: &whole[BINARY..],
    })
}

fn label(whole: &[u8]) -> String {
    let raw: [u8; 48] = array(whole, 24);
    let len = raw.iter().position(|&byte| byte == 0).unwrap_or(raw.len());
    String::from_utf8_lossy(&raw[..len]).into_owned()
}

fn check_sum(whole: &[u8]) -> Result<(), LuksError> {
    let name = text::<32>(whole, 72, "csum_alg")?;
    let hash = HashName::parse(&name)?;
    let field: [u8; 64] = array(whole, CHECKSUM_AT);
    let parts = [&whole[..CHECKSUM_AT], &[0; 64], &whole[CHECKSUM_AT + 64..]];
    let is_right = match hash {
        HashName::Sha1 => has_digest::<sha1::Sha1>(parts, &field),
        HashName::Sha256 => has_digest::<Sha256>(parts, &field),
        HashName::Sha512 => has_digest::<Sha512>(parts, &field),
    };
    if is_right { Ok(()) } else { Err(LuksError::field("csum", "the header's checksum is wrong")) }
}

fn has_digest<H: Digest>(parts: [&[u8]; 3], expected: &[u8]) -> bool {
    let mut hash = H::new();
    for part in parts {
        hash.update(part);
    }
    expected.starts_with(&hash.finalize())
}
