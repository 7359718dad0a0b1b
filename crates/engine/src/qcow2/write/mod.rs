//! Writing guest data: plan, data, link.
//!
//! 1. **plan**, under the lock of one slice: what is allocated and unshared is written in place. For the rest, host
//!    clusters are chosen and the guest clusters marked in flight; a request that overlaps waits for them.
//! 2. **data**, under no lock: one vectored write per run, with the copied head and tail merged into it.
//! 3. **link**, under the lock again: the entries are set, what they replaced goes into quarantine. If step 2
//!    failed, nothing is linked: the old content stays readable (invariant I4).

mod allocation;
mod compressed;
mod data;
mod edges;
mod from_backing;
mod padding;
mod plan;
mod transfer;
pub(crate) mod zero;

pub(crate) use allocation::{Allocation, DataBarrier, Filled};
pub(crate) use plan::Plan;
