//! The JSON of a LUKS2 header as it is written. Members that are not known are skipped; 64-bit numbers are text.

use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
pub(crate) struct RawMetadata {
    pub(crate) keyslots: BTreeMap<String, RawKeyslot>,
    pub(crate) segments: BTreeMap<String, RawSegment>,
    pub(crate) digests: BTreeMap<String, RawDigest>,
    pub(crate) config: RawConfig,
}

#[derive(Deserialize)]
pub(crate) struct RawKeyslot {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) key_size: Option<u64>,
    pub(crate) priority: Option<u64>,
    pub(crate) area: Option<RawArea>,
    pub(crate) kdf: Option<RawKdf>,
    pub(crate) af: Option<RawSplitter>,
}

#[derive(Deserialize)]
pub(crate) struct RawArea {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) offset: String,
    pub(crate) size: String,
    pub(crate) encryption: Option<String>,
    pub(crate) key_size: Option<u64>,
}

#[derive(Deserialize)]
pub(crate) struct RawKdf {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) salt: String,
    pub(crate) hash: Option<String>,
    pub(crate) iterations: Option<u64>,
    pub(crate) time: Option<u64>,
    pub(crate) memory: Option<u64>,
    pub(crate) cpus: Option<u64>,
}

#[derive(Deserialize)]
pub(crate) struct RawSplitter {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) stripes: u64,
    pub(crate) hash: String,
}

#[derive(Deserialize)]
pub(crate) struct RawSegment {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) offset: String,
    pub(crate) size: String,
    pub(crate) iv_tweak: Option<String>,
    pub(crate) encryption: Option<String>,
    pub(crate) sector_size: Option<u64>,
    pub(crate) integrity: Option<serde::de::IgnoredAny>,
    pub(crate) flags: Option<Vec<String>>,
}

#[derive(Deserialize)]
pub(crate) struct RawDigest {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) keyslots: Vec<String>,
    pub(crate) segments: Vec<String>,
    pub(crate) salt: String,
    pub(crate) digest: String,
    pub(crate) hash: Option<String>,
    pub(crate) iterations: Option<u64>,
}

#[derive(Deserialize)]
pub(crate) struct RawConfig {
    #[serde(default)]
    pub(crate) requirements: RawRequirements,
}

#[derive(Deserialize, Default)]
pub(crate) struct RawRequirements {
    #[serde(default)]
    pub(crate) mandatory: Vec<String>,
}
