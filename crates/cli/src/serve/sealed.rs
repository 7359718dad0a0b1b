//! Images that are sealed since a fork: the overlay that holds the disk is served in their place.

use super::log_lines::LogLines;
use crate::failure::Failure;
use crate::image_failure::image_failure;
use crate::session::Session;
use std::path::PathBuf;
use zebu_disks::{ImageSpec, printable};
use zebu_engine::jobs::follow_seals;
use zebu_engine::{Access, Chain, Format, Image, Purpose, Remedy};

/// How the image of `spec` is opened, or the overlay in which its disk goes on, if it is to be written and is sealed.
///
/// # Errors
/// The overlay is missing, stands on something else, or may not be opened.
pub(super) fn current_spec(
    session: &Session,
    spec: &ImageSpec,
    lines: &LogLines,
) -> Result<ImageSpec, Failure> {
    let is_plain = spec.filters.is_empty() && spec.described.is_none() && spec.driver.is_none();
    let may_be = matches!(spec.options.format, None | Some(Format::Qcow2));
    if spec.options.access == Access::ReadOnly || !is_plain || !may_be || !is_sealed(session, spec)? {
        return Ok(spec.clone());
    }
    let worker = session.worker();
    let overlays = worker
        .block_on(follow_seals(worker, &spec.path, &spec.options))
        .map_err(|error| image_failure(spec, session.context(), &error))?;
    let mut names: Vec<PathBuf> = vec![spec.path.clone()];
    names.extend(overlays);
    let [.., base, current] = names.as_slice() else { return Ok(spec.clone()) };
    lines.say(format!(
        "{}: '{}' is sealed: its disk continues in '{}', which is served\n",
        session.dialect().name(),
        printable(&spec.path.to_string_lossy()),
        printable(&current.to_string_lossy()),
    ));
    let mut found = spec.clone();
    found.path.clone_from(current);
    found.options.format = Some(Format::Qcow2);
    // The way here has led over it, so the overlay need not be trusted with its name.
    found.options.backing = Some((base.clone(), Some(Format::Qcow2)));
    Ok(found)
}

/// Whether the image is sealed. What else is wrong with it, its opening tells.
///
/// # Errors
/// A signal came while the writes of a killed server were waited for, which may seal it.
fn is_sealed(session: &Session, spec: &ImageSpec) -> Result<bool, Failure> {
    let options =
        spec.options.clone().access(Access::ReadOnly).chain(Chain::TopOnly).purpose(Purpose::Inspect);
    let worker = session.worker();
    let looked = worker.block_on(async {
        let image = Image::open(worker, &spec.path, &options).await?;
        let is_sealed = image.is_sealed();
        image.close(worker).await.map(|()| is_sealed)
    });
    match looked {
        Ok(is_sealed) => Ok(is_sealed),
        Err(error) if error.remedy() == Some(&Remedy::WaitForWrites) => {
            Err(image_failure(spec, session.context(), &error))
        }
        Err(_) => Ok(false),
    }
}
