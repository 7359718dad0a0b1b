//! Two doors for a simulated world, which is a crate for tests (`zebu-sim`).
//!
//! A world decides when each operation takes effect, what time it is and when work for other threads is done. So it
//! stands behind a worker as its completion queue ([`SimulatedQueue`]) and behind a `File` as the place of its bytes
//! ([`SimulatedFile`]). The feature `simulated` builds the ways in: `Worker::simulated` and `File::simulated`.
//!
//! The doors cost the product nothing. Without the feature a `Door` has no value, so the variants that hold one
//! have no place in `Backend` and `FileInner`: these are as large, and each match on them branches as often, as if there
//! were no such variant. A build without the feature checks it by the size.
//!
//! A storage that is no local file and has no clock of its own (remote, in memory) is a [`crate::Storage`] instead.

mod door;
mod file;
mod queue;

#[cfg(feature = "simulated")]
pub use crate::file_types::FileFacts;
#[cfg(feature = "simulated")]
pub use crate::request::{Completion, Job, OpDone, OpId, OpKind, OpRequest};
pub(crate) use door::Door;
pub use file::SimulatedFile;
pub use queue::SimulatedQueue;
