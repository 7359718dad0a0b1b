//! The lists of `-o help`, line by line as qemu-img prints them: scripts look for options in them.

use crate::failure::Failure;
use zebu_disks::Program;
use zebu_engine::Format;

/// Options of the file that an image is in, as opposed to its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileOptions {
    /// A file was named: the list has them.
    Listed,
    /// No file was named: the list says that there may be more.
    NotKnown,
}

/// An option: its name, the kind of its value, its description.
type Line = (&'static str, &'static str, &'static str);

const SWITCH: &str = "bool (on/off)";

const OF_FILES: [Line; 2] = [
    ("extent_size_hint", "size", "Extent size hint for the image file, 0 to disable"),
    ("nocow", SWITCH, "Turn off copy-on-write (valid only on btrfs)"),
];
const PREALLOCATION_OF_FILES: Line =
    ("preallocation", "str", "Preallocation mode (allowed values: off, falloc, full)");
const SIZE: Line = ("size", "size", "Virtual disk size");

/// Options that qcow2 images are made and changed with.
const QCOW2: [Line; 8] = [
    ("backing_file", "str", "File name of a base image"),
    ("backing_fmt", "str", "Image format of the base image"),
    ("compat", "str", "Compatibility level (v2 [0.10] or v3 [1.1])"),
    ("data_file", "str", "File name of an external data file"),
    ("data_file_raw", SWITCH, "The external data file must stay valid as a raw image"),
    ("lazy_refcounts", SWITCH, "Postpone refcount updates"),
    ("refcount_bits", "num", "Width of a reference count entry in bits"),
    SIZE,
];
const ITER_TIME: Line = ("encrypt.iter-time", "num", "Time to spend in PBKDF in milliseconds");
const NEW_QCOW2: [Line; 12] = [
    ("cluster_size", "size", "qcow2 cluster size"),
    ("compression_type", "str", "Compression method used for image cluster compression"),
    ("encrypt.cipher-alg", "str", "Name of encryption cipher algorithm"),
    ("encrypt.cipher-mode", "str", "Name of encryption cipher mode"),
    ("encrypt.format", "str", "Encrypt the image, format choices: 'aes', 'luks'"),
    ("encrypt.hash-alg", "str", "Name of encryption hash algorithm"),
    ("encrypt.ivgen-alg", "str", "Name of IV generator algorithm"),
    ("encrypt.ivgen-hash-alg", "str", "Name of IV generator hash algorithm"),
    ("encrypt.key-secret", "str", "ID of secret providing qcow AES key or LUKS passphrase"),
    (
        "encryption",
        SWITCH,
        "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)",
    ),
    ("extended_l2", SWITCH, "Extended L2 tables"),
    ("preallocation", "str", "Preallocation mode (allowed values: off, metadata, falloc, full)"),
];
const AMENDED_QCOW2: [Line; 4] = [
    ("encrypt.keyslot", "num", "Select a single keyslot to modify explicitly"),
    ("encrypt.new-secret", "str", "New secret to set in the matching keyslots. Empty string to erase"),
    ("encrypt.old-secret", "str", "Select all keyslots that match this password"),
    ("encrypt.state", "str", "Select new state of affected keyslots (active/inactive)"),
];

/// Options that an image of `format` is made with. `None`: qemu-img has others than zebu for it.
pub(crate) fn create(format: Format, of_file: FileOptions) -> Option<String> {
    let mut lines: Vec<Line> = match format {
        Format::Qcow2 => QCOW2.into_iter().chain(NEW_QCOW2).chain([ITER_TIME]).collect(),
        Format::Raw => vec![SIZE],
        _ => return None,
    };
    match of_file {
        FileOptions::Listed => {
            lines.extend(OF_FILES);
            lines.extend((format == Format::Raw).then_some(PREALLOCATION_OF_FILES));
            Some(list("Supported options:", lines))
        }
        FileOptions::NotKnown => {
            let list = list(&format!("Supported {} options:", format.name()), lines);
            Some(format!(
                "{list}\nThe protocol level may support further options.\n\
                 Specify the target filename to include those options.\n"
            ))
        }
    }
}

/// Options that can be changed of a qcow2 image.
pub(crate) fn amend() -> String {
    list("Amend options for 'qcow2':", QCOW2.into_iter().chain(AMENDED_QCOW2).chain([ITER_TIME]).collect())
}

fn list(heading: &str, mut lines: Vec<Line>) -> String {
    lines.sort_unstable();
    let line =
        |(name, value, description): Line| format!("  {:<22} - {description}\n", format!("{name}=<{value}>"));
    std::iter::once(format!("{heading}\n")).chain(lines.into_iter().map(line)).collect()
}

/// Refuses, under QEMU's names, lists of options that QEMU refuses as such.
pub(crate) fn check(dialect: Program, lists: &[String]) -> Result<(), Failure> {
    match lists.iter().find(|options| dialect.is_qemu() && !is_valid(options)) {
        Some(options) => Err(Failure::new(format!("Invalid option list: {options}"))),
        None => Ok(()),
    }
}

/// Whether a list has text at its beginning and at its end.
fn is_valid(options: &str) -> bool {
    let commas_at_end = options.bytes().rev().take_while(|byte| *byte == b',').count();
    !options.is_empty() && !options.starts_with(',') && commas_at_end % 2 == 0
}

#[cfg(test)]
mod tests {

    #[test]
    fn doubled_commas_belong_to_a_value() {
        for (options, is_valid) in [
            ("a=b", true),
            ("a=b,,", true),
            ("a=b,", false),
            ("a=b,,,", false),
            (",help", false),
            (",,", false),
            ("", false),
        ] {
            assert_eq!(super::is_valid(options), is_valid, "{options}");
        }
    }
}
