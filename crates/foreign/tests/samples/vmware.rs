//! Images in VMDK.

use super::packed::zlib;
use super::{Sample, pattern, put};

/// Bytes of a grain.
const GRAIN: usize = 4096;

/// A descriptor that names extents.
pub fn descriptor(create_type: &str, more: &str, extents: &str) -> Vec<u8> {
    format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"{create_type}\"\n{more}\n\
         # Extent description\n{extents}\n\n# The Disk Data Base\nddb.adapterType = \"ide\"\n"
    )
    .into_bytes()
}

fn header(flags: u32, sectors: u64, directory: u64) -> Vec<u8> {
    let mut image = b"KDMV".to_vec();
    for (at, value) in [(4, 3u32), (8, flags | 1), (44, 512)] {
        put(&mut image, at, &value.to_le_bytes());
    }
    for (at, value) in [(12, sectors), (20, GRAIN as u64 / 512), (28, 1), (36, 2), (56, directory)] {
        put(&mut image, at, &value.to_le_bytes());
    }
    put(&mut image, 73, b"\n \r\n");
    image.resize(512, 0);
    image
}

/// Five grains: two of data, one of zeroes, two nowhere. The last one is cut off by the end of the disk.
pub fn sparse() -> Sample {
    let size = 4 * GRAIN + 512;
    let mut image = header(1 << 2, size as u64 / 512, 3);
    put(&mut image, 512, &descriptor("monolithicSparse", "", "RW 33 SPARSE \"image\""));
    put(&mut image, 1536, &4u32.to_le_bytes());
    for (index, sector) in [16u32, 1, 0, 24, 0].into_iter().enumerate() {
        put(&mut image, 2048 + 4 * index, &sector.to_le_bytes());
    }
    let (first, fourth) = (pattern(GRAIN, 21), pattern(GRAIN, 22));
    put(&mut image, 8192, &first);
    put(&mut image, 12288, &fourth);
    let mut disk = vec![0; size];
    disk[..GRAIN].copy_from_slice(&first);
    disk[3 * GRAIN..4 * GRAIN].copy_from_slice(&fourth);
    Sample::one("vmdk", image, disk)
}

fn marker(image: &mut Vec<u8>, sectors: u64, kind: u32) {
    let at = image.len();
    put(image, at, &sectors.to_le_bytes());
    put(image, at + 12, &kind.to_le_bytes());
    image.resize(at + 512, 0);
}

/// Two grains behind their markers, a table, a directory, a footer.
pub fn stream_optimized() -> Sample {
    let size = 3 * GRAIN;
    let mut image = header(3 << 16, size as u64 / 512, u64::MAX);
    put(&mut image, 77, &1u16.to_le_bytes());
    put(&mut image, 512, &descriptor("streamOptimized", "", "RW 24 SPARSE \"image\""));
    image.resize(1536, 0);
    let mut table = vec![0; 2048];
    let mut disk = vec![0; size];
    for grain in [0, 2] {
        let data = pattern(GRAIN, 30 + grain as u8);
        let stream = zlib(&data);
        let at = image.len();
        put(&mut table, 4 * grain, &(at as u32 / 512).to_le_bytes());
        put(&mut image, at, &((grain * GRAIN / 512) as u64).to_le_bytes());
        put(&mut image, at + 8, &(stream.len() as u32).to_le_bytes());
        put(&mut image, at + 12, &stream);
        image.resize(image.len().next_multiple_of(512), 0);
        disk[grain * GRAIN..(grain + 1) * GRAIN].copy_from_slice(&data);
    }
    marker(&mut image, 4, 1);
    let table_at = image.len() as u32 / 512;
    image.extend(table);
    marker(&mut image, 1, 2);
    let directory = image.len() as u64 / 512;
    image.extend(table_at.to_le_bytes());
    image.resize(image.len().next_multiple_of(512), 0);
    marker(&mut image, 1, 3);
    let mut footer = header(3 << 16, size as u64 / 512, directory);
    put(&mut footer, 77, &1u16.to_le_bytes());
    image.extend(footer);
    marker(&mut image, 0, 0);
    Sample::one("vmdk", image, disk)
}

/// A descriptor and two flat extents, one of them from the middle of its file, with zeroes between them.
pub fn flat() -> Sample {
    let extents = "RW 8 FLAT \"one\" 0\nRW 3 ZERO\nRDONLY 4 FLAT \"two\" 2";
    let (one, two) = (pattern(4096, 41), pattern(4096, 42));
    let disk = [&one[..], &[0; 1536], &two[1024..3072]].concat();
    let files = vec![("image", descriptor("twoGbMaxExtentFlat", "", extents)), ("one", one), ("two", two)];
    Sample { format: "vmdk", files, disk }
}

/// The extent of [`cowd`] by itself.
pub fn cowd_alone() -> Sample {
    let Sample { mut files, disk, .. } = cowd();
    Sample::one("vmdk", files.remove(1).1, disk)
}

/// A descriptor, and a sparse extent of ESX 3: grains of a sector.
pub fn cowd() -> Sample {
    let mut image = b"COWD".to_vec();
    for (at, value) in [(4, 1u32), (8, 3), (12, 20), (16, 1), (20, 4), (24, 1), (28, 60)] {
        put(&mut image, at, &value.to_le_bytes());
    }
    put(&mut image, 2048, &5u32.to_le_bytes());
    let data = pattern(1024, 51);
    for (grain, sector) in [(3, 40u32), (4, 41)] {
        put(&mut image, 2560 + 4 * grain, &sector.to_le_bytes());
    }
    put(&mut image, 40 * 512, &data);
    let mut disk = vec![0; 20 * 512];
    disk[3 * 512..5 * 512].copy_from_slice(&data);
    let descriptor = descriptor("vmfsSparse", "", "RW 20 VMFSSPARSE \"delta\"");
    Sample { format: "vmdk", files: vec![("image", descriptor), ("delta", image)], disk }
}

/// A descriptor, and an extent as ESX 6.5 makes them for snapshots: one grain of data, one unmapped, one of zeroes.
pub fn se_sparse() -> Sample {
    let size = 5 * GRAIN;
    let mut extent = Vec::new();
    let fields = [
        (0, 0xcafe_babe_u64),
        (1, 0x2_0000_0001),
        (2, size as u64 / 512),
        (3, 8),
        (4, 64),
        (10, 1),
        (11, 1),
        (16, 2),
        (17, 1),
        (18, 64),
        (19, 64),
        (24, 128),
        (25, 16),
    ];
    for (index, value) in fields {
        put(&mut extent, 8 * index, &value.to_le_bytes());
    }
    put(&mut extent, 512, &0xcafe_cafe_u64.to_le_bytes());
    put(&mut extent, 1024, &0x1000_0000_0000_0000_u64.to_le_bytes());
    // Grain 1 of the file: its number's low 12 bits stand above bit 48.
    for (index, entry) in [0u64, 3 << 60 | 1 << 48, 1 << 60, 2 << 60].into_iter().enumerate() {
        put(&mut extent, 64 * 512 + 8 * index, &entry.to_le_bytes());
    }
    let data = pattern(GRAIN, 61);
    put(&mut extent, 128 * 512 + GRAIN, &data);
    let mut disk = vec![0; size];
    disk[GRAIN..2 * GRAIN].copy_from_slice(&data);
    let image = descriptor("seSparse", "", "RW 40 SESPARSE \"delta\"");
    Sample { format: "vmdk", files: vec![("image", image), ("delta", extent)], disk }
}
