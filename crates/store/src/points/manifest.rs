//! The manifest of a point: what it is of, and the layers that show its disk.

use super::name::is_point;
use super::sha::{is_hash, of_bytes};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The version of the layout that this program writes and reads.
pub(super) const VERSION: u32 = 2;
/// The most layers that a point stands on.
pub const LAYERS_AT_MOST: usize = 256;
/// Stands in for the digest of a manifest while the digest is made.
const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// The largest disk, in bytes: what a signed number can say.
const LARGEST: u64 = i64::MAX as u64;
/// The latest time of a point, in seconds after the beginning of 1970.
pub(super) const LATEST: u64 = LARGEST / 1_000_000;

/// A layer: a qcow2 image that holds what changed since the layer below it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Layer {
    /// SHA-256 of its bytes; its object is `layers/SHA256.qcow2`.
    pub sha256: String,
    /// Bytes of its object.
    pub size: u64,
    /// SHA-256 of the hashes of all clusters of the disk as it shows it; their object is `hashes/SHA256.hashes`.
    pub hashes: String,
    /// Bytes of that object.
    pub hashes_size: u64,
}

impl Layer {
    /// The key of its image.
    pub fn key(&self) -> String {
        layer_key(&self.sha256)
    }

    /// The key of its hashes.
    pub fn hashes_key(&self) -> String {
        hashes_key(&self.hashes)
    }

    /// The name of its image among the layers.
    pub fn file_name(&self) -> String {
        format!("{}.qcow2", self.sha256)
    }
}

pub(super) fn layer_key(sha256: &str) -> String {
    format!("layers/{sha256}.qcow2")
}

pub(super) fn hashes_key(sha256: &str) -> String {
    format!("hashes/{sha256}.hashes")
}

/// A point in time of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Point {
    /// Of the layout: 2.
    pub version: u32,
    /// Its place in the order of points, whatever the clock said: from 1 on.
    pub sequence: u64,
    /// The name by which it is asked for.
    pub name: String,
    /// Seconds after the beginning of 1970, by the clock of the machine that made it.
    pub time: u64,
    /// The id of a moment that it shares with points of other disks, whose time it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moment: Option<String>,
    /// Bytes of the disk.
    pub disk_size: u64,
    /// Bytes of a cluster of its layers.
    pub cluster_size: u64,
    /// The point that it was compared with, or whose bitmap it went on from; none for a full one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Bytes of the objects that it added to the store.
    pub added: u64,
    /// Its layers, from the top to the one that stands on nothing.
    pub layers: Vec<Layer>,
}

impl Point {
    /// The key of the manifest of the point of this sequence.
    pub(super) fn key_of(sequence: u64) -> String {
        format!("points/{sequence:08}.json")
    }

    /// The key of its manifest.
    pub fn key(&self) -> String {
        Self::key_of(self.sequence)
    }

    /// Bytes of all its objects, shared ones included.
    pub fn total(&self) -> u64 {
        self.layers
            .iter()
            .fold(0, |sum: u64, layer| sum.saturating_add(layer.size).saturating_add(layer.hashes_size))
    }

    /// The layer that shows its disk.
    pub fn top(&self) -> Option<&Layer> {
        self.layers.first()
    }

    /// The text of its manifest, with the digest.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let signed = Signed { point: Cow::Borrowed(self), digest: NO_DIGEST.to_owned() };
        let mut text = serde_json::to_string_pretty(&signed).unwrap_or_default();
        text.push('\n');
        let digest = of_bytes(text.as_bytes());
        // It is the last of the fields.
        if let Some(at) = text.rfind(NO_DIGEST) {
            text.replace_range(at..at + NO_DIGEST.len(), &digest);
        }
        text.into_bytes()
    }

    /// Reads the manifest of the point of this sequence.
    ///
    /// # Errors
    /// The reason in words: it is no manifest, is of a newer version, or names what can't be.
    pub(super) fn parse(bytes: &[u8], sequence: u64) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let versioned: Versioned = serde_json::from_slice(bytes)
            .map_err(|error| format!("it is no manifest of a point ({error})"))?;
        if versioned.version != VERSION {
            return Err(format!(
                "it is of version {} of the layout, and {VERSION} is known",
                versioned.version
            ));
        }
        let Signed { point, digest } = serde_json::from_slice(bytes)
            .map_err(|error| format!("it is no manifest of a point ({error})"))?;
        if !is_hash(&digest) || digest_of(bytes, &digest).as_ref() != Some(&digest) {
            return Err("its text is not what its digest says".to_owned());
        }
        point.check(sequence)?;
        Ok(point.into_owned())
    }

    fn check(&self, sequence: u64) -> Result<(), String> {
        if self.sequence != sequence || sequence == 0 {
            return Err(format!("it is of sequence {}, not of {sequence}", self.sequence));
        }
        if !is_point(&self.name) || self.parent.as_ref().is_some_and(|parent| !is_point(parent)) {
            return Err("the name of the point can't be one".to_owned());
        }
        if self.disk_size > LARGEST || self.time > LATEST {
            return Err("the size or the time of the point is out of range".to_owned());
        }
        if self.moment.as_ref().is_some_and(|moment| !is_point(moment)) {
            return Err("the id of the point's moment can't be one".to_owned());
        }
        if !self.cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&self.cluster_size) {
            return Err(format!("clusters of {} bytes can't be", self.cluster_size));
        }
        if self.layers.is_empty() || self.layers.len() > LAYERS_AT_MOST {
            return Err(format!("it has {} layers: 1 to {LAYERS_AT_MOST} can be", self.layers.len()));
        }
        for layer in &self.layers {
            if !is_hash(&layer.sha256) || !is_hash(&layer.hashes) {
                return Err("a layer's name is no SHA-256".to_owned());
            }
            if layer.size > LARGEST || layer.hashes_size > LARGEST {
                return Err("the size of a layer is out of range".to_owned());
            }
        }
        let mut names: Vec<&str> = self.layers.iter().map(|layer| layer.sha256.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        if names.len() != self.layers.len() {
            return Err("a layer stands on itself".to_owned());
        }
        Ok(())
    }
}

