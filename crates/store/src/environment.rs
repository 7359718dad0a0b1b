//! Variables of the environment that name credentials and places.

/// Looks variables up. An empty one counts as none, as with AWS's own tools.
#[derive(Clone, Copy)]
pub(crate) struct Environment<'a>(pub(crate) &'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    /// The value of a variable.
    pub(crate) fn get(self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }
}

/// The process's own.
pub(crate) fn of_process(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
