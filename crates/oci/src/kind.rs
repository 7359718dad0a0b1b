//! The disk in an image: which blob it is, and how it is packed.

use crate::document::{Descriptor, Manifest, QCOW2, TITLE, shown};
use crate::failure::Failure;
use crate::stack::{self, LayerFormat};

/// The beginnings of media types of disks: KubeVirt's, and zebu's own.
const DISKS: [&str; 2] = ["application/vnd.kubevirt.disk.", "application/vnd.zebu.disk."];
/// KubeVirt's annotation that names a disk.
const KUBEVIRT_NAME: &str = "io.kubevirt.disk.name";
/// Media types of layers of a container.
const LAYERS: [&str; 2] = ["application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs."];
/// Bytes by which a blob is known.
pub(crate) const SNIFFED: u64 = 512;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// How a blob is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    None,
    Gzip,
    Zstd,
}

impl Packing {
    /// The packing of a blob that begins so.
    pub(crate) fn of(first: &[u8]) -> Self {
        if first.starts_with(GZIP) {
            Self::Gzip
        } else if first.starts_with(ZSTD) {
            Self::Zstd
        } else {
            Self::None
        }
    }
}

/// The disk in an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind<'a> {
    /// A blob.
    Disk(&'a Descriptor, Packing),
    /// A file in the layers of a container.
    InLayers(&'a [Descriptor]),
    /// Blobs that stand on each other, the lowest first.
    Stack(Vec<(&'a Descriptor, LayerFormat)>),
}

impl<'a> Kind<'a> {
    /// The disk in `manifest`, the one called `name` if a name is given. `first` tells how a blob begins.
    pub(crate) fn of(
        manifest: &'a Manifest,
        name: Option<&str>,
        first: impl Fn(&Descriptor) -> Result<Vec<u8>, Failure>,
    ) -> Result<Self, Failure> {
        if let Some(stack) = stack::layers_of(manifest)? {
            return match name {
                None => Ok(Self::Stack(stack)),
                Some(name) => Err(Failure::new(
                    libc::EINVAL,
                    format!(
                        "the image is one disk, whose blobs stand on each other: it has no disk '{name}'"
                    ),
                )),
            };
        }
        let layers = &manifest.layers;
        let is_disk = |layer: &&Descriptor| format_of(layer).is_some();
        if layers.iter().any(|layer| is_disk(&layer)) {
            let disk = choose(layers.iter().filter(is_disk), name)?;
            let first = first(disk)?;
            let packing = match format_of(disk).unwrap_or_default() {
                "raw" => Packing::None,
                "qcow2" if first.starts_with(QCOW2) => Packing::None,
                "raw+gzip" | "qcow2+gzip" if first.starts_with(GZIP) => Packing::Gzip,
                "raw+zstd" | "qcow2+zstd" if first.starts_with(ZSTD) => Packing::Zstd,
                "qcow2" | "raw+gzip" | "qcow2+gzip" | "raw+zstd" | "qcow2+zstd" => {
                    return Err(lie(disk));
                }
                _ => {
                    return Err(Failure::unsupported(format!(
                        "blob {}: disks of the media type '{}' are not supported",
                        disk.digest,
                        shown(&disk.media_type)
                    )));
                }
            };
            return Ok(Self::Disk(disk, packing));
        }
        let is_layer = |layer: &Descriptor| LAYERS.iter().any(|kind| layer.media_type.starts_with(kind));
        if layers.len() != 1 && layers.iter().all(is_layer) && !layers.is_empty() && name.is_none() {
            return Ok(Self::InLayers(layers));
        }
        let disk = choose(layers.iter(), name)?;
        let first = first(disk)?;
        if is_tar(&first) {
            return Ok(Self::InLayers(std::slice::from_ref(disk)));
        }
        let packing = Packing::of(&first);
        if !is_layer(disk) {
            return Ok(Self::Disk(disk, packing));
        }
        // Programs that push files call them layers, too, and note the file's name.
        match packing {
            Packing::None if first.starts_with(QCOW2) || disk.title().is_some() => {
                Ok(Self::Disk(disk, packing))
            }
            Packing::None => Err(lie(disk)),
            _ => Ok(Self::InLayers(std::slice::from_ref(disk))),
        }
    }
}

/// The format of a disk: the rest of its media type.
fn format_of(layer: &Descriptor) -> Option<&str> {
    DISKS.iter().find_map(|kind| layer.media_type.strip_prefix(kind))
}

fn is_tar(first: &[u8]) -> bool {
    first.get(257..262) == Some(b"ustar")
}

fn lie(disk: &Descriptor) -> Failure {
    let media_type = shown(&disk.media_type);
    Failure::wrong(format!("blob {}: it is not what its media type '{media_type}' says", disk.digest))
}

/// The name of a disk.
fn name_of(disk: &Descriptor) -> Option<&str> {
    disk.annotations.get(KUBEVIRT_NAME).or_else(|| disk.annotations.get(TITLE)).map(String::as_str)
}

/// The only disk, or the one with a name.
fn choose<'a>(
    disks: impl Iterator<Item = &'a Descriptor>,
    name: Option<&str>,
) -> Result<&'a Descriptor, Failure> {
    let disks: Vec<&Descriptor> = disks.collect();
    let told = || {
        let names: Vec<String> =
            disks.iter().map(|disk| name_of(disk).map_or_else(|| disk.digest.to_string(), shown)).collect();
        names.join(", ")
    };
    let is_meant = |disk: &&&Descriptor| {
        name.is_none_or(|name| name_of(disk) == Some(name) || disk.digest.to_string() == name)
    };
    let meant: Vec<&&Descriptor> = disks.iter().filter(is_meant).collect();
    match (meant[..].len(), name) {
        (1, _) => Ok(*meant[0]),
        (0, None) => {
            Err(Failure::new(libc::ENOENT, "there is no disk in the image: its manifest has no blobs"))
        }
        (0, Some(name)) => {
            Err(Failure::new(libc::ENOENT, format!("the image has no disk '{name}': it has {}", told())))
        }
        _ => Err(Failure::new(
            libc::EINVAL,
            format!("the image has several disks: {} (--oci-disk names one)", told()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::document::{EMPTY, Manifest};
    use std::collections::BTreeMap;

    fn blob(media_type: &str, names: &[(&str, &str)]) -> Descriptor {
        let names = names.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let digest = Digest::of(format!("{media_type}{names:?}").as_bytes());
        Descriptor { annotations: names.collect(), ..Descriptor::new(media_type, digest, 1) }
    }

    fn manifest(layers: Vec<Descriptor>) -> Manifest {
        let config = Descriptor::new(EMPTY, Digest::of(b"{}"), 2);
        let (media_type, artifact_type, annotations) = (None, None, BTreeMap::new());
        Manifest { schema_version: 2, media_type, artifact_type, config, layers, annotations }
    }

    fn kind(
        layers: &[Descriptor],
        name: Option<&str>,
        first: &[u8],
    ) -> Result<(usize, Option<Packing>), String> {
        let manifest = manifest(layers.to_vec());
        let found = Kind::of(&manifest, name, |_| Ok(first.to_vec())).map_err(|failure| failure.reason)?;
        Ok(match found {
            Kind::Disk(disk, packing) => {
                (manifest.layers.iter().position(|layer| layer == disk).unwrap(), Some(packing))
            }
            Kind::InLayers(layers) => (layers.len(), None),
            Kind::Stack(layers) => (layers.len(), None),
        })
    }

    #[test]
    fn disks_are_found_by_media_type_and_first_bytes() {
        let mut tar = [0; 512];
        tar[257..262].copy_from_slice(b"ustar");
        let layer = "application/vnd.oci.image.layer.v1.tar";
        let one = |media_type: &str| [blob(media_type, &[])];
        let of = |media_type: &str, first: &[u8]| kind(&one(media_type), None, first);
        assert_eq!(of("application/vnd.kubevirt.disk.qcow2", QCOW2), Ok((0, Some(Packing::None))));
        assert_eq!(of("application/vnd.kubevirt.disk.raw+zstd", ZSTD), Ok((0, Some(Packing::Zstd))));
        assert_eq!(of("application/vnd.kubevirt.disk.raw+gzip", GZIP), Ok((0, Some(Packing::Gzip))));
        // The bytes of a raw disk may be anything.
        assert_eq!(of("application/vnd.kubevirt.disk.raw", GZIP), Ok((0, Some(Packing::None))));
        assert_eq!(of("application/octet-stream", GZIP), Ok((0, Some(Packing::Gzip))));
        assert_eq!(of("application/octet-stream", b"x"), Ok((0, Some(Packing::None))));
        assert_eq!(of(layer, &tar), Ok((1, None)));
        assert_eq!(of(&format!("{layer}+gzip"), GZIP), Ok((1, None)));
        assert_eq!(of(layer, QCOW2), Ok((0, Some(Packing::None))));
        let titled = [blob(layer, &[(TITLE, "disk.raw")])];
        assert_eq!(kind(&titled, None, b"x"), Ok((0, Some(Packing::None))));
        let two = [blob(layer, &[]), blob(layer, &[(TITLE, "x")])];
        assert_eq!(kind(&two, None, GZIP), Ok((2, None)));
        for (media_type, first, word) in [
            ("application/vnd.kubevirt.disk.qcow2", GZIP, "says"),
            ("application/vnd.kubevirt.disk.raw+zstd", GZIP, "says"),
            ("application/vnd.kubevirt.disk.vmdk", b"KDMV", "not supported"),
            (layer, b"x", "says"),
        ] {
            let error = of(media_type, first).unwrap_err();
            assert!(error.contains(word) && error.contains("sha256:"), "{error}");
        }
        assert!(kind(&[], None, b"").unwrap_err().contains("no disk"));
    }

    #[test]
    fn several_disks_are_told_by_name() {
        let disk = |name: &str| blob("application/vnd.kubevirt.disk.raw", &[(KUBEVIRT_NAME, name)]);
        let both = [disk("root"), disk("data")];
        assert_eq!(kind(&both, Some("data"), b""), Ok((1, Some(Packing::None))));
        assert!(kind(&both, None, b"").unwrap_err().contains("root, data"));
        assert!(kind(&both, Some("x"), b"").unwrap_err().contains("root, data"));
    }
}
