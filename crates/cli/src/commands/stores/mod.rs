//! Commands on stores of points in time.

pub(crate) mod compact;
pub(crate) mod delta;
pub(crate) mod forget;
pub(crate) mod moment_points;
pub(crate) mod new_point;
pub(crate) mod point_options;
pub(crate) mod point_report;
pub(crate) mod points;
pub(crate) mod restore;
pub(crate) mod shared;
pub(crate) mod verify;
