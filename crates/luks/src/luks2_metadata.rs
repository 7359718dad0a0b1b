//! Key slots, segment and digests of a LUKS2 header, validated.

use crate::cipher_spec::CipherSpec;
use crate::error::{LuksError, printable};
use crate::hash::HashName;
use crate::kdf::{Argon2Cost, Argon2Kind, Kdf};
use crate::limits::{LUKS2_SLOTS, Limits, MAX_STRIPES, SECTOR};
use crate::luks2_json::{RawArea, RawDigest, RawKdf, RawKeyslot, RawMetadata, RawSegment};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::ops::Range;

/// Longest salt in bytes. cryptsetup writes 32.
const MAX_SALT: usize = 1024;

/// How soon a slot is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Only when it is asked for by number.
    Ignore,
    /// As usual.
    Normal,
    /// First.
    Prefer,
}

/// A key slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Luks2Slot {
    pub(crate) number: u32,
    pub(crate) priority: Priority,
    pub(crate) key_len: usize,
    pub(crate) area: Range<u64>,
    pub(crate) area_cipher: CipherSpec,
    pub(crate) kdf: Kdf,
    pub(crate) splitter_hash: HashName,
    pub(crate) stripes: u32,
    /// Index in the metadata's digests.
    pub(crate) digest: usize,
}

impl Luks2Slot {
    /// The slot's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How soon it is tried.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// Bytes of the device that hold the slot's key material.
    pub fn material(&self) -> Range<u64> {
        self.area.start..self.area.start + self.key_len as u64 * u64::from(self.stripes)
    }

    /// The cipher of the slot's key material.
    pub fn cipher(&self) -> CipherSpec {
        self.area_cipher
    }

    /// How a passphrase becomes the key of the slot.
    pub fn kdf(&self) -> &Kdf {
        &self.kdf
    }
}

/// A key slot that holds a key of the data, and that can't be tried.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Luks2UnusableSlot {
    /// The slot's number.
    pub number: u32,
    /// The thing that is not supported, or the cost that is over a limit.
    pub reason: String,
    /// Whether it is a cost: higher [`Limits`] make the slot usable.
    pub is_over_limit: bool,
}

/// The encrypted data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Luks2Segment {
    /// Byte at which the data begins.
    pub offset: u64,
    /// Bytes of the data; `None`: to the end of the device.
    pub len: Option<u64>,
    /// The cipher of the data.
    pub cipher: CipherSpec,
    /// Bytes of a sector: 512, 1024, 2048 or 4096.
    pub sector_size: u32,
    /// Number, in units of 512 bytes, that the initialization vector of the first sector has.
    pub first_sector: u64,
}

/// A digest of the master key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MasterDigest {
    pub(crate) slots: Vec<u32>,
    pub(crate) hash: HashName,
    pub(crate) iterations: u32,
    pub(crate) salt: Vec<u8>,
    pub(crate) digest: Vec<u8>,
}

/// The validated metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Luks2Metadata {
    pub(crate) slots: Vec<Luks2Slot>,
    pub(crate) unusable: Vec<Luks2UnusableSlot>,
    pub(crate) segment: Luks2Segment,
    pub(crate) digests: Vec<MasterDigest>,
}

