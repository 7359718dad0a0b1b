//! Images of several blobs, each of which is an overlay of the one before it: a stack.
//!
//! The layers of the manifest are the blobs, the lowest first. The media types tell the version of these rules and the format
//! of a blob, and an annotation of each but the first the digest of the blob that it stands on.

use crate::document::{Descriptor, Manifest, QCOW2, shown};
use crate::failure::Failure;

/// The beginning of all media types of stacks.
const ALL: &str = "application/vnd.zebu.stack.";
/// The type of the image.
pub(crate) const STACK: &str = "application/vnd.zebu.stack.v1";
const LAYER_QCOW2: &str = "application/vnd.zebu.stack.v1.qcow2";
const LAYER_RAW: &str = "application/vnd.zebu.stack.v1.raw";
/// The annotation of a blob that tells the digest of the one that it stands on.
const BELOW: &str = "vnd.zebu.stack.below";
/// The most blobs of a stack.
pub(crate) const MOST_LAYERS: usize = 64;

/// The format of a blob in a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerFormat {
    /// A qcow2 image.
    Qcow2,
    /// A raw disk, which is the lowest one.
    Raw,
}

impl LayerFormat {
    fn media_type(self) -> &'static str {
        match self {
            Self::Qcow2 => LAYER_QCOW2,
            Self::Raw => LAYER_RAW,
        }
    }

    /// Refuses a blob that does not begin as its format does.
    pub(crate) fn check(self, of: &Descriptor, first: &[u8]) -> Result<(), Failure> {
        match self {
            Self::Qcow2 if !first.starts_with(QCOW2) => Err(Failure::wrong(format!(
                "blob {}: it is not what its media type '{}' says",
                of.digest,
                shown(&of.media_type)
            ))),
            _ => Ok(()),
        }
    }
}

/// Describes a blob as one of a stack, above the one before it.
pub(crate) fn describe(blob: &mut Descriptor, format: LayerFormat, below: Option<&Descriptor>) {
    format.media_type().clone_into(&mut blob.media_type);
    if let Some(below) = below {
        blob.annotations.insert(BELOW.to_owned(), below.digest.to_string());
    }
}

/// The blobs of a stack, the lowest first; `None` if the image is none.
///
/// # Errors
/// It is of a newer version, or does not say how its blobs stack.
pub(crate) fn layers_of(manifest: &Manifest) -> Result<Option<Vec<(&Descriptor, LayerFormat)>>, Failure> {
    let of_image = manifest.artifact_type.as_deref().unwrap_or_default();
    let is_of_stack = |layer: &Descriptor| layer.media_type.starts_with(ALL);
    if !of_image.starts_with(ALL) && !manifest.layers.iter().any(is_of_stack) {
        return Ok(None);
    }
    if manifest.layers.is_empty() || manifest.layers.len() > MOST_LAYERS {
        let count = manifest.layers.len();
        return Err(Failure::unsupported(format!(
            "a stack has 1 to {MOST_LAYERS} blobs, and this one {count}"
        )));
    }
    let mut below: Option<&Descriptor> = None;
    let mut layers = Vec::new();
    for layer in &manifest.layers {
        let format = match layer.media_type.as_str() {
            LAYER_QCOW2 => LayerFormat::Qcow2,
            LAYER_RAW if below.is_none() => LayerFormat::Raw,
            LAYER_RAW => {
                return Err(Failure::wrong(format!(
                    "blob {}: only the lowest blob of a stack can be raw",
                    layer.digest
                )));
            }
            other => {
                return Err(Failure::unsupported(format!(
                    "blob {}: the media type '{}' is none of the stacks that this version reads",
                    layer.digest,
                    shown(other)
                )));
            }
        };
        let told = layer.annotations.get(BELOW).map(String::as_str);
        let is = below.map(|below| below.digest.to_string());
        if told != is.as_deref() {
            return Err(Failure::wrong(format!(
                "blob {}: it stands on {}, and the manifest has {} below it",
                layer.digest,
                told.map_or_else(|| "nothing".to_owned(), shown),
                is.as_deref().unwrap_or("nothing"),
            )));
        }
        layers.push((layer, format));
        below = Some(layer);
    }
    Ok(Some(layers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::document::EMPTY;
    use std::collections::BTreeMap;

    fn manifest(layers: Vec<Descriptor>) -> Manifest {
        let config = Descriptor::new(EMPTY, Digest::of(b"{}"), 2);
        let artifact_type = Some(STACK.to_owned());
        let annotations = BTreeMap::new();
        Manifest { schema_version: 2, media_type: None, artifact_type, config, layers, annotations }
    }

    fn blob(name: &str, format: LayerFormat, below: Option<&Descriptor>) -> Descriptor {
        let mut blob = Descriptor::new("", Digest::of(name.as_bytes()), 1);
        describe(&mut blob, format, below);
        blob
    }

    #[test]
    fn a_stack_says_how_its_blobs_stand_on_each_other() {
        let lowest = blob("a", LayerFormat::Raw, None);
        let middle = blob("b", LayerFormat::Qcow2, Some(&lowest));
        let top = blob("c", LayerFormat::Qcow2, Some(&middle));
        let all = manifest(vec![lowest.clone(), middle.clone(), top.clone()]);
        let read = layers_of(&all).unwrap().unwrap();
        assert_eq!(read.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), [&lowest, &middle, &top]);
        assert!(top.media_type.contains(".v1."));
        let mut newer = middle.clone();
        newer.media_type = newer.media_type.replace("v1", "v2");
        for (layers, words) in [
            (vec![], "1 to 64"),
            (vec![lowest.clone(); 65], "1 to 64"),
            (vec![middle.clone(), lowest.clone()], "nothing"),
            (vec![lowest.clone(), top.clone()], "stands on"),
            (vec![lowest.clone(), lowest.clone()], "raw"),
            (vec![lowest.clone(), newer], "none of the stacks"),
            (vec![lowest.clone(), Descriptor::new("x", Digest::of(b"x"), 1)], "none of the stacks"),
        ] {
            let told = layers_of(&manifest(layers)).unwrap_err().reason;
            assert!(told.contains(words), "{words}: {told}");
        }
        let mut other = manifest(vec![Descriptor::new("x", Digest::of(b"x"), 1)]);
        other.artifact_type = None;
        assert_eq!(layers_of(&other), Ok(None));
    }
}
