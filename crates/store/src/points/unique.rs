//! Ids and times of what is made.

use super::sha::of_bytes;
use std::fs::File;
use std::io::Read;
use std::time::SystemTime;

/// Seconds after the beginning of 1970, by this machine's clock.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A word that nobody else has.
pub(super) fn new_id() -> String {
    let mut bytes = [0; 12];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    let seed = if read.is_ok() { bytes.to_vec() } else { Vec::new() };
    let nanos = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let text = format!("{seed:?} {nanos} {}", std::process::id());
    of_bytes(text.as_bytes())[..24].to_owned()
}
