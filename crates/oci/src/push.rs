//! Images of files: blobs first, the manifest after them, so that a tag never leads to what is not there.

use crate::auth::Access;
use crate::content::{Content, InOrder};
use crate::digest::Digest;
use crate::document::{CONFIG, Descriptor, EMPTY, MANIFEST, Manifest, TITLE};
use crate::failure::Failure;
use crate::hashes::Making;
use crate::hosts::of_registry;
use crate::layout::Layout;
use crate::name::{OciName, Reference};
use crate::options::{OciOptions, Platform};
use crate::referrers;
use crate::registry::Registry;
use crate::spool;
use crate::upload::{Sent, upload};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use zebu_remote::RemoteError;
use zstd_safe::{CCtx, InBuffer, OutBuffer};

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;
/// The level of compression.
const LEVEL: i32 = 3;
/// The user that KubeVirt runs machines as, who owns the disk of a container.
const QEMU: u64 = 107;
const BLOCK: u64 = 512;

/// The kind of image that is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PushAs {
    /// The file as it is, a qcow2 image: KubeVirt's `disk.qcow2`.
    Qcow2,
    /// The file as it is, a raw disk.
    Raw,
    /// A raw disk, packed: KubeVirt's `disk.raw+zstd`.
    RawZstd,
    /// The file in a container, as KubeVirt starts machines from it.
    ContainerDisk,
}

/// The image that is made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PushOptions {
    /// Its kind.
    pub kind: PushAs,
    /// The name of the file in it.
    pub title: String,
    /// Annotations of its manifest.
    pub annotations: Vec<(String, String)>,
}

impl PushOptions {
    /// An image of a kind, whose file has this name.
    pub fn new(kind: PushAs, title: impl Into<String>) -> Self {
        Self { kind, title: title.into(), annotations: Vec::new() }
    }

    /// Adds annotations of the manifest.
    #[must_use]
    pub fn annotations(mut self, annotations: impl IntoIterator<Item = (String, String)>) -> Self {
        self.annotations.extend(annotations);
        self
    }
}

/// An image that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// The digest of its manifest.
    pub digest: Digest,
    /// Bytes of its blob.
    pub len: u64,
    /// Whether the registry had the blob.
    pub was_there: bool,
}

/// Makes an image of `file` under `name`. `on` hears of bytes that are done, and of how many there are; it may end the work
/// (`false`). The file must not change meanwhile.
///
/// # Errors
/// The image's name, an errno and the reason: no right to write, a name with a digest, a file that can't be read.
pub fn push(
    file: &File,
    name: &OciName,
    push: &PushOptions,
    options: &OciOptions,
    on: &dyn Fn(u64, u64) -> bool,
) -> Result<Pushed, RemoteError> {
    let told = |failure: Failure| RemoteError::new(&name.to_string(), failure.errno, failure.reason);
    if let OciName::Registry { reference: Reference::Digest(_), .. } = name {
        return Err(told(Failure::new(libc::EINVAL, "a digest can't be chosen: give a tag")));
    }
    make(file, name, push, options).and_then(|made| send(&made, name, options, on)).map_err(told)
}

/// An image that is ready to be sent.
struct Made {
    content: Content,
    blob: Descriptor,
    config: (Descriptor, Vec<u8>),
    /// Hashes of the blob, if ranges of it are read.
    hashes: Option<(Descriptor, Vec<u8>)>,
    manifest: Vec<u8>,
}

