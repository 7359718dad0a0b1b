//! Files that are no disks, though they are met where one is looked for.
//!
//! They are pieces of images, containers of backup and forensic programs, and what servers send in place of a file.

use std::fmt;
use std::path::Path;

/// A file that is no disk by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoDisk {
    Html,
    Xml,
    Json,
    ErrorText,
    GitLfs,
    ParallelsDescriptor,
    ParallelsStub,
    VmdkPart,
    Ewf,
    Vma,
    EncryptedDmg,
    AppleSparse,
    AndroidSparse,
    RbdExport,
    BtrfsStream,
    Partclone,
    Ntfsclone,
}

/// Bytes at the start of a file.
const STARTS: &[(&[u8], NoDisk)] = &[
    (b"EVF\x09\x0d\x0a\xff\0", NoDisk::Ewf),
    (b"EVF2\x0d\x0a\x81\0", NoDisk::Ewf),
    (b"LVF\x09\x0d\x0a\xff\0", NoDisk::Ewf),
    (b"VMA\0", NoDisk::Vma),
    (b"encrcdsa", NoDisk::EncryptedDmg),
    (b"sprs\0\0\0\x03", NoDisk::AppleSparse),
    (b"\x3a\xff\x26\xed\x01\0", NoDisk::AndroidSparse),
    (b"rbd image v", NoDisk::RbdExport),
    (b"rbd diff v", NoDisk::RbdExport),
    (b"btrfs-stream\0", NoDisk::BtrfsStream),
    (b"partclone-image", NoDisk::Partclone),
    (b"\0ntfsclone-image", NoDisk::Ntfsclone),
    (b"version https://git-lfs.github.com/spec/", NoDisk::GitLfs),
];

/// The last bytes of an encrypted disk image of old versions of macOS.
const OLD_ENCRYPTED_DMG: &[u8] = b"cdsaencr";

impl NoDisk {
    /// The kind of a file with these first and last bytes, if it is no disk. `last` may be empty.
    pub(crate) fn of(first: &[u8], last: &[u8]) -> Option<Self> {
        let starts = STARTS.iter().find(|(magic, _)| first.starts_with(magic)).map(|(_, found)| *found);
        starts
            .or_else(|| last.ends_with(OLD_ENCRYPTED_DMG).then_some(Self::EncryptedDmg))
            .or_else(|| Self::of_text(first))
    }

    /// The kind of a file by its name, where its `len` bytes have no mark.
    pub(crate) fn of_name(path: &Path, len: u64) -> Option<Self> {
        if len == 0 {
            let is_stub = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("hdd"));
            return is_stub.then_some(Self::ParallelsStub);
        }
        let name = path.file_name()?.to_str()?;
        // Flat parts of a VMDK that is split: disk-f001.vmdk and so on.
        let (disk, number) = name.strip_suffix(".vmdk")?.rsplit_once('f')?;
        (disk.ends_with('-') && number.len() == 3 && number.bytes().all(|byte| byte.is_ascii_digit()))
            .then_some(Self::VmdkPart)
    }

    /// Markup, which a server sends with the reason why there is no file.
    fn of_text(first: &[u8]) -> Option<Self> {
        let text = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first).trim_ascii_start();
        if text.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace()) {
            return None;
        }
        let begins = |word: &str| {
            text.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word.as_bytes()))
        };
        let is_object = |text: &[u8]| text.trim_ascii_start().starts_with(b"\"");
        if begins("<?xml") || begins("<Error>") || begins("<Error ") {
            let has = |word: &str| text.windows(word.len()).any(|part| part == word.as_bytes());
            if has("<Parallels_disk_image") {
                return Some(Self::ParallelsDescriptor);
            }
            return Some(if has("<html") { Self::Html } else { Self::Xml });
        }
        if begins("<!doctype html") || begins("<html") || begins("<head") {
            return Some(Self::Html);
        }
        if is_status(text) {
            return Some(Self::ErrorText);
        }
        match text {
            [b'{', rest @ ..] if is_object(rest) => Some(Self::Json),
            [b'[', rest @ ..] if rest.trim_ascii_start().starts_with(b"{") => Some(Self::Json),
            _ => None,
        }
    }

    /// Its name, in words.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Html => "a web page (HTML)",
            Self::Xml => "text in XML",
            Self::Json => "text in JSON",
            Self::ErrorText => "an error of a web server",
            Self::GitLfs => "a pointer of Git LFS, which stands for a file",
            Self::ParallelsDescriptor => "the descriptor of a Parallels disk",
            Self::ParallelsStub => "the empty part of a Parallels disk",
            Self::VmdkPart => "a part of a split VMDK, by its name",
            Self::Ewf => "a forensic image (E01, EWF)",
            Self::Vma => "a backup of Proxmox (VMA)",
            Self::EncryptedDmg => "an encrypted disk image of macOS (DMG)",
            Self::AppleSparse => "a sparse disk image of macOS",
            Self::AndroidSparse => "a sparse image of Android",
            Self::RbdExport => "an export of Ceph RBD",
            Self::BtrfsStream => "a stream of btrfs",
            Self::Partclone => "an image of partclone",
            Self::Ntfsclone => "an image of ntfsclone",
        }
    }

    /// Advice, in words.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Html | Self::Xml | Self::Json | Self::ErrorText => {
                "a download may have failed, look at the text"
            }
            Self::GitLfs => "fetch the file first (by git lfs pull)",
            Self::ParallelsDescriptor | Self::ParallelsStub => {
                "open the directory, or the .hds file that holds the disk"
            }
            Self::VmdkPart => "open the descriptor that names all parts",
            Self::Ewf => "unpack it first (by ewfexport)",
            Self::Vma => "unpack it first (by vma extract)",
            Self::EncryptedDmg | Self::AppleSparse => "convert it on macOS first (by hdiutil convert)",
            Self::AndroidSparse => "unpack it first (by simg2img)",
            Self::RbdExport => "import it into Ceph first (by rbd import)",
            Self::BtrfsStream => "receive it first (by btrfs receive)",
            Self::Partclone => "restore it first (by partclone.restore)",
            Self::Ntfsclone => "restore it first (by ntfsclone)",
        }
    }
}

