//! Scratch directories: on the disk that the build is on, so that O_DIRECT, holes and punching are real.

use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A directory that is gone when dropped, unless the test failed and `ZEBU_KEEP=1`.
#[derive(Debug)]
pub struct Scratch {
    dir: Option<TempDir>,
}

impl Scratch {
    /// Makes a directory, below `ZEBU_TEST_DIR` or the target directory.
    ///
    /// # Panics
    /// If that fails.
    pub fn new(name: &str) -> Self {
        let base = base();
        std::fs::create_dir_all(&base).unwrap_or_else(|e| panic!("{}: {e}", base.display()));
        let dir = TempDir::with_prefix_in(format!("{name}-"), &base)
            .unwrap_or_else(|e| panic!("{}: {e}", base.display()));
        Self { dir: Some(dir) }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.dir.as_ref().map_or(Path::new("."), TempDir::path)
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let keep = std::thread::panicking() && std::env::var_os("ZEBU_KEEP").is_some_and(|v| v == "1");
        if keep && let Some(dir) = self.dir.take() {
            eprintln!("kept: {}", dir.keep().display());
        }
    }
}

/// A directory for what is expensive to get, kept between runs.
pub fn cache(name: &str) -> PathBuf {
    base().with_file_name("test-cache").join(name)
}

/// `target/PROFILE/deps/TEST` or `target/PROFILE/PROGRAM` is this program: `target/test-scratch` lies beside.
fn base() -> PathBuf {
    if let Some(dir) = std::env::var_os("ZEBU_TEST_DIR") {
        return dir.into();
    }
    let own = std::env::current_exe().unwrap_or_default();
    let profile = own.ancestors().skip(1).find(|dir| dir.file_name().is_some_and(|n| n != "deps"));
    let target = profile.and_then(Path::parent).unwrap_or(Path::new("/tmp"));
    target.join("test-scratch")
}
