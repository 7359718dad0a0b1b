//! LUKS1 headers that lie.

use crate::support::cheap;
use proptest::prelude::*;
use std::sync::OnceLock;
use zebu_luks::{CipherSpec, HashName, Limits, Luks1Header, SystemRandom};

/// A good device.
fn good() -> &'static [u8] {
    static GOOD: OnceLock<Vec<u8>> = OnceLock::new();
    GOOD.get_or_init(|| {
        let options = cheap(CipherSpec::AES_256_XTS, HashName::Sha256);
        Luks1Header::create(&options, b"one", &mut SystemRandom).unwrap().2
    })
}

/// The error after a change of the header.
fn refused(at: usize, bytes: &[u8]) -> String {
    let mut device = good().to_vec();
    device[at..at + bytes.len()].copy_from_slice(bytes);
    Luks1Header::parse(&device, &Limits::default()).expect_err("it is refused").to_string()
}

const fn slot(number: usize) -> usize {
    208 + 48 * number
}

#[test]
fn each_lie_is_named_by_its_field() {
    let number = |value: u32| value.to_be_bytes();
    for (at, bytes, words) in [
        (0, &b"NOPE"[..], "magic number"),
        (6, &[0, 3], "version 3"),
        (8, b"cast5\0", "cipher \"cast5\""),
        (8, b"\xff\xfe", "cipher-name"),
        (40, b"lrw-benbi\0", "cipher mode \"lrw-benbi\""),
        (72, b"whirlpool\0", "hash \"whirlpool\""),
        (108, &number(65), "key-bytes"),
        (108, &number(u32::MAX), "key-bytes"),
        (104, &number(0), "payload-offset"),
        (104, &number(1), "payload-offset"),
        (104, &number(1000), "key-material-offset of key slot 1"),
        (164, &number(0), "mk-digest-iter"),
        (164, &number(u32::MAX), "mk-digest-iter is 4294967295, more than the limit of 50000000"),
        (slot(0), &number(7), "active of key slot 0"),
        (slot(0) + 4, &number(0), "iterations of key slot 0"),
        (slot(0) + 4, &number(4_000_000_000), "iterations of key slot 0 is 4000000000"),
        (slot(3) + 40, &number(0), "key-material-offset of key slot 3: 0 lies inside the header"),
        (slot(3) + 40, &number(u32::MAX), "key-material-offset of key slot 3"),
        (slot(3) + 40, &number(100), "slot 3: the key material overlaps that of slot 0"),
        (slot(0) + 44, &number(0), "stripes of key slot 0"),
        (slot(0) + 44, &number(4_000_000_000), "stripes of key slot 0: 4000000000"),
        (slot(7) + 44, &number(8000), "key-material-offset of key slot 7"),
    ] {
        let error = refused(at, bytes);
        assert!(error.contains(words), "{at}: {error}");
    }
    assert!(refused(104, &number(0)).contains("apart from its data"));
    let cut = Luks1Header::parse(&good()[..591], &Limits::default()).unwrap_err().to_string();
    assert!(cut.contains("592 bytes are needed, 591 are there"), "{cut}");
}

#[test]
fn part_of_a_block_is_no_key_material() {
    let mut device = good().to_vec();
    for (at, bytes) in
        [(40, &b"cbc-plain64\0"[..]), (108, &24u32.to_be_bytes()), (slot(0) + 44, &7u32.to_be_bytes())]
    {
        device[at..at + bytes.len()].copy_from_slice(bytes);
    }
    let error = Luks1Header::parse(&device, &Limits::default()).unwrap_err().to_string();
    assert!(error.contains("stripes of key slot 0: 168 bytes"), "{error}");
}

#[test]
fn limits_can_be_lifted() {
    let mut device = good().to_vec();
    device[slot(0) + 4..slot(0) + 8].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(Luks1Header::parse(&device, &Limits::default()).is_err());
    assert_eq!(Luks1Header::parse(&device, &Limits::NONE).unwrap().slots()[0].iterations, u32::MAX);
}

#[test]
fn text_of_an_image_does_not_reach_the_terminal_as_it_is() {
    let error = refused(72, b"\x1b[31mred\0");
    assert!(!error.contains('\x1b') && error.contains("[31mred"), "{error}");
}

proptest! {
    #[test]
    fn any_bytes_are_an_answer(changes in prop::collection::vec((0usize..592, any::<u8>()), 0..12)) {
        let mut device = good().to_vec();
        for (at, byte) in changes {
            device[at] = byte;
        }
        let limits = Limits::default().pbkdf2_iterations(2000);
        if let Ok(header) = Luks1Header::parse(&device, &limits) {
            let again = Luks1Header::parse(&header.encode(), &limits).unwrap();
            prop_assert_eq!(&again, &header);
            for slot in header.active_slots() {
                let material = header.material(slot).unwrap();
                prop_assert!(material.start >= 1024 && material.end <= header.payload_offset());
            }
        }
    }
}
