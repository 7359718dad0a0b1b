//! Encrypted images of the tests, by zebu and by QEMU, with the same secrets.

use crate::program::{Finished, required, run_in, zebu};
use crate::qemu::Qemu;
use std::path::Path;

/// Passphrases by their IDs.
pub const OBJECTS: [&str; 4] =
    ["--object", "secret,id=one,data=first", "--object", "secret,id=two,data=second"];

/// Image options that open `file`, LUKS by itself or qcow2, with the secret of that ID.
pub fn of(file: &str, key: &str) -> String {
    if file.contains(".luks") {
        format!("driver=luks,key-secret={key},file.driver=file,file.filename={file}")
    } else {
        format!("driver=qcow2,encrypt.key-secret={key},file.driver=file,file.filename={file}")
    }
}

/// A command line of words, with the secrets after the command.
pub fn with_objects(line: &str) -> Vec<String> {
    let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    words.splice(1..1, OBJECTS.map(str::to_owned));
    words
}

/// Runs zebu with the secrets.
pub fn run_zebu(dir: &Path, line: &str) -> Finished {
    zebu(dir, with_objects(line))
}

/// Runs qemu-img with the secrets.
pub fn run_qemu(qemu: &Qemu, dir: &Path, line: &str) -> Finished {
    qemu.img(dir, with_objects(line))
}

/// Runs cryptsetup in `dir`, with words split at blanks. What it says.
///
/// # Panics
/// If it is missing or fails.
#[track_caller]
pub fn cryptsetup(dir: &Path, line: &str) -> String {
    let finished = run_in(dir, &required("cryptsetup"), line.split_whitespace()).ok();
    finished.stdout + &finished.stderr
}

/// Requires that nobody reads anything else from `file` than `plain`, which lies in a file of that name too.
pub fn all_read(qemu: &Qemu, dir: &Path, file: &str, key: &str, plain: &[u8]) {
    let name = of(file, key);
    for (who, finished) in [
        ("zebu", run_zebu(dir, &format!("convert --image-opts {name} -O raw read.zebu"))),
        ("QEMU", run_qemu(qemu, dir, &format!("convert --image-opts {name} -O raw read.QEMU"))),
    ] {
        finished.ok();
        let read = std::fs::read(dir.join(format!("read.{who}"))).unwrap();
        assert!(read == plain, "{file}: {who} reads other bytes");
    }
}

/// Creation options of an encrypted image with the secret `one`; those in `cipher`, without their prefix, as well.
pub fn encrypt_options(cipher: &str, prefix: &str) -> String {
    let fixed = ["key-secret=one", "iter-time=10"];
    let all = fixed.into_iter().chain(cipher.split(',')).filter(|option| !option.is_empty());
    all.map(|option| format!("{prefix}{option}")).collect::<Vec<_>>().join(",")
}
