//! Images in VHD and VHDX.

use super::crc32c::crc32c;
use super::{Sample, pattern, put};

/// Makes the sum of a structure of a VHD right.
pub fn set_vhd_sum(bytes: &mut [u8], at: usize) {
    bytes[at..at + 4].fill(0);
    let sum = !bytes.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    bytes[at..at + 4].copy_from_slice(&sum.to_be_bytes());
}

/// A footer of a disk of `size` bytes, by a program of which the size counts.
pub fn vhd_footer(kind: u32, size: u64) -> Vec<u8> {
    let mut footer = b"conectix".to_vec();
    put(&mut footer, 8, &2u32.to_be_bytes());
    put(&mut footer, 12, &0x0001_0000u32.to_be_bytes());
    put(&mut footer, 16, &(if kind == 2 { u64::MAX } else { 512 }).to_be_bytes());
    put(&mut footer, 28, b"win ");
    put(&mut footer, 40, &size.to_be_bytes());
    put(&mut footer, 48, &size.to_be_bytes());
    put(&mut footer, 56, &[0, 1, 4, 17]);
    put(&mut footer, 60, &kind.to_be_bytes());
    put(&mut footer, 68, &[0xab; 16]);
    footer.resize(512, 0);
    set_vhd_sum(&mut footer, 64);
    footer
}

/// A fixed VHD.
pub fn vhd_fixed() -> Sample {
    let disk = pattern(40 * 512, 71);
    let image = [&disk[..], &vhd_footer(2, disk.len() as u64)].concat();
    Sample::one("vpc", image, disk)
}

/// Blocks of 4 KiB: one of data, the others nowhere.
fn vhd_blocks(kind: u32, more: impl FnOnce(&mut Vec<u8>), bitmap: u8) -> (Vec<u8>, Vec<u8>) {
    let size = 3 * 4096;
    let mut image = vhd_footer(kind, size);
    let mut header = b"cxsparse".to_vec();
    put(&mut header, 8, &u64::MAX.to_be_bytes());
    put(&mut header, 16, &1536u64.to_be_bytes());
    for (at, value) in [(24, 0x0001_0000u32), (28, 3), (32, 4096)] {
        put(&mut header, at, &value.to_be_bytes());
    }
    header.resize(1024, 0);
    more(&mut header);
    set_vhd_sum(&mut header, 36);
    image.extend(header);
    for entry in [u32::MAX, 8, u32::MAX] {
        image.extend(entry.to_be_bytes());
    }
    let data = pattern(4096, 72);
    put(&mut image, 8 * 512, &[bitmap]);
    put(&mut image, 9 * 512, &data);
    image.extend(vhd_footer(kind, size));
    (image, data)
}

/// A dynamic VHD.
pub fn vhd_dynamic() -> Sample {
    let (image, data) = vhd_blocks(3, |_| {}, 0xff);
    let disk = [vec![0; 4096], data, vec![0; 4096]].concat();
    Sample::one("vpc", image, disk)
}

/// A differencing VHD whose parent is named by a relative path. Of its block, it holds sectors 1, 2 and 7.
pub fn vhd_differencing() -> Sample {
    let name: Vec<u8> = ".\\dir\\parent.vhd".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let (mut image, data) = vhd_blocks(
        4,
        |header| {
            put(header, 40, &[0xcd; 16]);
            put(header, 576, b"W2ru");
            put(header, 584, &32u32.to_be_bytes());
            put(header, 592, &20480u64.to_be_bytes());
            header.resize(1024, 0);
        },
        0b0110_0001,
    );
    put(&mut image, 20480, &name);
    let mut disk = vec![0; 3 * 4096];
    for sector in [1, 2, 7] {
        disk[4096 + sector * 512..][..512].copy_from_slice(&data[sector * 512..][..512]);
    }
    Sample::one("vpc", image, disk)
}

/// Makes the sum of a structure of a VHDX right.
pub fn set_vhdx_sum(image: &mut [u8], at: usize, len: usize) {
    image[at + 4..at + 8].fill(0);
    let sum = crc32c(&image[at..at + len]);
    image[at + 4..at + 8].copy_from_slice(&sum.to_le_bytes());
}

const MIB: usize = 1 << 20;
/// Offset of the log.
pub const LOG: usize = MIB;
/// Offset of the metadata.
pub const METADATA: usize = 2 * MIB;
/// Offset of the block allocation table.
pub const TABLE: usize = 3 * MIB;
/// Offset of the first block.
pub const BLOCK: usize = 4 * MIB;
/// Offset of the bitmap.
pub const BITMAP: usize = 5 * MIB;
/// The log's GUID.
const LOG_GUID: [u8; 16] = [0x77; 16];

fn guid(text: &str) -> [u8; 16] {
    let digits: String = text.split('-').collect();
    let bytes = u128::from_str_radix(&digits, 16).expect("digits").to_be_bytes();
    [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15].map(|at| bytes[at])
}

