//! Medians, their spread, and the rule that says when a ratio means something.

/// The middle and the spread of a set of measurements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    /// Median of the absolute deviations from the median.
    pub(crate) mad: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

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

/// The ratios of two sides' rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) figures: Summary,
    /// Then the median says little: another run may well say something else.
    pub(crate) scatters: bool,
}

/// Ratios scatter if the upper quartile of the rounds' ratios is more than this many times the lower one. The rule is the
/// same for a ratio and for its inverse.
const WIDEST_SPREAD: f64 = 1.35;

/// Fewer rounds have no spread to judge by.
const FEWEST_ROUNDS: usize = 3;

/// The ratio of `a` to `b`, measured in the same rounds, if there are enough. It is taken round by round, so that a slow
/// spell of the machine, which hits both, cancels out.
pub(crate) fn ratio(a: &[f64], b: &[f64]) -> Option<Ratio> {
    let ratios: Vec<f64> =
        a.iter().zip(b).filter(|(a, b)| **a > 0.0 && **b > 0.0).map(|(a, b)| a / b).collect();
    if ratios.len() < FEWEST_ROUNDS {
        return None;
    }
    let logarithms = sorted(&ratios.iter().map(|ratio| ratio.ln()).collect::<Vec<_>>());
    let spread = quantile(&logarithms, 0.75) - quantile(&logarithms, 0.25);
    Some(Ratio { figures: Summary::of(&ratios), scatters: spread > WIDEST_SPREAD.ln() })
}

impl Ratio {
    /// Whether it is below 1 by more than its spread: if it scatters, in every round.
    pub(crate) fn is_below_one(&self) -> bool {
        let Summary { median, mad, max, .. } = self.figures;
        if self.scatters { max < 1.0 } else { median + mad < 1.0 }
    }

    /// `1.23x ±0.02`, or `0.13–0.31x` if it scatters.
    pub(crate) fn shown(&self) -> String {
        let Summary { median, mad, min, max } = self.figures;
        if self.scatters {
            format!("{min:.2}\u{2013}{max:.2}x")
        } else {
            format!("{median:.2}x \u{b1}{mad:.2}")
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
        let s = ratio(&a, &a.map(|v| v * 2.0)).expect("enough rounds");
        assert!((s.figures.median - 0.5).abs() < 1e-9 && s.figures.mad < 1e-9 && !s.scatters);
    }

    #[test]
    fn scattered_rounds_have_no_median_and_few_no_ratio() {
        let b = [1.0; 5];
        let scattered = ratio(&[0.2, 0.3, 0.4, 0.5, 0.9], &b).expect("enough rounds");
        assert_eq!((scattered.shown().as_str(), scattered.is_below_one()), ("0.20\u{2013}0.90x", true));
        assert!(!ratio(&[0.2, 0.3, 0.4, 0.5, 1.1], &b).expect("enough rounds").is_below_one());
        assert!(ratio(&[1.0, 1.0], &b).is_none());
        assert!(!ratio(&[1.0, 1.0, 1.02, 1.0, 9.0], &b).expect("enough rounds").scatters, "one outlier");
    }

    #[test]
    fn a_ratio_and_its_inverse_are_judged_alike() {
        // The 99th percentiles of a reader beside two backups. Judged by its own median, one of the two ratios scatters
        // and the other does not.
        let (zebu, other) = ([4014.0, 2113.5, 1744.9, 1974.3, 1908.7], [505.9, 510.0, 423.9, 618.5, 342.0]);
        let scatters = |a, b| ratio(a, b).expect("enough rounds").scatters;
        assert!(scatters(&zebu, &other) && scatters(&other, &zebu));
        let (steady, steadier) = ([1.0, 1.1, 1.0, 1.1, 1.0], [2.0; 5]);
        assert!(!scatters(&steady, &steadier) && !scatters(&steadier, &steady));
    }
}
