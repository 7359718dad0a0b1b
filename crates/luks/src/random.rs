//! Where random bytes come from.

use crate::error::LuksError;
use std::io;

/// A source of random bytes for keys and salts.
pub trait Random {
    /// Fills `bytes`.
    ///
    /// # Errors
    /// [`LuksError::Random`].
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), LuksError>;
}

/// The system's own source (`getrandom`).
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), LuksError> {
        getrandom::fill(bytes).map_err(|error| LuksError::Random { source: io::Error::other(error) })
    }
}
