//! How large parts are.

use super::options::Length;
use super::resume::MARK;

/// The least bytes of a part that is not the last: S3's.
const LEAST: u64 = 5 << 20;
/// The usual bytes of a part.
const USUAL: u64 = 8 << 20;
/// Bytes by which parts become larger.
const STEP: u64 = 1 << 20;
/// The most bytes of a part: S3's.
const MOST: u64 = 5 << 30;
/// The most parts in memory. Each that is sent takes two threads.
const MOST_PARTS: u64 = 16;

/// Bytes of a part, and how many there are in memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sizing {
    pub(super) part: u64,
    pub(super) buffers: usize,
}

impl Sizing {
    /// For an object of up to `most` bytes.
    ///
    /// # Errors
    /// The memory is too small, or no store takes so much.
    pub(super) fn of(memory: u64, most: u64, length: Length) -> Result<Self, String> {
        // One that is filled, one that is sent, and the first if it is kept.
        let least_buffers = match length {
            Length::Fixed => 2,
            Length::Growing => 3,
        };
        let needed = most.div_ceil(MARK as u64).next_multiple_of(STEP).max(LEAST);
        if needed > MOST {
            return Err(format!("the object would have {most} bytes, which is more than a store takes"));
        }
        let part = needed.max(USUAL.min(memory / (least_buffers + 3) / STEP * STEP));
        let buffers = memory / part;
        if buffers < least_buffers {
            let enough = (needed * least_buffers).div_ceil(1 << 20);
            return Err(format!("parts of {} MiB need {enough} MiB of memory", needed >> 20));
        }
        Ok(Self { part, buffers: buffers.min(MOST_PARTS) as usize })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fit_into_memory_and_are_never_too_many() {
        for length in [Length::Fixed, Length::Growing] {
            for memory in [16u64 << 20, 48 << 20, 1 << 30, 64 << 30] {
                for most in [0, 1, 1 << 30, 80 << 30, 1 << 40, 40 << 40] {
                    let Ok(sizing) = Sizing::of(memory, most, length) else {
                        assert!(memory / 3 < most.div_ceil(9_000).max(6 << 20));
                        continue;
                    };
                    assert!(sizing.part * sizing.buffers as u64 <= memory, "{memory} {most} {sizing:?}");
                    assert!(
                        most.div_ceil(sizing.part) <= 9_999 && sizing.part >= LEAST,
                        "{memory} {most} {sizing:?}"
                    );
                }
            }
        }
        assert_eq!(Sizing::of(48 << 20, 1 << 30, Length::Growing), Ok(Sizing { part: 8 << 20, buffers: 6 }));
        assert!(Sizing::of(1 << 20, 1, Length::Fixed).unwrap_err().contains("10 MiB"));
        assert!(Sizing::of(1 << 20, u64::MAX >> 1, Length::Fixed).unwrap_err().contains("store takes"));
    }
}
