//! Images that name other files, and raw files that look like images: what CVE-2015-5163, CVE-2024-32498,
//! CVE-2024-4467, CVE-2024-44082 and CVE-2022-47951 are made of.

use super::base::{self, EXTENSIONS, NAME};
use crate::patch::{Patch, header as field};
use std::path::Path;

const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE_NAME: u32 = 0x4441_5441;

/// Writes the intact image with one header extension in place of its own.
fn with_extension(path: &Path, kind: u32, data: &[u8]) -> Patch {
    std::fs::write(path, base::image()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let patch = Patch::open(path);
    // Bitmaps and the snapshot go: an image with a data file may have neither.
    patch.set_u64(field::AUTOCLEAR, 0).set_u32(field::SNAPSHOT_COUNT, 0).set_u64(field::SNAPSHOTS_OFFSET, 0);
    patch.set(EXTENSIONS, &[0; 64]).set_u32(EXTENSIONS, kind).set_u32(EXTENSIONS + 4, data.len() as u32);
    patch.set(EXTENSIONS + 8, data);
    patch
}

/// An image that names a backing file, and its format unless that is empty.
pub fn backing(path: &Path, name: &str, format: &str) {
    let kind = if format.is_empty() { 0 } else { BACKING_FORMAT };
    let patch = with_extension(path, kind, format.as_bytes());
    patch.set_u64(8, NAME).set_u32(field::BACKING_FILE_SIZE, name.len() as u32).set(NAME, name.as_bytes());
}

/// An image that names an external data file. Its one data cluster lies there; the others are not allocated.
pub fn data_file(path: &Path, name: &str) {
    let patch = with_extension(path, DATA_FILE_NAME, name.as_bytes());
    patch.set_u64(field::INCOMPATIBLE, 4);
    patch.set(base::L2, &[0; 64]).set_u64(base::L2, 1 << 63);
}

/// A raw disk on which a guest wrote the header of an image that names a file.
pub fn raw_with_qcow2_header(path: &Path, name: &str) {
    backing(path, name, "raw");
}

/// A raw disk on which a guest wrote a VMDK descriptor that names a file.
pub fn vmdk_descriptor(path: &Path, name: &str) {
    let text = format!(
        "# Disk DescriptorFile\nversion=1\ncreateType=\"monolithicFlat\"\nRW 8192 FLAT \"{name}\" 0\n"
    );
    write_padded(path, text);
}

/// A VMDK that names a parent.
pub fn vmdk_child(path: &Path, name: &str) {
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nparentCID=12345678\nparentFileNameHint=\"{name}\"\n\
         createType=\"monolithicFlat\"\nRW 8192 ZERO\n"
    );
    write_padded(path, text);
}

fn write_padded(path: &Path, text: String) {
    let mut bytes = text.into_bytes();
    bytes.resize(65536, 0);
    std::fs::write(path, bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
