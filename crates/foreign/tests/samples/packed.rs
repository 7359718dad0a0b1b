//! Images with compressed units: cloop, DMG, and version 1 of qcow.

use super::{Sample, pattern, put};
use flate2::Compression;
use flate2::write::{DeflateEncoder, ZlibEncoder};
use std::io::Write as _;

/// A zlib stream.
pub fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).expect("memory takes it");
    encoder.finish().expect("memory takes it")
}

/// Three blocks of 2 KiB.
pub fn cloop() -> Sample {
    let disk = pattern(3 * 2048, 9);
    let mut image = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop\n".to_vec();
    put(&mut image, 128, &2048u32.to_be_bytes());
    put(&mut image, 132, &3u32.to_be_bytes());
    let mut at = 136 + 4 * 8;
    for (index, block) in disk.chunks(2048).enumerate() {
        let stream = zlib(block);
        put(&mut image, 136 + 8 * index, &(at as u64).to_be_bytes());
        put(&mut image, at, &stream);
        at += stream.len();
    }
    put(&mut image, 136 + 3 * 8, &(at as u64).to_be_bytes());
    Sample::one("cloop", image, disk)
}

/// One packed cluster of 4 KiB, one plain, one nowhere. QEMU's window has 4 KiB, which is a cluster here.
pub fn qcow1_packed() -> Sample {
    let mut image = b"QFI\xfb\0\0\0\x01".to_vec();
    put(&mut image, 24, &(3 * 4096u64).to_be_bytes());
    put(&mut image, 32, &[12, 9]);
    put(&mut image, 40, &48u64.to_be_bytes());
    put(&mut image, 48, &4096u64.to_be_bytes());
    let (packed, plain) = (pattern(4096, 11), pattern(4096, 12));
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&packed).expect("memory takes it");
    let stream = encoder.finish().expect("memory takes it");
    let entry = 1 << 63 | (stream.len() as u64) << 51 | 0x3000;
    put(&mut image, 4096, &entry.to_be_bytes());
    put(&mut image, 4104, &8192u64.to_be_bytes());
    put(&mut image, 8192, &plain);
    put(&mut image, 12288, &stream);
    let disk = [packed, plain, vec![0; 4096]].concat();
    Sample::one("qcow", image, disk)
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let number = group.iter().fold(0u32, |n, byte| n << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for digit in 0..4 {
            let value = number >> (18 - 6 * digit) & 63;
            text.push(if digit <= group.len() { DIGITS[value as usize] as char } else { '=' });
        }
    }
    text
}

/// The kind, first sector, sectors, offset and stored bytes of a chunk of a DMG.
pub type Chunk = (u32, u64, u64, u64, u64);

/// A DMG of these chunks, whose data is `data`.
pub fn dmg_of(data: &[u8], chunks: &[Chunk], sectors: u64) -> Vec<u8> {
    let mut table = b"mish".to_vec();
    put(&mut table, 16, &sectors.to_be_bytes());
    put(&mut table, 200, &(chunks.len() as u32).to_be_bytes());
    for (index, (kind, first, count, offset, stored)) in chunks.iter().enumerate() {
        let at = 204 + 40 * index;
        put(&mut table, at, &kind.to_be_bytes());
        for (number, value) in [first, count, offset, stored].into_iter().enumerate() {
            put(&mut table, at + 8 + 8 * number, &value.to_be_bytes());
        }
    }
    let list = format!(
        "<plist><dict><key>resource-fork</key><dict><key>blkx</key><array><dict>\n<data>\n{}\n</data>\n\
         </dict></array></dict></dict></plist>",
        base64(&table)
    );
    let mut image = data.to_vec();
    let at = image.len();
    image.extend_from_slice(list.as_bytes());
    let trailer = image.len();
    put(&mut image, trailer, b"koly");
    put(&mut image, trailer + 4, &4u32.to_be_bytes());
    put(&mut image, trailer + 8, &512u32.to_be_bytes());
    put(&mut image, trailer + 32, &(data.len() as u64).to_be_bytes());
    put(&mut image, trailer + 216, &(at as u64).to_be_bytes());
    put(&mut image, trailer + 224, &(list.len() as u64).to_be_bytes());
    put(&mut image, trailer + 492, &sectors.to_be_bytes());
    image.resize(trailer + 512, 0);
    image
}

/// A stored chunk, one in zlib, and one of zeroes.
pub fn dmg() -> Sample {
    let (stored, packed) = (pattern(2048, 13), pattern(4096, 14));
    let stream = zlib(&packed);
    let data = [&stored[..], &stream].concat();
    let chunks = [
        (1, 0, 4, 0, 2048),
        (0x8000_0005, 4, 8, 2048, stream.len() as u64),
        (2, 12, 4, 0, 0),
        (0xffff_ffff, 16, 0, 0, 0),
    ];
    let image = dmg_of(&data, &chunks, 16);
    let disk = [stored, packed, vec![0; 2048]].concat();
    Sample::one("dmg", image, disk)
}
