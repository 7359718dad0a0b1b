//! The result of reading the headers of an image.

use crate::parent::{Identity, Parent};

/// An image with tables of one format.
pub(crate) struct Opened<M> {
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Bytes of the unit of allocation, or 0.
    pub(crate) unit: u64,
    pub(crate) variant: &'static str,
    pub(crate) parent: Option<Parent>,
    pub(crate) identity: Option<Identity>,
    pub(crate) map: M,
}

impl<M> Opened<M> {
    /// The same with other tables.
    pub(crate) fn map<N>(self, change: impl FnOnce(M) -> N) -> Opened<N> {
        let Self { size, unit, variant, parent, identity, map } = self;
        Opened { size, unit, variant, parent, identity, map: change(map) }
    }
}
