//! Hostile images, made by code: each is the intact image of [`base`] with one thing done to it, under a name that says
//! where the trick is from (a CVE, a check at open, a check at run time).

pub mod base;
#[path = "../../../crates/foreign/tests/samples/mod.rs"]
pub mod foreign_samples;
pub mod headers;
pub mod luks;
pub mod many;
pub mod references;
pub mod tables;

use crate::patch::Patch;
use std::path::Path;

/// One hostile image.
#[derive(Debug, Clone, Copy)]
pub struct Hostile {
    /// The damage, in words.
    pub name: &'static str,
    /// The damage of the intact image.
    pub damage: fn(&Patch),
}

impl Hostile {
    /// Writes the image.
    ///
    /// # Panics
    /// If the file can't be written.
    pub fn write(&self, path: &Path) {
        std::fs::write(path, base::image()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        (self.damage)(&Patch::open(path));
    }
}

/// All of them.
pub fn all() -> Vec<Hostile> {
    [
        headers::ALL,
        headers::EXTENSION_FIELDS,
        tables::MAPPING,
        tables::REFCOUNTS,
        tables::INTERNAL_SNAPSHOTS,
        tables::COMPRESSED,
        many::ALL,
    ]
    .concat()
}
