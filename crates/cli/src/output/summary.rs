//! The last line of a job, for people.

use super::units::size_short;
use std::time::Duration;

/// A line such as `2 GiB -> 310 MiB in 13.2 s, 155 MiB/s`: bytes of the disk, of the file that was made if it is one, the time,
/// and the bytes of the disk in a second.
pub(crate) fn summary(disk: u64, file: Option<u64>, time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let made = file.map_or_else(String::new, |bytes| format!(" -> {}", size_short(bytes)));
    let rate = if seconds > 0.0 { disk as f64 / seconds } else { 0.0 };
    let rate = if rate >= 1.0 { format!(", {}/s", size_short(rate as u64)) } else { String::new() };
    format!("{}{made} in {}{rate}", size_short(disk), time_text(time))
}

fn time_text(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_told_in_one_line() {
        let line = summary(2 << 30, Some(310 << 20), Duration::from_millis(13_200));
        assert_eq!(line, "2 GiB -> 310 MiB in 13.2 s, 155 MiB/s");
        assert_eq!(summary(1 << 20, None, Duration::from_secs(64)), "1 MiB in 1 min 4 s, 16 KiB/s");
        assert_eq!(summary(0, Some(0), Duration::ZERO), "0 B -> 0 B in 0.0 s");
        assert_eq!(summary(1 << 40, None, Duration::from_secs(7_320)), "1 TiB in 2 h 2 min, 143 MiB/s");
    }
}
