//! Digests of blobs of registries that a command has read as a whole.

use crate::failure::Failure;
use crate::watch::Watch;
use std::path::Path;
use zebu_disks::{Context, printable};

/// Compares the digests of blobs that were read by ranges and have no hashes. Where one is wrong, the new files `made` of them go.
///
/// # Errors
/// A blob has another digest, or its rest can't be read; or the user has ended the command.
pub(crate) fn compare<'a>(
    context: &Context,
    watch: &Watch,
    made: impl IntoIterator<Item = &'a Path>,
) -> Result<(), Failure> {
    let on = |done: u64, total: u64| {
        watch.note("comparing the digest", done, total);
        !watch.cancel().is_cancelled()
    };
    let Err(error) = context.disks.remote.compare_digests(&on) else { return Ok(()) };
    let is_file = |file: &&Path| file.symlink_metadata().is_ok_and(|found| found.is_file());
    for file in made.into_iter().filter(is_file) {
        // The failure that is told is worse than one more file.
        let _ = std::fs::remove_file(file);
    }
    if watch.cancel().is_cancelled() {
        return Err(Failure::interrupted());
    }
    let (name, reason) = (printable(error.name()), printable(error.reason()));
    Err(Failure::new(format!("the data that was read is not the registry's: '{name}': {reason}")))
}
