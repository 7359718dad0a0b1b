//! How a worker is made and what it counts: plain values.

/// Which completion queue is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Engine {
    /// io_uring, or threads where the kernel or a seccomp filter refuses it.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// Threads.
    Threads,
}

/// How a worker is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WorkerConfig {
    /// The completion queue.
    pub engine: Engine,
    /// Operations on one disk that the ring takes at once, from 8 to 16,384. It has twice as many entries, for those on others.
    pub depth: u32,
    /// Threads of the thread-pool worker for one disk, at least 1. With several disks in use there are up to twice as many. Each is
    /// started when it is needed.
    pub threads: usize,
    /// Bytes of free buffers that the pool keeps for reuse.
    pub pool_bytes: usize,
    /// Commands for drivers.
    pub commands: Commands,
}

crate::option_setters!(WorkerConfig {
    engine: Engine,
    depth: u32,
    threads: usize,
    pool_bytes: usize,
    commands: Commands
});

/// Whether a worker's ring takes commands for the drivers of devices (`Worker::command`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Commands {
    /// It refuses them, for good.
    #[default]
    Refused,
    /// It takes them.
    Taken,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            engine: Engine::Auto,
            depth: 256,
            threads: 16,
            pool_bytes: 8 << 20,
            commands: Commands::Refused,
        }
    }
}

/// Which completion queue a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkerKind {
    /// io_uring.
    IoUring,
    /// Threads.
    Threads,
    /// A simulated disk.
    Simulated,
}

/// Counters of a worker since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct IoStats {
    /// Reads that went to the kernel.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes that went to the kernel.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// fdatasyncs.
    pub flushes: u64,
    /// fallocate calls of all modes.
    pub fallocates: u64,
    /// System calls made for I/O (io_uring_enter, or one per operation with threads).
    pub syscalls: u64,
    /// Requests that took a read-modify-write or a bounce buffer because of alignment.
    pub misaligned: u64,
}
