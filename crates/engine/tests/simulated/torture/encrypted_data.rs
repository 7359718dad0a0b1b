//! The data of an encrypted image, decrypted by the rules of the format alone.

use crate::crash::setup::PASSPHRASE;
use crate::torture::possible_image::word;
use std::ops::Range;
use zebu_luks::{Limits, Luks1Header, SectorCipher};
use zebu_sim::{Content, SECTOR};

/// The type of the header extension that says where the LUKS header is.
const POINTER: u32 = 0x0537_be77;

/// The key of an image, and the place of its LUKS header.
pub(crate) struct EncryptedData {
    cipher: SectorCipher,
    /// Bytes of the image file that the LUKS header takes.
    pub(crate) header: Range<u64>,
}

impl EncryptedData {
    /// Finds the key in the image, with the passphrase of all images here.
    pub(crate) fn of(image: &Content) -> Self {
        let header = pointer(image);
        let luks = Luks1Header::parse(&image.bytes(header.start..header.start + 4096), &Limits::default());
        let luks = luks.expect("a LUKS header");
        let slot = luks.active_slots().next().expect("a key slot");
        let material = luks.material(slot).expect("key material");
        let material = image.bytes(header.start + material.start..header.start + material.end);
        let key = luks.unlock(slot, PASSPHRASE, &material).expect("a sound slot").expect("the passphrase");
        let cipher = key.sector_cipher(luks.cipher()).expect("a cipher");
        Self { cipher, header }
    }

    /// The guest's bytes in a sector of the file that has the data. Within qcow2, its place in the file is its number.
    pub(crate) fn decrypted(&self, sector: u64, bytes: &[u8]) -> Vec<u8> {
        let mut plain = bytes.to_vec();
        self.cipher.decrypt(sector, &mut plain).expect("a whole sector");
        plain
    }
}

/// The bytes of the LUKS header, by the extension of the image's header.
fn pointer(image: &Content) -> Range<u64> {
    let header = image.bytes(0..4 * SECTOR);
    let half = |at: usize| (word(&header, at) >> 32) as u32;
    let mut at = if half(4) == 3 { half(100) as usize } else { 72 };
    while half(at) != POINTER {
        assert!(half(at) != 0, "no LUKS header");
        at += 8 + (half(at + 4) as usize).next_multiple_of(8);
    }
    let start = word(&header, at + 8);
    start..start + word(&header, at + 16)
}
