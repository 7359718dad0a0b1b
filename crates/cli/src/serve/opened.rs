//! Images that are served, with their overlays and what verifies them.

use super::log_lines::LogLines;
use super::overlay::overlay_of;
use super::sealed::current_spec;
use super::verified::{Report, VerifiedBase};
use crate::failure::Failure;
use crate::session::Session;
use std::ffi::OsString;
use std::path::PathBuf;
use zebu_disks::ImageSpec;
use zebu_engine::{Access, Format, Image, OpenOptions};

/// An open image, and how it was opened.
pub(crate) struct Opened {
    pub(crate) image: Image,
    pub(crate) access: Access,
    /// The image below, if what is read of it is verified.
    pub(crate) base: Option<Image>,
    /// Options of the top image.
    pub(crate) options: OpenOptions,
}

/// Disks that the command line puts above an image.
pub(crate) struct Layers<'a> {
    /// The path of an overlay, and the name of its base as it was given.
    pub(crate) overlay: Option<(&'a PathBuf, &'a OsString)>,
    /// The manifest of what the image must be.
    pub(crate) manifest: Option<&'a PathBuf>,
    /// Told of clusters that are not so.
    pub(crate) report: Report,
    /// Lines about what is served in the place of the image.
    pub(crate) lines: LogLines,
}

impl Opened {
    /// Opens the image of `spec` with what stands above it.
    pub(crate) fn open(session: &Session, spec: &ImageSpec, layers: Layers<'_>) -> Result<Self, Failure> {
        let Layers { overlay, manifest, report, lines } = layers;
        let base =
            manifest.map(|manifest| VerifiedBase::open(session, spec, manifest, report)).transpose()?;
        let image = open_above(session, spec, overlay, base.as_ref(), &lines);
        let base = base.map(|base| base.image);
        match (image, base) {
            (Ok((image, options)), base) => Ok(Self { image, access: spec.options.access, base, options }),
            (Err(failure), Some(base)) => session.close(&base, Access::ReadOnly).and(Err(failure)),
            (Err(failure), None) => Err(failure),
        }
    }

    /// Closes it, and then what is below.
    pub(crate) fn close(&self, session: &Session) -> Result<(), Failure> {
        let closed = session.close(&self.image, self.access);
        self.base.iter().fold(closed, |closed, base| closed.and(session.close(base, Access::ReadOnly)))
    }
}

fn open_above(
    session: &Session,
    spec: &ImageSpec,
    overlay: Option<(&PathBuf, &OsString)>,
    base: Option<&VerifiedBase>,
    lines: &LogLines,
) -> Result<(Image, OpenOptions), Failure> {
    let overlay = overlay.map(|(path, given)| overlay_of(session, spec, given, path, lines)).transpose()?;
    let spec = match (overlay, base) {
        (Some(mut overlay), Some(base)) => {
            if overlay.options.backing.is_some() {
                overlay.options.backing = Some((base.name.clone(), Some(Format::Raw)));
            }
            overlay
        }
        (Some(overlay), None) => overlay,
        (None, Some(base)) => base.spec(spec),
        (None, None) => current_spec(session, spec, lines)?,
    };
    Ok((session.open(&spec)?, spec.options))
}
