//! QEMU restores what zebu compresses: `convert -c` and `backup` in every cluster size, compression, version and window,
//! read by `qemu-img convert`, checked clean.
//!
//! `ZEBU_OLD_QEMU_IMG` names an older qemu-img (such as Debian 12's 7.2), which then has to read them, too.

use std::path::{Path, PathBuf};
use zebu_tests::program::{run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

/// Repetitions near and far, noise, holes; the last cluster is cut short.
fn content(len: usize) -> Vec<u8> {
    let mut random = Random::new(5);
    let mut bytes = vec![0; len];
    let mut far = vec![0; 20_000];
    random.fill(&mut far);
    for (index, piece) in bytes.chunks_mut(100_000).enumerate() {
        match index % 6 {
            // Only distances of 20,000 bytes make it shorter.
            0 => piece.chunks_mut(far.len()).for_each(|part| part.copy_from_slice(&far[..part.len()])),
            1 => piece.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 5) as u8),
            2 => random.fill(piece),
            3 => piece.chunks_mut(700).for_each(|part| random.fill(&mut part[..300])),
            4 => {}
            _ => piece.fill(index as u8),
        }
    }
    bytes
}

struct Readers {
    qemu: Qemu,
    old: Option<PathBuf>,
}

impl Readers {
    fn find() -> Option<Self> {
        let qemu = Qemu::find()?;
        let old = std::env::var_os("ZEBU_OLD_QEMU_IMG").map(PathBuf::from);
        match &old {
            Some(program) => eprintln!("{}", run_in(Path::new("."), program, ["--version"]).ok().stdout),
            None => eprintln!("skipped: an older qemu-img, which ZEBU_OLD_QEMU_IMG would name"),
        }
        Some(Self { qemu, old })
    }

    /// Every reader gets `expected` out of the image, and finds it clean.
    fn restore(&self, dir: &Path, image: &str, expected: &[u8], what: &str) {
        for reader in ["QEMU", "the older QEMU"] {
            let run = |words: &[&str]| match &self.old {
                _ if reader == "QEMU" => Some(self.qemu.img(dir, words)),
                Some(program) => Some(run_in(dir, program, words)),
                None => None,
            };
            let Some(converted) = run(&["convert", "-f", "qcow2", "-O", "raw", image, "restored"]) else {
                continue;
            };
            assert!(converted.code == Some(0), "{what}: {converted}");
            let restored = std::fs::read(dir.join("restored")).unwrap();
            assert!(restored == expected, "{what}: {reader} reads something else");
            let checked = run(&["check", "-f", "qcow2", image]);
            assert!(checked.as_ref().is_some_and(|out| out.code == Some(0)), "{what}: {checked:?}");
        }
    }
}

#[test]
fn what_is_converted_is_restored() {
    let Some(readers) = Readers::find() else { return };
    let scratch = Scratch::new("restores");
    let dir = scratch.path();
    let bytes = content((2 << 20) + 512);
    std::fs::write(scratch.file("disk.raw"), &bytes).unwrap();
    let mut made = 0;
    for cluster_bits in 9..=21 {
        let cluster = 1u64 << cluster_bits;
        for (options, more) in [
            ("compat=0.10", ""),
            ("compat=0.10", "--strict-deflate"),
            ("compat=1.1", ""),
            ("compat=1.1,extended_l2=on", ""),
            ("compat=1.1,compression_type=zstd", ""),
            ("compat=1.1,compression_type=zstd,extended_l2=on", ""),
        ] {
            if options.contains("extended_l2") && cluster < 16384 {
                continue;
            }
            let options = format!("{options},cluster_size={cluster}");
            let words = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options];
            let words = words.into_iter().chain(more.split_whitespace()).chain(["disk.raw", "disk.qcow2"]);
            zebu(dir, words).ok();
            let what = format!("{options} {more}");
            readers.restore(dir, "disk.qcow2", &bytes, &what);
            let len = std::fs::metadata(scratch.file("disk.qcow2")).unwrap().len();
            // Where the noise ends within a cluster, the rest of it helps little.
            assert!(cluster > 65536 || len < bytes.len() as u64 * 9 / 10, "{what}: {len} bytes");
            std::fs::remove_file(scratch.file("disk.qcow2")).unwrap();
            made += 1;
        }
    }
    assert!(made > 60);
}

#[test]
fn what_is_backed_up_is_restored() {
    let Some(readers) = Readers::find() else { return };
    let scratch = Scratch::new("restores-backup");
    let dir = scratch.path();
    let mut bytes = content((2 << 20) + 512);
    std::fs::write(scratch.file("disk.raw"), &bytes).unwrap();
    for (index, cluster_bits) in (9..=21).enumerate() {
        let cluster = format!("{}", 1u64 << cluster_bits);
        let compression = ["zlib", "zstd"][index % 2];
        let shape = ["-q", "-f", "raw", "--cluster-size", &cluster, "--compression-type", compression];
        let full = ["backup"].into_iter().chain(shape).chain(["--manifest", "full.manifest"]);
        zebu(dir, full.chain(["disk.raw", "full.qcow2"])).ok();
        let what = format!("{compression}, {cluster}");
        readers.restore(dir, "full.qcow2", &bytes, &what);
        // An increment, of a disk with some bytes more and some gone.
        let before = bytes.clone();
        bytes[700_000..700_900].fill(0xee);
        bytes[1_200_000..1_400_000].fill(0);
        std::fs::write(scratch.file("disk.raw"), &bytes).unwrap();
        let next = ["backup"].into_iter().chain(shape).chain(["--previous", "full.qcow2"]);
        let next = next.chain(["--previous-manifest", "full.manifest", "disk.raw", "next.qcow2"]);
        zebu(dir, next).ok();
        readers.restore(dir, "next.qcow2", &bytes, &format!("increment: {what}"));
        bytes = before;
        for name in ["full.qcow2", "full.manifest", "next.qcow2"] {
            std::fs::remove_file(scratch.file(name)).unwrap();
        }
        std::fs::write(scratch.file("disk.raw"), &bytes).unwrap();
    }
}