fn make(file: &File, name: &OciName, push: &PushOptions, options: &OciOptions) -> Result<Made, Failure> {
    let unreadable = |error: io::Error| Failure::of_file("the file can't be read", &error);
    let len = file.metadata().map_err(unreadable)?.len();
    let own = file.try_clone().map_err(unreadable)?;
    let mut annotations = BTreeMap::from([(TITLE.to_owned(), push.title.clone())]);
    let content = match push.kind {
        PushAs::Qcow2 | PushAs::Raw => Content { head: Vec::new(), file: own, file_len: len, zeroes: 0 },
        PushAs::RawZstd => {
            annotations.insert("io.kubevirt.disk.name".to_owned(), push.title.clone());
            annotations.insert("io.kubevirt.disk.size".to_owned(), len.to_string());
            let packed = spool::unnamed(&options.spool_directory())?;
            let file_len = pack(file, len, &packed)?;
            Content { head: Vec::new(), file: packed, file_len, zeroes: 0 }
        }
        PushAs::ContainerDisk => {
            let head = tar_head(&push.title, len)?;
            // To the end of a block, and two empty ones.
            Content { head, file: own, file_len: len, zeroes: len.next_multiple_of(BLOCK) - len + 2 * BLOCK }
        }
    };
    let (media_type, artifact_type) = match push.kind {
        PushAs::Qcow2 => ("application/vnd.kubevirt.disk.qcow2", Some("application/vnd.zebu.disk.v1")),
        PushAs::Raw => ("application/vnd.zebu.disk.raw", Some("application/vnd.zebu.disk.v1")),
        PushAs::RawZstd => ("application/vnd.kubevirt.disk.raw+zstd", Some("application/vnd.zebu.disk.v1")),
        PushAs::ContainerDisk => ("application/vnd.oci.image.layer.v1.tar", None),
    };
    // Of a layout, all is compared when it is opened.
    let is_by_ranges = !name.is_local() && matches!(push.kind, PushAs::Qcow2 | PushAs::Raw);
    let mut making = is_by_ranges.then(|| Making::new(content.len()));
    let digest = content.digest(making.as_mut())?;
    let mut blob = Descriptor::new(media_type, digest, content.len());
    let config = if push.kind == PushAs::ContainerDisk {
        let Platform { os, architecture, .. } = options.wanted_platform();
        let text = serde_json::json!({
            "architecture": architecture,
            "os": os,
            "config": {},
            "rootfs": { "type": "layers", "diff_ids": [blob.digest.to_string()] },
        });
        (CONFIG, text.to_string().into_bytes())
    } else {
        blob.annotations = annotations;
        (EMPTY, b"{}".to_vec())
    };
    let hashes = making.map(|making| making.finish(&mut blob));
    let (config_type, config) = config;
    let config = (Descriptor::new(config_type, Digest::of(&config), config.len() as u64), config);
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(MANIFEST.to_owned()),
        artifact_type: artifact_type.map(str::to_owned),
        config: config.0.clone(),
        layers: vec![blob.clone()],
        annotations: push.annotations.iter().cloned().collect(),
    };
    let manifest = serde_json::to_vec(&manifest).map_err(|error| Failure::wrong(error.to_string()))?;
    Ok(Made { content, blob, config, hashes, manifest })
}

/// The head of a tar file with the directory of a container's disk and, up to its bytes, the disk.
fn tar_head(title: &str, len: u64) -> Result<Vec<u8>, Failure> {
    let header = |path: &str, kind, mode, size| -> io::Result<tar::Header> {
        let mut header = tar::Header::new_gnu();
        header.set_path(path)?;
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(QEMU);
        header.set_gid(QEMU);
        header.set_size(size);
        header.set_mtime(0);
        header.set_cksum();
        Ok(header)
    };
    let unfit =
        |error: io::Error| Failure::new(libc::EINVAL, format!("the name of the file in the image: {error}"));
    let directory = header("disk/", tar::EntryType::Directory, 0o755, 0).map_err(unfit)?;
    let file = header(&format!("disk/{title}"), tar::EntryType::Regular, 0o440, len).map_err(unfit)?;
    Ok([&directory.as_bytes()[..], file.as_bytes()].concat())
}

/// Packs the bytes of a file into another; the length.
fn pack(file: &File, len: u64, out: &File) -> Result<u64, Failure> {
    let broken = |code: usize| Failure::new(libc::EIO, format!("zstd: {}", zstd_safe::get_error_name(code)));
    let cant_write = |error: io::Error| Failure::of_file("the packed bytes can't be written", &error);
    let mut context = CCtx::create();
    context.set_parameter(zstd_safe::CParameter::CompressionLevel(LEVEL)).map_err(broken)?;
    context.set_parameter(zstd_safe::CParameter::ChecksumFlag(true)).map_err(broken)?;
    context.set_pledged_src_size(Some(len)).map_err(broken)?;
    let (mut piece, mut packed) = (vec![0; PIECE], vec![0; PIECE]);
    let (mut at, mut written) = (0, 0);
    loop {
        let most = PIECE.min((len - at) as usize);
        file.read_exact_at(&mut piece[..most], at)?;
        at += most as u64;
        let mut input = InBuffer::around(&piece[..most]);
        loop {
            let mut output = OutBuffer::around(&mut packed[..]);
            let left = if at == len {
                context.compress_stream2(
                    &mut output,
                    &mut input,
                    zstd_safe::zstd_sys::ZSTD_EndDirective::ZSTD_e_end,
                )
            } else {
                context.compress_stream2(
                    &mut output,
                    &mut input,
                    zstd_safe::zstd_sys::ZSTD_EndDirective::ZSTD_e_continue,
                )
            };
            let left = left.map_err(broken)?;
            let made = output.pos();
            out.write_all_at(&packed[..made], written).map_err(cant_write)?;
            written += made as u64;
            let is_done = if at == len { left == 0 } else { input.pos() == most };
            if is_done {
                break;
            }
        }
        if at == len {
            return Ok(written);
        }
    }
}

