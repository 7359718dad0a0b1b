//! Latencies, counted in buckets whose width grows with the value.

/// Bits of a value that tell buckets apart within one power of two: buckets are 1/32 of their value wide at most.
const SUB_BITS: u32 = 5;
const SUB_BUCKETS: usize = 1 << SUB_BITS;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUB_BUCKETS;

/// Counts of values (nanoseconds), exact below 64, to 1/32 above. Adding one costs a few instructions.
#[derive(Clone)]
pub(crate) struct Histogram {
    counts: Box<[u64; BUCKETS]>,
    total: u64,
    max: u64,
    sum: u128,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0; BUCKETS]), total: 0, max: 0, sum: 0 }
    }
}

impl Histogram {
    /// Counts a value.
    #[inline]
    pub(crate) fn add(&mut self, value: u64) {
        self.counts[bucket(value)] += 1;
        self.total += 1;
        self.sum += u128::from(value);
        self.max = self.max.max(value);
    }

    /// Adds the counts of another histogram.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts.iter()) {
            *count += more;
        }
        self.total += other.total;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// The largest value.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// The average; 0 without values.
    pub(crate) fn mean(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.sum as f64 / self.total as f64 }
    }

    /// The value that `permille` of 1000 values do not exceed, to the width of a bucket; 0 without values.
    pub(crate) fn percentile(&self, permille: u32) -> u64 {
        let rank = (u128::from(self.total) * u128::from(permille)).div_ceil(1000).max(1) as u64;
        let mut seen = 0;
        for (index, &count) in self.counts.iter().enumerate() {
            seen += count;
            if count > 0 && seen >= rank {
                return middle(index).min(self.max);
            }
        }
        self.max
    }
}

fn bucket(value: u64) -> usize {
    if value < SUB_BUCKETS as u64 {
        return value as usize;
    }
    let shift = value.ilog2() - SUB_BITS;
    // `value >> shift` has its highest bit at SUB_BITS, so it lies in SUB_BUCKETS..2 * SUB_BUCKETS.
    (shift as usize) * SUB_BUCKETS + (value >> shift) as usize
}

/// A value in the middle of a bucket.
fn middle(index: usize) -> u64 {
    if index < 2 * SUB_BUCKETS {
        return index as u64;
    }
    let shift = index / SUB_BUCKETS - 1;
    let low = ((index % SUB_BUCKETS + SUB_BUCKETS) as u64) << shift;
    low + (1u64 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_bucket_that_is_close_to_it() {
        let mut values: Vec<u64> = (0..5000).collect();
        values.extend((0..64).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, (1 << bit) | 1]));
        values.push(u64::MAX);
        for value in values {
            let index = bucket(value);
            assert!(index < BUCKETS, "{value}");
            assert!(middle(index).abs_diff(value) <= value / 32, "{value} -> {}", middle(index));
        }
    }

    #[test]
    fn buckets_are_in_the_order_of_values() {
        let mut last = 0;
        for value in (0..200_000u64).chain((18..63).map(|bit| 1 << bit)) {
            let index = bucket(value);
            assert!(index >= last, "{value}");
            last = index;
        }
    }

    #[test]
    fn percentiles_agree_with_sorted_values() {
        let mut state = 7u64;
        let mut values = Vec::new();
        let mut histogram = Histogram::default();
        for _ in 0..20_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let value = (state >> 33) % (1 << (state >> 60));
            values.push(value);
            histogram.add(value);
        }
        values.sort_unstable();
        for permille in [1, 500, 900, 990, 999, 1000] {
            let exact = values[(values.len() * permille as usize).div_ceil(1000) - 1];
            let found = histogram.percentile(permille);
            assert!(found.abs_diff(exact) <= exact / 32 + 1, "{permille}: {found}, exactly {exact}");
        }
        assert_eq!(histogram.max(), values[values.len() - 1]);
    }

    #[test]
    fn merged_histograms_count_both() {
        let (mut a, mut b) = (Histogram::default(), Histogram::default());
        (0..10).for_each(|value| a.add(value));
        (10..20).for_each(|value| b.add(value));
        a.merge(&b);
        assert_eq!((a.percentile(500), a.max()), (9, 19));
        assert!((a.mean() - 9.5).abs() < 1e-9);
        assert_eq!(Histogram::default().percentile(990), 0);
    }
}
