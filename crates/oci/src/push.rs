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
use crate::pack::pack;
use crate::referrers;
use crate::registry::Registry;
use crate::spool;
use crate::stack::{self, LayerFormat, MOST_LAYERS, STACK};
use crate::upload::{Sent, upload};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use zebu_remote::RemoteError;

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
    /// A raw disk, packed: KubeVirt's `disk.raw+zstd`, in frames that can be read one by one.
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

/// A file of a stack.
#[derive(Debug)]
pub struct StackFile {
    /// The file, a qcow2 image or a raw disk.
    pub file: File,
    /// Its format.
    pub format: LayerFormat,
    /// Its name in the image.
    pub title: String,
}

/// An image that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// The digest of its manifest.
    pub digest: Digest,
    /// Bytes of its blobs.
    pub len: u64,
    /// Whether the registry had all of them.
    pub was_there: bool,
    /// The blobs, of a stack the lowest first.
    pub blobs: Vec<PushedBlob>,
}

/// A blob of an image that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PushedBlob {
    /// Its digest.
    pub digest: Digest,
    /// Its bytes.
    pub len: u64,
    /// Whether the registry had it.
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
    let made = check_tag(name).and_then(|()| make(file, name, push, options));
    made.and_then(|made| send(&made, name, options, on)).map_err(|failure| told(name, failure))
}

/// Makes an image of a chain of files, the lowest first, each of which is an overlay of the one before. The image shows the disk
/// of the last one. Blobs that the registry has are not sent again. The kind that `push` says is not heeded.
///
/// # Errors
/// As of [`push()`]; also that there are more files than a stack may have.
pub fn push_stack(
    files: &[StackFile],
    name: &OciName,
    push: &PushOptions,
    options: &OciOptions,
    on: &dyn Fn(u64, u64) -> bool,
) -> Result<Pushed, RemoteError> {
    let made = check_tag(name).and_then(|()| make_stack(files, name, push));
    made.and_then(|made| send(&made, name, options, on)).map_err(|failure| told(name, failure))
}

fn told(name: &OciName, failure: Failure) -> RemoteError {
    RemoteError::new(&name.to_string(), failure.errno, failure.reason)
}

fn check_tag(name: &OciName) -> Result<(), Failure> {
    match name {
        OciName::Registry { reference: Reference::Digest(_), .. } => {
            Err(Failure::new(libc::EINVAL, "a digest can't be chosen: give a tag"))
        }
        _ => Ok(()),
    }
}

/// A blob that is ready to be sent.
struct MadeBlob {
    content: Content,
    blob: Descriptor,
    /// Hashes of the blob, if ranges of it are read.
    hashes: Option<(Descriptor, Vec<u8>)>,
}

/// An image that is ready to be sent.
struct Made {
    blobs: Vec<MadeBlob>,
    config: (Descriptor, Vec<u8>),
    manifest: Vec<u8>,
}

impl MadeBlob {
    /// A blob, with hashes if ranges of it will be read.
    fn new(content: Content, media_type: &str, is_by_ranges: bool) -> Result<Self, Failure> {
        let mut making = is_by_ranges.then(|| Making::new(content.len()));
        let digest = content.digest(making.as_mut())?;
        let mut blob = Descriptor::new(media_type, digest, content.len());
        let hashes = making.map(|making| making.finish(&mut blob));
        Ok(Self { content, blob, hashes })
    }
}

impl Made {
    fn new(
        blobs: Vec<MadeBlob>,
        (config_type, config): (&str, Vec<u8>),
        artifact_type: Option<&str>,
        push: &PushOptions,
    ) -> Result<Self, Failure> {
        let config = (Descriptor::new(config_type, Digest::of(&config), config.len() as u64), config);
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(MANIFEST.to_owned()),
            artifact_type: artifact_type.map(str::to_owned),
            config: config.0.clone(),
            layers: blobs.iter().map(|made| made.blob.clone()).collect(),
            annotations: push.annotations.iter().cloned().collect(),
        };
        let manifest = serde_json::to_vec(&manifest).map_err(|error| Failure::wrong(error.to_string()))?;
        Ok(Self { blobs, config, manifest })
    }
}

/// The bytes of a file, and how many.
fn content_of(file: &File) -> Result<Content, Failure> {
    let unreadable = |error: io::Error| Failure::of_file("the file can't be read", &error);
    let file_len = file.metadata().map_err(unreadable)?.len();
    let file = file.try_clone().map_err(unreadable)?;
    Ok(Content { head: Vec::new(), file, file_len, zeroes: 0 })
}