/// Whether a text is a line that begins with the status of a failed HTTP request, as `404 Not Found` or `403: Forbidden`.
fn is_status(text: &[u8]) -> bool {
    let Some((code, rest)) = text.split_at_checked(3) else { return false };
    let is_error = matches!(code[0], b'4' | b'5') && code.iter().all(u8::is_ascii_digit);
    let reason = rest.strip_prefix(b":").unwrap_or(rest);
    let words = reason.strip_prefix(b" ").unwrap_or_default().trim_ascii_end();
    is_error && words.first().is_some_and(u8::is_ascii_uppercase) && !words.contains(&b'\n')
}

impl fmt::Display for NoDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_known_by_its_beginning_and_is_text() {
        let of = |text: &[u8]| NoDisk::of(text, &[]);
        for (text, found) in [
            (&b"\xef\xbb\xbf \n<!DOCTYPE html><html>"[..], Some(NoDisk::Html)),
            (b"<HTML lang=en>", Some(NoDisk::Html)),
            (b"<?xml version=\"1.0\"?>\n<Error><Code>NoSuchKey</Code></Error>", Some(NoDisk::Xml)),
            (b"<?xml version=\"1.0\"?><html xmlns=\"x\">", Some(NoDisk::Html)),
            (
                b"<?xml version='1.0'?>\n<Parallels_disk_image Version=\"1.0\">",
                Some(NoDisk::ParallelsDescriptor),
            ),
            (b"{\n  \"message\": \"Not Found\"}", Some(NoDisk::Json)),
            (b"[{\"errors\": 1}]", Some(NoDisk::Json)),
            (b"<Error xmlns=\"x\"><Code>AccessDenied</Code></Error>", Some(NoDisk::Xml)),
            (b"404: Not Found", Some(NoDisk::ErrorText)),
            (b"503 Service Unavailable\r\n", Some(NoDisk::ErrorText)),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", Some(NoDisk::GitLfs)),
            (b"404 Not Found\nand so on", None),
            (b"200 OK", None),
            (b"4040 Found", None),
            (b"<html\0\0", None),
            (b"{ text }", None),
            (b"AAAA", None),
            (b"", None),
        ] {
            assert_eq!(of(text), found, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn parts_are_known_by_their_names() {
        for (name, len, found) in [
            ("disk-f001.vmdk", 512, Some(NoDisk::VmdkPart)),
            ("disk-flat.vmdk", 512, None),
            ("disk-f1.vmdk", 512, None),
            ("disk.hdd", 0, Some(NoDisk::ParallelsStub)),
            ("disk.hdd", 512, None),
            ("disk.raw", 0, None),
        ] {
            assert_eq!(NoDisk::of_name(Path::new(name), len), found, "{name}");
        }
    }
}
