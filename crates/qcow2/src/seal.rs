//! Seals of images whose disk goes on in an overlay: a header extension of zebu's own (docs/design/format.md, "The seal").

use crate::bytes::ZeroExtended;

/// The seal of an image that is only read from now on, because an overlay holds what its disk becomes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ForkSeal {
    overlay: Vec<u8>,
}

/// The first byte of the data. 0 seals nothing.
const LAYOUT: u8 = 1;
/// Offset of the length of the overlay's name, two bytes.
const LEN_AT: usize = 2;
/// Offset of the overlay's name.
const NAME_AT: usize = 8;

impl ForkSeal {
    /// Bytes of the extension's data, whatever it names: it is changed in its place.
    pub const SIZE: usize = 1024;
    /// Bytes of an overlay's name at most.
    pub const MAX_NAME: usize = Self::SIZE - NAME_AT;

    /// A seal that names the overlay. `None`: the name is empty, too long, or holds a zero.
    pub fn new(overlay: &[u8]) -> Option<Self> {
        let fits = (1..=Self::MAX_NAME).contains(&overlay.len()) && !overlay.contains(&0);
        fits.then(|| Self { overlay: overlay.to_vec() })
    }

    /// The name of the overlay, an absolute path.
    pub fn overlay(&self) -> &[u8] {
        &self.overlay
    }

    /// The extension's data.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = vec![LAYOUT, 0];
        data.extend_from_slice(&(self.overlay.len() as u16).to_be_bytes());
        data.resize(NAME_AT, 0);
        data.extend_from_slice(&self.overlay);
        data.resize(Self::SIZE, 0);
        data
    }

    fn parse(data: &[u8]) -> Option<Self> {
        if data.len() != Self::SIZE || data.first() != Some(&LAYOUT) {
            return None;
        }
        let bytes = ZeroExtended(data);
        let len = usize::from(u16::from_be_bytes(bytes.array(LEN_AT)));
        Self::new(data.get(NAME_AT..)?.get(..len)?)
    }
}

/// The state of an image, as its extension tells.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SealState {
    /// It may be written.
    Open,
    /// It is only read: its disk goes on in the overlay that the seal names.
    Sealed(ForkSeal),
    /// It is only read, by a seal of another layout or one that was damaged.
    Unreadable,
}

impl SealState {
    /// Reads the extension's data. One that begins with 0 seals nothing: it is left of a seal that was taken away, or is not whole yet.
    pub fn parse(data: &[u8]) -> Self {
        if data.first().is_none_or(|layout| *layout == 0) {
            return Self::Open;
        }
        ForkSeal::parse(data).map_or(Self::Unreadable, Self::Sealed)
    }

    /// Whether the image may only be read.
    pub fn is_sealed(&self) -> bool {
        *self != Self::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_that_are_none() {
        assert_eq!(ForkSeal::new(b""), None);
        assert_eq!(ForkSeal::new(b"/a\0b"), None);
        assert_eq!(ForkSeal::new(&[b'a'; ForkSeal::MAX_NAME + 1]), None);
        assert!(ForkSeal::new(&[b'a'; ForkSeal::MAX_NAME]).is_some());
    }

    #[test]
    fn nothing_is_open_and_the_rest_is_sealed() {
        assert_eq!(SealState::parse(&[]), SealState::Open);
        assert_eq!(SealState::parse(&[0; ForkSeal::SIZE]), SealState::Open);
        assert_eq!(SealState::parse(&[2; ForkSeal::SIZE]), SealState::Unreadable);
        assert_eq!(SealState::parse(&[0, 1]), SealState::Open);
        assert_eq!(SealState::parse(&[1]), SealState::Unreadable);
    }

    proptest! {
        #[test]
        fn round_trip(name in proptest::collection::vec(1u8.., 1..=ForkSeal::MAX_NAME)) {
            let seal = ForkSeal::new(&name).unwrap();
            prop_assert_eq!(SealState::parse(&seal.encode()), SealState::Sealed(seal.clone()));
        }

        #[test]
        fn any_bytes_give_a_verdict(bytes in proptest::collection::vec(any::<u8>(), 1000..1030)) {
            let _ = SealState::parse(&bytes);
        }
    }
}
