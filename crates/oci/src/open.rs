//! The way from the name of an image to its disk.

use crate::auth::Access;
use crate::blob::Blob;
use crate::digest::Digest;
use crate::document::Descriptor;
use crate::failure::Failure;
use crate::hashes::Hashes;
use crate::hosts::{Place, places};
use crate::image::{Image, Store};
use crate::kind::{Kind, Packing, SNIFFED};
use crate::layers;
use crate::layout::Layout;
use crate::name::{OciName, Reference};
use crate::options::OciOptions;
use crate::registry::Registry;
use crate::seek_table::{FOOTER, SeekTable};
use crate::spool;
use crate::stack::{self, LayerFormat};
use crate::unpack::unpacked;
use std::cell::RefCell;
use std::fs::File;
use zebu_remote::RemoteError;
use zebu_remote::http::{HttpDisk, ServersWithoutRanges};

/// The disk of an image.
pub enum Opened {
    /// Its blob, which is read by ranges.
    Lazy(Box<Lazy>),
    /// A file with all of it, which was compared with its digest.
    Whole(File),
    /// Overlays and what they stand on, the lowest first.
    Stack(Vec<StackLayer>),
}

/// A blob that is read by ranges. Nothing of it was compared with its digest.
pub struct Lazy {
    /// The blob.
    pub disk: HttpDisk,
    /// The digest that all of it must have.
    pub digest: Digest,
    /// The hashes of its blocks, if the image has some: a [`HashedDisk`](crate::HashedDisk) compares them.
    pub hashes: Option<Hashes>,
    /// Whether it is packed in frames, which a [`FramesDisk`](crate::FramesDisk) unpacks.
    pub is_in_frames: bool,
}

/// A blob of a stack.
pub struct StackLayer {
    /// Its digest.
    pub digest: Digest,
    /// Its format.
    pub format: LayerFormat,
    /// Its bytes. It is no stack.
    pub opened: Opened,
}

/// Opens the disk of an image. Mirrors are asked first.
///
/// # Errors
/// The image's name, an errno and the reason with the digest of what is wrong: there is no such image, no right to read it,
/// no disk in it or several, a kind that is not supported, bytes of another digest.
pub fn open(name: &OciName, options: &OciOptions) -> Result<Opened, RemoteError> {
    anywhere(name, options, |image| open_disk(image, options))
}

/// The digest of an image that is of several blobs, which stand on each other; `None` if it is none.
///
/// # Errors
/// The image's name, an errno and the reason: there is no such image, or no right to read it.
pub fn stack_digest(name: &OciName, options: &OciOptions) -> Result<Option<Digest>, RemoteError> {
    anywhere(name, options, |image| {
        let layers = stack::layers_of(&image.manifest);
        let layers = layers.map_err(|failure| failure.during(format!("image {}", image.digest)))?;
        Ok(layers.map(|_| image.digest))
    })
}

/// Does something with an image: at the first place where that succeeds.
pub(crate) fn anywhere<T>(
    name: &OciName,
    options: &OciOptions,
    mut act: impl FnMut(Image) -> Result<T, Failure>,
) -> Result<T, RemoteError> {
    let told = |failure: Failure| RemoteError::new(&name.to_string(), failure.errno, failure.reason);
    match name {
        OciName::Layout { path, tag } => {
            let found = Layout::open(path).and_then(|layout| {
                let reference = layout.reference(tag.as_deref())?;
                Image::find(Store::Layout(layout), &reference, &options.wanted_platform())
            });
            found.and_then(act).map_err(told)
        }
        OciName::Registry { registry, repository, reference } => {
            let mut before = String::new();
            let mut last = Failure::new(libc::ENOENT, "there is no place to ask");
            for place in places(registry, options).map_err(told)? {
                match at_place(&place, repository, reference, options).and_then(&mut act) {
                    Ok(done) => return Ok(done),
                    // Nobody waits for other places, and what the user's disk has no place for is the same there.
                    Err(failure) if matches!(failure.errno, libc::ECANCELED | libc::ENOSPC) => {
                        return Err(told(failure));
                    }
                    Err(failure) => {
                        if place.mirror_of.is_some() {
                            before.push_str(&format!(" (the mirror {}: {failure})", place.api));
                        }
                        last = failure;
                    }
                }
            }
            Err(told(Failure::new(last.errno, last.reason + &before)))
        }
    }
}

fn at_place(
    place: &Place,
    repository: &str,
    reference: &Reference,
    options: &OciOptions,
) -> Result<Image, Failure> {
    let registry = Registry::new(place, repository, Access::Pull, options)?;
    Image::find(Store::Registry(Box::new(registry)), reference, &options.wanted_platform())
}

/// A blob that was looked at.
pub(crate) type LookedAt = RefCell<Option<(Digest, Blob)>>;

