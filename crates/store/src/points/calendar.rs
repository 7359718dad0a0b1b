//! Days of the calendar, in UTC.

/// A moment, as the calendar has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment {
    pub(super) year: i64,
    pub(super) month: u32,
    pub(super) day: u32,
    hour: u32,
    minute: u32,
    second: u32,
}

/// Days from 0000-03-01 to 1970-01-01.
const EPOCH: i64 = 719_468;
/// Days of 400 years.
const ERA: i64 = 146_097;

impl Moment {
    /// The moment so many seconds after the beginning of 1970.
    pub(super) fn of(seconds: u64) -> Self {
        let days = (seconds / 86_400) as i64 + EPOCH;
        let of_day = (seconds % 86_400) as u32;
        let era = days.div_euclid(ERA);
        let of_era = days.rem_euclid(ERA);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // Months from March on.
        let shifted = (5 * of_year + 2) / 153;
        let day = (of_year - (153 * shifted + 2) / 5 + 1) as u32;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 } as u32;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        Self { year, month, day, hour: of_day / 3600, minute: of_day / 60 % 60, second: of_day % 60 }
    }

    /// Year and number of its week by ISO 8601, for a moment so many seconds after the beginning of 1970.
    pub(super) fn week(seconds: u64) -> (i64, u32) {
        let days = (seconds / 86_400) as i64;
        // 1970-01-01 was a Thursday; the Thursday of a week decides on its year.
        let thursday = days - (days + 3).rem_euclid(7) + 3;
        let found = Self::of(u64::try_from(thursday.max(0)).unwrap_or(0) * 86_400);
        let first = thursday - Self::day_of_year(found) as i64;
        (found.year, ((thursday - first) / 7 + 1) as u32)
    }

    /// Days of the year before this one.
    fn day_of_year(self) -> u32 {
        const BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let before = BEFORE.get(self.month as usize - 1).copied().unwrap_or(0);
        before + self.day - 1 + u32::from(leap && self.month > 2)
    }
}

/// `20261129T150102Z`, for a moment in seconds after the beginning of 1970.
pub fn compact_time(seconds: u64) -> String {
    let Moment { year, month, day, hour, minute, second } = Moment::of(seconds);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

/// `2026-11-29T15:01:02Z`, for a moment in seconds after the beginning of 1970.
pub fn readable_time(seconds: u64) -> String {
    let Moment { year, month, day, hour, minute, second } = Moment::of(seconds);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_date() {
        // As `date -u -d @N` has them.
        for (seconds, text, week) in [
            (0, "1970-01-01T00:00:00Z", (1970, 1)),
            (951_782_399, "2000-02-28T23:59:59Z", (2000, 9)),
            (951_782_400, "2000-02-29T00:00:00Z", (2000, 9)),
            (1_230_768_000, "2009-01-01T00:00:00Z", (2009, 1)),
            (1_262_304_000, "2010-01-01T00:00:00Z", (2009, 53)),
            (1_609_459_199, "2020-12-31T23:59:59Z", (2020, 53)),
            (4_107_542_400, "2100-03-01T00:00:00Z", (2100, 9)),
        ] {
            assert_eq!(readable_time(seconds), text);
            assert_eq!(Moment::week(seconds), week, "{text}");
        }
        assert_eq!(compact_time(951_782_399), "20000228T235959Z");
    }
}
