//! Options of a vhost-user-blk device.

use crate::log::Log;
use crate::memory_budget::MemoryBudget;

/// How a device is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VhostConfig {
    /// Rings, at least one; each is served by one thread of the pool.
    pub queues: u16,
    /// Memory of all clients, in which the device's requests take part.
    pub memory: MemoryBudget,
    /// Where messages go.
    pub log: Log,
}

zebu_storage::option_setters!(VhostConfig { queues: u16, memory: MemoryBudget, log: Log });

impl Default for VhostConfig {
    fn default() -> Self {
        Self { queues: 1, memory: MemoryBudget::default(), log: Log::none() }
    }
}
