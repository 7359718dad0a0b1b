//! A file of a simulated world.

/// A file of a simulated world: plain numbers, because a file may be sent to other threads and a world may not.
#[derive(Clone, Copy)]
pub struct SimulatedFile {
    /// The world, among those of this process.
    pub world: u64,
    /// The file, among those of its world.
    pub number: usize,
    /// Bytes of simulated disk in use, or an errno.
    pub disk_usage: fn(Self) -> Result<u64, i32>,
}
