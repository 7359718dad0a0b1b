//! An image: its manifest, and the place of its blobs.

use crate::blob::Blob;
use crate::digest::Digest;
use crate::document::{Descriptor, Document, Manifest};
use crate::failure::Failure;
use crate::layout::Layout;
use crate::name::Reference;
use crate::options::Platform;
use crate::registry::{Registry, Told};
use zebu_remote::http::ServersWithoutRanges;

/// Indexes that lead to each other.
const MOST_INDEXES: usize = 4;

/// A place of manifests and blobs.
pub(crate) enum Store {
    Registry(Box<Registry>),
    Layout(Layout),
}

impl Store {
    fn document(&self, reference: &Reference) -> Result<Told, Failure> {
        match self {
            Self::Registry(registry) => registry.manifest(reference),
            Self::Layout(layout) => layout.document(reference),
        }
    }

    /// A blob. `without_ranges` says whether it may be read in order if the registry has no ranges.
    pub(crate) fn blob(
        &self,
        blob: &Descriptor,
        without_ranges: ServersWithoutRanges,
    ) -> Result<Blob, Failure> {
        match self {
            Self::Registry(registry) => {
                registry.blob(blob, without_ranges).map(|disk| Blob::Remote(Box::new(disk)))
            }
            Self::Layout(layout) => layout.blob(blob),
        }
        .map_err(|failure| failure.during(format!("blob {}", blob.digest)))
    }
}

/// An image.
pub(crate) struct Image {
    pub(crate) store: Store,
    pub(crate) digest: Digest,
    pub(crate) manifest: Manifest,
}

impl Image {
    /// Looks for an image, through indexes. From the first document on, digests say which.
    pub(crate) fn find(store: Store, reference: &Reference, platform: &Platform) -> Result<Self, Failure> {
        let mut reference = reference.clone();
        for _ in 0..=MOST_INDEXES {
            let Told { digest, bytes, media_type } = store.document(&reference)?;
            let document = Document::read(&bytes, media_type.as_deref());
            match document.map_err(|failure| failure.during(format!("manifest {digest}")))? {
                Document::Manifest(manifest) => return Ok(Self { store, digest, manifest: *manifest }),
                Document::Index(index) => {
                    let chosen = index.choose(platform);
                    let chosen = chosen.map_err(|failure| failure.during(format!("manifest {digest}")))?;
                    reference = Reference::Digest(chosen.digest.clone());
                }
            }
        }
        Err(Failure::unsupported(format!("more than {MOST_INDEXES} indexes lead to each other")))
    }
}
