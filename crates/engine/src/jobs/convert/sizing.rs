//! How the memory and the work of a conversion are divided.

use super::options::ConvertOptions;
use crate::jobs::pipeline::MOST_AT_ONCE;
use crate::{Error, ErrorKind, Result};
use std::num::NonZeroU64;

/// How memory and work are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizing {
    /// Bytes of one copy buffer, which is the most that one piece of work moves.
    pub(super) chunk: usize,
    /// Copy buffers, over all threads: pieces of work in flight.
    pub(super) tasks: usize,
    /// Threads.
    pub(super) threads: usize,
}

/// Largest piece of work: beyond this, larger requests gain nothing.
const MAX_CHUNK: usize = 1 << 20;
/// Unit of the size of pieces: no cluster size of common images divides a piece unevenly.
const CHUNK_UNIT: usize = 64 << 10;
/// Largest sparse size, as in qemu-img.
const MAX_SPARSE_SIZE: u64 = 32 << 20;

impl Sizing {
    /// `compressed`: bytes of clusters that pieces must not divide, a power of two. `plain`: of those that they do not divide
    /// if there is memory for it. (Two pieces of one new cluster at a time may each set one aside, and a device has room for
    /// one.)
    pub(super) fn of(
        options: &ConvertOptions,
        compressed: Option<NonZeroU64>,
        plain: Option<NonZeroU64>,
    ) -> Result<Self> {
        let invalid = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
        if options.workers == 0 || options.requests == 0 {
            return invalid("convert needs at least one worker and one request in flight".into());
        }
        if options.buffer_memory < CHUNK_UNIT {
            return invalid(format!("the buffers of convert need at least {CHUNK_UNIT} bytes of memory"));
        }
        let sparse = options.sparse_size;
        if !sparse.is_multiple_of(512) || sparse > MAX_SPARSE_SIZE {
            return invalid(format!(
                "invalid sparse size {sparse}: valid are multiples of 512 up to 32M; 0 writes everything"
            ));
        }
        let bytes_of = |cluster: Option<NonZeroU64>| cluster.map_or(0, |cluster| cluster.get() as usize);
        let least = CHUNK_UNIT.max(bytes_of(compressed));
        if least > options.buffer_memory {
            return invalid(format!("compressing clusters of {least} bytes needs as much buffer memory"));
        }
        let whole = least.max(bytes_of(plain));
        let chunk_of = |unit: usize| unit.max((sparse as usize).next_multiple_of(unit));
        let unit = if chunk_of(whole) <= options.buffer_memory { whole } else { least };
        let sparse = chunk_of(unit);
        if sparse > options.buffer_memory {
            return invalid(format!(
                "a sparse size of {} needs buffer memory of at least {sparse} bytes",
                options.sparse_size
            ));
        }
        let share = options.buffer_memory / options.requests / unit * unit;
        let chunk = share.clamp(unit, MAX_CHUNK.max(unit)).max(sparse);
        let tasks = options.requests.min(options.buffer_memory / chunk).min(MOST_AT_ONCE);
        Ok(Self { chunk, tasks, threads: options.workers.min(tasks) })
    }

    /// Copy buffers of one thread: the first ones get what is left over.
    pub(super) fn tasks_of(self, thread: usize) -> usize {
        self.tasks / self.threads + usize::from(thread < self.tasks % self.threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_sizing(options: &ConvertOptions, compressed: Option<NonZeroU64>, plain: Option<NonZeroU64>) {
        let memory = options.buffer_memory;
        let least = compressed.map_or(CHUNK_UNIT, |cluster| CHUNK_UNIT.max(cluster.get() as usize));
        let Ok(sizing) = Sizing::of(options, compressed, plain) else {
            assert!(
                (options.sparse_size as usize).next_multiple_of(least).max(least) > memory,
                "{options:?}"
            );
            return;
        };
        assert!(sizing.chunk * sizing.tasks <= memory, "{options:?}");
        assert!(sizing.chunk as u64 >= options.sparse_size && sizing.chunk.is_multiple_of(least));
        let whole = plain.map_or(0, |cluster| cluster.get() as usize);
        assert!(sizing.chunk.is_multiple_of(whole.max(1)) || whole + options.sparse_size as usize > memory);
        assert!(sizing.threads >= 1 && (1..=options.requests).contains(&sizing.tasks));
        let all: usize = (0..sizing.threads).map(|thread| sizing.tasks_of(thread)).sum();
        assert_eq!(all, sizing.tasks);
        assert!((0..sizing.threads).all(|thread| sizing.tasks_of(thread) > 0));
    }

    #[test]
    fn buffers_never_exceed_their_bound() {
        for requests in [1, 3, 8, 16, 100] {
            for workers in [1, 2, 5, 16] {
                for buffer_memory in [64 << 10, 100 << 10, 1 << 20, 3 << 20, 10_000_000, 64 << 20] {
                    for sparse_size in [0, 512, 4096, 65536 + 512, 1 << 20, 3 << 20] {
                        let options = ConvertOptions {
                            workers,
                            requests,
                            buffer_memory,
                            sparse_size,
                            ..Default::default()
                        };
                        for cluster in [512, 64 << 10, 2 << 20].map(NonZeroU64::new) {
                            check_sizing(&options, cluster, None);
                            check_sizing(&options, None, cluster);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn options_out_of_range_are_refused() {
        for options in [
            ConvertOptions { workers: 0, ..Default::default() },
            ConvertOptions { requests: 0, ..Default::default() },
            ConvertOptions { buffer_memory: 4096, ..Default::default() },
            ConvertOptions { sparse_size: 1000, ..Default::default() },
            ConvertOptions { sparse_size: 64 << 20, ..Default::default() },
            ConvertOptions { sparse_size: 1 << 20, buffer_memory: 1 << 19, ..Default::default() },
        ] {
            assert_eq!(
                Sizing::of(&options, None, None).unwrap_err().kind(),
                ErrorKind::InvalidArgument,
                "{options:?}"
            );
        }
    }
}