/// A VHDX of three blocks of 1 MiB: one of data, one nowhere, one of zeroes.
fn vhdx_with(flags: u32, locator: &[u8], states: [u64; 3]) -> Vec<u8> {
    let mut image = b"vhdxfile".to_vec();
    image.resize(6 * MIB, 0);
    for (at, number) in [(64 << 10, 1u64), (128 << 10, 2)] {
        put(&mut image, at, b"head");
        put(&mut image, at + 8, &number.to_le_bytes());
        put(&mut image, at + 32, &[0x55; 16]);
        put(&mut image, at + 66, &1u16.to_le_bytes());
        put(&mut image, at + 68, &(MIB as u32).to_le_bytes());
        put(&mut image, at + 72, &(LOG as u64).to_le_bytes());
        set_vhdx_sum(&mut image, at, 4096);
    }
    for at in [192 << 10, 256 << 10] {
        put(&mut image, at, b"regi");
        put(&mut image, at + 8, &2u32.to_le_bytes());
        let regions = [
            ("2DC27766-F623-4200-9D64-115E9BFD4A08", TABLE),
            ("8B7CA206-4790-4B9A-B8FE-575F050F886E", METADATA),
        ];
        for (index, (id, place)) in regions.into_iter().enumerate() {
            let entry = at + 16 + 32 * index;
            put(&mut image, entry, &guid(id));
            put(&mut image, entry + 16, &(place as u64).to_le_bytes());
            put(&mut image, entry + 24, &(MIB as u32).to_le_bytes());
            put(&mut image, entry + 28, &1u32.to_le_bytes());
        }
        set_vhdx_sum(&mut image, at, 64 << 10);
    }
    put(&mut image, METADATA, b"metadata");
    let parameters = [(1u32 << 20).to_le_bytes(), flags.to_le_bytes()].concat();
    let size = (3 * MIB as u64).to_le_bytes();
    let sector = 512u32.to_le_bytes();
    let mut items: Vec<(&str, &[u8])> = vec![
        ("CAA16737-FA36-4D43-B3B6-33F0AA44E76B", &parameters),
        ("2FA54224-CD1B-4876-B211-5DBED83BF4B8", &size),
        ("8141BF1D-A96F-4709-BA47-F233A8FAAB5F", &sector),
        ("CDA348C7-445D-4471-9CC9-E9885251C556", &sector),
        ("BECA12AB-B2E6-4523-93EF-C309E000C746", &[0x66; 16]),
    ];
    if !locator.is_empty() {
        items.push(("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C", locator));
    }
    put(&mut image, METADATA + 10, &(items.len() as u16).to_le_bytes());
    for (index, (id, item)) in items.into_iter().enumerate() {
        let (entry, at) = (METADATA + 32 + 32 * index, (64 << 10) + 4096 * index);
        put(&mut image, entry, &guid(id));
        put(&mut image, entry + 16, &(at as u32).to_le_bytes());
        put(&mut image, entry + 20, &(item.len() as u32).to_le_bytes());
        put(&mut image, entry + 24, &4u32.to_le_bytes());
        put(&mut image, METADATA + at, item);
    }
    for (index, state) in states.into_iter().enumerate() {
        put(&mut image, TABLE + 8 * index, &state.to_le_bytes());
    }
    let data = pattern(MIB, 81);
    put(&mut image, BLOCK, &data);
    image
}

/// A dynamic VHDX.
pub fn vhdx() -> Sample {
    let image = vhdx_with(0, &[], [6 | BLOCK as u64, 0, 2]);
    let mut disk = pattern(MIB, 81);
    disk.resize(3 * MIB, 0);
    Sample::one("vhdx", image, disk)
}

/// A VHDX whose table says that the third block is there only by the log.
pub fn vhdx_with_log() -> Sample {
    let mut image = vhdx_with(0, &[], [6 | BLOCK as u64, 0, 2]);
    for at in [64 << 10, 128 << 10] {
        put(&mut image, at + 48, &LOG_GUID);
        set_vhdx_sum(&mut image, at, 4096);
    }
    // Two entries: the first zeroes the table, the second writes it.
    let mut table = vec![0; 4096];
    put(&mut table, 8, &(6 | BITMAP as u64).to_le_bytes());
    put(&mut image, BITMAP, &pattern(MIB, 82));
    let mut entries = Vec::new();
    for (number, is_data) in [(41u64, false), (42, true)] {
        let mut entry = b"loge".to_vec();
        let len = if is_data { 8192u32 } else { 4096 };
        put(&mut entry, 8, &len.to_le_bytes());
        put(&mut entry, 16, &number.to_le_bytes());
        put(&mut entry, 24, &1u32.to_le_bytes());
        put(&mut entry, 32, &LOG_GUID);
        put(&mut entry, 48, &(6 * MIB as u64).to_le_bytes());
        put(&mut entry, 56, &(6 * MIB as u64).to_le_bytes());
        if is_data {
            put(&mut entry, 64, b"desc");
            put(&mut entry, 68, &table[4092..]);
            put(&mut entry, 72, &table[..8]);
            put(&mut entry, 4096, b"data");
            put(&mut entry, 4104, &table[8..4092]);
            put(&mut entry, 8188, &(number as u32).to_le_bytes());
        } else {
            put(&mut entry, 64, b"zero");
            put(&mut entry, 72, &4096u64.to_le_bytes());
        }
        put(&mut entry, 80, &(TABLE as u64).to_le_bytes());
        put(&mut entry, 88, &number.to_le_bytes());
        entry.resize(len as usize, 0);
        set_vhdx_sum(&mut entry, 0, len as usize);
        entries.extend(entry);
    }
    // They begin at the end of the ring and go on at its start.
    let first = MIB - 4096;
    let tail = (first as u32).to_le_bytes();
    for at in [0, 4096] {
        let len = if at == 0 { 4096 } else { 8192 };
        put(&mut entries, at + 12, &tail);
        set_vhdx_sum(&mut entries[at..], 0, len);
    }
    put(&mut image, LOG + first, &entries[..4096]);
    put(&mut image, LOG, &entries[4096..]);
    let mut disk = vec![0; 3 * MIB];
    disk[MIB..2 * MIB].copy_from_slice(&pattern(MIB, 82));
    Sample::one("vhdx", image, disk)
}

