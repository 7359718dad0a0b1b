//! Signals that ask a command to end, and one that must not.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::io::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Signals that ask a command to end.
const STOP: [i32; 3] = [SIGHUP, SIGINT, SIGTERM];

/// The signals that ask this process to end. Those that whoever started it has it ignore are left alone: SIGHUP under
/// nohup, SIGINT for a job that a script has put into the background.
pub(crate) fn stop_signals() -> Vec<i32> {
    // Without /proc none of them counts as ignored, which is what they are by default.
    let ignored = std::fs::read_to_string("/proc/self/status").map_or(0, |status| ignored_of(&status));
    STOP.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect()
}

/// The set of ignored signals in a process's status (proc_pid_status(5)): bit 0 is signal 1.
fn ignored_of(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Lets a write past the limit on the size of files (`ulimit -f`) fail instead of ending the process. A handler does so
/// here only; to ignore the signal would be inherited by the programs that this one starts.
pub(crate) fn survive_size_limit() -> Result<(), Error> {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        assert_eq!(ignored_of("Name:\tzebu\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored_of("Name:\tzebu\n"), 0);
        assert_eq!(ignored_of("SigIgn:\tnonsense\n"), 0);
    }
}
