//! How a new point of a store is made.

use zebu_engine::jobs::BackupOptions;
use zebu_store::points::PointMoment;

/// The point that a new one stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BaseChoice {
    /// The last one, if it can be.
    Last,
    /// None.
    None,
}

/// The answer to a bitmap that is not there, while another one goes on from the last point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingBitmap {
    /// The name is taken for mistyped.
    Refuse,
    /// It is added.
    Add,
}

/// How a point is made.
pub(crate) struct PointOptions {
    /// Options of its layer, but for the target and what that stands on.
    pub(crate) layer: BackupOptions,
    pub(crate) base: BaseChoice,
    pub(crate) missing_bitmap: MissingBitmap,
    /// The moment at which the disk was as the point shows it, unless that is the one of its publishing.
    pub(crate) moment: Option<PointMoment>,
}
