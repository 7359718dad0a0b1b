//! How an image is encrypted, in QEMU's words.

use serde::Serialize;
use std::fmt::Write as _;
use zebu_disks::printable;
use zebu_engine::{EncryptionInfo, LuksInfo, LuksSlotInfo};

/// The object about a LUKS header.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct LuksData {
    ivgen_alg: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ivgen_hash_alg: Option<&'static str>,
    detached_header: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    hash_alg: Option<&'static str>,
    cipher_alg: String,
    uuid: String,
    cipher_mode: &'static str,
    slots: Vec<Slot>,
    payload_offset: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    master_key_iters: Option<u32>,
    /// Of LUKS2, which QEMU does not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    /// Bytes, where it is not 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    sector_size: Option<u32>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Slot {
    /// Its number, where some are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    number: Option<u32>,
    active: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    iters: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stripes: Option<u32>,
    /// The reason why no passphrase can be tried on it; QEMU has no such slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    unusable: Option<String>,
}

/// The object about the encryption within a qcow2 image.
#[derive(Debug, Serialize)]
#[serde(tag = "format", rename_all = "kebab-case")]
pub(crate) enum Encrypt {
    Aes,
    Luks(LuksData),
    /// A header that can't be read.
    #[serde(rename = "luks")]
    Unreadable {},
    #[serde(rename = "unknown")]
    Unknown {},
}

impl Encrypt {
    /// The object for an image that is encrypted by `method`.
    pub(crate) fn new(method: &str, info: Option<&EncryptionInfo>) -> Self {
        match (info, method) {
            (Some(EncryptionInfo::Luks(luks)), _) => Self::Luks(LuksData::new(luks)),
            (_, "aes") => Self::Aes,
            (_, "luks") => Self::Unreadable {},
            _ => Self::Unknown {},
        }
    }
}

impl LuksData {
    pub(crate) fn new(luks: &LuksInfo) -> Self {
        let is_first = luks.version == 1;
        Self {
            ivgen_alg: luks.ivgen_alg(),
            ivgen_hash_alg: luks.ivgen_hash_alg(),
            detached_header: false,
            hash_alg: luks.hash,
            cipher_alg: luks.cipher_alg(),
            uuid: luks.uuid.clone(),
            cipher_mode: luks.cipher_mode(),
            slots: luks.slots.iter().map(|slot| Slot::new(slot, is_first)).collect(),
            payload_offset: luks.payload_offset,
            master_key_iters: luks.master_key_iterations,
            version: (!is_first).then_some(luks.version),
            sector_size: Some(luks.sector_size).filter(|&bytes| bytes != 512),
        }
    }
}

impl Slot {
    fn new(slot: &LuksSlotInfo, all_are_there: bool) -> Self {
        Self {
            number: (!all_are_there).then_some(slot.number),
            active: slot.is_active,
            iters: slot.iterations,
            key_offset: slot.key_offset,
            stripes: slot.stripes,
            unusable: slot.unusable.clone(),
        }
    }
}

/// The lines about a LUKS header, each behind `indent` spaces. `format` is told within qcow2.
pub(crate) fn push_luks(out: &mut String, luks: &LuksInfo, indent: usize, tells_format: bool) {
    let mut line = |depth: usize, text: &str| {
        let _ = writeln!(out, "{:width$}{text}", "", width = indent + 4 * depth);
    };
    line(0, &format!("ivgen alg: {}", luks.ivgen_alg()));
    line(0, "detached header: false");
    if let Some(hash) = luks.hash {
        line(0, &format!("hash alg: {hash}"));
    }
    line(0, &format!("cipher alg: {}", luks.cipher_alg()));
    line(0, &format!("uuid: {}", printable(&luks.uuid)));
    if let Some(hash) = luks.ivgen_hash_alg() {
        line(0, &format!("ivgen hash alg: {hash}"));
    }
    if tells_format {
        line(0, "format: luks");
    }
    line(0, &format!("cipher mode: {}", luks.cipher_mode()));
    line(0, "slots:");
    for slot in &luks.slots {
        line(1, &format!("[{}]:", slot.number));
        line(2, &format!("active: {}", slot.is_active));
        if let Some(iterations) = slot.iterations {
            line(2, &format!("iters: {iterations}"));
        }
        if let Some(offset) = slot.key_offset {
            line(2, &format!("key offset: {offset}"));
        }
        if let Some(stripes) = slot.stripes {
            line(2, &format!("stripes: {stripes}"));
        }
        if let Some(reason) = &slot.unusable {
            line(2, &format!("unusable: {}", printable(reason)));
        }
    }
    line(0, &format!("payload offset: {}", luks.payload_offset));
    if let Some(iterations) = luks.master_key_iterations {
        line(0, &format!("master key iters: {iterations}"));
    }
    if luks.version != 1 {
        line(0, &format!("version: {}", luks.version));
    }
    if luks.sector_size != 512 {
        line(0, &format!("sector size: {}", luks.sector_size));
    }
}
