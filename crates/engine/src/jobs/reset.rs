//! Throwing away what an overlay holds, so that its disk is that of the image below again.

use crate::{Error, ErrorKind, Image, Result};
use zebu_storage::Worker;

/// Empties the overlay in which the disk of `image` goes on since a fork, durably, while requests go on. A crash shows the disk as it
/// was, or as the image below has it. Changes wait meanwhile; who has read the disk has to be told that it is another one.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: the image is no overlay that a fork has made, or its size was changed since. [`ErrorKind::Exists`]: a
/// backup is under way. Failures of the file; nothing was thrown away then, or all of it.
pub async fn reset(worker: &Worker, image: &Image) -> Result<()> {
    let image = image.current();
    image.qcow2("overlays")?.check_writable()?;
    refuse_what_is_no_fork(&image)?;
    image
        .alone(worker, async move |image, on| {
            image.check_nothing_is_copied("is reset")?;
            refuse_what_is_no_fork(image)?;
            let qcow2 = image.qcow2("overlays")?;
            qcow2.prepare_write(on).await?;
            // Nobody knows which of it differs.
            qcow2.note_change(on, 0, image.virtual_size()).await?;
            qcow2.make_empty(&image.0, on).await
        })
        .await
}

fn refuse_what_is_no_fork(image: &Image) -> Result<()> {
    let unsupported = |message: &str| Err(Error::new(ErrorKind::Unsupported, message).on(image.path()));
    let Some(base) = image.backing() else {
        return unsupported("it is no overlay: only a disk that was forked can be reset");
    };
    let own = std::path::absolute(image.path()).unwrap_or_else(|_| image.path().to_owned());
    if base.sealed_by().is_none_or(|overlay| overlay != own) {
        return unsupported("the image below is not sealed for it: only a disk that was forked can be reset");
    }
    if base.virtual_size() != image.virtual_size() {
        return unsupported(
            "the size of the disk was changed since the fork, and a reset does not change it back",
        );
    }
    Ok(())
}
