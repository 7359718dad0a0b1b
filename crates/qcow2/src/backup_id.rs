//! Marks that say which backup an image is, and which backup each bitmap goes on from: header extensions of zebu's own
//! (docs/design/format.md, "Extensions of zebu's own").

use crate::bytes::ZeroExtended;
use std::fmt;
use std::str::FromStr;

/// The random id of a backup.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackupId(pub [u8; BackupId::SIZE]);

impl BackupId {
    /// Bytes of an id.
    pub const SIZE: usize = 16;
}

impl fmt::Display for BackupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The mark of an image that is a backup.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackupMark {
    /// The backup's id.
    pub id: BackupId,
    /// The backup that its backing file was. `None`: it has no backing file.
    pub stands_on: Option<BackupId>,
}

impl BackupMark {
    /// Bytes of the extension's data: the id, and that of the backup beneath, or zeroes.
    pub const SIZE: usize = 2 * BackupId::SIZE;

    /// The extension's data.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut data = [0; Self::SIZE];
        let (id, stands_on) = data.split_at_mut(BackupId::SIZE);
        id.copy_from_slice(&self.id.0);
        stands_on.copy_from_slice(&self.stands_on.map_or([0; BackupId::SIZE], |id| id.0));
        data
    }

    /// Reads the extension's data. `None`: it marks nothing.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let bytes = ZeroExtended(data);
        let id = |at| Some(BackupId(bytes.array(at))).filter(|id| id.0 != [0; BackupId::SIZE]);
        (data.len() == Self::SIZE).then_some(())?;
        Some(Self { id: id(0)?, stands_on: id(BackupId::SIZE) })
    }
}

/// A text that is no id of a backup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotABackupId;

impl fmt::Display for NotABackupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the id of a backup has {} hexadecimal digits", BackupId::SIZE.saturating_mul(2))
    }
}

impl std::error::Error for NotABackupId {}

impl FromStr for BackupId {
    type Err = NotABackupId;

    fn from_str(text: &str) -> Result<Self, NotABackupId> {
        let digits = text.as_bytes();
        if digits.len() != Self::SIZE.saturating_mul(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(NotABackupId);
        }
        u128::from_str_radix(text, 16).map(|id| Self(id.to_be_bytes())).map_err(|_| NotABackupId)
    }
}

/// The name of a bitmap in [`BitmapBases`]: a hash of it.
pub type BitmapKey = [u8; BitmapBases::KEY];

/// The seal of [`BitmapBases`].
pub type Seal = [u8; BitmapBases::SEAL];

/// The backups that bitmaps go on from.
///
/// The seal lies in the padding of the extension, which a program that writes the header anew fills with zeroes. QEMU does so
/// whenever it has opened an image with bitmaps for writing, whatever it did with them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BitmapBases {
    entries: Vec<(BitmapKey, BackupId)>,
}

/// The first byte of the data.
const LAYOUT: u8 = 1;

impl BitmapBases {
    /// Entries at most.
    pub const MOST: usize = 4;
    /// Bytes of the extension's data, whatever it holds: it is changed in its place.
    pub const SIZE: usize = 1 + Self::MOST * (Self::KEY + BackupId::SIZE);
    /// Bytes of a key.
    pub const KEY: usize = 16;
    /// Bytes of the seal: all of the padding.
    pub const SEAL: usize = Self::SIZE.wrapping_neg() & 7;

    /// The backups of the first bitmaps, as many as there is room for.
    pub fn new(entries: impl IntoIterator<Item = (BitmapKey, BackupId)>) -> Self {
        Self { entries: entries.into_iter().take(Self::MOST).collect() }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The backup of a bitmap.
    pub fn get(&self, key: &BitmapKey) -> Option<BackupId> {
        self.entries.iter().find(|(known, _)| known == key).map(|(_, id)| *id)
    }

    /// The extension's data.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = vec![LAYOUT];
        for (key, id) in &self.entries {
            data.extend_from_slice(key);
            data.extend_from_slice(&id.0);
        }
        data.resize(Self::SIZE, 0);
        data
    }

    /// Reads the extension's data. `None`: it has another layout.
    pub fn parse(data: &[u8]) -> Option<Self> {
        if data.len() != Self::SIZE || data.first() != Some(&LAYOUT) {
            return None;
        }
        let bytes = ZeroExtended(data);
        let entry = Self::KEY.saturating_add(BackupId::SIZE);
        let entries = (0..Self::MOST).map(|index| {
            let at = index.saturating_mul(entry).saturating_add(1);
            (bytes.array(at), BackupId(bytes.array(at.saturating_add(Self::KEY))))
        });
        Some(Self { entries: entries.filter(|(_, id)| id.0 != [0; BackupId::SIZE]).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes() {
        assert_eq!((BitmapBases::SIZE, BitmapBases::SEAL), (129, 7));
    }

    #[test]
    fn ids_as_text() {
        let id = BackupId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xf5]);
        let text = id.to_string();
        assert_eq!(text, "000102030405060708090a0b0c0d0ef5");
        assert_eq!(text.parse(), Ok(id));
        for wrong in ["", "00", "+0112233445566778899aabbccddeeff", &format!("{text}0"), &"g".repeat(32)] {
            assert_eq!(wrong.parse::<BackupId>(), Err(NotABackupId), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn round_trip(entries in proptest::collection::vec((any::<[u8; 16]>(), any::<[u8; 16]>()), 0..7)) {
            let entries = entries.into_iter().map(|(key, id)| (key, BackupId(id))).filter(|(_, id)| id.0 != [0; 16]);
            let bases = BitmapBases::new(entries);
            prop_assert_eq!(BitmapBases::parse(&bases.encode()), Some(bases.clone()));
            for (key, _) in &bases.entries {
                prop_assert!(bases.get(key).is_some());
            }
        }

        #[test]
        fn marks_round_trip(id in any::<[u8; 16]>(), beneath in any::<Option<[u8; 16]>>()) {
            let some = |id: [u8; 16]| (id != [0; 16]).then_some(BackupId(id));
            if let Some(id) = some(id) {
                let mark = BackupMark { id, stands_on: beneath.and_then(some) };
                prop_assert_eq!(BackupMark::parse(&mark.encode()), Some(mark));
                prop_assert_eq!(BackupMark::parse(&mark.encode()[1..]), None);
            }
        }

        #[test]
        fn any_bytes_give_a_verdict(bytes in proptest::collection::vec(any::<u8>(), 120..140)) {
            let _ = (BitmapBases::parse(&bytes), BackupMark::parse(&bytes));
        }
    }
}
