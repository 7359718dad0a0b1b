//! What of files is in the page cache.

use crate::Outcome;
use crate::process::{find, output};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// MiB of a file in the page cache; a file that is not there has none.
pub(super) fn cached_mib(file: &Path) -> Outcome<f64> {
    if !file.exists() {
        return Ok(0.0);
    }
    let fincore = find("fincore").ok_or("fincore is missing")?;
    let text = output(Command::new(fincore).args(["-b", "-n", "-o", "RES"]).arg(file))?;
    let bytes: f64 = text.trim().parse().map_err(|_| format!("fincore said: {text}"))?;
    Ok(bytes / 1048576.0)
}

/// Runs `work`, and looks at the files every 200 ms meanwhile: its result, and the most MiB that all of them together
/// had in the page cache. Names may come into being while it runs.
pub(super) fn watched<T>(files: &[PathBuf], work: impl FnOnce() -> Outcome<T>) -> Outcome<(T, f64)> {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most: f64 = 0.0;
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(200));
                // A file may go while it is looked at.
                let now: f64 = files.iter().map(|file| cached_mib(file).unwrap_or(0.0)).sum();
                most = most.max(now);
            }
            most
        });
        let done = work();
        ended.store(true, Ordering::Relaxed);
        let most = watcher.join().map_err(|_| "the watcher panicked".to_owned())?;
        Ok((done?, most))
    })
}
