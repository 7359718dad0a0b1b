//! Overlays of what is served (`--overlay`): made if they are not there, and opened above it.

use super::log_lines::LogLines;
use crate::failure::Failure;
use crate::image_failure::image_failure;
use crate::session::Session;
use std::ffi::OsStr;
use std::path::Path;
use zebu_disks::{ImageSpec, backing_argument, printable};
use zebu_engine::jobs::{CloneMode, CloneOptions, backing_name, clone_image};
use zebu_engine::{Access, Chain, Format, Image, ImageInfo, Purpose};

/// How the overlay at `overlay` of the image `given`, which `base` describes, is opened. It is made if it is not there.
///
/// # Errors
/// The base can't be opened, the overlay can't be made, or it stands on something else.
pub(crate) fn overlay_of(
    session: &Session,
    base: &ImageSpec,
    given: &OsStr,
    overlay: &Path,
    lines: &LogLines,
) -> Result<ImageSpec, Failure> {
    let remote_name = backing_argument(given).map_err(|reason| Failure::opening_name(given, &reason))?;
    if overlay.symlink_metadata().is_err() {
        make(session, base, remote_name.clone(), overlay)?;
    }
    let mut spec = base.clone();
    overlay.clone_into(&mut spec.path);
    spec.options.format = Some(Format::Qcow2);
    spec.options.access = Access::ReadWrite;
    let info = look_at(session, &spec)?;
    let Some(found) = info.backing_file else {
        lines.say(format!(
            "{}: '{}' names no backing file: it has the whole disk, and '{}' is not used\n",
            session.dialect().name(),
            printable(&overlay.to_string_lossy()),
            printable(&base.path.to_string_lossy()),
        ));
        return Ok(spec);
    };
    let wanted = match remote_name {
        Some(name) => name,
        None => backing_name(&base.path, overlay).map_err(|error| Failure::new(error.to_string()))?,
    };
    if found != wanted {
        return Err(Failure::new(format!(
            "the overlay '{}' stands on '{}', not on '{}': give another file for a new overlay",
            overlay.display(),
            zebu_remote::http::HttpUrl::hide(&found),
            base.path.display(),
        )));
    }
    let recorded = info.backing_format.as_deref().and_then(Format::from_name);
    // The command line gave its name, so the overlay need not be trusted with it.
    spec.options.backing = Some((base.path.clone(), base.options.format.or(recorded)));
    Ok(spec)
}

fn make(
    session: &Session,
    base: &ImageSpec,
    remote_name: Option<String>,
    overlay: &Path,
) -> Result<(), Failure> {
    let options = CloneOptions::default()
        .mode(CloneMode::Overlay)
        .format(base.options.format)
        .cache(base.options.cache)
        .refs(base.options.refs.clone())
        .remote(base.options.remote.clone())
        .backing_name(remote_name)
        .keys(base.options.keys.clone());
    let made = session.worker().block_on(clone_image(session.worker(), &base.path, overlay, &options));
    made.map(drop).map_err(|error| {
        if error.image() == Some(&base.path) {
            image_failure(base, session.context(), &error)
        } else {
            Failure::during(&format!("could not make the overlay '{}'", overlay.display()), &error)
        }
    })
}

/// The header of an overlay that is there.
fn look_at(session: &Session, spec: &ImageSpec) -> Result<ImageInfo, Failure> {
    let options =
        spec.options.clone().access(Access::ReadOnly).chain(Chain::TopOnly).purpose(Purpose::Inspect);
    let worker = session.worker();
    let looked = worker.block_on(async {
        let image = Image::open(worker, &spec.path, &options).await?;
        let info = image.info();
        image.close(worker).await?;
        info
    });
    looked.map_err(|error| image_failure(spec, session.context(), &error))
}
