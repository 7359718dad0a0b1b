//! Images of which only what a manifest says is read (`--verify`).

use crate::failure::Failure;
use crate::session::Session;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_disks::ImageSpec;
use zebu_drivers::{ImageDisk, Verified, VerifiedHooks};
use zebu_engine::jobs::{Cancel, ManifestIndex};
use zebu_engine::{Access, Format, Image, Keys};

/// Told of what is wrong, by any thread.
pub(crate) type Report = Box<dyn Fn(&str) + Send + Sync>;

/// An image below the disk that is compared with a manifest.
pub(crate) struct VerifiedBase {
    /// The image, to be closed when nobody reads the disk any more.
    pub(crate) image: Image,
    /// The name of the disk, which is raw.
    pub(crate) name: PathBuf,
}

impl VerifiedBase {
    /// Opens the image of `spec` and `manifest`. `report` is told of clusters that are wrong.
    ///
    /// # Errors
    /// One of the two can't be opened, or the manifest is of another disk.
    pub(crate) fn open(
        session: &Session,
        spec: &ImageSpec,
        manifest: &Path,
        report: Report,
    ) -> Result<Self, Failure> {
        let report: Arc<Report> = Arc::new(report);
        let opened = Self::try_open(session, spec, manifest, &report);
        if opened.is_ok() {
            return opened;
        }
        // The header may have come wrong, or a cache may have it so.
        let afresh = session.context().disks.remote.reads_afresh();
        if afresh.is_empty() { opened } else { Self::try_open(session, spec, manifest, &report) }
    }

    fn try_open(
        session: &Session,
        spec: &ImageSpec,
        manifest: &Path,
        report: &Arc<Report>,
    ) -> Result<Self, Failure> {
        let index = ManifestIndex::open(manifest, &Cancel::default())
            .map_err(|error| Failure::during("could not use the manifest of --verify", &error))?;
        let mut below = spec.clone();
        below.options.access = Access::ReadOnly;
        let image = session.open(&below)?;
        let opened = Self::above(session, &image, spec, index, Arc::clone(report));
        if opened.is_err() {
            // What it says matters less.
            let _ = session.close(&image, Access::ReadOnly);
        }
        Ok(Self { image, name: opened? })
    }

    fn above(
        session: &Session,
        image: &Image,
        spec: &ImageSpec,
        index: ManifestIndex,
        report: Arc<Report>,
    ) -> Result<PathBuf, Failure> {
        let shown = spec.path.display().to_string();
        let below = Arc::new(ImageDisk::new(image.clone(), Access::ReadOnly, session.config().engine)?);
        let disks = &session.context().disks;
        // The disk is theirs.
        let owner = Arc::downgrade(disks);
        let afresh = move || owner.upgrade().map(|disks| disks.remote.reads_afresh());
        let hooks = VerifiedHooks::new(move |told: &str| report(told), afresh);
        let disk = Arc::new(Verified::new(below, &shown, index, hooks).map_err(Failure::new)?);
        let name = disks.verified.name_of_next(&shown);
        let name = disks.names.note_verified(PathBuf::from(name), disk.clone()).map_err(Failure::new)?;
        disks.verified.note(shown, disk);
        Ok(name)
    }

    /// How the disk itself is opened, as `spec` says of what is served.
    pub(crate) fn spec(&self, spec: &ImageSpec) -> ImageSpec {
        let mut spec = spec.clone();
        self.name.clone_into(&mut spec.path);
        spec.options.format = Some(Format::Raw);
        spec.options.snapshot = None;
        spec.options.backing = None;
        spec.options.data_file = None;
        spec.options.keys = Keys::default();
        spec.filters.clear();
        spec
    }
}
