//! Rules of `zebu` where it makes a file: the format follows the name, and nothing is replaced without being asked.
//! Under QEMU's names both are as there.

use crate::failure::Failure;
use crate::session::Session;
use crate::store_target::store_name;
use crate::values::NamedFormat;
use std::ffi::OsStr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use zebu_disks::{Program, printable, without_secrets};
use zebu_engine::storage::{File, OpenFlags};
use zebu_engine::{Format, probe};

/// Ends of names, and the formats that they stand for.
const SUFFIXES: [(&str, &str); 7] = [
    ("qcow2", "qcow2"),
    ("raw", "raw"),
    ("img", "raw"),
    ("vmdk", "vmdk"),
    ("vhdx", "vhdx"),
    ("vhd", "vpc"),
    ("vdi", "vdi"),
];

/// Chooses the format of the new file `name` where `given` is none. `option` is how a user asks for one. Standard output, devices and
/// disks on servers are raw.
///
/// # Errors
/// The name shows none.
pub(crate) fn settle_format(
    dialect: Program,
    given: &mut Option<NamedFormat>,
    name: &OsStr,
    option: &str,
) -> Result<(), Failure> {
    if given.is_some() || dialect.is_qemu() || !is_file_of_its_own(name)? {
        return Ok(());
    }
    let Some(format) = format_by_suffix(name) else {
        return Err(Failure::new(format!(
            "the name '{}' does not show the format of the new image; give it: `{}` or `{}`",
            without_secrets(name),
            typed_with(option, "qcow2"),
            typed_with(option, "raw")
        )));
    };
    *given = Format::from_name(format).map(NamedFormat::from);
    Ok(())
}

/// The command line with an option more, for a user to paste.
fn typed_with(option: &str, value: &str) -> String {
    let words = std::env::args_os().enumerate().flat_map(|(number, word)| {
        let word = if number == 0 { "zebu".to_owned() } else { quoted(&without_secrets(&word)) };
        std::iter::once(word).chain((number == 1).then(|| format!("{option} {value}")))
    });
    let mut words: Vec<String> = words.collect();
    if words.len() == 1 {
        words.push(format!("{option} {value}"));
    }
    words.join(" ")
}

/// Refuses to write the bytes of a disk over the local image at `path` where nobody named a format of the target.
///
/// # Errors
/// There is one. The message has the lines that would do.
pub(crate) fn refuse_raw_over_image(session: &Session, path: &Path) -> Result<(), Failure> {
    let worker = session.worker();
    let found = File::open(path, &OpenFlags::default()).ok();
    let found = found.and_then(|file| worker.block_on(probe(worker, &file)).ok());
    let Some(format) = found.filter(|format| *format != Format::Raw) else { return Ok(()) };
    let into = match format {
        Format::Qcow2 => format!("`{}` writes into its disk, ", typed_with("-O", "qcow2")),
        _ => String::new(),
    };
    Err(Failure::new(format!(
        "'{}' is an image of the format {}: {into}`{}` writes over the image itself",
        without_secrets(path.as_os_str()),
        format.name(),
        typed_with("-O", "raw")
    )))
}

/// The name of the format that the suffix of `name` stands for.
pub(crate) fn format_by_suffix(name: &OsStr) -> Option<&'static str> {
    let suffix = Path::new(name).extension()?;
    SUFFIXES.iter().find(|(ending, _)| suffix.eq_ignore_ascii_case(ending)).map(|(_, format)| *format)
}

/// Whether `name` is that of a file, here or in a store, that is made as a whole.
fn is_file_of_its_own(name: &OsStr) -> Result<bool, Failure> {
    if store_name(name)?.is_some() {
        return Ok(true);
    }
    let text = name.to_string_lossy();
    let is_device = std::fs::metadata(name).is_ok_and(|found| {
        let kind = found.file_type();
        kind.is_block_device() || kind.is_char_device() || kind.is_fifo()
    });
    let scheme = text.split('/').next().unwrap_or_default();
    Ok(text != "-" && !is_device && !scheme.contains(':'))
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    let word = printable(word);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Whether a file that is there may be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub(crate) struct ForceArg {
    /// Replace a file that exists and is not empty
    #[arg(long)]
    force: bool,
}

impl ForceArg {
    /// Refuses to make the file at `path` where a regular file is that holds something.
    ///
    /// # Errors
    /// There is one, and nobody said that it may go.
    pub(crate) fn check(self, dialect: Program, path: &Path) -> Result<(), Failure> {
        let is_free = || std::fs::metadata(path).map_or(true, |found| !found.is_file() || found.len() == 0);
        if self.force || dialect.is_qemu() || is_free() {
            return Ok(());
        }
        Err(Failure::creating_name(
            path.as_os_str(),
            "the file exists and is not empty; name another, or replace it with --force",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(dialect: Program, name: &str) -> Result<Option<String>, Failure> {
        let mut given = None;
        settle_format(dialect, &mut given, name.as_ref(), "-f")?;
        Ok(given.map(|named| named.format.name().to_owned()))
    }

    #[test]
    fn the_format_of_a_new_file_follows_its_suffix() {
        for (name, format) in [
            ("a.qcow2", Some("qcow2")),
            ("A.QCOW2", Some("qcow2")),
            ("d.x/a.img", Some("raw")),
            ("a.vhd", Some("vpc")),
            ("s3://bucket/a.vmdk", Some("vmdk")),
            ("-", None),
            ("/dev/null", None),
            ("nbd://host/a", None),
        ] {
            assert_eq!(settled(Program::Zebu, name), Ok(format.map(str::to_owned)), "{name}");
            assert_eq!(settled(Program::QemuImg, name), Ok(None), "{name}");
        }
        for name in ["disk", "disk.bin", ".qcow2"] {
            let message = settled(Program::Zebu, name).unwrap_err().message.unwrap();
            assert!(message.contains("-f qcow2") && message.contains("-f raw"), "{message}");
        }
    }

    #[test]
    fn words_are_quoted_as_a_shell_reads_them() {
        assert_eq!(quoted("a.qcow2"), "a.qcow2");
        assert_eq!(quoted("it's a disk"), "'it'\\''s a disk'");
    }
}
