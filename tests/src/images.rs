//! Images made by QEMU in every shape that the format allows.

use crate::qemu::Qemu;
use crate::random::Random;
use std::fmt;
use std::path::Path;

/// A feature of an image besides plain clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Feature {
    /// Nothing.
    Plain,
    /// Extended L2 entries.
    ExtendedL2,
    /// Clusters compressed with deflate.
    Zlib,
    /// Clusters compressed with zstd.
    Zstd,
    /// External data file.
    DataFile,
    /// External data file that is a raw image by itself.
    RawDataFile,
    /// Raw backing file, shorter than the image.
    BackingRaw,
    /// Two qcow2 backing files below: the nearer longer than the image, the farther shorter.
    BackingChain,
    /// Two internal snapshots.
    Snapshot,
    /// The lazy-refcounts flag, cleanly closed.
    LazyRefcounts,
    /// The dirty bit, left by a killed process: refcounts are stale.
    Dirty,
}

impl Feature {
    /// All of them.
    pub const ALL: [Feature; 11] = [
        Feature::Plain,
        Feature::ExtendedL2,
        Feature::Zlib,
        Feature::Zstd,
        Feature::DataFile,
        Feature::RawDataFile,
        Feature::BackingRaw,
        Feature::BackingChain,
        Feature::Snapshot,
        Feature::LazyRefcounts,
        Feature::Dirty,
    ];

    /// Its name in messages and on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Feature::Plain => "plain",
            Feature::ExtendedL2 => "extended-l2",
            Feature::Zlib => "zlib",
            Feature::Zstd => "zstd",
            Feature::DataFile => "data-file",
            Feature::RawDataFile => "raw-data-file",
            Feature::BackingRaw => "backing-raw",
            Feature::BackingChain => "backing-chain",
            Feature::Snapshot => "snapshot",
            Feature::LazyRefcounts => "lazy-refcounts",
            Feature::Dirty => "dirty",
        }
    }

    /// Whether there are backing files.
    pub fn has_backing(self) -> bool {
        matches!(self, Feature::BackingRaw | Feature::BackingChain)
    }
}

/// The shape of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// 2 or 3.
    pub version: u32,
    /// Bytes.
    pub cluster: u64,
    /// Width of a refcount.
    pub refcount_bits: u32,
    /// The feature besides.
    pub feature: Feature,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, cluster, refcount_bits, feature } = self;
        write!(f, "v{version}-c{cluster}-r{refcount_bits}-{}", feature.name())
    }
}

/// The cluster sizes of the matrix, in bytes.
pub const CLUSTERS: [u64; 4] = [512, 4096, 65536, 2 << 20];

/// The files of a shape all have these names; the image itself is this one.
pub const IMAGE: &str = "image.qcow2";

/// Names of the two snapshots.
pub const SNAPSHOTS: [&str; 2] = ["first", "second"];

impl Shape {
    /// All legal shapes.
    pub fn matrix() -> Vec<Shape> {
        let of_version = |version| CLUSTERS.into_iter().flat_map(move |cluster| Shape::all(version, cluster));
        [2, 3].into_iter().flat_map(of_version).collect()
    }

    /// All legal shapes of a version with clusters of `cluster` bytes.
    pub fn all(version: u32, cluster: u64) -> Vec<Shape> {
        let of = |refcount_bits, feature| Shape { version, cluster, refcount_bits, feature };
        [1, 16, 64]
            .into_iter()
            .flat_map(|bits| Feature::ALL.map(|feature| of(bits, feature)))
            .filter(Shape::is_legal)
            .collect()
    }

    /// The number of the first shape of a version with one cluster size: tenths of matrices begin with different features.
    pub fn first(version: u32, cluster: u64) -> usize {
        (version + cluster.ilog2()) as usize
    }

    /// Whether QEMU can make it (limits of the format, and a refcount of one bit can't count a second snapshot).
    pub fn is_legal(&self) -> bool {
        let needs_v3 = !matches!(
            self.feature,
            Feature::Plain | Feature::Zlib | Feature::BackingRaw | Feature::BackingChain | Feature::Snapshot
        );
        (self.version == 3 || (!needs_v3 && self.refcount_bits == 16))
            && (self.feature != Feature::ExtendedL2 || self.cluster >= 16384)
            && (self.feature != Feature::Snapshot || self.refcount_bits > 1)
    }

    /// Bytes of its disk: several L2 tables where that is affordable, and a part of a cluster at the end.
    pub fn size(&self) -> u64 {
        let clusters = match self.cluster {
            512 => 4096,
            4096 => 2048,
            65536 => 256,
            _ => 20,
        };
        // The last cluster is a part of one, unless a cluster is a sector.
        clusters * self.cluster - if self.cluster > 512 { self.cluster / 2 } else { 0 }
    }

