//! The simulator's random numbers: small, seeded, the same on every machine and in every release.

/// A seeded generator of 64-bit numbers (xoshiro256++, its state filled by splitmix64; both by Blackman and Vigna,
/// public domain). Not for secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimRng {
    state: [u64; 4],
}

/// One step of splitmix64: a bijection of the 64-bit numbers that spreads neighbours far apart.
pub(crate) fn mix64(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl SimRng {
    /// A generator whose numbers depend on `seed` alone.
    pub fn new(seed: u64) -> Self {
        let mut state = [0; 4];
        let mut word = seed;
        for slot in &mut state {
            *slot = mix64(word);
            word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        Self { state }
    }

    /// A generator for a part of the work. It differs from its parent's and its siblings', so that drawing more or
    /// fewer numbers in one part does not change the others.
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let result = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let shifted = b << 17;
        let c = c ^ a;
        let d = d ^ b;
        self.state = [a ^ d, b ^ c, c ^ shifted, d.rotate_left(45)];
        result
    }

    /// A number from 0 to `bound - 1`; 0 for a bound of 0. The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// An index into something of `len` elements. `len` is not 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below((high - low).saturating_add(1))
    }

    /// True in `numerator` of `denominator` cases.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// One of `choices`, which is not empty.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.index(choices.len())]
    }

    /// Puts `items` into random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_matches_its_published_sequence() {
        // The first outputs of splitmix64 for the seed 1234567, from the authors' reference program.
        let seed = 1_234_567_u64;
        let step = 0x9e37_79b9_7f4a_7c15_u64;
        let got: Vec<u64> = (0..3).map(|i| mix64(seed.wrapping_add(step.wrapping_mul(i)))).collect();
        assert_eq!(got, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn equal_seeds_agree_and_others_do_not() {
        let numbers = |seed| {
            let mut rng = SimRng::new(seed);
            (0..100).map(|_| rng.next_u64()).collect::<Vec<_>>()
        };
        assert_eq!(numbers(7), numbers(7));
        assert_ne!(numbers(7), numbers(8));
    }

    #[test]
    fn ranges_are_kept_and_filled() {
        let mut rng = SimRng::new(1);
        let mut seen = [0_u32; 6];
        for _ in 0..6000 {
            seen[(rng.between(10, 15) - 10) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
        assert_eq!(rng.between(u64::MAX, u64::MAX), u64::MAX);
        let mut items: Vec<u32> = (0..50).collect();
        rng.shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
