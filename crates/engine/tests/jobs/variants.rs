//! Images of one disk in every form, made by QEMU.

use crate::support::{Images, Seeded, disk, qemu_img, qemu_io, text, write_sparse};
use std::path::{Path, PathBuf};

/// An image made by QEMU, and what a guest reads from it.
pub(crate) struct Variant {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) format: &'static str,
    pub(crate) bytes: Vec<u8>,
}

/// Options of plain images; with `-c` the clusters are compressed.
const PLAIN: &[(&str, &str)] = &[
    ("compat=0.10", ""),
    ("compat=0.10", "-c"),
    ("compat=0.10,cluster_size=512", ""),
    ("cluster_size=512,refcount_bits=1", ""),
    ("cluster_size=4096,refcount_bits=64", ""),
    ("cluster_size=4096", "-c"),
    ("refcount_bits=16", ""),
    ("refcount_bits=16", "-c"),
    ("compression_type=zstd", "-c"),
    ("cluster_size=2M", ""),
    ("cluster_size=2M,compression_type=zstd", "-c"),
    ("extended_l2=on", ""),
    ("extended_l2=on,cluster_size=16384", ""),
    ("extended_l2=on", "-c"),
    ("lazy_refcounts=on", ""),
    ("preallocation=metadata", ""),
    ("preallocation=falloc", ""),
];

/// All of them, in `images`.
pub(crate) fn all(images: &Images, seed: u64) -> Vec<Variant> {
    let mut random = Seeded(seed);
    let bytes = disk(seed, 10_000 + random.below(8_000));
    let raw = images.path("disk.raw");
    write_sparse(&raw, &bytes);
    let mut made =
        vec![Variant { name: "raw".into(), path: raw.clone(), format: "raw", bytes: bytes.clone() }];
    let mut add = |name: String, path: PathBuf, bytes: &[u8]| {
        made.push(Variant { name, path, format: "qcow2", bytes: bytes.to_vec() });
    };

    for (i, (options, compress)) in PLAIN.iter().enumerate() {
        let path = images.path(&format!("plain{i}.qcow2"));
        let mut args = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", options];
        args.extend((!compress.is_empty()).then_some(*compress));
        args.extend([text(&raw), text(&path)]);
        qemu_img(&args);
        add(format!("{options} {compress}"), path, &bytes);
    }

    for raw_data in ["off", "on"] {
        let path = images.path(&format!("external-{raw_data}.qcow2"));
        let data = images.path(&format!("external-{raw_data}.data"));
        let options = format!("data_file={},data_file_raw={raw_data}", text(&data));
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-o", &options, text(&raw), text(&path)]);
        add(format!("data file, raw {raw_data}"), path, &bytes);
    }

    let (path, bytes_now) = overlay(images, "on-raw", ("disk.raw", "raw"), &bytes, &mut random, "");
    add("overlay of raw".into(), path, &bytes_now);

    // A chain of three, each with something of its own; the top one larger than what it stands on.
    let (_, bytes_1) =
        overlay(images, "chain1", ("plain6.qcow2", "qcow2"), &bytes, &mut random, "cluster_size=4096");
    let (path, mut bytes_2) =
        overlay(images, "chain2", ("chain1.qcow2", "qcow2"), &bytes_1, &mut random, "extended_l2=on");
    add("chain of 3".into(), path.clone(), &bytes_2);
    let longer = images.path("longer.qcow2");
    let size = (bytes_2.len() + (3 << 20)).to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "chain2.qcow2", "-F", "qcow2", text(&longer), &size]);
    bytes_2.resize(bytes_2.len() + (3 << 20), 0);
    add("longer than its backing file".into(), longer, &bytes_2);
    let shorter = images.path("shorter.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "chain2.qcow2", "-F", "qcow2", text(&shorter), "1M"]);
    add("shorter than its backing file".into(), shorter, &bytes_2[..1 << 20]);

    // Written after a snapshot: clusters are shared, some are zero with a place kept for them.
    let path = images.path("snapshot.qcow2");
    std::fs::copy(images.path("plain6.qcow2"), &path).unwrap();
    qemu_img(&["snapshot", "-c", "before", text(&path)]);
    let bytes_now = scribble(&path, &bytes, &mut random);
    add("internal snapshot".into(), path, &bytes_now);
    made
}

/// An image over another one, written here and there.
fn overlay(
    images: &Images,
    name: &str,
    backing: (&str, &str),
    bytes: &[u8],
    random: &mut Seeded,
    options: &str,
) -> (PathBuf, Vec<u8>) {
    let path = images.path(&format!("{name}.qcow2"));
    let mut args = vec!["create", "-q", "-f", "qcow2", "-b", backing.0, "-F", backing.1];
    if !options.is_empty() {
        args.extend(["-o", options]);
    }
    args.push(text(&path));
    qemu_img(&args);
    let bytes = scribble(&path, bytes, random);
    (path, bytes)
}

/// Writes, zeroes (with and without giving up the space) and overwrites ranges of an image; gives what a guest reads.
pub(crate) fn scribble(path: &Path, bytes: &[u8], random: &mut Seeded) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut commands = Vec::new();
    let sectors = bytes.len() as u64 / 512;
    for _ in 0..12 {
        let len = 1 + random.below(700).min(sectors - 1);
        let start = random.below(sectors - len);
        let range = (start * 512) as usize..((start + len) * 512) as usize;
        let pattern = match random.below(3) {
            0 => 1 + random.below(255),
            _ => 0,
        };
        let (offset, count) = (range.start, range.len());
        commands.push(match (pattern, random.below(2)) {
            (0, 0) => format!("write -z {offset} {count}"),
            (0, _) => format!("write -z -u {offset} {count}"),
            _ => format!("write -P {pattern} {offset} {count}"),
        });
        bytes[range].fill(pattern as u8);
    }
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu_io(path, "qcow2", &commands);
    bytes
}