    /// Makes the image in `dir`, with content by `seed`.
    ///
    /// # Panics
    /// If QEMU can't.
    pub fn make(&self, qemu: &Qemu, dir: &Path, seed: u64) {
        let mut random = Random::new(seed);
        let size = self.size();
        let options = self.create_options();
        match self.feature {
            Feature::BackingRaw => {
                let base = random_disk(&mut random, size / 3 / 512 * 512);
                std::fs::write(dir.join("base.raw"), base).expect("scratch is writable");
                self.create_over(qemu, dir, IMAGE, "base.raw", "raw", size);
            }
            Feature::BackingChain => {
                qemu.create(dir, "base.qcow2", "qcow2", "cluster_size=64k", size / 2 / 512 * 512);
                scribble(qemu, dir, "base.qcow2", size / 2 / 512 * 512, 20, &mut random);
                let middle = Shape { feature: Feature::Plain, ..*self };
                middle.create_over(qemu, dir, "middle.qcow2", "base.qcow2", "qcow2", size + 3 * 512);
                scribble(qemu, dir, "middle.qcow2", size, 20, &mut random);
                self.create_over(qemu, dir, IMAGE, "middle.qcow2", "qcow2", size);
            }
            Feature::Zlib | Feature::Zstd => {
                std::fs::write(dir.join("source.raw"), random_disk(&mut random, size))
                    .expect("scratch is writable");
                let args = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "source.raw", IMAGE];
                qemu.img(dir, args).ok();
                std::fs::remove_file(dir.join("source.raw")).expect("it is ours");
            }
            _ => qemu.create(dir, IMAGE, "qcow2", &options, size),
        }
        scribble(qemu, dir, IMAGE, size, 30, &mut random);
        match self.feature {
            Feature::Snapshot => {
                for name in SNAPSHOTS {
                    qemu.img(dir, ["snapshot", "-c", name, IMAGE]).ok();
                    scribble(qemu, dir, IMAGE, size, 15, &mut random);
                }
            }
            Feature::Dirty => {
                let mut commands = script(dir, size, 10, &mut random);
                // Something is allocated for sure; what was flushed stays; the process dies before it writes
                // refcounts back.
                commands.push(format!("write -z -u 0 {}", self.cluster));
                commands.extend(["write -P 9 0 512", "flush", "sigraise 9"].map(String::from));
                qemu.io(dir, "-f qcow2 -t writeback", IMAGE, &commands);
                let dirty = &qemu.info(dir, IMAGE)["dirty-flag"];
                assert_eq!(dirty, true, "{self}: the killed process left no dirty bit");
            }
            _ => {}
        }
    }

    /// Options of `create` for this shape.
    pub fn create_options(&self) -> String {
        let mut options = format!("cluster_size={}", self.cluster);
        if self.version == 2 {
            options += ",compat=0.10";
        } else {
            options += &format!(",compat=1.1,refcount_bits={}", self.refcount_bits);
        }
        options += match self.feature {
            Feature::ExtendedL2 => ",extended_l2=on",
            Feature::Zstd => ",compression_type=zstd",
            Feature::DataFile => ",data_file=data.bin",
            Feature::RawDataFile => ",data_file=data.bin,data_file_raw=on",
            Feature::LazyRefcounts | Feature::Dirty => ",lazy_refcounts=on",
            _ => "",
        };
        options
    }

    fn create_over(&self, qemu: &Qemu, dir: &Path, name: &str, backing: &str, format: &str, size: u64) {
        let (options, size) = (self.create_options(), size.to_string());
        let args = ["create", "-q", "-f", "qcow2", "-o", &options, "-b", backing, "-F", format, name, &size];
        qemu.img(dir, args).ok();
    }
}

/// A disk of random bytes, compressible text and holes.
fn random_disk(random: &mut Random, size: u64) -> Vec<u8> {
    let mut disk = vec![0; size as usize];
    let mut at = 0;
    while at < disk.len() {
        let len = (512 * random.between(1, 400) as usize).min(disk.len() - at);
        let piece = &mut disk[at..at + len];
        match random.below(4) {
            0 => random.fill(piece),
            1 => piece.fill(random.below(256) as u8),
            2 => {
                let tag = random.bits();
                for (line, chunk) in piece.chunks_mut(32).enumerate() {
                    let text = format!("{tag:016x} line {line:09}\n");
                    chunk.copy_from_slice(&text.as_bytes()[..chunk.len()]);
                }
            }
            _ => {}
        }
        at += len;
    }
    disk
}

/// Lets QEMU write, zero and discard at random.
fn scribble(qemu: &Qemu, dir: &Path, image: &str, size: u64, count: usize, random: &mut Random) {
    let commands = script(dir, size, count, random);
    let out = qemu.io(dir, "-f qcow2 -d unmap -t writeback", image, &commands);
    assert!(out.code == Some(0), "{out}");
}

/// Random commands for `qemu-io`. Some take their bytes from files, made here, that hold no byte pattern twice.
fn script(dir: &Path, size: u64, count: usize, random: &mut Random) -> Vec<String> {
    let sources: Vec<String> = (0..3)
        .map(|number| {
            let name = format!("source-{number}.bin");
            let mut bytes = vec![0; 65536];
            random.fill(&mut bytes);
            std::fs::write(dir.join(&name), bytes).expect("scratch is writable");
            name
        })
        .collect();
    let longest = (size / 12).max(512);
    (0..count)
        .map(|_| {
            let offset = random.below(size / 512) * 512;
            let len = (512 * random.between(1, longest / 512)).min(size - offset);
            match random.below(8) {
                0 => format!("write -z {offset} {len}"),
                1 => format!("write -z -u {offset} {len}"),
                2 => format!("discard {offset} {len}"),
                3 | 4 => format!("write -P {} {offset} {len}", random.between(1, 255)),
                _ => format!("write -s {} {offset} {len}", random.pick(&sources)),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_has_every_legal_shape_once() {
        let all = Shape::matrix();
        let unique: std::collections::HashSet<&Shape> = all.iter().collect();
        assert_eq!(all.len(), unique.len());
        // Version 2: 4 cluster sizes x 5 features. Version 3: 3 widths x 4 sizes x 11 features, less extended L2 on
        // the two small sizes, less snapshots with 1 bit.
        assert_eq!(all.len(), 4 * 5 + 3 * 4 * 11 - 3 * 2 - 4);
        assert!(all.iter().all(|shape| shape.size() % 512 == 0));
    }
}
