//! Following seals from an image to the overlay in which its disk goes on.

use crate::open::flags;
use crate::refs::{self, Role};
use crate::{Access, Chain, Error, ErrorKind, Image, OpenOptions, Purpose, Result, Sharing};
use std::io;
use std::path::{Path, PathBuf};
use zebu_storage::{File, FileId, LockMode, OpenFlags, Worker};

/// Seals that are followed at most.
const MOST: usize = 1024;

/// The overlays that seals lead to from the image at `path`, the last of which holds the disk. None: the image is not sealed.
///
/// # Errors
/// [`ErrorKind::ReadOnly`]: an overlay is missing, or stands on another image, or a seal can't be read.
/// [`ErrorKind::ReferenceRefused`]: an overlay may not be opened under the policy of `options`. As [`Image::open`].
pub async fn follow_seals(worker: &Worker, path: &Path, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let mut overlays: Vec<PathBuf> = Vec::new();
    loop {
        let at = overlays.last().map_or(path, PathBuf::as_path);
        match find_overlay(worker, at, options).await? {
            None => return Ok(overlays),
            Some(Overlay::Found(overlay)) if overlays.len() < MOST => overlays.push(overlay),
            Some(Overlay::Found(_)) => {
                let message = format!("more than {MOST} seals lead from one image to the next");
                return Err(Error::new(ErrorKind::Unsupported, message).on(path));
            }
            Some(Overlay::Missing { sealed }) => return Err(sealed.adding(" (it is not there)")),
            Some(Overlay::Another { sealed, why }) => return Err(sealed.adding(&format!(" ({why})"))),
        }
    }
}

/// The file that the seal of an image names.
pub(super) enum Overlay {
    /// It stands on the image.
    Found(PathBuf),
    Missing {
        sealed: Error,
    },
    /// It is something else.
    Another {
        sealed: Error,
        why: String,
    },
}

/// Looks for the overlay that the seal of the image at `path` names. `None`: it is not sealed.
pub(super) async fn find_overlay(
    worker: &Worker,
    path: &Path,
    options: &OpenOptions,
) -> Result<Option<Overlay>> {
    let look = OpenOptions {
        access: Access::ReadOnly,
        purpose: Purpose::Inspect,
        chain: Chain::TopOnly,
        sharing: Sharing::Unlocked,
        ..options.clone()
    };
    let Facts { id, sealed, .. } = facts(worker, path, &look).await?;
    let Some((overlay, error)) = sealed else { return Ok(None) };
    let Some(overlay) = overlay else { return Err(error) };
    let name = overlay.to_str().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "its seal names a file whose name is not UTF-8").on(path)
    })?;
    let opened = refs::open(path, name, Role::Overlay, &look, &flags(&look));
    let overlay = match opened {
        Ok((_, overlay)) => overlay,
        Err(refusal) if is_missing(&refusal) => return Ok(Some(Overlay::Missing { sealed: error })),
        Err(refusal) => return Err(refusal),
    };
    let found = OpenOptions { format: None, ..look };
    let another = |why: String| Ok(Some(Overlay::Another { sealed: error.clone(), why }));
    match facts(worker, &overlay, &found).await {
        Ok(facts) if facts.stands_on == Some(id) => Ok(Some(Overlay::Found(overlay))),
        Ok(_) => another("that file does not stand on this image".to_owned()),
        Err(failed) => another(format!("that file is no overlay: {}", failed.message())),
    }
}

fn is_missing(error: &Error) -> bool {
    io::Error::from_raw_os_error(error.errno()).kind() == io::ErrorKind::NotFound
}

struct Facts {
    id: FileId,
    /// The overlay, and the error of a change.
    sealed: Option<(Option<PathBuf>, Error)>,
    /// The backing file.
    stands_on: Option<FileId>,
}

async fn facts(worker: &Worker, path: &Path, look: &OpenOptions) -> Result<Facts> {
    let image = Image::open(worker, path, look).await?;
    let sealed = image.sealed_error().map(|error| (image.sealed_by(), error));
    let backing = image.info()?.backing_path;
    let unlocked = OpenFlags::default().lock(LockMode::None);
    let stands_on = backing.and_then(|path| File::open(&path, &unlocked).ok()).map(|file| file.id());
    let id = image.0.image_file().id();
    image.close(worker).await?;
    Ok(Facts { id, sealed, stands_on })
}
