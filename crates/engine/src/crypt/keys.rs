//! Passphrases, and which image of a chain each is for.

use crate::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use zebu_luks::Limits;
use zebu_storage::LockedBytes;

/// A passphrase: any bytes. It is held in memory that is locked, kept out of core dumps, and wiped at the end. Clones are the
/// same one.
#[derive(Clone)]
pub struct Passphrase(Arc<LockedBytes>);

impl Passphrase {
    /// A copy of `bytes`. The caller wipes them.
    ///
    /// # Errors
    /// [`ErrorKind::Io`]: the system gives no memory that is kept out of core dumps.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        let locked = LockedBytes::copy_of(bytes).map_err(|error| {
            Error::new(ErrorKind::Io, format!("no memory for a passphrase ({} bytes): {error}", bytes.len()))
        })?;
        Ok(Self(Arc::new(locked)))
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Says nothing of the bytes.
impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase(..)")
    }
}

/// Costs that a LUKS header may ask for before a passphrase is tried on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum HeaderCosts {
    /// 50 million iterations of PBKDF2 for a key slot, and 1 GiB of memory and 64 passes over it for Argon2.
    #[default]
    Bounded,
    /// As much as the format can say. For headers that are trusted.
    Unbounded,
}

impl HeaderCosts {
    pub(crate) fn limits(self) -> Limits {
        match self {
            Self::Bounded => Limits::default(),
            Self::Unbounded => Limits::NONE,
        }
    }
}

type OfName = dyn Fn(&Path) -> Result<Keys> + Send + Sync;
type Ask = dyn Fn(&Path) -> Result<Option<Passphrase>> + Send + Sync;

/// The passphrases for the encrypted images of a chain.
#[derive(Clone, Default)]
pub struct Keys {
    by_depth: BTreeMap<u32, Passphrase>,
    methods: BTreeMap<u32, &'static str>,
    of_name: Option<Arc<OfName>>,
    ask: Option<Arc<Ask>>,
    costs: HeaderCosts,
    /// Images of the chain above the one that counts as the top here.
    above: u32,
}

impl Keys {
    /// A passphrase for the top image of the chain.
    pub fn of_top(passphrase: Passphrase) -> Self {
        Self::default().with(0, passphrase)
    }

    /// The same with the passphrase of the image at `depth`: 0 is the top, 1 is its backing file.
    #[must_use]
    pub fn with(mut self, depth: u32, passphrase: Passphrase) -> Self {
        self.by_depth.insert(depth, passphrase);
        self
    }

    /// The same, and the image at `depth` must be encrypted in this way: "aes" or "luks".
    #[must_use]
    pub fn expecting(mut self, depth: u32, method: &'static str) -> Self {
        self.methods.insert(depth, method);
        self
    }

    /// The same, and `of_name` is called with the name of each image of the chain. It tells the keys that the name itself has, as
    /// seen from that image. A key that is given here by its depth goes first.
    #[must_use]
    pub fn naming(mut self, of_name: impl Fn(&Path) -> Result<Self> + Send + Sync + 'static) -> Self {
        self.of_name = Some(Arc::new(of_name));
        self
    }

    /// The same, and `ask` is called with the path of each encrypted image that has no passphrase here. It may wait for a
    /// person: it runs on a thread of its own while the image is being opened.
    #[must_use]
    pub fn asking(
        mut self,
        ask: impl Fn(&Path) -> Result<Option<Passphrase>> + Send + Sync + 'static,
    ) -> Self {
        self.ask = Some(Arc::new(ask));
        self
    }

    /// The same with these bounds of what a header may cost.
    #[must_use]
    pub fn with_costs(mut self, costs: HeaderCosts) -> Self {
        self.costs = costs;
        self
    }

    /// Whether there is no passphrase, and nobody to ask.
    pub fn is_empty(&self) -> bool {
        self.by_depth.is_empty() && self.ask.is_none()
    }

    /// The keys as seen from the image `depth` steps further down.
    pub(crate) fn below(&self, depth: u32) -> Self {
        Self { above: self.above.saturating_add(depth), ..self.clone() }
    }

    /// The same with the keys that the name of the image at `depth` has.
    pub(crate) fn with_named(mut self, depth: u32, name: &Path) -> Result<Self> {
        let Some(of_name) = &self.of_name else { return Ok(self) };
        let named = of_name(name)?;
        let own = self.above.saturating_add(depth);
        for (below, passphrase) in named.by_depth {
            self.by_depth.entry(own.saturating_add(below)).or_insert(passphrase);
        }
        for (below, method) in named.methods {
            self.methods.entry(own.saturating_add(below)).or_insert(method);
        }
        Ok(self)
    }

    /// The passphrase of the image at `depth`, if it is known without asking.
    pub(crate) fn known(&self, depth: u32) -> Option<Passphrase> {
        self.by_depth.get(&self.above.saturating_add(depth)).cloned()
    }

    /// Fails unless the image at `depth` may be encrypted by `method`.
    pub(crate) fn check_method(&self, depth: u32, method: &str, path: &Path) -> Result<()> {
        match self.methods.get(&self.above.saturating_add(depth)) {
            Some(expected) if *expected != method => {
                let message =
                    format!("Header reported '{method}' encryption format but options specify '{expected}'");
                Err(Error::new(ErrorKind::InvalidArgument, message).on(path))
            }
            _ => Ok(()),
        }
    }

    /// Fails if the image at `depth`, which is not encrypted, must be.
    pub(crate) fn check_plain(&self, depth: u32, path: &Path) -> Result<()> {
        match self.methods.get(&self.above.saturating_add(depth)) {
            Some(expected) => {
                let message =
                    format!("No encryption in image header, but options specified format '{expected}'");
                Err(Error::new(ErrorKind::InvalidArgument, message).on(path))
            }
            None => Ok(()),
        }
    }

    /// The way to ask for a passphrase.
    pub(crate) fn ask(&self) -> Option<Arc<Ask>> {
        self.ask.clone()
    }

    pub(crate) fn limits(&self) -> Limits {
        self.costs.limits()
    }
}

/// Says for which images there are passphrases.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys")
            .field("depths", &self.by_depth.keys())
            .field("asks", &self.ask.is_some())
            .field("costs", &self.costs)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_count_from_the_image_that_is_asked_for() {
        let keys = Keys::of_top(Passphrase::new(b"top").unwrap()).with(2, Passphrase::new(b"base").unwrap());
        assert_eq!(keys.known(0).unwrap().as_bytes(), b"top");
        assert!(keys.known(1).is_none());
        assert_eq!(keys.below(1).below(1).known(0).unwrap().as_bytes(), b"base");
        assert!(!format!("{keys:?} {:?}", keys.known(0)).contains("top"), "a passphrase was told");
    }
}
