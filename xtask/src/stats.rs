//! Medians, their spread, and when a ratio of two medians means something.

/// The middle and the spread of a set of measurements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    /// Median.
    pub(crate) median: f64,
    /// Median of the absolute deviations from the median.
    pub(crate) mad: f64,
    /// Smallest.
    pub(crate) min: f64,
    /// Largest.
    pub(crate) max: f64,
}

/// A ratio of paired measurements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Ratio {
    /// The median of the rounds' ratios, with its spread.
    Known(Summary),
    /// Too few rounds, or they scatter too much to say anything.
    Meaningless(&'static str),
}

/// A ratio is not given if the middle half of the rounds' ratios spans more than this share of their median: then
/// another run of the same benchmark may well say something else.
const WIDEST_SPREAD: f64 = 0.30;

/// Fewer rounds have no spread to judge by.
const FEWEST_ROUNDS: usize = 3;

impl Summary {
    /// Of at least one value.
    pub(crate) fn of(values: &[f64]) -> Self {
        let sorted = sorted(values);
        let median = quantile(&sorted, 0.5);
        let deviations: Vec<f64> = sorted.iter().map(|v| (v - median).abs()).collect();
        let mad = quantile(&self::sorted(&deviations), 0.5);
        Self { median, mad, min: sorted[0], max: sorted[sorted.len() - 1] }
    }
}

impl Ratio {
    /// Of `a` to `b`, measured in the same rounds: the ratio is taken round by round, so that a slow spell of the
    /// machine, which hits both, cancels out.
    pub(crate) fn of(a: &[f64], b: &[f64]) -> Self {
        let ratios: Vec<f64> = a.iter().zip(b).filter(|(_, b)| **b > 0.0).map(|(a, b)| a / b).collect();
        if ratios.len() < FEWEST_ROUNDS {
            return Ratio::Meaningless("too few rounds");
        }
        let sorted = sorted(&ratios);
        let summary = Summary::of(&ratios);
        let spread = quantile(&sorted, 0.75) - quantile(&sorted, 0.25);
        if spread > WIDEST_SPREAD * summary.median.abs() {
            return Ratio::Meaningless("rounds scatter too much");
        }
        Ratio::Known(summary)
    }

    /// `1.23x ±0.02`, or the reason why there is no number.
    pub(crate) fn shown(&self) -> String {
        match self {
            Ratio::Known(s) => format!("{:.2}x ±{:.2}", s.median, s.mad),
            Ratio::Meaningless(why) => format!("- ({why})"),
        }
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Linear interpolation between the closest ranks; `sorted` is not empty.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = q * (sorted.len() - 1) as f64;
    let below = rank.floor();
    let (lo, hi) = (sorted[below as usize], sorted[rank.ceil() as usize]);
    lo + (hi - lo) * (rank - below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_deviation_of_known_values() {
        let s = Summary::of(&[9.0, 1.0, 2.0, 6.0, 4.0, 2.0, 1.0]);
        // Textbook example: median 2, absolute deviations 0 0 1 1 2 4 7, their median 1.
        assert_eq!((s.median, s.mad, s.min, s.max), (2.0, 1.0, 1.0, 9.0));
        assert!((Summary::of(&[1.0, 2.0]).median - 1.5).abs() < 1e-12);
    }

    #[test]
    fn a_slow_spell_that_hits_both_cancels_out() {
        let a = [1.0, 5.0, 1.0, 2.0, 1.1];
        let b = a.map(|v| v * 2.0);
        match Ratio::of(&a, &b) {
            Ratio::Known(s) => assert!((s.median - 0.5).abs() < 1e-9 && s.mad < 1e-9),
            Ratio::Meaningless(why) => panic!("{why}"),
        }
    }

    #[test]
    fn scattered_or_few_rounds_give_no_ratio() {
        let b = [1.0; 5];
        assert!(matches!(Ratio::of(&[1.0, 2.0, 3.0, 4.0, 5.0], &b), Ratio::Meaningless(_)));
        assert!(matches!(Ratio::of(&[1.0, 1.0], &b), Ratio::Meaningless(_)));
        assert!(
            matches!(Ratio::of(&[1.0, 1.0, 1.02, 1.0, 9.0], &b), Ratio::Known(_)),
            "one outlier is no scatter"
        );
    }
}
