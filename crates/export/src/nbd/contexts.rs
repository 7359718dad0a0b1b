//! Metadata contexts: what BLOCK_STATUS can report.

use std::borrow::Cow;

/// The prefix of a bitmap's name in that of its context.
const BITMAP: &str = "qemu:dirty-bitmap:";

/// A metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Context {
    /// Holes and zeroes.
    Allocation,
    /// Which image of the chain a range comes from: 0 none, 1 the exported one, 2 its backing file, and so on.
    Depth,
    /// The dirty ranges of a bitmap, by its place among those of the export.
    Bitmap(u32),
}

impl Context {
    /// The contexts of an export with these bitmaps.
    fn all(bitmaps: &[String]) -> impl Iterator<Item = Self> {
        [Self::Allocation, Self::Depth].into_iter().chain((0..).zip(bitmaps).map(|(i, _)| Self::Bitmap(i)))
    }

    /// The name of a context of an export with these bitmaps.
    pub(crate) fn name(self, bitmaps: &[String]) -> Cow<'static, str> {
        match self {
            Context::Allocation => "base:allocation".into(),
            Context::Depth => "qemu:allocation-depth".into(),
            Context::Bitmap(index) => {
                format!("{BITMAP}{}", bitmaps.get(index as usize).map_or("", String::as_str)).into()
            }
        }
    }

    /// Its number on the wire.
    pub(crate) fn id(self) -> u32 {
        match self {
            Context::Allocation => 1,
            Context::Depth => 2,
            Context::Bitmap(index) => index + 3,
        }
    }
}

/// Chosen contexts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Contexts(Vec<Context>);

impl Contexts {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Context> {
        self.0.iter().copied()
    }

    /// The contexts that the queries of a SET name exactly.
    pub(crate) fn chosen(queries: &[&str], bitmaps: &[String]) -> Self {
        let is_named = |context: &Context| queries.contains(&&*context.name(bitmaps));
        Self(Context::all(bitmaps).filter(is_named).collect())
    }

    /// The contexts that the queries of a LIST name, or begin with where they end in a colon; all if there is none.
    pub(crate) fn listed(queries: &[&str], bitmaps: &[String]) -> Self {
        let is_listed = |context: &Context| {
            let name = context.name(bitmaps);
            let is_named =
                |query: &&str| name == *query || (query.ends_with(':') && name.starts_with(*query));
            queries.is_empty() || queries.iter().any(is_named)
        };
        Self(Context::all(bitmaps).filter(is_listed).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_take_patterns_and_sets_take_names() {
        let bitmaps = ["a".to_owned(), "b:c".to_owned()];
        let names = |contexts: Contexts| contexts.iter().map(|c| c.name(&bitmaps)).collect::<Vec<_>>();
        let listed = |queries: &[&str]| names(Contexts::listed(queries, &bitmaps));
        let chosen = |queries: &[&str]| names(Contexts::chosen(queries, &bitmaps));
        let (a, bc) = ("qemu:dirty-bitmap:a", "qemu:dirty-bitmap:b:c");
        assert_eq!(listed(&[]), ["base:allocation", "qemu:allocation-depth", a, bc]);
        assert_eq!(listed(&["qemu:"]), ["qemu:allocation-depth", a, bc]);
        assert_eq!(listed(&["qemu:dirty-bitmap:"]), [a, bc]);
        assert_eq!(listed(&["base:allocation", "x:"]), ["base:allocation"]);
        assert_eq!(chosen(&["base:allocation", "x-none:y"]), ["base:allocation"]);
        assert_eq!(chosen(&[bc]), [bc]);
        assert_eq!(
            Contexts::chosen(&["base:", "qemu:", "qemu:dirty-bitmap:", "qemu:dirty-bitmap:no"], &bitmaps),
            Contexts::default()
        );
        assert_eq!(Contexts::chosen(&[], &bitmaps), Contexts::default());
        assert_eq!(Contexts::chosen(&["qemu:dirty-bitmap:a"], &[]), Contexts::default());
    }
}
