//! The anti-forensic splitter: a key, inflated so that a part of it lost is all of it lost.

use crate::error::LuksError;
use crate::hash::HashName;
use crate::random::Random;
use zebu_storage::LockedBytes;

fn diffused(key_len: usize) -> Result<LockedBytes, LuksError> {
    LockedBytes::zeroed(key_len).map_err(|error| LuksError::key_memory(key_len, error))
}

fn xor(into: &mut [u8], from: &[u8]) {
    for (to, from) in into.iter_mut().zip(from) {
        *to ^= from;
    }
}

/// Splits `key` into as many stripes as `material` holds whole keys. What is left of `material` stays as it is.
pub(crate) fn split(
    hash: HashName,
    key: &[u8],
    material: &mut [u8],
    random: &mut dyn Random,
) -> Result<(), LuksError> {
    let mut sum = diffused(key.len())?;
    let mut stripes = material.chunks_exact_mut(key.len().max(1));
    let Some(last) = stripes.next_back() else { return Ok(()) };
    for stripe in stripes {
        random.fill(stripe)?;
        xor(&mut sum, stripe);
        hash.diffuse(&mut sum);
    }
    last.copy_from_slice(key);
    xor(last, &sum);
    Ok(())
}

/// Merges the first `stripes` stripes of `material` into a key of `key_len` bytes.
pub(crate) fn merge(
    hash: HashName,
    key_len: usize,
    stripes: u32,
    material: &[u8],
) -> Result<LockedBytes, LuksError> {
    let mut key = diffused(key_len)?;
    let mut stripes = material.chunks_exact(key_len.max(1)).take(stripes as usize);
    let Some(last) = stripes.next_back() else { return Ok(key) };
    for stripe in stripes {
        xor(&mut key, stripe);
        hash.diffuse(&mut key);
    }
    xor(&mut key, last);
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SystemRandom;

    #[test]
    fn every_stripe_is_needed() {
        for hash in [HashName::Sha1, HashName::Sha256, HashName::Sha512] {
            let key: Vec<u8> = (0..48).collect();
            let mut material = vec![0; 48 * 17];
            split(hash, &key, &mut material, &mut SystemRandom).unwrap();
            assert_eq!(&*merge(hash, 48, 17, &material).unwrap(), &key);
            for stripe in 0..17 {
                let mut damaged = material.clone();
                damaged[stripe * 48 + 3] ^= 1;
                assert_ne!(&*merge(hash, 48, 17, &damaged).unwrap(), &key, "stripe {stripe}");
            }
            assert!(material.windows(16).all(|window| window != &key[..16]));
        }
    }
}