fn make(file: &File, name: &OciName, push: &PushOptions, options: &OciOptions) -> Result<Made, Failure> {
    let mut content = content_of(file)?;
    let len = content.file_len;
    let mut annotations = BTreeMap::from([(TITLE.to_owned(), push.title.clone())]);
    match push.kind {
        PushAs::Qcow2 | PushAs::Raw => {}
        PushAs::RawZstd => {
            annotations.insert("io.kubevirt.disk.name".to_owned(), push.title.clone());
            annotations.insert("io.kubevirt.disk.size".to_owned(), len.to_string());
            let packed = spool::unnamed(&options.spool_directory())?;
            content.file_len = pack(file, len, &packed)?;
            content.file = packed;
        }
        PushAs::ContainerDisk => {
            content.head = tar_head(&push.title, len)?;
            // To the end of a block, and two empty ones.
            content.zeroes = len.next_multiple_of(BLOCK) - len + 2 * BLOCK;
        }
    }
    let (media_type, artifact_type) = match push.kind {
        PushAs::Qcow2 => ("application/vnd.kubevirt.disk.qcow2", Some("application/vnd.zebu.disk.v1")),
        PushAs::Raw => ("application/vnd.zebu.disk.raw", Some("application/vnd.zebu.disk.v1")),
        PushAs::RawZstd => ("application/vnd.kubevirt.disk.raw+zstd", Some("application/vnd.zebu.disk.v1")),
        PushAs::ContainerDisk => ("application/vnd.oci.image.layer.v1.tar", None),
    };
    // Of a layout, all is compared when it is opened.
    let is_by_ranges = !name.is_local() && push.kind != PushAs::ContainerDisk;
    let mut made = MadeBlob::new(content, media_type, is_by_ranges)?;
    let config = if push.kind == PushAs::ContainerDisk {
        let Platform { os, architecture, .. } = options.wanted_platform();
        let text = serde_json::json!({
            "architecture": architecture,
            "os": os,
            "config": {},
            "rootfs": { "type": "layers", "diff_ids": [made.blob.digest.to_string()] },
        });
        (CONFIG, text.to_string().into_bytes())
    } else {
        made.blob.annotations.extend(annotations);
        (EMPTY, b"{}".to_vec())
    };
    Made::new(vec![made], config, artifact_type, push)
}

fn make_stack(files: &[StackFile], name: &OciName, push: &PushOptions) -> Result<Made, Failure> {
    if files.is_empty() || files.len() > MOST_LAYERS {
        let count = files.len();
        return Err(Failure::unsupported(format!(
            "an image has at most {MOST_LAYERS} files, and the chain has {count}: zebu convert makes one of them"
        )));
    }
    let mut blobs: Vec<MadeBlob> = Vec::with_capacity(files.len());
    for StackFile { file, format, title } in files {
        let mut made = MadeBlob::new(content_of(file)?, "", !name.is_local())?;
        stack::describe(&mut made.blob, *format, blobs.last().map(|below| &below.blob));
        made.blob.annotations.insert(TITLE.to_owned(), title.clone());
        blobs.push(made);
    }
    Made::new(blobs, (EMPTY, b"{}".to_vec()), Some(STACK), push)
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

fn send(
    made: &Made,
    name: &OciName,
    options: &OciOptions,
    on: &dyn Fn(u64, u64) -> bool,
) -> Result<Pushed, Failure> {
    let Made { blobs, config, manifest } = made;
    let image = Descriptor::new(MANIFEST, Digest::of(manifest), manifest.len() as u64);
    let len = blobs.iter().map(|made| made.blob.size).sum();
    let progress = |done: u64| {
        if on(done, len) { Ok(()) } else { Err(Failure::new(libc::ECANCELED, "interrupted")) }
    };
    let mut pushed = Vec::with_capacity(blobs.len());
    let mut before = 0;
    let mut note = |blob: &Descriptor, was_there| {
        before += blob.size;
        pushed.push(PushedBlob { digest: blob.digest.clone(), len: blob.size, was_there });
        before
    };
    match name {
        OciName::Layout { path, tag } => {
            let layout = Layout::create(path)?;
            for MadeBlob { content, blob, .. } in blobs {
                let was_there = layout.has(blob);
                if !was_there {
                    layout.put(&blob.digest, &mut InOrder { content, at: 0 })?;
                }
                progress(note(blob, was_there))?;
            }
            layout.put(&config.0.digest, &mut config.1.as_slice())?;
            layout.put(&image.digest, &mut manifest.as_slice())?;
            layout.tag(image.clone(), tag.as_deref())?;
        }
        OciName::Registry { registry, repository, reference } => {
            let place = of_registry(registry, options);
            let registry = Registry::new(&place, repository, Access::Push, options)?;
            let mut done = 0;
            for MadeBlob { content, blob, .. } in blobs {
                let sent = upload(&registry, content, blob, &|own| progress(done + own))
                    .map_err(|failure| failure.during(format!("blob {}", blob.digest)))?;
                done = note(blob, sent == Sent::Before);
            }
            let hashes = blobs.iter().filter_map(|made| made.hashes.as_ref());
            for (small, bytes) in hashes.clone().chain([config]) {
                let file = spool::unnamed(&options.spool_directory())?;
                file.write_all_at(bytes, 0)?;
                let content = Content { head: Vec::new(), file_len: small.size, file, zeroes: 0 };
                upload(&registry, &content, small, &|_| Ok(()))
                    .map_err(|failure| failure.during(format!("blob {}", small.digest)))?;
            }
            let hashes: Vec<&Descriptor> = hashes.map(|(hashes, _)| hashes).collect();
            if !hashes.is_empty() {
                let attached = referrers::attach(&registry, &image, &config.0, &hashes);
                attached.map_err(|failure| failure.during("the hashes of the image"))?;
            }
            registry.put_manifest(reference, MANIFEST, manifest.clone())?;
        }
    }
    let was_there = pushed.iter().all(|blob| blob.was_there);
    Ok(Pushed { digest: image.digest, len, was_there, blobs: pushed })
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
