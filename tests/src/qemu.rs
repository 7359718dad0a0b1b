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
    /// Of the images that commands are run on.
    passphrase: Option<String>,
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
        Some(Self { img: tool("qemu-img"), io: tool("qemu-io"), passphrase: None })
    }

    /// Runs `qemu-img` in `dir`.
    pub fn img<S: AsRef<OsStr>>(&self, dir: &Path, args: impl IntoIterator<Item = S>) -> Finished {
        run_in(dir, &self.img, args)
    }

    /// The same, which is told the passphrase of encrypted images: see [`Qemu::on_image`].
    #[must_use]
    pub fn with_passphrase(&self, passphrase: &str) -> Self {
        Self { passphrase: Some(passphrase.to_owned()), ..self.clone() }
    }

    /// Runs a command of `qemu-img` on a qcow2 image, with options before it and words behind it.
    pub fn on_image(
        &self,
        dir: &Path,
        command: &str,
        options: &[&str],
        image: &str,
        rest: &[&str],
    ) -> Finished {
        let mut words = vec![command.to_owned()];
        words.extend(options.iter().map(|word| (*word).to_owned()));
        match &self.passphrase {
            None => words.extend(["-f".to_owned(), "qcow2".to_owned(), image.to_owned()]),
            Some(passphrase) => words.extend([
                "--object".to_owned(),
                format!("secret,id=key,data={passphrase}"),
                "--image-opts".to_owned(),
                format!("driver=qcow2,encrypt.key-secret=key,file.driver=file,file.filename={image}"),
            ]),
        }
        words.extend(rest.iter().map(|word| (*word).to_owned()));
        self.img(dir, words)
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
        let mut args = vec!["-O", "raw"];
        let selector = snapshot.map(|name| format!("snapshot.name={name}"));
        if let Some(selector) = &selector {
            args.extend(["-l", selector]);
        }
        self.on_image(dir, "convert", &args, image, &[&target]).ok();
        let path = dir.join(target);
        let bytes = std::fs::read(&path).expect("qemu-img wrote it");
        std::fs::remove_file(path).expect("it is ours");
        bytes
    }

    /// An error that quotes `check`, unless it finds neither errors nor leaks.
    pub fn check_clean(&self, dir: &Path, image: &str) -> Result<(), String> {
        let out = self.on_image(dir, "check", &[], image, &[]);
        if out.code == Some(0) { Ok(()) } else { Err(out.to_string()) }
    }

    /// An error that quotes `compare`, unless a raw file and an image show the same bytes.
    pub fn same_content(&self, dir: &Path, raw: &str, image: &str) -> Result<(), String> {
        let out = self.img(dir, ["compare", "-f", "raw", "-F", "qcow2", raw, image]);
        if out.code == Some(0) { Ok(()) } else { Err(out.to_string()) }
    }
}
