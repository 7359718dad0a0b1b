//! A range that a thread gets from the server, and the memory that it goes to.

use super::cache::BLOCK;
use crate::network::deadline::Allowance;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use zebu_storage::{Completer, StorageDone, StorageOp};

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
    /// To blocks of the cache. They are made when a thread begins, and handed over as they become whole.
    Blocks(VecDeque<Arc<[u8]>>),
}

impl Fetch {
    /// For one reader.
    pub(super) fn of_reader(range: Range<u64>, done: Completer, allowance: Allowance) -> Self {
        Self { range, done: 0, allowance, handed_over: 0, memory: Memory::Readers(vec![done]) }
    }

    /// For whole blocks.
    pub(super) fn of_blocks(range: Range<u64>, allowance: Allowance) -> Self {
        Self { range, done: 0, allowance, handed_over: 0, memory: Memory::Blocks(VecDeque::new()) }
    }

    /// The time when it fails if no bytes come.
    pub(super) fn deadline(&self) -> Instant {
        self.allowance.deadline()
    }

    /// The time when it fails even if bytes come.
    pub(super) fn limit(&self) -> Instant {
        self.allowance.limit()
    }

    /// Takes `next` in if it is what follows, and both are of one kind and no longer than `most` together.
    pub(super) fn join(&mut self, next: Fetch, most: u64) -> Result<(), Box<Fetch>> {
        if self.range.end != next.range.start || next.range.end - self.range.start > most {
            return Err(Box::new(next));
        }
        match (&mut self.memory, next.memory) {
            (Memory::Readers(readers), Memory::Readers(more)) => readers.extend(more),
            (Memory::Blocks(blocks), Memory::Blocks(more)) if blocks.is_empty() && more.is_empty() => {}
            (_, memory) => return Err(Box::new(Fetch { memory, ..next })),
        }
        self.range.end = next.range.end;
        self.allowance.join(next.allowance);
        Ok(())
    }

    /// Makes the memory of blocks.
    pub(super) fn prepare(&mut self) {
        if let Memory::Blocks(blocks) = &mut self.memory
            && blocks.is_empty()
        {
            let mut at = self.range.start;
            while at < self.range.end {
                let len = (self.range.end - at).min(BLOCK);
                blocks.push_back(std::iter::repeat_n(0, len as usize).collect());
                at += len;
            }
        }
    }

    /// A block that became whole, and its number. The fetch has no more to do with it.
    pub(super) fn next_whole(&mut self) -> Option<(u64, Arc<[u8]>)> {
        let Memory::Blocks(blocks) = &mut self.memory else { return None };
        let len = blocks.front()?.len() as u64;
        if self.done < len {
            return None;
        }
        let block = blocks.pop_front()?;
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
            Memory::Blocks(blocks) => {
                let index = (self.done / BLOCK) as usize;
                // Nobody else has them before the fetch is over.
                let block = blocks.get_mut(index).and_then(Arc::get_mut);
                block.map_or(&mut [], |block| &mut block[(self.done % BLOCK) as usize..])
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