/// A point and the digest of its manifest's text.
#[derive(Serialize, Deserialize)]
struct Signed<'a> {
    #[serde(flatten)]
    point: Cow<'a, Point>,
    digest: String,
}

/// The digest of a text that has `digest` once: that of the text with zeroes in its place. `None`: it has it never or twice.
fn digest_of(bytes: &[u8], digest: &str) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (before, after) = text.split_once(digest)?;
    (!after.contains(digest)).then(|| of_bytes([before, NO_DIGEST, after].concat().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A manifest that somebody else has changed, and given the digest that fits.
    fn with_digest(text: &str) -> String {
        let start = text.find("\"digest\": \"").unwrap() + "\"digest\": \"".len();
        let none = [&text[..start], NO_DIGEST, &text[start + NO_DIGEST.len()..]].concat();
        none.replace(NO_DIGEST, &of_bytes(none.as_bytes()))
    }

    fn point() -> Point {
        let layer = |digit: &str| Layer {
            sha256: digit.repeat(64),
            size: 10,
            hashes: digit.repeat(64),
            hashes_size: 5,
        };
        Point {
            version: VERSION,
            sequence: 3,
            name: "20261129T150102Z-3".to_owned(),
            time: 1_795_964_462,
            moment: Some("4f1d".to_owned()),
            disk_size: 1 << 30,
            cluster_size: 65536,
            parent: Some("20261128T150102Z-2".to_owned()),
            added: 15,
            layers: vec![layer("a"), layer("b")],
        }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let point = point();
        assert_eq!(Point::parse(&point.to_bytes(), 3), Ok(point.clone()));
        assert_eq!((point.total(), point.key().as_str()), (30, "points/00000003.json"));
    }

    #[test]
    fn a_point_without_a_moment_says_nothing_of_one() {
        let alone = Point { moment: None, ..point() };
        assert!(!String::from_utf8(alone.to_bytes()).unwrap().contains("moment"));
        assert_eq!(Point::parse(&alone.to_bytes(), 3), Ok(alone));
    }

    #[test]
    fn hostile_manifests_are_refused() {
        let text = String::from_utf8(point().to_bytes()).unwrap();
        let layer = "a".repeat(64);
        for (from, to, word) in [
            ("\"version\": 2", "\"version\": 3", "version 3"),
            ("\"sequence\": 3", "\"sequence\": 4", "sequence"),
            ("20261129T150102Z-3", "../x", "name"),
            ("4f1d", "../x", "moment"),
            (layer.as_str(), "../../etc/passwd", "SHA-256"),
            (layer.as_str(), &"A".repeat(64), "SHA-256"),
            (layer.as_str(), &"b".repeat(64), "itself"),
            ("1073741824", "18446744073709551615", "range"),
            ("1073741824", "-1", "no manifest"),
            ("1073741824", "1e400", "no manifest"),
            ("65536", "3", "clusters"),
            ("\"size\": 10", "\"size\": 18446744073709551615", "range"),
        ] {
            assert!(text.contains(from), "{from}");
            let error = Point::parse(with_digest(&text.replace(from, to)).as_bytes(), 3).unwrap_err();
            assert!(error.contains(word), "{to}: {error}");
        }
        let mut long = point();
        long.layers = (0..100_000)
            .map(|number| Layer { sha256: format!("{number:064x}"), ..long.layers[0].clone() })
            .collect();
        assert!(Point::parse(&long.to_bytes(), 3).unwrap_err().contains("100000 layers"));
        for len in 0..text.len() - 2 {
            assert!(Point::parse(&text.as_bytes()[..len], 3).is_err());
        }
    }

    #[test]
    fn no_changed_byte_goes_unseen() {
        let text = point().to_bytes();
        assert_eq!(with_digest(std::str::from_utf8(&text).unwrap()).as_bytes(), text);
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut wrong = text.clone();
                wrong[at] ^= 1 << bit;
                assert!(Point::parse(&wrong, 3).is_err(), "bit {bit} of byte {at}");
            }
        }
        let text = String::from_utf8(text).unwrap();
        let swapped = text.replace(&"a".repeat(64), "x").replace(&"b".repeat(64), &"a".repeat(64));
        let swapped = swapped.replace("\"x\"", &format!("\"{}\"", "b".repeat(64)));
        for wrong in [text.replace("1795964462", "1795964463"), swapped, text.replace('\n', "")] {
            assert!(Point::parse(wrong.as_bytes(), 3).unwrap_err().contains("digest"), "{wrong}");
        }
        let none = text[..text.find(",\n  \"digest\"").unwrap()].to_owned() + "}";
        assert!(Point::parse(none.as_bytes(), 3).unwrap_err().contains("digest"));
    }
}