/// The disk of an image; the blob that was opened to know what it is stays in `looked_at`.
pub(crate) fn kind_of<'a>(
    image: &'a Image,
    options: &OciOptions,
    looked_at: &LookedAt,
) -> Result<Kind<'a>, Failure> {
    let first = |blob: &Descriptor| {
        let opened = image.store.blob(blob, ServersWithoutRanges::Stream)?;
        let first =
            opened.first(SNIFFED).map_err(|failure| failure.during(format!("blob {}", blob.digest)))?;
        *looked_at.borrow_mut() = Some((blob.digest.clone(), opened));
        Ok(first)
    };
    Kind::of(&image.manifest, options.disk.as_deref(), first)
        .map_err(|failure| failure.during(format!("image {}", image.digest)))
}

/// The blob of a disk, which may be open already.
pub(crate) fn blob_of(image: &Image, blob: &Descriptor, looked_at: LookedAt) -> Result<Blob, Failure> {
    match looked_at.into_inner() {
        Some((digest, opened)) if digest == blob.digest => Ok(opened),
        _ => image.store.blob(blob, ServersWithoutRanges::Stream),
    }
}

fn open_disk(image: Image, options: &OciOptions) -> Result<Opened, Failure> {
    let looked_at = LookedAt::default();
    match kind_of(&image, options, &looked_at)? {
        Kind::InLayers(layers) => {
            drop(looked_at);
            let (directory, most) = (options.spool_directory(), options.most_unpacked_bytes());
            layers::extract(&image.store, layers, &directory, most).map(Opened::Whole)
        }
        Kind::Stack(layers) => {
            let open = |(of, format): (&Descriptor, LayerFormat)| {
                let blob = image.store.blob(of, ServersWithoutRanges::Stream)?;
                format.check(of, &blob.first(SNIFFED)?)?;
                let opened = open_blob(&image.store, of, blob, Packing::None, options)?;
                Ok(StackLayer { digest: of.digest.clone(), format, opened })
            };
            layers.into_iter().map(open).collect::<Result<_, _>>().map(Opened::Stack)
        }
        Kind::Disk(of, packing) => {
            let blob = blob_of(&image, of, looked_at)?;
            open_blob(&image.store, of, blob, packing, options)
        }
    }
}

/// Opens a blob: by ranges, or as a file that was compared.
fn open_blob(
    store: &Store,
    of: &Descriptor,
    blob: Blob,
    packing: Packing,
    options: &OciOptions,
) -> Result<Opened, Failure> {
    let during = |failure: Failure| failure.during(format!("blob {}", of.digest));
    let is_by_ranges = matches!(&blob, Blob::Remote(disk) if !disk.is_streamed());
    let is_in_frames = is_by_ranges && packing == Packing::Zstd && frames_of(&blob).map_err(during)?;
    let is_lazy = is_by_ranges && (packing == Packing::None || is_in_frames);
    let hashes = if is_lazy { Hashes::fetch(store, of).map_err(during)? } else { None };
    match blob {
        // What is unpacked as a whole is compared.
        Blob::Remote(_) if is_in_frames && options.only_verified && hashes.is_none() => {
            unpack(&blob, of, packing, options)
        }
        Blob::Remote(_) if is_lazy && options.only_verified && hashes.is_none() => {
            let reason = "it has no hashes with which ranges of it could be compared, and only what was compared is wanted: zebu \
                          pull compares all of it, and zebu push attaches hashes";
            Err(Failure::new(libc::EACCES, reason))
        }
        Blob::Remote(disk) if is_lazy => {
            let digest = of.digest.clone();
            return Ok(Opened::Lazy(Box::new(Lazy { disk: *disk, digest, hashes, is_in_frames })));
        }
        // A file of its own is used as it is, after it was compared.
        Blob::Local { file, offset: 0, len }
            if packing == Packing::None && file.metadata().is_ok_and(|found| found.len() == len) =>
        {
            let blob = Blob::Local { file, offset: 0, len };
            blob.all(of).finish().map_err(during)?;
            let Blob::Local { file, .. } = blob else { return Err(Failure::wrong("it is gone")) };
            Ok(file)
        }
        blob => unpack(&blob, of, packing, options),
    }
    .map(Opened::Whole)
    .map_err(during)
}

/// The content of a blob, in a file without a name. All of the blob is compared.
fn unpack(blob: &Blob, of: &Descriptor, packing: Packing, options: &OciOptions) -> Result<File, Failure> {
    let file = spool::unnamed(&options.spool_directory())?;
    let mut packed = blob.all(of);
    let most = options.most_unpacked_bytes();
    spool::copy(&mut *unpacked(packing, &mut packed), &file, 0, most, &mut |_| Ok(()))?;
    packed.finish()?;
    Ok(file)
}

/// Whether a blob in zstd tells where its frames are, and they can be unpacked one by one.
fn frames_of(blob: &Blob) -> Result<bool, Failure> {
    let len = blob.len();
    let footer = blob.range(len.saturating_sub(FOOTER), len)?;
    let Some(table) = SeekTable::range(&footer, len)? else { return Ok(false) };
    SeekTable::read(&blob.range(table.start, table.end)?, len).map(|table| table.is_usable())
}
