//! A request of a guest: headers, and parts of memory that are cut into header, data and status.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_export::vhost::{Parts, parse_header, split_front, split_last_byte};

fuzz_target!(|bytes: &[u8]| {
    let Some((header, rest)) = bytes.split_first_chunk::<16>() else { return };
    let _ = parse_header(header);
    let mut parts = Parts::new();
    for part in rest.chunks_exact(12) {
        let address = u64::from_le_bytes(part[..8].try_into().expect("8 bytes"));
        parts.push((address, u32::from_le_bytes(part[8..].try_into().expect("4 bytes"))));
    }
    let len = |parts: &Parts| parts.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
    let whole = len(&parts);
    let mut left = whole;
    if split_last_byte(&mut parts).is_some() {
        left -= 1;
    } else {
        assert_eq!(whole, 0);
    }
    assert_eq!(len(&parts), left);
    match split_front(&mut parts, 16) {
        Some(head) => assert_eq!((len(&head), len(&parts)), (16, left - 16)),
        None => assert!(left < 16),
    }
});
