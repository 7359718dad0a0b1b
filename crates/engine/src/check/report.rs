//! The result of a check.

use super::finding::{Finding, FindingKind, Outcome, Severity};

/// The numbers of one pass over the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CheckCounts {
    /// Parts of the image that could not be checked.
    pub check_errors: u64,
    /// Corruptions that stand.
    pub corruptions: u64,
    /// Leaks that stand.
    pub leaks: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// End of the highest cluster in use or with a refcount, in bytes.
    pub image_end_offset: u64,
    /// Clusters of the virtual disk.
    pub total_clusters: u64,
    /// Of them, with a host cluster.
    pub allocated_clusters: u64,
    /// Of them, not following their predecessor in the file (and every compressed one).
    pub fragmented_clusters: u64,
    /// Of them, compressed.
    pub compressed_clusters: u64,
}

/// The result of a check: the keys of qemu-img's `ImageCheck`, and what was found in words.
///
/// After a repair the numbers are those of a second check, made after it, with the numbers of repairs of the first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CheckReport {
    /// The state of the image now; the `_fixed` numbers are of the repair.
    pub counts: CheckCounts,
    /// Findings that remain, the first [`super::CheckOptions::max_findings`] of them.
    pub findings: Vec<Finding>,
    /// Findings that were only counted.
    pub findings_left_out: u64,
    /// The state before the repair with what was repaired, if anything was.
    pub repair: Option<RepairReport>,
}

/// The result of a repair.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RepairReport {
    /// Counts of what remained when it ended, and of what it had repaired.
    pub counts: CheckCounts,
    /// Findings and repairs, in order, bounded as in the report.
    pub findings: Vec<Finding>,
    /// Findings that were only counted.
    pub findings_left_out: u64,
    /// All refcount structures were written anew.
    pub rebuilt: bool,
}

impl CheckReport {
    /// Whether nothing at all is wrong.
    pub fn is_clean(&self) -> bool {
        self.counts.check_errors == 0 && self.counts.corruptions == 0 && self.counts.leaks == 0
    }

    /// The exit code of `check`: 0 clean, 1 not (wholly) checked, 2 corrupt, 3 leaks only.
    pub fn exit_code(&self) -> u8 {
        let CheckCounts { check_errors, corruptions, leaks, .. } = self.counts;
        match (check_errors, corruptions, leaks) {
            (0, 0, 0) => 0,
            (0, 0, _) => 3,
            (0, _, _) => 2,
            _ => 1,
        }
    }
}

/// Counts findings and keeps the first of them.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) counts: CheckCounts,
    findings: Vec<Finding>,
    left_out: u64,
    max: usize,
}

impl Tally {
    pub(super) fn new(max: usize) -> Self {
        Self { counts: CheckCounts::default(), findings: Vec::new(), left_out: 0, max }
    }

    /// Notes `kind`, met `times` times.
    pub(super) fn add(&mut self, kind: FindingKind, times: u64) {
        self.note(kind, times, times, Outcome::Found);
    }

    /// Notes `kind`, which was met and mended.
    pub(super) fn add_repaired(&mut self, kind: FindingKind) {
        self.note(kind, 1, 1, Outcome::Repaired);
    }

    /// Notes `kind`, which stands once in the report and counts `weight`.
    pub(super) fn add_weighted(&mut self, kind: FindingKind, weight: u64) {
        self.note(kind, 1, weight, Outcome::Found);
    }

    fn note(&mut self, kind: FindingKind, times: u64, weight: u64, outcome: Outcome) {
        let counts = &mut self.counts;
        let number = match (kind.severity(), outcome) {
            (Severity::CheckError, _) => &mut counts.check_errors,
            (Severity::Corruption, Outcome::Found) => &mut counts.corruptions,
            (Severity::Corruption, Outcome::Repaired) => &mut counts.corruptions_fixed,
            (Severity::Leak, Outcome::Found) => &mut counts.leaks,
            (Severity::Leak, Outcome::Repaired) => &mut counts.leaks_fixed,
        };
        *number = number.saturating_add(weight);
        if self.findings.len() < self.max {
            self.findings.push(Finding { kind, times, outcome });
        } else {
            self.left_out = self.left_out.saturating_add(1);
        }
    }

