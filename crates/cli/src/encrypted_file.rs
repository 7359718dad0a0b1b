//! Encrypted images, known by their first bytes, that would end up in plain text by an oversight.

use crate::failure::Failure;
use crate::output::stderr;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use zebu_disks::Program;

/// Bytes of a qcow2 header up to the end of `crypt_method`.
const HEADER: usize = 36;
const CRYPT_METHOD: usize = 32;

/// Warns of an overlay in plain text: what is written to it is encrypted no more, nor what it copies from below.
pub(crate) fn warn_of_plain_overlay(dialect: Program, backing: &Path) {
    if let Some(encryption) = encryption(backing) {
        stderr::tell(
            dialect,
            &format!(
                "warning: the backing file '{}' is {encryption}, and this overlay is not encrypted: \
             -o encrypt.format=luks,encrypt.key-secret=ID encrypts it",
                backing.display()
            ),
        );
    }
}

/// The encryption of a file, in words; `None` for every other file, and for one that can't be read.
fn encryption(path: &Path) -> Option<&'static str> {
    // A pipe is not waited for.
    let kind = path.metadata().ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let mut header = [0; HEADER];
    File::open(path).ok()?.read_exact(&mut header).ok()?;
    if header.starts_with(b"LUKS\xba\xbe") || header.starts_with(b"SKUL\xba\xbe") {
        return Some("a LUKS disk");
    }
    let is_encrypted = header.starts_with(b"QFI\xfb") && header[CRYPT_METHOD..] != [0; 4];
    is_encrypted.then_some("an encrypted qcow2 image")
}

/// Fails if `path` is an encrypted image, which a format that nobody named would turn into plain text.
pub(crate) fn refuse_plain_text(path: &Path) -> Result<(), Failure> {
    let Some(encryption) = encryption(path) else { return Ok(()) };
    Err(Failure::new(format!(
        "'{}' is {encryption}, and would be overwritten with plain text: -O FORMAT does so; -n \
         --target-image-opts writes into it",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encrypted_files_are_known_by_their_first_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let mut qcow2 = vec![0; 512];
        qcow2[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        for (bytes, is_refused) in [
            (&b"LUKS\xba\xbe\0\x01 and what follows in the header"[..], true),
            (&[b"SKUL\xba\xbe\0\x02".as_slice(), &[0; 100]].concat(), true),
            (&qcow2, false),
            (&b"LUKS"[..], false),
            (&[0; 512][..], false),
        ] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(refuse_plain_text(&path).is_err(), is_refused, "{bytes:?}");
        }
        qcow2[35] = 2;
        std::fs::write(&path, &qcow2).unwrap();
        assert!(refuse_plain_text(&path).unwrap_err().message.unwrap().contains("encrypted qcow2"));
        assert!(refuse_plain_text(&dir.path().join("missing")).is_ok());
    }
}
