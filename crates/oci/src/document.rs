//! Documents of the image specification: descriptors, manifests, indexes.

use crate::digest::Digest;
use crate::failure::Failure;
use crate::options::Platform;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Media types.
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const EMPTY: &str = "application/vnd.oci.empty.v1+json";
pub(crate) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_OLD: &str = "application/vnd.docker.distribution.manifest.v1";
/// Media types that are asked for.
pub(crate) const ACCEPTED: [&str; 4] = [MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_LIST];
/// The longest document, in bytes.
pub(crate) const LONGEST: usize = 4 << 20;
/// The most blobs or images that one may name.
const MOST_ENTRIES: usize = 4096;

/// The first bytes of a blob that is a qcow2 image.
pub(crate) const QCOW2: &[u8] = b"QFI\xfb";

/// The annotation that tells the name of a file.
pub(crate) const TITLE: &str = "org.opencontainers.image.title";
/// The annotation that tells a tag in a layout.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// A blob: what it is, its digest and its length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) platform: Option<PlatformEntry>,
}

impl Descriptor {
    pub(crate) fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        let (annotations, platform) = (BTreeMap::new(), None);
        Self { media_type: media_type.to_owned(), digest, size, annotations, platform }
    }

    /// The name of the file that it was made of, as far as it tells.
    pub(crate) fn title(&self) -> Option<&str> {
        self.annotations.get(TITLE).map(String::as_str)
    }
}

/// The platform of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlatformEntry {
    pub(crate) os: String,
    pub(crate) architecture: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) variant: Option<String>,
}

impl PlatformEntry {
    fn shown(&self) -> String {
        let variant = self.variant.as_ref().map(|variant| format!("/{variant}")).unwrap_or_default();
        format!("{}/{}{variant}", self.os, self.architecture)
    }

    fn is(&self, wanted: &Platform) -> bool {
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && wanted.variant.as_ref().is_none_or(|wanted| self.variant.as_ref() == Some(wanted))
    }
}

/// A manifest: the blobs of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) media_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) artifact_type: Option<String>,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

/// An index: images for several platforms.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Index {
    pub(crate) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) media_type: Option<String>,
    pub(crate) manifests: Vec<Descriptor>,
}

/// A document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Document {
    Manifest(Box<Manifest>),
    Index(Index),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shape {
    schema_version: Option<u32>,
    media_type: Option<String>,
    layers: Option<serde::de::IgnoredAny>,
    manifests: Option<serde::de::IgnoredAny>,
}

impl Document {
    /// Reads a document. `told` is the media type by which it came.
    pub(crate) fn read(bytes: &[u8], told: Option<&str>) -> Result<Self, Failure> {
        let bad = |error: serde_json::Error| Failure::wrong(format!("the manifest can't be read: {error}"));
        let shape: Shape = serde_json::from_slice(bytes).map_err(bad)?;
        let told = told.map(|told| told.split(';').next().unwrap_or_default().trim());
        let told = told.filter(|told| ACCEPTED.contains(told));
        let named = shape.media_type.as_deref().or(told);
        if shape.schema_version == Some(1) || named.is_some_and(|named| named.starts_with(DOCKER_OLD)) {
            return Err(Failure::unsupported(
                "the manifest is of docker's old version 1: push the image again",
            ));
        }
        if shape.schema_version != Some(2) {
            return Err(Failure::wrong("the manifest has no schemaVersion 2"));
        }
        // One that is both would be read in two ways.
        let is_index = match (shape.layers.is_some(), shape.manifests.is_some()) {
            (true, false) => false,
            (false, true) => true,
            (true, true) => return Err(Failure::wrong("the manifest is an image and an index at once")),
            (false, false) => return Err(Failure::wrong("the manifest has neither layers nor manifests")),
        };
        let fits: &[&str] = if is_index { &[INDEX, DOCKER_LIST] } else { &[MANIFEST, DOCKER_MANIFEST] };
        let contradiction = [named, told].into_iter().flatten().find(|one| !fits.contains(one));
        if let Some(named) = contradiction {
            return Err(Failure::wrong(format!(
                "the manifest is not what its media type '{}' says",
                shown(named)
            )));
        }
        let document = if is_index {
            Self::Index(serde_json::from_slice(bytes).map_err(bad)?)
        } else {
            Self::Manifest(serde_json::from_slice(bytes).map_err(bad)?)
        };
        let entries = match &document {
            Self::Index(index) => &index.manifests,
            Self::Manifest(manifest) => &manifest.layers,
        };
        if entries.len() > MOST_ENTRIES {
            return Err(Failure::unsupported(format!("the manifest has more than {MOST_ENTRIES} entries")));
        }
        Ok(document)
    }
}

