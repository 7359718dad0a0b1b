//! Which points stay, by the rules of restic.

use super::calendar::Moment;

/// How many points stay. Nothing is kept by a rule of 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Keep {
    /// The last ones.
    pub last: u32,
    /// The last one of each of so many days that have any.
    pub daily: u32,
    /// The same of weeks, which begin on Mondays.
    pub weekly: u32,
    /// The same of months.
    pub monthly: u32,
}

impl Keep {
    /// Whether no rule is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A rule: how many more it keeps, what is the same for points of one span of time, and the last such.
struct Rule {
    left: u32,
    span: fn(usize, u64) -> (i64, u32),
    before: Option<(i64, u32)>,
}

/// Which points stay: `times` are those of the points from the oldest on, in seconds after the beginning of 1970.
///
/// Days, weeks and months are those of UTC. A span of time in which no point was made does not count. Where fewer spans
/// have points than a rule of days, weeks or months keeps, the oldest point stays, too.
pub fn kept(times: &[u64], keep: &Keep) -> Vec<bool> {
    let mut rules = [
        Rule { left: keep.last, span: |number, _| (number as i64, 0), before: None },
        Rule { left: keep.daily, span: |_, time| day(time), before: None },
        Rule { left: keep.weekly, span: |_, time| Moment::week(time), before: None },
        Rule { left: keep.monthly, span: |_, time| month(time), before: None },
    ];
    let mut kept = vec![false; times.len()];
    for (number, time) in times.iter().enumerate().rev() {
        for rule in rules.iter_mut().filter(|rule| rule.left > 0) {
            let span = (rule.span)(number, *time);
            if rule.before != Some(span) || number == 0 {
                rule.before = Some(span);
                rule.left -= 1;
                kept[number] = true;
            }
        }
    }
    kept
}

fn day(time: u64) -> (i64, u32) {
    ((time / 86_400) as i64, 0)
}

fn month(time: u64) -> (i64, u32) {
    let moment = Moment::of(time);
    (moment.year, moment.month)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400;
    /// A Monday: 2024-01-01.
    const START: u64 = 1_704_067_200;

    fn numbers(times: &[u64], keep: Keep) -> Vec<usize> {
        kept(times, &keep)
            .into_iter()
            .enumerate()
            .filter_map(|(number, stays)| stays.then_some(number))
            .collect()
    }

    #[test]
    fn rules_keep_what_restic_keeps() {
        // Two a day, at 3:00 and 15:00, for ten weeks.
        let times: Vec<u64> =
            (0..140).map(|half| START + half / 2 * DAY + (3 + half % 2 * 12) * 3600).collect();
        let keep = Keep::default();
        assert_eq!(numbers(&times, keep), Vec::<usize>::new());
        assert_eq!(numbers(&times, Keep { last: 3, ..keep }), [137, 138, 139]);
        assert_eq!(numbers(&times, Keep { daily: 3, ..keep }), [135, 137, 139]);
        // Sundays.
        assert_eq!(numbers(&times, Keep { weekly: 3, ..keep }), [111, 125, 139]);
        // The last of March (the 10th), of February and of January.
        assert_eq!(numbers(&times, Keep { monthly: 3, ..keep }), [61, 119, 139]);
        // There are three months only: the oldest stays.
        assert_eq!(numbers(&times, Keep { monthly: 9, ..keep }), [0, 61, 119, 139]);
        // Rules add up, and one point may be kept by several.
        assert_eq!(numbers(&times, Keep { last: 1, daily: 2, weekly: 2, monthly: 1 }), [125, 137, 139]);
    }

    #[test]
    fn spans_without_points_do_not_count() {
        let times = [START, START + 40 * DAY, START + 41 * DAY, START + 400 * DAY];
        let keep = Keep::default();
        assert_eq!(numbers(&times, Keep { daily: 2, ..keep }), [2, 3]);
        assert_eq!(numbers(&times, Keep { weekly: 2, ..keep }), [2, 3]);
        assert_eq!(numbers(&times, Keep { monthly: 2, ..keep }), [2, 3]);
        assert_eq!(numbers(&times, Keep { daily: 30, ..keep }), [0, 1, 2, 3]);
        assert_eq!(numbers(&[], Keep { last: 2, ..keep }), Vec::<usize>::new());
        assert_eq!(numbers(&[START], Keep { last: 2, ..keep }), [0]);
    }

    #[test]
    fn a_clock_that_jumps_loses_no_last_point() {
        let times = [START + 10 * DAY, START, START + DAY];
        assert_eq!(numbers(&times, Keep { last: 1, ..Keep::default() }), [2]);
        assert_eq!(numbers(&times, Keep { daily: 2, ..Keep::default() }), [1, 2]);
    }
}
