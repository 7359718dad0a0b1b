//! The vocabulary of a chain: the place of a cluster, and how much of it is known.

/// Bits of a word of a merged slice: its kind; the depth; the offset.
const KIND: u64 = 0b111;
const KIND_UNKNOWN: u64 = 0;
const KIND_ZERO: u64 = 1;
const KIND_DATA: u64 = 2;
const KIND_DATA_COPIED: u64 = 3;
const KIND_BELOW: u64 = 4;
const DEPTH_SHIFT: u32 = 3;
const HOST_SHIFT: u32 = 16;
/// Images that a word can tell apart.
const DEPTHS: u64 = 1 << (HOST_SHIFT - DEPTH_SHIFT);

/// The place of a guest cluster's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClusterPlace {
    pub(crate) kind: PlaceKind,
    /// The image of the chain: 0 is the top.
    pub(crate) depth: u16,
}

/// The content of a cluster as its image holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlaceKind {
    Zero,
    /// At this offset of the image's data file.
    Data {
        host: u64,
        /// It may be written in place.
        copied: bool,
    },
}

impl ClusterPlace {
    /// The place of what is `bytes` further on in the same run.
    pub(crate) fn advanced(self, bytes: u64) -> Self {
        match self.kind {
            PlaceKind::Zero => self,
            PlaceKind::Data { host, copied } => {
                Self { kind: PlaceKind::Data { host: host.wrapping_add(bytes), copied }, ..self }
            }
        }
    }

    /// A word for the extent index. Bits 9 to 55: the offset; bit 0: data; bit 1: may be written in place.
    pub(super) fn extent_word(self) -> u64 {
        match self.kind {
            PlaceKind::Zero => 0,
            PlaceKind::Data { host, copied } => host | 1 | u64::from(copied) << 1,
        }
    }

    pub(super) fn from_extent_word(word: u64, depth: u16) -> Self {
        let kind = if word & 1 == 0 {
            PlaceKind::Zero
        } else {
            PlaceKind::Data { host: word & !511, copied: word & 2 != 0 }
        };
        Self { kind, depth }
    }
}

/// The knowledge of where a cluster, or a run of them, lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The place.
    Hit(ClusterPlace),
    /// Mixed or compressed. The images above this depth do not allocate any of it.
    Below(u16),
    /// Nothing: ask the images.
    Miss,
}

impl Lookup {
    /// A word of a merged slice; 0 for what can't be said in one.
    pub(super) fn word(self) -> u64 {
        let place = match self {
            Self::Below(depth) if u64::from(depth) < DEPTHS => {
                return KIND_BELOW | u64::from(depth) << DEPTH_SHIFT;
            }
            Self::Hit(place) if u64::from(place.depth) < DEPTHS => place,
            Self::Miss | Self::Below(_) | Self::Hit(_) => return KIND_UNKNOWN,
        };
        let depth = u64::from(place.depth) << DEPTH_SHIFT;
        match place.kind {
            PlaceKind::Zero => KIND_ZERO | depth,
            PlaceKind::Data { host, .. } if host & 511 != 0 || host >> 56 != 0 => KIND_UNKNOWN,
            PlaceKind::Data { host, copied } => {
                (if copied { KIND_DATA_COPIED } else { KIND_DATA }) | depth | (host >> 9) << HOST_SHIFT
            }
        }
    }

    /// The meaning of a word.
    pub(super) fn from_word(word: u64) -> Self {
        let depth = (word >> DEPTH_SHIFT & (DEPTHS - 1)) as u16;
        let kind = match word & KIND {
            KIND_ZERO => PlaceKind::Zero,
            kind @ (KIND_DATA | KIND_DATA_COPIED) => {
                PlaceKind::Data { host: word >> HOST_SHIFT << 9, copied: kind == KIND_DATA_COPIED }
            }
            KIND_BELOW => return Self::Below(depth),
            _ => return Self::Miss,
        };
        Self::Hit(ClusterPlace { kind, depth })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_what_was_encoded() {
        for depth in [0, 1, 499, 1023] {
            for kind in [
                PlaceKind::Zero,
                PlaceKind::Data { host: 0, copied: false },
                PlaceKind::Data { host: (1 << 56) - 512, copied: true },
            ] {
                let known = Lookup::Hit(ClusterPlace { kind, depth });
                assert_eq!(Lookup::from_word(known.word()), known);
            }
            assert_eq!(Lookup::from_word(Lookup::Below(depth).word()), Lookup::Below(depth));
        }
        let far = ClusterPlace { kind: PlaceKind::Data { host: 1 << 56, copied: false }, depth: 0 };
        assert_eq!(Lookup::from_word(Lookup::Hit(far).word()), Lookup::Miss);
        assert_eq!(Lookup::from_word(0), Lookup::Miss);
    }
}
