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
use crate::spool;
use crate::unpack::unpacked;
use std::cell::RefCell;
use std::fs::File;
use zebu_remote::RemoteError;
use zebu_remote::http::{HttpDisk, ServersWithoutRanges};

/// The disk of an image.
pub enum Opened {
    /// Its blob, which is read by ranges.
    Lazy {
        /// The blob. Nothing of it was compared with its digest.
        disk: Box<HttpDisk>,
        /// The hashes of its blocks, if the image has some: a [`HashedDisk`](crate::HashedDisk) compares them.
        hashes: Option<Hashes>,
    },
    /// A file with all of it, which was compared with its digest.
    Whole(File),
}

/// Opens the disk of an image. Mirrors are asked first.
///
/// # Errors
/// The image's name, an errno and the reason with the digest of what is wrong: there is no such image, no right to read it,
/// no disk in it or several, a kind that is not supported, bytes of another digest.
pub fn open(name: &OciName, options: &OciOptions) -> Result<Opened, RemoteError> {
    anywhere(name, options, |image| open_disk(image, options))
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
    let (directory, most) = (options.spool_directory(), options.most_unpacked_bytes());
    match kind_of(&image, options, &looked_at)? {
        Kind::InLayers(layers) => {
            drop(looked_at);
            layers::extract(&image.store, layers, &directory, most).map(Opened::Whole)
        }
        Kind::Disk(of, packing) => {
            let during = |failure: Failure| failure.during(format!("blob {}", of.digest));
            match (blob_of(&image, of, looked_at)?, packing) {
                (Blob::Remote(disk), Packing::None) if !disk.is_streamed() => {
                    let hashes = Hashes::fetch(&image.store, of).map_err(during)?;
                    if options.only_verified && hashes.is_none() {
                        let reason = "it has no hashes with which ranges of it could be compared, and only what was compared is \
                                      wanted: zebu pull compares all of it, and zebu push attaches hashes";
                        return Err(during(Failure::new(libc::EACCES, reason)));
                    }
                    Ok(Opened::Lazy { disk, hashes })
                }
                // A file of its own is used as it is, after it was compared.
                (Blob::Local { file, offset: 0, len }, Packing::None)
                    if file.metadata().is_ok_and(|found| found.len() == len) =>
                {
                    let blob = Blob::Local { file, offset: 0, len };
                    blob.all(of).finish().map_err(during)?;
                    let Blob::Local { file, .. } = blob else { return Err(Failure::wrong("it is gone")) };
                    Ok(Opened::Whole(file))
                }
                (blob, packing) => {
                    let file = spool::unnamed(&directory)?;
                    let mut packed = blob.all(of);
                    let copied =
                        spool::copy(&mut *unpacked(packing, &mut packed), &file, 0, most, &mut |_| Ok(()));
                    copied.and_then(|_| packed.finish()).map_err(during)?;
                    Ok(Opened::Whole(file))
                }
            }
        }
    }
}