/// A VHDX with a log of 64 MiB that is full: its entries write as much behind the end of the file, where nothing of the disk is.
pub fn vhdx_with_long_log() -> Sample {
    const LEN: usize = 64 * MIB;
    const DESCRIPTORS: usize = 126;
    const ENTRY: usize = (DESCRIPTORS + 1) * 4096;
    let mut sample = vhdx();
    let image = sample.image();
    let log = image.len();
    image.resize(log + LEN, 0);
    for at in [64 << 10, 128 << 10] {
        put(image, at + 48, &LOG_GUID);
        put(image, at + 68, &(LEN as u32).to_le_bytes());
        put(image, at + 72, &(log as u64).to_le_bytes());
        set_vhdx_sum(image, at, 4096);
    }
    let (flushed, last) = (image.len() as u64, image.len() as u64 + LEN as u64);
    for index in 0..LEN / ENTRY {
        let number = index as u64 + 1;
        let mut entry = b"loge".to_vec();
        put(&mut entry, 8, &(ENTRY as u32).to_le_bytes());
        put(&mut entry, 16, &number.to_le_bytes());
        put(&mut entry, 24, &(DESCRIPTORS as u32).to_le_bytes());
        put(&mut entry, 32, &LOG_GUID);
        put(&mut entry, 48, &flushed.to_le_bytes());
        put(&mut entry, 56, &last.to_le_bytes());
        for sector in 0..DESCRIPTORS {
            let descriptor = 64 + 32 * sector;
            let place = flushed + ((index * DESCRIPTORS + sector) * 4096) as u64;
            put(&mut entry, descriptor, b"desc");
            put(&mut entry, descriptor + 16, &place.to_le_bytes());
            put(&mut entry, descriptor + 24, &number.to_le_bytes());
            let data = 4096 * (sector + 1);
            put(&mut entry, data, b"data");
            put(&mut entry, data + 4092, &(number as u32).to_le_bytes());
        }
        set_vhdx_sum(&mut entry, 0, ENTRY);
        put(image, log + index * ENTRY, &entry);
    }
    sample
}

/// A differencing VHDX: of its first block, it holds sectors 3 to 9 and 100.
pub fn vhdx_differencing() -> Sample {
    let pairs =
        [("parent_linkage", "{01020304-0506-0708-090A-0B0C0D0E0F10}"), ("relative_path", "..\\base.vhdx")];
    let mut locator = guid("B04AEFB7-D19E-4A81-B789-25B8E9445913").to_vec();
    put(&mut locator, 18, &(pairs.len() as u16).to_le_bytes());
    let mut at = 20 + 12 * pairs.len();
    for (index, (key, value)) in pairs.into_iter().enumerate() {
        for (part, text) in [key, value].into_iter().enumerate() {
            let bytes: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
            put(&mut locator, 20 + 12 * index + 4 * part, &(at as u32).to_le_bytes());
            put(&mut locator, 20 + 12 * index + 8 + 2 * part, &(bytes.len() as u16).to_le_bytes());
            put(&mut locator, at, &bytes);
            at += bytes.len();
        }
    }
    let mut image = vhdx_with(2, &locator, [7 | BLOCK as u64, 0, 2]);
    // 4096 blocks of 1 MiB share a bitmap; its entry stands behind theirs.
    put(&mut image, TABLE + 8 * 4096, &(6 | BITMAP as u64).to_le_bytes());
    let mut disk = vec![0; 3 * MIB];
    let data = pattern(MIB, 81);
    for sector in (3..10).chain([100]) {
        image[BITMAP + sector / 8] |= 1 << (sector % 8);
        disk[sector * 512..][..512].copy_from_slice(&data[sector * 512..][..512]);
    }
    Sample::one("vhdx", image, disk)
}
