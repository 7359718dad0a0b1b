//! New files, which are removed unless what they belong to is complete.

use std::path::{Path, PathBuf};
use zebu_storage::sync::{Mutex, MutexGuard};

/// The files of all [`NewFiles`] of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock()
}

/// Removes all files that jobs of this process have made and not finished, for a program that ends at once, without
/// its jobs. The parts of a backup that can be resumed stay.
pub fn remove_unfinished_files() {
    for path in unfinished().drain(..) {
        // There is nobody to tell, and nothing to do about it.
        let _ = std::fs::remove_file(path);
    }
}

/// Files that were made and are not wanted unless the job succeeds.
#[derive(Debug, Default)]
pub(crate) struct NewFiles(Vec<PathBuf>);

impl NewFiles {
    /// Adds a file that was made, or is about to be.
    pub(crate) fn add(&mut self, path: &Path) {
        unfinished().push(path.to_owned());
        self.0.push(path.to_owned());
    }

    /// Names of the files.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(PathBuf::as_path)
    }

    /// Lets all of them stay.
    pub(crate) fn keep(&mut self) {
        let _ = self.keep_if(|| Ok::<(), ()>(()));
    }

    /// Lets all of them stay if `work` succeeds. A program that ends at once removes them before it or not at all.
    pub(crate) fn keep_if<T, E>(
        &mut self,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        if self.0.is_empty() {
            return work();
        }
        let mut unfinished = unfinished();
        let done = work()?;
        for path in self.0.drain(..) {
            if let Some(at) = unfinished.iter().position(|other| *other == path) {
                unfinished.swap_remove(at);
            }
        }
        Ok(done)
    }
}

impl Drop for NewFiles {
    fn drop(&mut self) {
        for path in &self.0 {
            // There is nobody to tell, and nothing to do about it.
            let _ = std::fs::remove_file(path);
        }
        self.keep();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_wanted_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a");
        std::fs::write(&file, b"").unwrap();
        let mut made = NewFiles::default();
        made.add(&file);
        made.add(&directory.path().join("never made"));
        drop(made);
        assert!(!file.exists());
        assert!(!unfinished().iter().any(|path| path.starts_with(directory.path())));
    }

    #[test]
    fn files_that_are_kept_are_not_removed_by_a_program_that_ends() {
        let directory = tempfile::tempdir().unwrap();
        let (kept, lost) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&kept, b"").unwrap();
        let mut made = NewFiles::default();
        made.add(&kept);
        made.add(&lost);
        assert!(unfinished().contains(&kept) && unfinished().contains(&lost));
        made.keep();
        assert!(!unfinished().contains(&kept) && !unfinished().contains(&lost));
        drop(made);
        assert!(kept.exists());
    }
}
