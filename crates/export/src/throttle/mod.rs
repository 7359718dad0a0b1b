//! Limits of requests and bytes per second, of an export and of groups of exports (docs/design/throttle.md).
//!
//! `bucket` and `queue` know no clock and no threads. `waiters` decides who is woken and who keeps the time, without either, too.
//! `gate` has the lock and the futures.

mod bucket;
mod gate;
mod group;
mod limits;
mod queue;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod thread_tests;
mod waiters;

pub(crate) use group::ExportThrottle;
pub use group::{LimitGroup, ThrottleStats};
pub use limits::Limits;
