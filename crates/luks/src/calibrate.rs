//! How many PBKDF2 iterations take a given time on this machine.

use crate::hash::HashName;
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Fewest iterations of a key slot (format, and both tools).
pub const MIN_ITERATIONS: u32 = 1000;

/// Iterations of PBKDF2 that take about `target` for a key of `key_len` bytes: at least [`MIN_ITERATIONS`].
///
/// Takes up to a quarter of a second itself.
pub fn pbkdf2_iterations(hash: HashName, key_len: usize, target: Duration) -> u32 {
    let mut key = Zeroizing::new(vec![0; key_len]);
    let mut iterations = MIN_ITERATIONS;
    loop {
        let start = Instant::now();
        hash.pbkdf2(b"calibration", &[0; 32], iterations, &mut key);
        let took = start.elapsed();
        if took >= Duration::from_millis(50) || iterations >= 1 << 28 {
            let wanted = f64::from(iterations) * target.as_secs_f64() / took.as_secs_f64().max(1e-9);
            return (wanted.min(f64::from(u32::MAX)) as u32).max(MIN_ITERATIONS);
        }
        iterations *= 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_time_is_more_iterations_and_none_too_few() {
        assert_eq!(pbkdf2_iterations(HashName::Sha256, 64, Duration::ZERO), MIN_ITERATIONS);
        // A measurement would have to stand still for hours.
        let days = Duration::from_secs(1_000_000);
        assert!(pbkdf2_iterations(HashName::Sha1, 16, days) > 10 * MIN_ITERATIONS);
    }
}
