//! Real QEMU as the oracle of the tests beside this module.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A directory for images, gone at the end of the test.
pub(crate) struct Scratch(tempfile::TempDir);

impl Scratch {
    /// `None` if the environment says that tests against QEMU are to be skipped.
    pub(crate) fn new() -> Option<Self> {
        if std::env::var_os("ZEBU_SKIP_QEMU").is_some_and(|value| value == "1") {
            eprintln!("skipped: ZEBU_SKIP_QEMU=1");
            return None;
        }
        for tool in ["qemu-img", "qemu-io"] {
            let found = Command::new(tool).arg("--version").output();
            assert!(
                found.is_ok_and(|output| output.status.success()),
                "{tool} is needed as the oracle of this test: install it (Debian and Ubuntu: apt-get install \
                 qemu-utils; Fedora: dnf install qemu-img), or set ZEBU_SKIP_QEMU=1 to leave these tests out"
            );
        }
        Some(Self(tempfile::tempdir().expect("a temporary directory")))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `qemu-img create -f qcow2 -o OPTIONS SIZE`; the bytes of the new image.
    pub(crate) fn create(&self, options: &str, size: &str) -> Vec<u8> {
        let path = self.path("created.qcow2");
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-u"];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        qemu_img(&arguments, &[&path], &[size]);
        std::fs::read(&path).expect("the created image")
    }

    /// Writes an image for QEMU to judge.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("an image in the temporary directory");
        path
    }
}

/// Runs a tool in the C locale.
pub(crate) fn run(tool: &str, before: &[&str], paths: &[&Path], after: &[&str]) -> Output {
    Command::new(tool)
        .args(before)
        .args(paths)
        .args(after)
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{tool}: {error}"))
}

/// Runs `qemu-img` and expects success; its standard output.
pub(crate) fn qemu_img(before: &[&str], paths: &[&Path], after: &[&str]) -> String {
    let output = run("qemu-img", before, paths, after);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "qemu-img {before:?} {paths:?} {after:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}
