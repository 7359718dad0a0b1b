//! QEMU's tools: the judge of everything here.

use crate::program::{Finished, find, run_in};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The installed `qemu-img` and `qemu-io`.
#[derive(Debug, Clone)]
pub struct Qemu {
    img: PathBuf,
    io: PathBuf,
}

impl Qemu {
    /// The installed tools; `None` if `ZEBU_SKIP_QEMU=1`, and then the test is to pass without them.
    ///
    /// # Panics
    /// If they are missing and may not be skipped.
    pub fn find() -> Option<Self> {
        if std::env::var_os("ZEBU_SKIP_QEMU").is_some_and(|v| v == "1") {
            eprintln!("skipped: ZEBU_SKIP_QEMU=1");
            return None;
        }
        let tool = |name| {
            find(name).unwrap_or_else(|| {
                panic!(
                    "{name} is missing: `cargo xtask setup` installs it; ZEBU_SKIP_QEMU=1 passes without it"
                )
            })
        };
        Some(Self { img: tool("qemu-img"), io: tool("qemu-io") })
    }

    /// Runs `qemu-img` in `dir`.
    pub fn img<S: AsRef<OsStr>>(&self, dir: &Path, args: impl IntoIterator<Item = S>) -> Finished {
        run_in(dir, &self.img, args)
    }

    /// Runs `qemu-img` with words split at blanks.
    pub fn img_line(&self, dir: &Path, line: &str) -> Finished {
        self.img(dir, line.split_whitespace())
    }

    /// Runs commands of `qemu-io` on an image, with the options given (words split at blanks).
    pub fn io<S: AsRef<str>>(&self, dir: &Path, options: &str, image: &str, commands: &[S]) -> Finished {
        let mut args: Vec<&str> = options.split_whitespace().collect();
        for command in commands {
            args.extend(["-c", command.as_ref()]);
        }
        args.push(image);
        run_in(dir, &self.io, args)
    }

    /// Creates an image.
    pub fn create(&self, dir: &Path, name: &str, format: &str, options: &str, size: u64) {
        let mut args = vec!["create", "-q", "-f", format];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        let size = size.to_string();
        args.extend([name, &size]);
        self.img(dir, args).ok();
    }

    /// The answer of `info`.
    pub fn info(&self, dir: &Path, image: &str) -> Value {
        let out = self.img(dir, ["info", "-U", "--output=json", image]).ok();
        serde_json::from_str(&out.stdout).expect("qemu-img prints JSON")
    }

    /// The bytes that a guest reads, as QEMU reads them.
    pub fn read_all(&self, dir: &Path, image: &str, snapshot: Option<&str>) -> Vec<u8> {
        let target = format!("{image}.as-read-by-qemu");
        let mut args = vec!["convert", "-O", "raw"];
        let selector = snapshot.map(|name| format!("snapshot.name={name}"));
        if let Some(selector) = &selector {
            args.extend(["-l", selector]);
        }
        args.extend(["-f", "qcow2", image, &target]);
        self.img(dir, args).ok();
        let path = dir.join(target);
        let bytes = std::fs::read(&path).expect("qemu-img wrote it");
        std::fs::remove_file(path).expect("it is ours");
        bytes
    }

    /// An error that quotes `check`, unless it finds neither errors nor leaks.
    pub fn check_clean(&self, dir: &Path, image: &str) -> Result<(), String> {
        let out = self.img(dir, ["check", "-f", "qcow2", image]);
        if out.code == Some(0) { Ok(()) } else { Err(out.to_string()) }
    }

    /// An error that quotes `compare`, unless a raw file and an image show the same bytes.
    pub fn same_content(&self, dir: &Path, raw: &str, image: &str) -> Result<(), String> {
        let out = self.img(dir, ["compare", "-f", "raw", "-F", "qcow2", raw, image]);
        if out.code == Some(0) { Ok(()) } else { Err(out.to_string()) }
    }
}
