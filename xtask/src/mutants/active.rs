//! Which change of the code is active: compiled into the changed copy of the engine only.

use std::io::Write;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The number of the active change.
static ACTIVE: LazyLock<u32> =
    LazyLock::new(|| std::env::var("ZEBU_CHANGE").ok().and_then(|text| text.parse().ok()).unwrap_or(u32::MAX));
/// Where the numbers of the changed places go that are reached.
static REACHED: LazyLock<Option<std::fs::File>> = LazyLock::new(|| {
    let path = std::env::var_os("ZEBU_CHANGES_REACHED")?;
    std::fs::OpenOptions::new().append(true).create(true).open(path).ok()
});
static SEEN: [AtomicBool; 1 << 14] = [const { AtomicBool::new(false) }; 1 << 14];

/// Whether a change is active.
pub(crate) fn is(number: u32) -> bool {
    if let Some(mut file) = REACHED.as_ref()
        && SEEN.get(number as usize).is_some_and(|seen| !seen.swap(true, Relaxed))
    {
        let _ = file.write_all(format!("{number}\n").as_bytes());
    }
    *ACTIVE == number
}