fn send(
    made: &Made,
    name: &OciName,
    options: &OciOptions,
    on: &dyn Fn(u64, u64) -> bool,
) -> Result<Pushed, Failure> {
    let Made { content, blob, config, hashes, manifest } = made;
    let image = Descriptor::new(MANIFEST, Digest::of(manifest), manifest.len() as u64);
    let progress = |done: u64| {
        if on(done, blob.size) { Ok(()) } else { Err(Failure::new(libc::ECANCELED, "interrupted")) }
    };
    let was_there = match name {
        OciName::Layout { path, tag } => {
            let layout = Layout::create(path)?;
            let was_there = layout.has(blob);
            if !was_there {
                layout.put(&blob.digest, &mut InOrder { content, at: 0 })?;
            }
            progress(blob.size)?;
            layout.put(&config.0.digest, &mut config.1.as_slice())?;
            layout.put(&image.digest, &mut manifest.as_slice())?;
            layout.tag(image.clone(), tag.as_deref())?;
            was_there
        }
        OciName::Registry { registry, repository, reference } => {
            let place = of_registry(registry, options);
            let registry = Registry::new(&place, repository, Access::Push, options)?;
            let sent = upload(&registry, content, blob, &progress)
                .map_err(|failure| failure.during(format!("blob {}", blob.digest)))?;
            for (small, bytes) in hashes.iter().chain([config]) {
                let file = spool::unnamed(&options.spool_directory())?;
                file.write_all_at(bytes, 0)?;
                let content = Content { head: Vec::new(), file_len: small.size, file, zeroes: 0 };
                upload(&registry, &content, small, &|_| Ok(()))
                    .map_err(|failure| failure.during(format!("blob {}", small.digest)))?;
            }
            if let Some((hashes, _)) = hashes {
                let attached = referrers::attach(&registry, &image, &config.0, hashes);
                attached.map_err(|failure| failure.during("the hashes of the image"))?;
            }
            registry.put_manifest(reference, MANIFEST, manifest.clone())?;
            sent == Sent::Before
        }
    };
    Ok(Pushed { digest: image.digest, len: blob.size, was_there })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Opened, open, pull};

    fn file_of(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    #[test]
    fn what_is_pushed_into_a_layout_is_what_is_opened_and_pulled() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes: Vec<u8> = (0..300_000u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
        bytes.extend(vec![0; 100_000]);
        let qcow2 = [b"QFI\xfb", &bytes[..]].concat();
        let options = OciOptions::default().directory(dir.path().to_owned());
        for (kind, bytes) in [
            (PushAs::Qcow2, &qcow2),
            (PushAs::Raw, &bytes),
            (PushAs::RawZstd, &bytes),
            (PushAs::ContainerDisk, &qcow2),
        ] {
            let name: OciName =
                OciName::parse(&format!("oci-layout:{}/{kind:?}:v1", dir.path().display())).unwrap();
            let image = PushOptions::new(kind, "disk.img").annotations([("a".to_owned(), "b".to_owned())]);
            let first = push(&file_of(bytes), &name, &image, &options, &|_, _| true).unwrap();
            let again = push(&file_of(bytes), &name, &image, &options, &|_, _| true).unwrap();
            assert!(!first.was_there && again.was_there && first.digest == again.digest, "{kind:?}");
            let Opened::Whole(opened) = open(&name, &options).unwrap_or_else(|e| panic!("{kind:?}: {e}"))
            else {
                panic!("a layout is not lazy")
            };
            let mut found = vec![0; bytes.len() + 1];
            let len = opened.read_at(&mut found, 0).unwrap();
            assert!(found[..len] == **bytes, "{kind:?}: {len}");
            let target = dir.path().join(format!("{kind:?}.img"));
            let pulled =
                pull(&name, &target, &options, &|_, _| true).unwrap_or_else(|e| panic!("{kind:?}: {e}"));
            assert!(std::fs::read(&target).unwrap() == *bytes && pulled.digest == first.digest, "{kind:?}");
            assert!(pull(&name, &target, &options, &|_, _| true).is_err_and(|e| e.errno() == libc::EEXIST));
        }
        let hidden = std::fs::read_dir(dir.path()).unwrap().filter_map(Result::ok);
        assert!(hidden.map(|entry| entry.file_name()).all(|name| !name.to_string_lossy().ends_with(".part")));
    }

    #[test]
    fn a_blob_that_is_not_its_digest_is_neither_opened_nor_pulled() {
        let dir = tempfile::tempdir().unwrap();
        let name = OciName::parse(&format!("oci-layout:{}/l", dir.path().display())).unwrap();
        let options = OciOptions::default().directory(dir.path().to_owned());
        push(&file_of(&[7; 9000]), &name, &PushOptions::new(PushAs::Raw, "x"), &options, &|_, _| true)
            .unwrap();
        let digest = Digest::of(&[7; 9000]);
        let path = dir.path().join("l/blobs/sha256").join(digest.hex());
        let mut wrong = vec![7; 9000];
        wrong[8999] = 8;
        std::fs::write(&path, &wrong).unwrap();
        let error = open(&name, &options).err().unwrap().to_string();
        assert!(
            error.contains("another digest") && error.contains(digest.hex()) && error.contains("oci-layout:"),
            "{error}"
        );
        let target = dir.path().join("target");
        assert!(pull(&name, &target, &options, &|_, _| true).is_err());
        assert!(!target.exists());
        std::fs::write(&path, &wrong[..8999]).unwrap();
        assert!(open(&name, &options).err().unwrap().to_string().contains("8999 bytes"));
    }
}
