//! Metadata contexts: what BLOCK_STATUS can tell.

/// A metadata context. Its number on the wire is its place here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Context {
    /// Holes and zeroes.
    Allocation,
    /// Which image of the chain a range comes from: 0 none, 1 the exported one, 2 its backing file, and so on.
    Depth,
}

impl Context {
    pub(crate) const ALL: [Self; 2] = [Self::Allocation, Self::Depth];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Context::Allocation => "base:allocation",
            Context::Depth => "qemu:allocation-depth",
        }
    }

    pub(crate) fn id(self) -> u32 {
        self as u32 + 1
    }
}

/// Chosen contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Contexts([bool; 2]);

impl Contexts {
    pub(crate) fn add(&mut self, context: Context) {
        self.0[context as usize] = true;
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |&context| self.0[context as usize])
    }

    /// The contexts that the queries of a SET name exactly.
    pub(crate) fn chosen(queries: &[&str]) -> Self {
        let mut chosen = Self::default();
        for context in Context::ALL.into_iter().filter(|context| queries.contains(&context.name())) {
            chosen.add(context);
        }
        chosen
    }

    /// The contexts that the queries of a LIST name, or begin with where they end in a colon; all if there is none.
    pub(crate) fn listed(queries: &[&str]) -> Self {
        let mut listed = Self::default();
        for context in Context::ALL {
            let name = context.name();
            let is_named =
                |query: &&str| name == *query || (query.ends_with(':') && name.starts_with(*query));
            if queries.is_empty() || queries.iter().any(is_named) {
                listed.add(context);
            }
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_take_patterns_and_sets_take_names() {
        let names = |contexts: Contexts| contexts.iter().map(Context::name).collect::<Vec<_>>();
        assert_eq!(names(Contexts::listed(&[])), ["base:allocation", "qemu:allocation-depth"]);
        assert_eq!(names(Contexts::listed(&["qemu:"])), ["qemu:allocation-depth"]);
        assert_eq!(names(Contexts::listed(&["base:allocation", "x:"])), ["base:allocation"]);
        assert_eq!(names(Contexts::chosen(&["base:allocation", "x-none:y"])), ["base:allocation"]);
        assert_eq!(Contexts::chosen(&["base:", "qemu:"]), Contexts::default());
        assert_eq!(Contexts::chosen(&[]), Contexts::default());
    }
}
