//! Overlapping ranges, each with a weight, cut into disjoint ones: what many tables share is looked at once.

/// How many tables of each sort something belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Weight {
    /// The active L1 table.
    pub(super) active: u64,
    /// Anything else.
    pub(super) other: u64,
}

impl Weight {
    pub(super) const ACTIVE: Self = Self { active: 1, other: 0 };
    pub(super) const OTHER: Self = Self { active: 0, other: 1 };

    /// Number of tables of both sorts.
    pub(super) fn total(self) -> u64 {
        self.active.saturating_add(self.other)
    }
}

/// A range with a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    /// Exclusive.
    pub(super) end: u64,
    pub(super) weight: Weight,
}

/// Disjoint spans, ascending, that cover what `spans` cover with the summed weights. Empty spans are dropped.
pub(super) fn sweep(spans: &[Span]) -> Vec<Span> {
    // Each edge is a position with the weight that begins and the weight that ends there.
    let mut edges: Vec<(u64, Weight, Weight)> = Vec::with_capacity(spans.len() * 2);
    for span in spans.iter().filter(|span| span.start < span.end) {
        edges.push((span.start, span.weight, Weight::default()));
        edges.push((span.end, Weight::default(), span.weight));
    }
    edges.sort_unstable_by_key(|edge| edge.0);
    let mut out: Vec<Span> = Vec::new();
    let mut weight = Weight::default();
    let mut start = 0;
    for (at, begins, ends) in edges {
        if at > start && weight != Weight::default() {
            match out.last_mut() {
                Some(last) if last.end == start && last.weight == weight => last.end = at,
                _ => out.push(Span { start, end: at, weight }),
            }
        }
        start = at;
        // Every end comes at or after its beginning in this order, except at equal positions.
        weight.active = weight.active.wrapping_add(begins.active).wrapping_sub(ends.active);
        weight.other = weight.other.wrapping_add(begins.other).wrapping_sub(ends.other);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_point_keeps_its_weight(
            ranges in proptest::collection::vec((0u64..60, 0u64..20, any::<bool>()), 0..20),
        ) {
            let spans: Vec<Span> = ranges
                .iter()
                .map(|(start, len, active)| Span {
                    start: *start,
                    end: start + len,
                    weight: if *active { Weight::ACTIVE } else { Weight::OTHER },
                })
                .collect();
            let swept = sweep(&spans);
            for pair in swept.windows(2) {
                prop_assert!(pair[0].end <= pair[1].start);
            }
            for point in 0..100 {
                let inside = |span: &&Span| span.start <= point && point < span.end;
                let active = spans.iter().filter(inside).map(|span| span.weight.active).sum();
                let other = spans.iter().filter(inside).map(|span| span.weight.other).sum();
                let found = swept.iter().find(inside).map_or_else(Weight::default, |span| span.weight);
                prop_assert_eq!(found, Weight { active, other });
            }
        }
    }

    #[test]
    fn many_equal_spans_are_one() {
        let span = Span { start: 8, end: u64::MAX, weight: Weight::OTHER };
        let swept = sweep(&vec![span; 65536]);
        assert_eq!(swept, vec![Span { weight: Weight { active: 0, other: 65536 }, ..span }]);
    }
}
