//! Readers of images that are neither zebu nor QEMU: 7-Zip, libvhdi and libvmdk. They need QEMU's installation no more than
//! `cargo xtask setup`, and are left out with it.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

/// Debian's Python, which has the modules of Debian's packages.
const PYTHON: &str = "/usr/bin/python3";

/// Writes the disk of an image (`sys.argv[2]`) to a file, with the library that `sys.argv[1]` names. Parents follow, the
/// direct one first.
const READ: &str = "
import sys
kind, path, out, *parents = sys.argv[1:]
if kind == 'vhdi':
    import pyvhdi
    chain = []
    for name in [path] + parents:
        image = pyvhdi.file()
        image.open(name)
        chain.append(image)
    for child, parent in zip(chain, chain[1:]):
        child.set_parent(parent)
    image = chain[0]
else:
    import pyvmdk
    image = pyvmdk.handle()
    image.open(path)
    image.open_extent_data_files()
left = image.get_media_size()
with open(out, 'wb') as file:
    while left:
        piece = image.read_buffer(min(left, 1 << 20))
        file.write(piece)
        left -= len(piece)
";

/// The disk of a VHD or VHDX as libvhdi reads it. `parents` are those of a differencing image, the direct one first.
///
/// # Panics
/// libvhdi does not read it.
pub fn read_by_libvhdi(dir: &Path, image: &str, parents: &[&str]) -> Vec<u8> {
    read_by_python(dir, "vhdi", image, parents)
}

/// The disk of a VMDK as libvmdk reads it.
///
/// # Panics
/// libvmdk does not read it.
pub fn read_by_libvmdk(dir: &Path, image: &str) -> Vec<u8> {
    read_by_python(dir, "vmdk", image, &[])
}

fn read_by_python(dir: &Path, kind: &str, image: &str, parents: &[&str]) -> Vec<u8> {
    let out = Command::new(PYTHON)
        .args(["-c", READ, kind, image, "second.raw"])
        .args(parents)
        .current_dir(dir)
        .output()
        .expect("Debian's Python is installed by `cargo xtask setup`");
    assert!(out.status.success(), "{image}: {}", String::from_utf8_lossy(&out.stderr));
    std::fs::read(dir.join("second.raw")).expect("just made")
}

/// The disk of an image as 7-Zip reads it. `kind` is its own name of the format.
///
/// # Panics
/// 7-Zip does not read it.
pub fn read_by_7zip(dir: &Path, kind: &str, image: &str) -> Vec<u8> {
    let into = File::create(dir.join("second.raw")).expect("scratch is writable");
    let out = Command::new("7zz")
        .args(["e", "-so", &format!("-t{kind}"), image])
        .current_dir(dir)
        .stdout(into)
        .stderr(Stdio::piped())
        .output()
        .expect("7-Zip is installed by `cargo xtask setup`");
    assert!(out.status.success(), "{image}: {}", String::from_utf8_lossy(&out.stderr));
    std::fs::read(dir.join("second.raw")).expect("just made")
}
