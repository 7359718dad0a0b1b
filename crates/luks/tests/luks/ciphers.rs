//! Ciphers, beside the crate `xts-mode`.

use crate::support::random_bytes;
use aes::{Aes128, Aes192, Aes256};
use cipher::array::Array;
use cipher::consts::U16;
use cipher::{BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit};
use serpent::Serpent;
use twofish::Twofish;
use xts_mode::Xts128;
use zebu_luks::{BlockCipher, CipherSpec, LuksError, Mode, SectorCipher, legacy_aes};

const SECTORS: [u64; 5] = [0, 1, 0xffff_fff0, 0x1_0000_0005, u64::MAX - 40];

fn beside_xts_mode<C>(cipher: BlockCipher, key_len: usize)
where
    C: BlockSizeUser<BlockSize = U16> + BlockCipherEncrypt + BlockCipherDecrypt + KeyInit,
{
    let key = random_bytes(key_len);
    let half = |bytes: &[u8]| C::new_from_slice(bytes).unwrap();
    let other = Xts128::new(half(&key[..key_len / 2]), half(&key[key_len / 2..]));
    for (mode, mask) in [(Mode::XtsPlain64, u64::MAX), (Mode::XtsPlain, u64::from(u32::MAX))] {
        for sector_size in [512, 4096u32] {
            let spec = CipherSpec::new(cipher, mode, key_len).unwrap();
            let ours = SectorCipher::with_sector_size(spec, &key, sector_size).unwrap();
            for first in SECTORS {
                let plain = random_bytes(sector_size as usize * 11);
                let mut expected = plain.clone();
                for (index, sector) in expected.chunks_mut(sector_size as usize).enumerate() {
                    let number = first.wrapping_add(index as u64 * u64::from(sector_size / 512));
                    other.encrypt_sector(sector, Array(u128::from(number & mask).to_le_bytes()));
                }
                let mut data = plain.clone();
                ours.encrypt(first, &mut data).unwrap();
                assert!(data == expected, "{spec}, {sector_size}, sector {first}");
                ours.decrypt(first, &mut data).unwrap();
                assert!(data == plain, "{spec}, {sector_size}, sector {first}");
            }
        }
    }
}

#[test]
fn xts_is_that_of_another_implementation() {
    beside_xts_mode::<Aes128>(BlockCipher::Aes, 32);
    beside_xts_mode::<Aes192>(BlockCipher::Aes, 48);
    beside_xts_mode::<Aes256>(BlockCipher::Aes, 64);
    for key_len in [32, 48, 64] {
        beside_xts_mode::<Serpent>(BlockCipher::Serpent, key_len);
        beside_xts_mode::<Twofish>(BlockCipher::Twofish, key_len);
    }
}

#[test]
fn each_mode_gives_back_what_it_took_and_depends_on_the_sector() {
    for cipher in [BlockCipher::Aes, BlockCipher::Serpent, BlockCipher::Twofish] {
        for mode in [Mode::CbcPlain64, Mode::CbcPlain, Mode::CbcEssivSha256] {
            for key_len in [16, 24, 32] {
                let spec = CipherSpec::new(cipher, mode, key_len).unwrap();
                let ours = SectorCipher::new(spec, &random_bytes(key_len)).unwrap();
                let plain = random_bytes(2048);
                let mut data = plain.clone();
                ours.encrypt(5, &mut data).unwrap();
                let mut elsewhere = plain.clone();
                ours.encrypt(6, &mut elsewhere).unwrap();
                assert!(data != plain && data != elsewhere, "{spec}");
                // A sector alone is the same as in its company.
                let mut third = plain[1024..1536].to_vec();
                ours.encrypt(7, &mut third).unwrap();
                assert_eq!(third, data[1024..1536], "{spec}");
                ours.decrypt(5, &mut data).unwrap();
                assert!(data == plain, "{spec}");
            }
        }
    }
}

#[test]
fn part_of_a_block_is_refused_and_left_alone() {
    let ours = SectorCipher::new(CipherSpec::AES_256_XTS, &[7; 64]).unwrap();
    let mut data = [1; 500];
    assert!(matches!(ours.encrypt(0, &mut data), Err(LuksError::PartialBlock { len: 500 })));
    assert_eq!(data, [1; 500]);
}

#[test]
fn keys_of_other_lengths_are_refused() {
    for (mode, key_len) in
        [(Mode::XtsPlain64, 16), (Mode::XtsPlain64, 33), (Mode::CbcPlain64, 64), (Mode::CbcPlain64, 0)]
    {
        assert!(CipherSpec::new(BlockCipher::Aes, mode, key_len).is_err(), "{mode:?} {key_len}");
    }
    assert!(SectorCipher::new(CipherSpec::AES_256_XTS, &[0; 32]).is_err());
    assert!(SectorCipher::with_sector_size(CipherSpec::AES_256_XTS, &[0; 64], 8192).is_err());
}

#[test]
fn names_of_headers_are_known_and_others_are_named() {
    let joined = CipherSpec::parse_joined("twofish-cbc-essiv:sha256", 32).unwrap();
    assert_eq!(joined.to_string(), "twofish-cbc-essiv:sha256");
    // QEMU writes the hash that it was given with whatever generator.
    let with_hash = CipherSpec::parse_joined("aes-xts-plain64:sha256", 64).unwrap();
    assert_eq!(with_hash, CipherSpec::AES_256_XTS);
    for (name, part) in [
        ("cast5-cbc-plain64", "cast5"),
        ("aes-ecb", "ecb"),
        ("aes-xts-essiv:sha1", "xts-essiv:sha1"),
        ("aes-xts-plain64:sha3", "xts-plain64:sha3"),
        ("aes", "mode"),
    ] {
        let error = CipherSpec::parse_joined(name, 32).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("supported"), "{error}");
    }
}

#[test]
fn a_long_passphrase_of_the_old_scheme_is_cut() {
    let (mut long, mut cut) = ([9; 512], [9; 512]);
    legacy_aes(b"sixteen bytes on and more").unwrap().encrypt(3, &mut long).unwrap();
    legacy_aes(b"sixteen bytes on").unwrap().encrypt(3, &mut cut).unwrap();
    assert_eq!(long, cut);
}
