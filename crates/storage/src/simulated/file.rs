//! A file of a simulated world.

/// A file of a simulated world. It may be sent to other threads, and a world may not.
pub struct SimulatedFile {
    /// The world, among those of this process.
    pub world: u64,
    /// The file, among those of its world.
    pub number: usize,
    /// Finds out how many bytes of simulated disk are in use, or an errno.
    pub disk_usage: Box<dyn Fn() -> Result<u64, i32> + Send + Sync>,
}
