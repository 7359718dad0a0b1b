//! A bound on the turns of a loop that keeps others waiting.

use crate::{Error, ErrorKind, Result};

/// The turns that a loop may still take.
#[derive(Debug)]
pub(crate) struct Turns {
    left: u64,
    /// The work of the loop, for the message.
    work: &'static str,
}

impl Turns {
    /// `turns` of a loop that does this `work`.
    pub(crate) fn at_most(turns: u64, work: &'static str) -> Self {
        Self { left: turns, work }
    }

    /// Takes a turn.
    ///
    /// # Errors
    /// None is left: the loop makes no progress, and would keep others waiting for ever.
    pub(crate) fn take(&mut self) -> Result<()> {
        let work = self.work;
        debug_assert!(self.left > 0, "{work} makes no progress");
        self.left = self.left.checked_sub(1).ok_or_else(|| {
            Error::new(ErrorKind::Io, format!("{work} makes no progress; please report this fault of zebu"))
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "the work makes no progress")]
    fn a_loop_ends_at_its_bound() {
        let mut turns = Turns::at_most(2, "the work");
        assert!(turns.take().is_ok() && turns.take().is_ok());
        let _ = turns.take();
    }
}
