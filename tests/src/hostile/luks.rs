//! Hostile LUKS headers, built field by field from the format documents: each is a good one with one thing done to it.

use sha2::{Digest, Sha256};

/// Bytes of an image file: header, key material, and some data.
const FILE: usize = 3 << 20;
/// Bytes of key material of a slot with a key of 64 bytes and 4000 stripes, in whole blocks.
const MATERIAL: u32 = 256_000;
/// Sector at which the data of a LUKS1 file begins.
const PAYLOAD: u32 = 4096;

/// A hostile header.
#[derive(Debug, Clone, Copy)]
pub struct HostileHeader {
    /// The damage, in words.
    pub name: &'static str,
    /// Words that the refusal has.
    pub refusal: &'static str,
    /// Makes the file.
    pub file: fn() -> Vec<u8>,
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Places of fields of LUKS1 (LUKS1 On-Disk Format Specification 1.2.3).
mod field {
    pub(super) const VERSION: usize = 6;
    pub(super) const CIPHER: usize = 8;
    pub(super) const MODE: usize = 40;
    pub(super) const HASH: usize = 72;
    pub(super) const PAYLOAD: usize = 104;
    pub(super) const KEY_BYTES: usize = 108;
    pub(super) const DIGEST_ITERATIONS: usize = 164;
    /// Of slot 0. Slots have 48 bytes each.
    pub(super) const STATE: usize = 208;
    pub(super) const ITERATIONS: usize = STATE + 4;
    pub(super) const MATERIAL: usize = STATE + 40;
    pub(super) const STRIPES: usize = STATE + 44;
}

/// A file with a sound LUKS1 header, which nothing opens: digest and key material are no key's.
pub fn first_version() -> Vec<u8> {
    let mut file = vec![0x33; FILE];
    file[..592].fill(0);
    put(&mut file, 0, b"LUKS\xba\xbe\0\x01");
    put(&mut file, field::CIPHER, b"aes");
    put(&mut file, field::MODE, b"xts-plain64");
    put(&mut file, field::HASH, b"sha256");
    put(&mut file, field::PAYLOAD, &PAYLOAD.to_be_bytes());
    put(&mut file, field::KEY_BYTES, &64u32.to_be_bytes());
    put(&mut file, field::DIGEST_ITERATIONS, &1000u32.to_be_bytes());
    put(&mut file, 168, b"01234567-89ab-4def-8123-456789abcdef");
    for slot in 0..8 {
        let state = if slot == 0 { 0x00ac_71f3u32 } else { 0x0000_dead };
        put(&mut file, field::STATE + 48 * slot, &state.to_be_bytes());
        put(&mut file, field::ITERATIONS + 48 * slot, &1000u32.to_be_bytes());
        let sector = 8 + slot as u32 * MATERIAL.next_multiple_of(4096) / 512;
        put(&mut file, field::MATERIAL + 48 * slot, &sector.to_be_bytes());
        put(&mut file, field::STRIPES + 48 * slot, &4000u32.to_be_bytes());
    }
    file
}

fn first_with(changes: &[(usize, &[u8])]) -> Vec<u8> {
    let mut file = first_version();
    for (at, value) in changes {
        put(&mut file, *at, value);
    }
    file
}

fn first_with_number(at: usize, value: u32) -> Vec<u8> {
    first_with(&[(at, &value.to_be_bytes())])
}

/// Lies in LUKS1.
pub const FIRST_VERSION: &[HostileHeader] = &[
    HostileHeader {
        name: "iterations of a key slot that take hours",
        refusal: "--header-costs unbounded",
        file: || first_with_number(field::ITERATIONS, u32::MAX),
    },
    HostileHeader {
        name: "iterations of the digest that take hours",
        refusal: "--header-costs unbounded",
        file: || first_with_number(field::DIGEST_ITERATIONS, 3_000_000_000),
    },
    HostileHeader {
        name: "no iterations",
        refusal: "iterations",
        file: || first_with_number(field::ITERATIONS, 0),
    },
    HostileHeader {
        name: "stripes of 4 billion",
        refusal: "stripes",
        file: || first_with_number(field::STRIPES, 4_000_000_000),
    },
    HostileHeader { name: "no stripes", refusal: "stripes", file: || first_with_number(field::STRIPES, 0) },
    HostileHeader {
        name: "overlapping key slots",
        refusal: "key slot",
        file: || first_with_number(field::MATERIAL + 48, 16),
    },
    HostileHeader {
        name: "key material on the header",
        refusal: "key-material-offset",
        file: || first_with_number(field::MATERIAL, 0),
    },
    HostileHeader {
        name: "key material on the data",
        refusal: "key-material-offset",
        file: || first_with_number(field::MATERIAL, PAYLOAD - 8),
    },
    HostileHeader {
        name: "key material past every file",
        refusal: "key-material-offset",
        file: || first_with_number(field::MATERIAL, u32::MAX),
    },
    HostileHeader {
        name: "data inside the header",
        refusal: "payload-offset",
        file: || first_with_number(field::PAYLOAD, 1),
    },
    HostileHeader {
        name: "data at 0, as of a detached header",
        refusal: "payload-offset",
        file: || first_with_number(field::PAYLOAD, 0),
    },
    HostileHeader {
        name: "data past every file",
        refusal: "cut short",
        file: || first_with_number(field::PAYLOAD, u32::MAX),
    },
    HostileHeader {
        name: "a key of no bytes",
        refusal: "key",
        file: || first_with_number(field::KEY_BYTES, 0),
    },
    HostileHeader {
        name: "a key of 4 GiB",
        refusal: "key",
        file: || first_with_number(field::KEY_BYTES, u32::MAX),
    },
    HostileHeader {
        name: "a key of an odd length",
        refusal: "key",
        file: || first_with_number(field::KEY_BYTES, 63),
    },
    HostileHeader {
        name: "a slot that is neither used nor free",
        refusal: "key slot 0",
        file: || first_with_number(field::STATE, 0x00ac_71f2),
    },
    HostileHeader {
        name: "an unknown cipher",
        refusal: "rot13",
        file: || first_with(&[(field::CIPHER, b"rot13")]),
    },
    HostileHeader {
        name: "no cipher at all",
        refusal: "null",
        file: || first_with(&[(field::CIPHER, b"cipher_null\0")]),
    },
    HostileHeader {
        name: "an unknown mode",
        refusal: "ecb",
        file: || first_with(&[(field::MODE, b"ecb\0\0\0\0\0\0\0\0")]),
    },
    HostileHeader {
        name: "an unknown hash",
        refusal: "md5",
        file: || first_with(&[(field::HASH, b"md5\0\0\0")]),
    },
    HostileHeader {
        name: "a name without an end",
        refusal: "",
        file: || first_with(&[(field::CIPHER, &[b'a'; 32])]),
    },
    HostileHeader {
        name: "a name with control characters",
        refusal: "",
        file: || first_with(&[(field::CIPHER, b"\x1b[2J\x1b]0;x\x07")]),
    },
    HostileHeader {
        name: "version 3",
        refusal: "version 3",
        file: || first_with(&[(field::VERSION, &[0, 3])]),
    },
    HostileHeader {
        name: "version 0",
        refusal: "version 0",
        file: || first_with(&[(field::VERSION, &[0, 0])]),
    },
    HostileHeader { name: "cut off within the magic", refusal: "", file: || first_version()[..7].to_vec() },
    HostileHeader { name: "cut off within the slots", refusal: "", file: || first_version()[..591].to_vec() },
    HostileHeader {
        name: "cut off within the key material",
        refusal: "cut short",
        file: || first_version()[..100_000].to_vec(),
    },
    HostileHeader {
        name: "every slot used, and none opened",
        refusal: "Invalid password",
        file: || {
            let mut file = first_version();
            for slot in 0..8 {
                put(&mut file, field::STATE + 48 * slot, &0x00ac_71f3u32.to_be_bytes());
            }
            file
        },
    },
    HostileHeader {
        name: "no slot used",
        refusal: "no key slot is active",
        file: || first_with_number(field::STATE, 0x0000_dead),
    },
];

/// Metadata of a sound LUKS2 header.
const METADATA: &str = r#"{"keyslots":{
"0":{"type":"luks2","key_size":64,"af":{"type":"luks1","stripes":4000,"hash":"sha256"},
"area":{"type":"raw","offset":"32768","size":"258048","encryption":"aes-xts-plain64","key_size":64},
"kdf":{"type":"argon2id","time":1,"memory":1024,"cpus":1,"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}},
"1":{"type":"luks2","key_size":64,"af":{"type":"luks1","stripes":4000,"hash":"sha256"},
"area":{"type":"raw","offset":"290816","size":"258048","encryption":"aes-xts-plain64","key_size":64},
"kdf":{"type":"pbkdf2","hash":"sha256","iterations":1000,"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}}},
"tokens":{},"segments":{"0":{"type":"crypt","offset":"1048576","size":"dynamic","iv_tweak":"0",
"encryption":"aes-xts-plain64","sector_size":512}},
"digests":{"0":{"type":"pbkdf2","keyslots":["0","1"],"segments":["0"],"hash":"sha256","iterations":1000,
"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","digest":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}},
"config":{"json_size":"12288","keyslots_size":"1015808"}}"#;

/// Bytes of one copy of a LUKS2 header.
const COPY: usize = 16384;

/// One copy of a LUKS2 header with a right checksum (LUKS2 On-Disk Format Specification 1.1.3).
fn copy(is_first: bool, len: u64, metadata: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; COPY];
    put(&mut bytes, 0, if is_first { b"LUKS\xba\xbe\0\x02" } else { b"SKUL\xba\xbe\0\x02" });
    put(&mut bytes, 8, &len.to_be_bytes());
    put(&mut bytes, 16, &1u64.to_be_bytes());
    put(&mut bytes, 72, b"sha256");
    put(&mut bytes, 168, b"01234567-89ab-4def-8123-456789abcdef");
    put(&mut bytes, 256, &(if is_first { 0 } else { COPY as u64 }).to_be_bytes());
    put(&mut bytes, 4096, &metadata[..metadata.len().min(COPY - 4096)]);
    let sum = Sha256::digest(&bytes);
    put(&mut bytes, 448, &sum);
    bytes
}

fn second_of(len: u64, metadata: &[u8]) -> Vec<u8> {
    let mut file = vec![0x44; FILE];
    put(&mut file, 0, &copy(true, len, metadata));
    put(&mut file, COPY, &copy(false, len, metadata));
    file
}

/// A file with a sound LUKS2 header, which nothing opens.
pub fn second_version() -> Vec<u8> {
    second_of(COPY as u64, METADATA.as_bytes())
}

/// The same with words of its metadata replaced.
fn second_with(from: &str, to: &str) -> Vec<u8> {
    assert!(METADATA.contains(from), "{from}");
    second_of(COPY as u64, METADATA.replacen(from, to, 1).as_bytes())
}

/// Lies in LUKS2.
pub const SECOND_VERSION: &[HostileHeader] = &[
    HostileHeader {
        name: "a detached header of LUKS2",
        refusal: "the header is detached",
        file: || second_with("\"offset\":\"1048576\"", "\"offset\":\"0\""),
    },
    HostileHeader {
        name: "2 GiB of memory for Argon2",
        refusal: "--header-costs unbounded",
        file: || second_with("\"memory\":1024", "\"memory\":2097152"),
    },
    HostileHeader {
        name: "4 TiB of memory for Argon2",
        refusal: "--header-costs unbounded",
        file: || second_with("\"memory\":1024", "\"memory\":4294967295"),
    },
    HostileHeader {
        name: "passes of Argon2 that take days",
        refusal: "--header-costs unbounded",
        file: || second_with("\"time\":1,", "\"time\":4000000000,"),
    },
    HostileHeader {
        name: "millions of processors for Argon2",
        refusal: "kdf",
        file: || second_with("\"cpus\":1", "\"cpus\":16777216"),
    },
    HostileHeader {
        name: "iterations of LUKS2 that take hours",
        refusal: "--header-costs unbounded",
        file: || second_with("\"iterations\":1000", "\"iterations\":4000000000"),
    },
    HostileHeader {
        name: "iterations of the digest of LUKS2 that take hours",
        refusal: "--header-costs unbounded",
        file: || {
            second_with(
                "\"hash\":\"sha256\",\"iterations\":1000,\n",
                "\"hash\":\"sha256\",\"iterations\":4000000000,\n",
            )
        },
    },
    HostileHeader {
        name: "stripes of 4 billion in LUKS2",
        refusal: "stripes",
        file: || second_with("\"stripes\":4000", "\"stripes\":4000000000"),
    },
    HostileHeader {
        name: "overlapping key slots of LUKS2",
        refusal: "overlap",
        file: || second_with("\"offset\":\"290816\"", "\"offset\":\"36864\""),
    },
    HostileHeader {
        name: "key material on the header of LUKS2",
        refusal: "lies inside the header",
        file: || second_with("\"offset\":\"32768\"", "\"offset\":\"4096\""),
    },
    HostileHeader {
        name: "data inside the header of LUKS2",
        refusal: "segments.offset",
        file: || second_with("\"offset\":\"1048576\"", "\"offset\":\"4096\""),
    },
    HostileHeader {
        name: "data past every file in LUKS2",
        refusal: "cut short",
        file: || second_with("\"offset\":\"1048576\"", "\"offset\":\"9223372036854775296\""),
    },
    HostileHeader {
        name: "sectors of 3 bytes",
        refusal: "sector_size",
        file: || second_with("\"sector_size\":512", "\"sector_size\":3"),
    },
    HostileHeader {
        name: "sectors of 2 GiB",
        refusal: "sector_size",
        file: || second_with("\"sector_size\":512", "\"sector_size\":2147483648"),
    },
    HostileHeader {
        name: "a key slot that is no number",
        refusal: "keyslots",
        file: || second_with("\"0\":{\"type\":\"luks2\"", "\"../0\":{\"type\":\"luks2\""),
    },
    HostileHeader { name: "no metadata", refusal: "json", file: || second_of(COPY as u64, b"") },
    HostileHeader {
        name: "metadata nested without end",
        refusal: "json",
        file: || second_of(COPY as u64, &[b'['; COPY - 4096]),
    },
    HostileHeader {
        name: "a header of LUKS2 of no bytes",
        refusal: "",
        file: || second_of(0, METADATA.as_bytes()),
    },
    HostileHeader {
        name: "a header of LUKS2 of 2^64 bytes",
        refusal: "",
        file: || second_of(u64::MAX, METADATA.as_bytes()),
    },
    HostileHeader {
        name: "a wrong checksum of both copies",
        refusal: "checksum",
        file: || {
            let mut file = second_version();
            file[448] ^= 1;
            file[COPY + 448] ^= 1;
            file
        },
    },
    HostileHeader {
        name: "LUKS2 cut off within its metadata",
        refusal: "",
        file: || second_version()[..5000].to_vec(),
    },
    HostileHeader {
        name: "LUKS2 cut off within the key material",
        refusal: "cut short",
        file: || second_version()[..100_000].to_vec(),
    },
];
