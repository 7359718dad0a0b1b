//! The hash of a disk, made from the hashes of its clusters in order.

use crate::Result;
use crate::progress::Cancel;

/// The item that stands for a zero cluster, where another cluster counts with its hash.
const ZERO: [u8; 32] = [0; 32];
/// Zero clusters hashed one by one between two looks at the switch.
const STEP: u64 = 1 << 20;

/// As many as are hashed at once.
static MANY: [[u8; 32]; 2048] = [ZERO; 2048];

/// An item that is hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// 32 bytes for each cluster, zero clusters included: what manifests of version 1 have.
    Clusters,
    /// For each run of clusters their number (8 bytes, little-endian) and 32 bytes. All zero clusters in a row are one
    /// run, every other cluster is one of its own.
    Runs,
}

/// A hash under way.
#[derive(Debug, Clone)]
pub(super) struct DiskHash {
    rule: Rule,
    hasher: blake3::Hasher,
    /// Zero clusters that a run begins with and that are not hashed yet.
    zeroes: u64,
    cancel: Cancel,
}

impl DiskHash {
    /// Of no cluster yet. Where it takes time to add many zero clusters, `cancel` ends that.
    pub(super) fn new(rule: Rule, cancel: &Cancel) -> Self {
        Self { rule, hasher: blake3::Hasher::new(), zeroes: 0, cancel: cancel.clone() }
    }

    /// Adds a cluster of this hash.
    pub(super) fn add(&mut self, digest: &[u8; 32]) {
        self.end_run();
        if self.rule == Rule::Runs {
            self.hasher.update(&1u64.to_le_bytes());
        }
        self.hasher.update(digest);
    }

    /// Adds zero clusters.
    pub(super) fn add_zeroes(&mut self, count: u64) -> Result<()> {
        if self.rule == Rule::Runs {
            self.zeroes = self.zeroes.saturating_add(count);
            return Ok(());
        }
        let mut left = count;
        while left > 0 {
            if left != count && (count - left).is_multiple_of(STEP) {
                self.cancel.check()?;
            }
            let some = left.min(MANY.len() as u64);
            self.hasher.update(MANY[..some as usize].as_flattened());
            left -= some;
        }
        Ok(())
    }

    fn end_run(&mut self) {
        let count = std::mem::take(&mut self.zeroes);
        if count > 0 {
            self.hasher.update(&count.to_le_bytes()).update(&ZERO);
        }
    }

    /// The hash of all clusters that were added.
    pub(super) fn finish(mut self) -> [u8; 32] {
        self.end_run();
        self.hasher.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(rule: Rule, parts: &[(u64, Option<[u8; 32]>)]) -> [u8; 32] {
        let mut hash = DiskHash::new(rule, &Cancel::new());
        for (zeroes, digest) in parts {
            hash.add_zeroes(*zeroes).unwrap();
            if let Some(digest) = digest {
                hash.add(digest);
            }
        }
        hash.finish()
    }

    #[test]
    fn clusters_count_as_their_hashes_and_runs_as_their_lengths() {
        let parts = [(3, Some([7; 32])), (0, Some([8; 32])), (2, None)];
        let clusters = [ZERO, ZERO, ZERO, [7; 32], [8; 32], ZERO, ZERO].concat();
        assert_eq!(hash(Rule::Clusters, &parts), <[u8; 32]>::from(blake3::hash(&clusters)));
        let mut runs = Vec::new();
        for (count, digest) in [(3u64, ZERO), (1, [7; 32]), (1, [8; 32]), (2, ZERO)] {
            runs.extend(count.to_le_bytes());
            runs.extend(digest);
        }
        assert_eq!(hash(Rule::Runs, &parts), <[u8; 32]>::from(blake3::hash(&runs)));
    }

    #[test]
    fn where_a_run_is_interrupted_does_not_count() {
        let whole = [(5000, Some([7; 32])), (9, None)];
        let divided = [(1, None), (4000, None), (0, None), (999, Some([7; 32])), (4, None), (5, None)];
        for rule in [Rule::Clusters, Rule::Runs] {
            assert_eq!(hash(rule, &whole), hash(rule, &divided), "{rule:?}");
        }
    }

    #[test]
    fn zeroes_of_any_number_are_one_item_or_can_be_cancelled() {
        let cancel = Cancel::new();
        cancel.cancel();
        let mut runs = DiskHash::new(Rule::Runs, &cancel);
        runs.add_zeroes(u64::MAX / 2).unwrap();
        runs.add_zeroes(u64::MAX / 2).unwrap();
        runs.finish();
        let mut clusters = DiskHash::new(Rule::Clusters, &cancel);
        assert!(clusters.add_zeroes(u64::MAX).is_err());
    }
}