impl Luks2Metadata {
    /// Parses a JSON area, which ends at a zero byte or with `area`. `copy_len` are the bytes of one copy of the header.
    ///
    /// # Errors
    /// The first thing that is wrong, or not supported by the data's own cipher and digest, with its path in the JSON. A key slot
    /// with something that is not supported, or that costs more than `limits`, is left out ([`Luks2Metadata::unusable_slots`]).
    pub fn parse(area: &[u8], copy_len: u64, limits: &Limits) -> Result<Self, LuksError> {
        let len = area.iter().position(|&byte| byte == 0).unwrap_or(area.len());
        let raw: RawMetadata = serde_json::from_slice(&area[..len])
            .map_err(|error| LuksError::field("json", printable(&error.to_string())))?;
        if let Some(name) = raw.config.requirements.mandatory.first() {
            return Err(LuksError::unsupported("requirement", name, "none"));
        }
        Limits::check("keyslots", raw.keyslots.len() as u64, LUKS2_SLOTS as u64)?;
        Limits::check("digests", raw.digests.len() as u64, LUKS2_SLOTS as u64)?;
        let (segment_name, segment) = the_segment(&raw)?;
        let digests = raw
            .digests
            .iter()
            .filter(|(_, digest)| digest.segments.contains(&segment_name))
            .map(|(name, digest)| parse_digest(name, digest, limits))
            .collect::<Result<Vec<_>, _>>()?;
        let (mut slots, mut unusable) = (Vec::new(), Vec::new());
        for (name, slot) in &raw.keyslots {
            let path = format!("keyslots.{}", printable(name));
            let number = slot_number(&path, name)?;
            let digest = digests.iter().position(|digest| digest.slots.contains(&number));
            // Slots of other kinds, and those of no segment, hold no key of the data.
            if let (Some(digest), "luks2") = (digest, slot.kind.as_str()) {
                match parse_slot(&path, number, digest, slot, limits) {
                    Ok(slot) => slots.push(slot),
                    Err(error @ (LuksError::Unsupported { .. } | LuksError::OverLimit { .. })) => {
                        unusable.push(Luks2UnusableSlot {
                            number,
                            reason: error.to_string(),
                            is_over_limit: matches!(error, LuksError::OverLimit { .. }),
                        });
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        let metadata = Self { slots, unusable, segment, digests };
        metadata.check_areas(copy_len)?;
        Ok(metadata)
    }

    fn check_areas(&self, copy_len: u64) -> Result<(), LuksError> {
        let headers = 2 * copy_len;
        if self.segment.offset == 0 {
            let problem = "0: the header is detached, made for a device apart from its data";
            return Err(LuksError::field("segments.offset", problem));
        }
        if self.segment.offset < headers {
            let problem = format!("{} lies inside the header, which ends at {headers}", self.segment.offset);
            return Err(LuksError::field("segments.offset", problem));
        }
        for (index, slot) in self.slots.iter().enumerate() {
            let field = |problem: String| {
                Err(LuksError::field(format!("keyslots.{}.area.offset", slot.number), problem))
            };
            if slot.area.start < headers {
                return field(format!("{} lies inside the header, which ends at {headers}", slot.area.start));
            }
            if slot.area.end > self.segment.offset {
                let payload = self.segment.offset;
                return field(format!(
                    "the area ends at {}, after the data's begin at {payload}",
                    slot.area.end
                ));
            }
            let overlaps =
                |other: &&Luks2Slot| slot.area.start < other.area.end && other.area.start < slot.area.end;
            if let Some(other) = self.slots[..index].iter().find(overlaps) {
                return field(format!("the area overlaps that of key slot {}", other.number));
            }
        }
        Ok(())
    }

    /// The key slots that hold a key of the data, the preferred ones first.
    pub fn slots(&self) -> impl Iterator<Item = &Luks2Slot> {
        let mut slots: Vec<&Luks2Slot> = self.slots.iter().collect();
        slots.sort_by_key(|slot| (std::cmp::Reverse(slot.priority), slot.number));
        slots.into_iter()
    }

    /// The key slots of the data that can't be tried.
    pub fn unusable_slots(&self) -> &[Luks2UnusableSlot] {
        &self.unusable
    }

    /// PBKDF2 iterations that it takes to know whether a slot's key is right, beside those of the slot.
    pub fn digest_iterations(&self, slot: &Luks2Slot) -> u32 {
        self.digests.get(slot.digest).map_or(0, |digest| digest.iterations)
    }

    /// The encrypted data.
    pub fn segment(&self) -> Luks2Segment {
        self.segment
    }
}

fn the_segment(raw: &RawMetadata) -> Result<(String, Luks2Segment), LuksError> {
    let mut segments = raw.segments.iter();
    let (Some((name, segment)), None) = (segments.next(), segments.next()) else {
        let problem = format!("{} segments; a header with one is supported", raw.segments.len());
        return Err(LuksError::field("segments", problem));
    };
    let digest = raw.digests.values().find(|digest| digest.segments.contains(name));
    let Some(digest) = digest else {
        return Err(LuksError::field("digests", "the segment has no digest"));
    };
    // A digest's first slot says how long the key is.
    let slot = digest.keyslots.iter().find_map(|slot| raw.keyslots.get(slot));
    let key_size = slot.and_then(|slot| slot.key_size).unwrap_or(64);
    Ok((name.clone(), parse_segment(&format!("segments.{}", printable(name)), segment, key_size)?))
}

fn parse_segment(path: &str, raw: &RawSegment, key_size: u64) -> Result<Luks2Segment, LuksError> {
    if raw.kind != "crypt" {
        return Err(LuksError::unsupported("segment type", &raw.kind, "crypt"));
    }
    if raw.integrity.is_some() {
        return Err(LuksError::unsupported("segment with", "integrity", "segments without it"));
    }
    if let Some(flag) = raw.flags.iter().flatten().next() {
        return Err(LuksError::unsupported("segment flag", flag, "none"));
    }
    let offset = number(&format!("{path}.offset"), &raw.offset)?;
    let len = match raw.size.as_str() {
        "dynamic" => None,
        text => Some(number(&format!("{path}.size"), text)?),
    };
    if !offset.is_multiple_of(SECTOR) {
        return Err(LuksError::field(format!("{path}.offset"), format!("{offset} is no sector's begin")));
    }
    let size = required(&format!("{path}.sector_size"), raw.sector_size)?;
    if !matches!(size, 512 | 1024 | 2048 | 4096) {
        let problem = format!("{size} is none of 512, 1024, 2048, 4096");
        return Err(LuksError::field(format!("{path}.sector_size"), problem));
    }
    if let Some(len) = len
        && (offset.checked_add(len).is_none() || !len.is_multiple_of(size))
    {
        return Err(LuksError::field(format!("{path}.size"), format!("{len} is no whole number of sectors")));
    }
    let tweak = raw.iv_tweak.as_deref().unwrap_or("0");
    Ok(Luks2Segment {
        offset,
        len,
        cipher: cipher(path, raw.encryption.as_deref(), key_size)?,
        sector_size: size as u32,
        first_sector: number(&format!("{path}.iv_tweak"), tweak)?,
    })
}

fn parse_digest(name: &str, raw: &RawDigest, limits: &Limits) -> Result<MasterDigest, LuksError> {
    let path = format!("digests.{}", printable(name));
    if raw.kind != "pbkdf2" {
        return Err(LuksError::unsupported("digest", &raw.kind, "pbkdf2"));
    }
    let digest = binary(&format!("{path}.digest"), &raw.digest, 64)?;
    if digest.len() < 16 {
        let problem = format!("{} bytes are too few to know a key by", digest.len());
        return Err(LuksError::field(format!("{path}.digest"), problem));
    }
    Ok(MasterDigest {
        slots: raw.keyslots.iter().map(|slot| slot_number(&path, slot)).collect::<Result<_, _>>()?,
        hash: hash(&format!("{path}.hash"), raw.hash.as_deref())?,
        iterations: iterations(&format!("{path}.iterations"), raw.iterations, limits)?,
        salt: binary(&format!("{path}.salt"), &raw.salt, MAX_SALT)?,
        digest,
    })
}

fn parse_slot(
    path: &str,
    slot_number: u32,
    digest: usize,
    raw: &RawKeyslot,
    limits: &Limits,
) -> Result<Luks2Slot, LuksError> {
    let missing = |member: &str| LuksError::field(format!("{path}.{member}"), "it is missing");
    let splitter = raw.af.as_ref().ok_or_else(|| missing("af"))?;
    if splitter.kind != "luks1" {
        return Err(LuksError::unsupported("splitter", &splitter.kind, "luks1"));
    }
    let stripes = format!("{path}.af.stripes");
    if splitter.stripes == 0 {
        return Err(LuksError::field(stripes, "0 stripes hold no key"));
    }
    if splitter.stripes > u64::from(MAX_STRIPES) {
        let problem = format!("{}, of which at most {MAX_STRIPES} are read", splitter.stripes);
        return Err(LuksError::field(stripes, problem));
    }
    let key_size = required(&format!("{path}.key_size"), raw.key_size)?;
    if !(1..=64).contains(&key_size) {
        return Err(LuksError::field(format!("{path}.key_size"), format!("{key_size} is none of 1 to 64")));
    }
    let area = raw.area.as_ref().ok_or_else(|| missing("area"))?;
    let range = parse_area(path, area)?;
    let material = key_size * splitter.stripes;
    if range.end - range.start < material {
        let problem = format!("{}, where the key material has {material} bytes", range.end - range.start);
        return Err(LuksError::field(format!("{path}.area.size"), problem));
    }
    if !material.is_multiple_of(16) {
        return Err(LuksError::field(stripes, format!("{material} bytes are no whole blocks of a cipher")));
    }
    let area_key = required(&format!("{path}.area.key_size"), area.key_size)?;
    Ok(Luks2Slot {
        number: slot_number,
        priority: match raw.priority {
            None | Some(1) => Priority::Normal,
            Some(0) => Priority::Ignore,
            Some(2) => Priority::Prefer,
            Some(other) => {
                return Err(LuksError::field(
                    format!("{path}.priority"),
                    format!("{other} is none of 0, 1, 2"),
                ));
            }
        },
        key_len: key_size as usize,
        area: range,
        area_cipher: cipher(&format!("{path}.area"), area.encryption.as_deref(), area_key)?,
        kdf: parse_kdf(&format!("{path}.kdf"), raw.kdf.as_ref().ok_or_else(|| missing("kdf"))?, limits)?,
        splitter_hash: hash(&format!("{path}.af.hash"), Some(&splitter.hash))?,
        stripes: splitter.stripes as u32,
        digest,
    })
}

fn parse_area(path: &str, raw: &RawArea) -> Result<Range<u64>, LuksError> {
    if raw.kind != "raw" {
        return Err(LuksError::unsupported("key slot area", &raw.kind, "raw"));
    }
    let start = number(&format!("{path}.area.offset"), &raw.offset)?;
    let size = number(&format!("{path}.area.size"), &raw.size)?;
    let end = start
        .checked_add(size)
        .ok_or_else(|| LuksError::field(format!("{path}.area.size"), "the area ends after 2^64"))?;
    Ok(start..end)
}

fn parse_kdf(path: &str, raw: &RawKdf, limits: &Limits) -> Result<Kdf, LuksError> {
    let salt = binary(&format!("{path}.salt"), &raw.salt, MAX_SALT)?;
    let kind = match raw.kind.as_str() {
        "pbkdf2" => {
            return Ok(Kdf::Pbkdf2 {
                hash: hash(&format!("{path}.hash"), raw.hash.as_deref())?,
                iterations: iterations(&format!("{path}.iterations"), raw.iterations, limits)?,
                salt,
            });
        }
        "argon2i" => Argon2Kind::Argon2i,
        "argon2id" => Argon2Kind::Argon2id,
        other => return Err(LuksError::unsupported("key derivation", other, "pbkdf2, argon2i, argon2id")),
    };
    let member = |name: &str, value: Option<u64>| {
        let path = format!("{path}.{name}");
        let value = required(&path, value)?;
        u32::try_from(value).map_err(|_| LuksError::field(path, format!("{value} is more than 2^32")))
    };
    let cost = Argon2Cost {
        passes: member("time", raw.time)?,
        memory: member("memory", raw.memory)?,
        lanes: member("cpus", raw.cpus)?,
    };
    cost.validate(path, salt.len(), limits)?;
    Ok(Kdf::Argon2 { kind, cost, salt })
}

fn slot_number(path: &str, name: &str) -> Result<u32, LuksError> {
    let number = name.parse::<u32>().ok().filter(|&number| (number as usize) < LUKS2_SLOTS);
    number.ok_or_else(|| LuksError::field(path, format!("\"{}\" is no key slot's number", printable(name))))
}

fn number(path: &str, text: &str) -> Result<u64, LuksError> {
    text.parse().map_err(|_| LuksError::field(path, format!("\"{}\" is no number", printable(text))))
}

fn required(path: &str, value: Option<u64>) -> Result<u64, LuksError> {
    value.ok_or_else(|| LuksError::field(path, "it is missing"))
}

fn binary(path: &str, text: &str, most: usize) -> Result<Vec<u8>, LuksError> {
    Limits::check(path, text.len() as u64, most.div_ceil(3) as u64 * 4)?;
    STANDARD.decode(text).map_err(|error| LuksError::field(path, format!("it is no base64: {error}")))
}

fn hash(path: &str, name: Option<&str>) -> Result<HashName, LuksError> {
    HashName::parse(name.ok_or_else(|| LuksError::field(path, "it is missing"))?)
}

fn iterations(path: &str, value: Option<u64>, limits: &Limits) -> Result<u32, LuksError> {
    let value = required(path, value)?;
    Limits::check(path, value, limits.pbkdf2_iterations)?;
    let iterations = u32::try_from(value).ok().filter(|&iterations| iterations > 0);
    iterations.ok_or_else(|| LuksError::field(path, format!("{value} iterations can't be run")))
}

fn cipher(path: &str, name: Option<&str>, key_size: u64) -> Result<CipherSpec, LuksError> {
    let path = format!("{path}.encryption");
    let name = name.ok_or_else(|| LuksError::field(&path, "it is missing"))?;
    CipherSpec::parse_joined(name, usize::try_from(key_size).unwrap_or(usize::MAX)).map_err(|error| {
        match error {
            LuksError::KeyLength { cipher, .. } => {
                LuksError::field(path, format!("a key of {key_size} bytes is none of {cipher}"))
            }
            other => other,
        }
    })
}
