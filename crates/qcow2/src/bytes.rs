//! Big-endian integers in byte slices, bounds always checked.

use crate::error::OutOfBounds;

/// The `N` bytes at `at`, or `None` where the slice ends before them.
#[inline]
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

#[inline]
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array_at(bytes, at).map(u16::from_be_bytes)
}

#[inline]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_be_bytes)
}

#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array_at(bytes, at).map(u64::from_be_bytes)
}

/// Overwrites `bytes` from `at` on with `value`.
#[inline]
pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) -> Result<(), OutOfBounds> {
    let target = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())).ok_or(OutOfBounds)?;
    target.copy_from_slice(value);
    Ok(())
}

/// Bytes of a structure that may end early because the file does: what lies past the end reads as zero.
#[derive(Clone, Copy)]
pub(crate) struct ZeroExtended<'a>(pub(crate) &'a [u8]);

impl ZeroExtended<'_> {
    pub(crate) fn array<const N: usize>(self, at: usize) -> [u8; N] {
        let mut out = [0; N];
        let present = self.0.get(at..).unwrap_or_default();
        for (to, from) in out.iter_mut().zip(present) {
            *to = *from;
        }
        out
    }

    pub(crate) fn u32(self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    pub(crate) fn u64(self, at: usize) -> u64 {
        u64::from_be_bytes(self.array(at))
    }

    /// `len` bytes at `at`; the caller has bounded `len` by a limit of the format.
    pub(crate) fn vec(self, at: usize, len: usize) -> Vec<u8> {
        let present = self.0.get(at..).unwrap_or_default();
        let mut out = present.get(..len).unwrap_or(present).to_vec();
        out.resize(len, 0);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_big_endian_and_bounded() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert_eq!(u16_at(&bytes, 7), Some(0x0809));
        assert_eq!(u16_at(&bytes, 8), None);
        assert_eq!(u32_at(&bytes, 5), Some(0x0607_0809));
        assert_eq!(u64_at(&bytes, 1), Some(0x0203_0405_0607_0809));
        assert_eq!(u64_at(&bytes, usize::MAX), None);
    }

    #[test]
    fn past_the_end_reads_as_zero() {
        let bytes = ZeroExtended(&[1, 2, 3]);
        assert_eq!(bytes.u32(1), 0x0203_0000);
        assert_eq!(bytes.u64(100), 0);
        assert_eq!(bytes.vec(2, 3), vec![3, 0, 0]);
        assert_eq!(bytes.vec(9, 2), vec![0, 0]);
    }

    #[test]
    fn put_stays_inside() {
        let mut bytes = [0; 4];
        assert_eq!(put(&mut bytes, 1, &[7, 8]), Ok(()));
        assert_eq!(bytes, [0, 7, 8, 0]);
        assert_eq!(put(&mut bytes, 3, &[7, 8]), Err(OutOfBounds));
        assert_eq!(put(&mut bytes, usize::MAX, &[7]), Err(OutOfBounds));
    }
}
