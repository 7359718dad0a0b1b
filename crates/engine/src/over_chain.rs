//! Refusing a new image over a file of the chain that it is to stand on: making it would empty that file.

use crate::open::chain_files;
use crate::same_file::FilePlace;
use crate::{CreateOptions, Error, ErrorKind, OpenOptions, Result, refs};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use zebu_storage::{FileId, LockMode, OpenFlags, Worker};

/// The file at `path`, if there is something in it to lose.
fn with_content(path: &Path) -> Option<FileId> {
    let found = std::fs::metadata(path).ok()?;
    let has_content = found.len() > 0 || found.file_type().is_block_device();
    FilePlace::of(path).file().filter(|_| has_content)
}

/// Refuses a new image over a file of the chain that it is to stand on. Files that can't be looked at are passed over,
/// and so is what they stand on.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: it would be made over such a file. [`ErrorKind::ReferenceRefused`]: something that is to
/// be overwritten may be one, because the chain names a file that may not be opened.
pub(crate) async fn check(worker: &Worker, path: &Path, options: &CreateOptions) -> Result<()> {
    let Some((name, format)) = options.backing.as_ref().filter(|(name, _)| !name.is_empty()) else {
        return Ok(());
    };
    let unlocked = OpenFlags::default().lock(LockMode::None);
    let elsewhere = options.remote.open_elsewhere(path, &unlocked);
    let is_backing_elsewhere =
        options.remote.is_name(name) && options.remote.local_file(Path::new(name)).is_none();
    // An image on a server stands on no local file.
    if elsewhere.is_none() && is_backing_elsewhere {
        return Ok(());
    }
    let image = match elsewhere {
        Some(opened) => opened.map(|file| file.files()).unwrap_or_default(),
        None => Vec::from_iter(with_content(path)),
    };
    let data_file = options.data_file.as_ref().map(|name| refs::resolve(path, name));
    let data = data_file.as_deref().and_then(with_content);
    if image.is_empty() && data.is_none() {
        return Ok(());
    }
    let open = OpenOptions {
        format: Some(*format),
        refs: options.refs.clone(),
        remote: options.remote.clone(),
        ..OpenOptions::default()
    };
    let backing = if options.remote.is_name(name) { PathBuf::from(name) } else { refs::resolve(path, name) };
    let chain = chain_files(worker, &backing, &open).await?;
    let made = if image.iter().any(|file| chain.contains(file)) {
        path
    } else if let Some(path) = data_file.as_deref().filter(|_| data.is_some_and(|data| chain.contains(&data)))
    {
        path
    } else {
        return Ok(());
    };
    let message = format!(
        "it is a file of the chain that the image would stand on ('{}'), which making it would destroy: give another name",
        backing.display()
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).on(made))
}
