//! A simulated disk, and a scheduler that decides by a seed what happens next.
//!
//! A [`SimWorld`] has files, any number of workers on one thread, a clock, and a log of every operation. The engine
//! runs on its workers unchanged; operations complete in any order, in parts, late, or fail. At any moment, the
//! states that the files may be in after a power failure can be enumerated ([`SimDisk::crash_states`]) and put into
//! the files of a new world. A [`GuestModel`] says what a guest may find there.
//!
//! Nothing here looks at the wall clock or depends on addresses or hashing: a seed and a program give one log.

mod backend;
mod content;
mod core;
mod counts;
mod crash;
mod disk;
mod driver;
mod fault;
mod guest;
mod guest_history;
mod guest_tag;
mod log;
mod op;
mod ranges;
mod rng;
mod sim_disk;
mod world;

pub use content::{BLOCK, Content, Space};
pub use core::{HoldId, Waiting};
pub use counts::{Counts, Tally};
pub use crash::{CrashOptions, CrashState, CrashStates, LogCursor, Possible, Tear};
pub use disk::SECTOR;
pub use driver::Seeds;
pub use fault::{FailedEffect, Fault, FaultPlan, FaultRates, FaultRule};
pub use guest::{DiscardLeaves, GuestConfig, GuestModel, GuestOp, GuestRequest, Violation};
pub use guest_history::GuestResult;
pub use guest_tag::{Found, GUEST_SECTOR, Value, backing_pattern};
pub use log::{LogEvent, LogKeep, SimLog};
pub use op::{FileNumber, OpClass, OpFilter, OpInfo, OpNumber, SimOp};
pub use rng::SimRng;
pub use sim_disk::{Facility, SimDisk, SimFileConfig};
pub use world::{SimCaller, SimConfig, SimWorld, Step, Stuck, StuckCause};
