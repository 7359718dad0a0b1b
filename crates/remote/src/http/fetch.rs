//! A range that a thread gets from the server, and the memory that it goes to.

use super::cache::BLOCK;
use crate::network::deadline::Allowance;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::{Completer, StorageDone, StorageOp};

/// The most time between the beginnings of two reads that are fetched as one: both fail when the first one's time is over.
const MOST_APART: Duration = Duration::from_secs(1);

/// A range to be fetched.
pub(super) struct Fetch {
    /// Bytes of the object.
    pub(super) range: Range<u64>,
    /// Bytes from the beginning that are there.
    pub(super) done: u64,
    /// Bytes of blocks that were handed over, which `range` has no more.
    handed_over: u64,
    /// The time that it has.
    allowance: Allowance,
    pub(super) memory: Memory,
}

/// Where the bytes go.
pub(super) enum Memory {
    /// To readers, one behind the other.
    Readers(Vec<Completer>),
    /// To blocks of the cache, one after the other, which are handed over as they become whole. The one that is being filled.
    Blocks(Option<Arc<[u8]>>),
}

impl Fetch {
    /// For one reader.
    pub(super) fn of_reader(range: Range<u64>, done: Completer, allowance: Allowance) -> Self {
        Self { range, done: 0, allowance, handed_over: 0, memory: Memory::Readers(vec![done]) }
    }

    /// For whole blocks.
    pub(super) fn of_blocks(range: Range<u64>, allowance: Allowance) -> Self {
        Self { range, done: 0, allowance, handed_over: 0, memory: Memory::Blocks(None) }
    }

    /// The time when it fails if no bytes come.
    pub(super) fn deadline(&self) -> Instant {
        self.allowance.deadline()
    }

    /// The time when it fails even if bytes come.
    pub(super) fn limit(&self) -> Instant {
        self.allowance.limit()
    }

    /// Takes `next` in if it is what follows, and both are of one kind and time and no longer than `most` together.
    pub(super) fn join(&mut self, next: Fetch, most: u64) -> Result<(), Box<Fetch>> {
        let apart = next.deadline().saturating_duration_since(self.deadline());
        if self.range.end != next.range.start
            || next.range.end - self.range.start > most
            || apart > MOST_APART
        {
            return Err(Box::new(next));
        }
        match (&mut self.memory, next.memory) {
            (Memory::Readers(readers), Memory::Readers(more)) => readers.extend(more),
            (Memory::Blocks(None), Memory::Blocks(None)) => {}
            (_, memory) => return Err(Box::new(Fetch { memory, ..next })),
        }
        self.range.end = next.range.end;
        self.allowance.join(next.allowance);
        Ok(())
    }

    /// A block that became whole, and its number. The fetch has no more to do with it.
    pub(super) fn next_whole(&mut self) -> Option<(u64, Arc<[u8]>)> {
        let Memory::Blocks(filling) = &mut self.memory else { return None };
        let len = filling.as_ref()?.len() as u64;
        if self.done < len {
            return None;
        }
        let block = filling.take()?;
        let number = self.range.start / BLOCK;
        self.done -= len;
        self.range.start += len;
        self.handed_over += len;
        Some((number, block))
    }

    /// Bytes that came so far.
    pub(super) fn progress(&self) -> u64 {
        self.handed_over + self.done
    }

    /// Bytes that are missing.
    pub(super) fn rest(&self) -> Range<u64> {
        self.range.start + self.done..self.range.end
    }

    /// Whether nobody wants it any more.
    pub(super) fn is_cancelled(&self) -> bool {
        match &self.memory {
            Memory::Readers(readers) => readers.iter().all(Completer::is_cancelled),
            Memory::Blocks(_) => false,
        }
    }

    /// Memory for the next bytes, in one piece; empty if all are there.
    pub(super) fn next_memory(&mut self) -> &mut [u8] {
        let at = self.range.start + self.done;
        match &mut self.memory {
            Memory::Blocks(filling) => {
                let len = (self.range.end - self.range.start).min(BLOCK) as usize;
                let block = filling.get_or_insert_with(|| std::iter::repeat_n(0, len).collect());
                // Nobody else has it before it is whole.
                Arc::get_mut(block).map_or(&mut [], |block| &mut block[self.done as usize..])
            }
            Memory::Readers(readers) => {
                for reader in readers {
                    let StorageOp::Read { offset, len } = reader.op() else { continue };
                    if at >= offset + len {
                        continue;
                    }
                    let mut skip = (at - offset) as usize;
                    for buf in reader.bufs_mut().parts_mut() {
                        if skip < buf.len() {
                            return &mut buf.as_mut_slice()[skip..];
                        }
                        skip -= buf.len();
                    }
                }
                &mut []
            }
        }
    }
}

/// Answers readers.
pub(super) fn answer(readers: Vec<Completer>, result: Result<(), i32>) {
    for reader in readers {
        let StorageOp::Read { len, .. } = reader.op() else { continue };
        reader.finish(result.map(|()| StorageDone::Moved(len)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::deadline::Backlog;
    use zebu_storage::IoBuf;

    #[test]
    fn reads_are_fetched_as_one_only_if_their_time_is_the_same() {
        let backlog = Backlog::default();
        let begun = Instant::now();
        let read = |number: u64, after: Duration| {
            let (offset, len) = (number * 4096, 4096);
            let op = StorageOp::Read { offset, len };
            let done = Completer::new(op, IoBuf::zeroed(len as usize).into(), |_, _| {});
            let allowance = backlog.allowance(begun + after, Duration::from_secs(60), len);
            Fetch::of_reader(offset..offset + len, done, allowance)
        };
        let mut fetch = read(0, Duration::ZERO);
        assert!(fetch.join(read(1, Duration::from_millis(500)), 1 << 20).is_ok());
        let later = read(2, Duration::from_secs(50));
        let deadline = later.deadline();
        let Err(left) = fetch.join(later, 1 << 20) else {
            panic!("it would fail 50 seconds before its time")
        };
        assert_eq!((left.deadline(), fetch.rest()), (deadline, 0..8192));
    }
}
