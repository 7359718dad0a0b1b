//! Devices as files and as bytes, and the programs that make them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_luks::{CipherSpec, HashName, Limits, Luks1Header, Luks1Options, MasterKey, Random, SystemRandom};

/// A directory of a test's own, with the passphrases `one` and `two` in files of these names.
pub(crate) struct Scratch(tempfile::TempDir);

impl Scratch {
    /// `None`: tests with other programs are left out.
    pub(crate) fn new() -> Option<Self> {
        if std::env::var_os("ZEBU_SKIP_QEMU").is_some_and(|value| value == "1") {
            eprintln!("skipped: ZEBU_SKIP_QEMU=1");
            return None;
        }
        let scratch = Self(tempfile::tempdir().unwrap());
        for name in ["one", "two"] {
            std::fs::write(scratch.path(name), name).unwrap();
        }
        Some(scratch)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A new file of 20 MiB of zeroes.
    pub(crate) fn device(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(20 << 20).unwrap();
        path
    }

    /// Runs a program in this directory; whether it said yes, and what it said.
    pub(crate) fn ask<A: AsRef<OsStr>>(&self, program: &str, args: &[A]) -> (bool, String) {
        let output = Command::new(program).current_dir(&self.0).args(args).output().unwrap_or_else(|error| {
            panic!("{program} is needed ({error}): apt install cryptsetup-bin qemu-utils, or set ZEBU_SKIP_QEMU=1")
        });
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    pub(crate) fn run<A: AsRef<OsStr> + std::fmt::Debug>(&self, program: &str, args: &[A]) -> String {
        let (is_well, said) = self.ask(program, args);
        assert!(is_well, "{program} {args:?}: {said}");
        said
    }
}

/// Options that cost little.
pub(crate) fn cheap(cipher: CipherSpec, hash: HashName) -> Luks1Options {
    Luks1Options::new(cipher, hash, 1000)
}

/// The key of a LUKS1 device, and the slot that the passphrase opens.
pub(crate) fn open_luks1(device: &[u8], passphrase: &[u8]) -> Option<(Luks1Header, MasterKey, u32)> {
    let header = Luks1Header::parse(device, &Limits::default()).unwrap();
    let found = header.active_slots().find_map(|slot| {
        let material = header.material(slot).unwrap();
        let material = &device[material.start as usize..material.end as usize];
        header.unlock(slot, passphrase, material).unwrap().map(|key| (key, slot))
    });
    found.map(|(key, slot)| (header, key, slot))
}

/// Writes a change to a device, whole.
pub(crate) fn apply(device: &mut [u8], steps: &[zebu_luks::HeaderStep]) {
    for write in steps.iter().flat_map(|step| &step.writes) {
        let at = write.offset as usize;
        device[at..at + write.bytes.len()].copy_from_slice(&write.bytes);
    }
}

/// `len` bytes that no cipher gives by chance.
pub(crate) fn random_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SystemRandom.fill(&mut bytes).unwrap();
    bytes
}

pub(crate) fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}
