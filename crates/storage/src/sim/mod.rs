//! A simulated disk.
mod content;
mod crash;
mod disk;
mod fault;
mod guest;
mod guest_tag;
mod log;
mod ranges;
mod rng;

pub use content::{BLOCK, Content, Space};
pub use crash::{CrashOptions, CrashState, CrashStates, LogCursor, Tear};
pub use disk::SECTOR;
pub use fault::{FailedEffect, Fault, FaultPlan, FaultRates, FaultRule, OpClass, OpFilter, OpInfo};
pub use guest::{DiscardLeaves, GuestConfig, GuestModel, GuestOp, GuestRequest, GuestResult, Violation};
pub use guest_tag::{Found, GUEST_SECTOR, Value, backing_pattern};
pub use log::{FileNumber, LogEvent, LogKeep, OpNumber, SimLog, SimOp};
pub use rng::SimRng;
