//! A disk, its store of points, and what the disk was at each point.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

pub(crate) const STORE: &str = "store:backups/vm1";
pub(crate) const DISK: &str = "disk.qcow2";
pub(crate) const MIB: u64 = 1 << 20;

/// A disk, its store, and what the disk was at each point.
pub(crate) struct Scene {
    pub(crate) scratch: Scratch,
    pub(crate) qemu: Qemu,
    pub(crate) size: u64,
    pub(crate) random: Random,
    pub(crate) copies: BTreeMap<String, PathBuf>,
    taken: u64,
}

impl Scene {
    pub(crate) fn new(name: &str, size: u64, seed: u64) -> Option<Self> {
        let qemu = Qemu::find()?;
        let scratch = Scratch::new(name);
        qemu.create(scratch.path(), DISK, "qcow2", "cluster_size=64k", size);
        Some(Self { scratch, qemu, size, random: Random::new(seed), copies: BTreeMap::new(), taken: 0 })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.scratch.path()
    }

    pub(crate) fn zebu(&self, words: &[&str]) -> Finished {
        zebu(self.dir(), words)
    }

    pub(crate) fn json(&self, words: &[&str]) -> Value {
        let line: Vec<&str> = words.iter().copied().chain(["--output", "json"]).collect();
        serde_json::from_str(&self.zebu(&line).ok().stdout).unwrap()
    }

    /// Changes the disk here and there.
    pub(crate) fn write(&mut self) {
        let mut commands =
            vec!["io".to_owned(), "-f".into(), "qcow2".into(), "-t".into(), "writeback".into()];
        for _ in 0..self.random.between(3, 10) {
            let offset = self.random.below(self.size / 512) * 512;
            let len = (512 * self.random.between(1, 3000)).min(self.size - offset);
            let command = match self.random.below(5) {
                0 => format!("write -z {offset} {len}"),
                1 => format!("discard {offset} {len}"),
                _ => format!("write -P {} {offset} {len}", self.random.between(1, 255)),
            };
            commands.extend(["-c".to_owned(), command]);
        }
        commands.push(DISK.to_owned());
        zebu(self.dir(), &commands).ok();
    }

    /// A copy of the disk as it is, by QEMU.
    pub(crate) fn copy(&mut self) -> PathBuf {
        self.taken += 1;
        let name = format!("copy{}.raw", self.taken);
        self.qemu.img(self.dir(), ["convert", "-f", "qcow2", "-O", "raw", DISK, &name]).ok();
        self.scratch.file(&name)
    }

    /// Takes a point, and keeps a copy.
    pub(crate) fn take(&mut self, options: &[&str]) -> Value {
        let copy = self.copy();
        let report = self.json(&[&["backup", DISK, STORE], options].concat());
        self.copies.insert(report["point"].as_str().unwrap().to_owned(), copy);
        report
    }

    pub(crate) fn points(&self) -> Vec<String> {
        let list = self.json(&["points", STORE]);
        list["points"]
            .as_array()
            .unwrap()
            .iter()
            .map(|point| point["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// A point restores what the disk was.
    pub(crate) fn check(&self, point: &str) {
        let name = format!("{STORE}@{point}");
        self.zebu(&["restore", "-q", "--force", &name, "restored.raw"]).ok();
        let copy = self.copies[point].to_str().unwrap();
        self.qemu.img(self.dir(), ["compare", "-f", "raw", "-F", "raw", copy, "restored.raw"]).ok();
        let lengths =
            [copy, "restored.raw"].map(|file| std::fs::metadata(self.dir().join(file)).unwrap().len());
        assert_eq!(lengths[0], lengths[1]);
    }

    pub(crate) fn check_all(&self) {
        for point in self.points() {
            self.check(&point);
        }
    }

    pub(crate) fn objects(&self, part: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir().join("backups/vm1").join(part)).unwrap();
        let mut found: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        found.sort();
        found
    }
}
