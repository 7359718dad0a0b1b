//! Stores of points in time of one disk: which layers there are, how points name them, and what may go.
//!
//! The layout is described in `docs/design/stores.md`. A store is a folder, or a prefix of a bucket.

mod calendar;
mod claim;
mod error;
mod folder;
mod hashes;
mod keep;
mod manifest;
mod moment;
mod name;
mod object;
mod objects;
mod pace;
mod place;
mod point_store;
mod prune;
mod sha;
mod unique;
mod verified;

pub use calendar::{compact_time, readable_time};
pub use claim::Claim;
pub use error::{PointsError, PointsErrorKind};
pub use hashes::{ChangedRange, differences};
pub use keep::{Keep, kept};
pub use manifest::{LAYERS_AT_MOST, Layer, Point};
pub use moment::PointMoment;
pub use name::{PointName, PointsPlace};
pub use point_store::{Layered, ObjectState, PointStore};
pub use prune::{Forgotten, Locks, Pruned};
pub use verified::KnownDamage;