    /// Corruptions, leaks and parts that could not be checked.
    pub(super) fn standing(&self) -> u64 {
        let counts = &self.counts;
        counts.corruptions.saturating_add(counts.leaks).saturating_add(counts.check_errors)
    }

    /// The number of repairs.
    pub(super) fn repaired(&self) -> u64 {
        self.counts.corruptions_fixed.saturating_add(self.counts.leaks_fixed)
    }

    /// This tally and `next`.
    pub(super) fn followed_by(mut self, next: Self) -> Self {
        let (to, from) = (&mut self.counts, next.counts);
        to.check_errors = to.check_errors.saturating_add(from.check_errors);
        to.corruptions = to.corruptions.saturating_add(from.corruptions);
        to.leaks = to.leaks.saturating_add(from.leaks);
        to.corruptions_fixed = to.corruptions_fixed.saturating_add(from.corruptions_fixed);
        to.leaks_fixed = to.leaks_fixed.saturating_add(from.leaks_fixed);
        let room = self.max.saturating_sub(self.findings.len());
        let cut = next.findings.len().saturating_sub(room) as u64;
        self.findings.extend(next.findings.into_iter().take(room));
        self.left_out = self.left_out.saturating_add(next.left_out).saturating_add(cut);
        self
    }

    /// The same tally after all refcounts were replaced: everything in it is repaired, but for counts that do not fit.
    pub(super) fn into_repaired(self) -> Self {
        let mut repaired = Self::new(self.max);
        repaired.counts.corruptions_fixed = self.counts.corruptions;
        repaired.counts.leaks_fixed = self.counts.leaks;
        repaired.left_out = self.left_out;
        for mut finding in self.findings {
            if matches!(finding.kind, FindingKind::RefcountOverflow { .. }) {
                let counts = &mut repaired.counts;
                counts.corruptions_fixed = counts.corruptions_fixed.saturating_sub(finding.times);
                counts.corruptions = counts.corruptions.saturating_add(finding.times);
            } else {
                finding.outcome = Outcome::Repaired;
            }
            repaired.findings.push(finding);
        }
        repaired
    }

    /// Takes what was found out of the tally: the findings and the number of those left out.
    pub(super) fn into_findings(self) -> (CheckCounts, Vec<Finding>, u64) {
        (self.counts, self.findings, self.left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_bounded_and_all_counted() {
        let mut tally = Tally::new(2);
        for cluster in 0..5 {
            tally.add(FindingKind::Leak { cluster, refcount: 1, references: 0 }, 1);
        }
        tally.add(FindingKind::L1ReservedBits { entry: 1 }, 7);
        tally.add_weighted(FindingKind::RefcountUnknown { index: 0, clusters: 11 }, 11);
        tally.add_repaired(FindingKind::SnapshotIncomplete { index: 1 });
        let (counts, findings, left_out) = tally.into_findings();
        assert_eq!((counts.leaks, counts.corruptions, counts.check_errors), (5, 7, 11));
        assert_eq!((counts.corruptions_fixed, counts.leaks_fixed), (1, 0));
        assert_eq!((findings.len(), left_out), (2, 6));
    }

    #[test]
    fn exit_codes_are_those_of_qemu_img() {
        let code = |check_errors, corruptions, leaks| {
            let counts = CheckCounts { check_errors, corruptions, leaks, ..CheckCounts::default() };
            CheckReport { counts, ..CheckReport::default() }.exit_code()
        };
        assert_eq!([code(0, 0, 0), code(0, 0, 1), code(0, 1, 1), code(1, 1, 1)], [0, 3, 2, 1]);
    }
}