impl Index {
    /// The image for a platform.
    pub(crate) fn choose(&self, wanted: &Platform) -> Result<&Descriptor, Failure> {
        // Attestations have the platform unknown/unknown.
        let is_image = |entry: &&Descriptor| {
            [MANIFEST, DOCKER_MANIFEST, INDEX, DOCKER_LIST].contains(&entry.media_type.as_str())
                && entry.platform.as_ref().is_none_or(|platform| platform.os != "unknown")
        };
        let images: Vec<&Descriptor> = self.manifests.iter().filter(is_image).collect();
        let fits = |entry: &&&Descriptor| entry.platform.as_ref().is_some_and(|platform| platform.is(wanted));
        if let Some(found) = images.iter().find(fits) {
            return Ok(found);
        }
        match images[..] {
            [] => Err(Failure::unsupported("the index has no image")),
            [only] if only.platform.is_none() => Ok(only),
            _ => {
                let has: Vec<String> = images
                    .iter()
                    .map(|entry| entry.platform.as_ref().map_or("none".to_owned(), |one| shown(&one.shown())))
                    .collect();
                Err(Failure::new(
                    libc::ENOENT,
                    format!("the index has no image for {wanted} (--platform): it has {}", has.join(", ")),
                ))
            }
        }
    }
}

/// A text of a document that can be shown: short, and without control characters.
pub(crate) fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(120).map(|c| if c.is_control() { '?' } else { c }).collect();
    if shown.len() < text.len() {
        shown.push_str("...");
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn descriptor(more: &str) -> String {
        format!("{{\"mediaType\":\"{MANIFEST}\",\"digest\":\"{DIGEST}\",\"size\":0{more}}}")
    }

    #[test]
    fn documents_are_read_and_liars_are_told() {
        let config = descriptor("");
        let manifest = format!("{{\"schemaVersion\":2,\"config\":{config},\"layers\":[{config}]}}");
        assert!(matches!(Document::read(manifest.as_bytes(), Some(MANIFEST)), Ok(Document::Manifest(_))));
        assert!(Document::read(manifest.as_bytes(), Some(INDEX)).unwrap_err().reason.contains("media type"));
        for (text, word) in [
            ("{", "can't be read"),
            ("{}", "schemaVersion"),
            ("{\"schemaVersion\":2}", "neither"),
            ("{\"schemaVersion\":1,\"fsLayers\":[]}", "version 1"),
            ("{\"schemaVersion\":2,\"layers\":[],\"manifests\":[]}", "at once"),
            ("{\"schemaVersion\":2,\"layers\":[]}", "config"),
            ("{\"schemaVersion\":2,\"manifests\":[{\"digest\":\"../x\"}]}", "can't be read"),
        ] {
            let error = Document::read(text.as_bytes(), None).unwrap_err();
            assert!(error.reason.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn a_platform_is_chosen() {
        let platform = |os: &str, architecture: &str, variant: &str| {
            descriptor(&format!(
                ",\"platform\":{{\"os\":\"{os}\",\"architecture\":\"{architecture}\"{variant}}}"
            ))
        };
        let index = |entries: &[String]| {
            let text = format!("{{\"schemaVersion\":2,\"manifests\":[{}]}}", entries.join(","));
            match Document::read(text.as_bytes(), None) {
                Ok(Document::Index(index)) => index,
                other => panic!("{other:?}"),
            }
        };
        let arm = platform("linux", "arm64", ",\"variant\":\"v8\"");
        let all = index(&[platform("unknown", "unknown", ""), platform("linux", "amd64", ""), arm.clone()]);
        let found = |wanted: &str| all.choose(&wanted.parse().unwrap()).map(|found| found.platform.clone());
        assert_eq!(found("linux/amd64").unwrap().unwrap().architecture, "amd64");
        assert_eq!(found("linux/arm64").unwrap().unwrap().variant.as_deref(), Some("v8"));
        let missing = found("linux/s390x").unwrap_err();
        assert!(missing.reason.contains("linux/amd64, linux/arm64/v8"), "{missing}");
        assert!(!missing.reason.contains("unknown"), "{missing}");
        assert!(index(&[descriptor("")]).choose(&"linux/s390x".parse().unwrap()).is_ok());
        assert!(index(&[arm]).choose(&"linux/s390x".parse().unwrap()).is_err());
        assert!(index(&[]).choose(&"linux/s390x".parse().unwrap()).unwrap_err().reason.contains("no image"));
    }
}
