//! Which ranges of a file are being written, so that read-modify-writes exclude every other write of their blocks.
//!
//! A read-modify-write (under O_DIRECT, of a range that is not whole blocks) writes back bytes that it read: a write
//! that touches the same blocks in between would be undone. So it *claims* its range, waits until no earlier write
//! touches it, and keeps later ones waiting. Whole-block writes do not exclude each other; they are only noted, in the
//! table's shard of their worker, so that workers do not contend for a lock.
//!
//! Image formats whose unit of writing is larger than a byte, as the sector of an encrypted disk, use the same table.
//!
//! A claim gets a ticket and is shown in every shard before it looks for writes in flight. A whole-block write that
//! meets a claim in its shard becomes a claim itself. Claims wait for writes noted before they were shown, and for
//! overlapping claims with lower tickets; a write that is noted waits for nothing. So there is no circle, and
//! nobody is overtaken for ever.

use crate::sabotage::{self, Fault};
use crate::sync::{Mutex, WaitList};
use slab::Slab;
use std::ops::Range;
use std::task::{Context, Poll};

const SHARDS: usize = if cfg!(all(test, shuttle)) { 2 } else { 16 };

/// The order in which claims were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// A write or a claim that is to be released with [`WriteTable::release`].
#[derive(Debug, PartialEq, Eq)]
pub enum Hold {
    /// A write of whole blocks, noted in a shard.
    Write {
        /// The shard.
        shard: usize,
        /// The place in it.
        slot: usize,
    },
    /// A claim.
    Claim(Ticket),
}

/// The writes in flight of one file. Ranges are in bytes, not empty.
#[derive(Default)]
pub struct WriteTable {
    shards: [Shard; SHARDS],
    claims: Mutex<Claims>,
}

/// Apart from each other in memory, so that workers do not share cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<Noted>);

#[derive(Default)]
struct Noted {
    writes: Slab<Range<u64>>,
    /// The claims of the whole table.
    claimed: Vec<(Ticket, Range<u64>)>,
    /// Claims that wait for a write here.
    waiting: WaitList,
}

#[derive(Default)]
struct Claims {
    tickets: u64,
    held: Vec<(Ticket, Range<u64>)>,
    /// Claims that wait for another.
    waiting: WaitList,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl WriteTable {
    /// Notes a write of whole blocks by a worker; `None` if a claim is in its way. Then the write has to claim too.
    pub fn try_write(&self, worker: usize, range: Range<u64>) -> Option<Hold> {
        let shard = worker % SHARDS;
        let mut noted = self.shards[shard].0.lock();
        if noted.claimed.iter().any(|(_, claimed)| overlap(claimed, &range)) {
            return None;
        }
        Some(Hold::Write { shard, slot: noted.writes.insert(range) })
    }

    /// Claims a range. The claim is good once [`WriteTable::poll_claim`] says so, and must be released either way.
    pub fn claim(&self, range: Range<u64>) -> Ticket {
        let ticket = {
            let mut claims = self.claims.lock();
            let ticket = Ticket(claims.tickets);
            claims.tickets += 1;
            claims.held.push((ticket, range.clone()));
            ticket
        };
        if !sabotage::is(Fault::HideClaim) {
            for shard in &self.shards {
                shard.0.lock().claimed.push((ticket, range.clone()));
            }
        }
        ticket
    }

    /// Ready when nothing overlaps the claim that was there before it.
    pub fn poll_claim(&self, ticket: Ticket, cx: &Context<'_>) -> Poll<()> {
        let range = {
            let mut claims = self.claims.lock();
            let Some(range) =
                claims.held.iter().find(|(held, _)| *held == ticket).map(|(_, range)| range.clone())
            else {
                return Poll::Ready(());
            };
            if claims.held.iter().any(|(held, other)| *held < ticket && overlap(other, &range)) {
                claims.waiting.add(cx.waker());
                return Poll::Pending;
            }
            range
        };
        for shard in &self.shards {
            let mut noted = shard.0.lock();
            if noted.writes.iter().any(|(_, write)| overlap(write, &range)) {
                noted.waiting.add(cx.waker());
                return Poll::Pending;
            }
        }
        Poll::Ready(())
    }

    /// The write, or what the claim was for, is over.
    pub fn release(&self, hold: Hold) {
        match hold {
            Hold::Write { shard, slot } => {
                let mut noted = self.shards[shard].0.lock();
                noted.writes.remove(slot);
                if !noted.waiting.is_empty() {
                    let waiting = noted.waiting.take();
                    drop(noted);
                    waiting.wake();
                }
            }
            Hold::Claim(ticket) => {
                for shard in &self.shards {
                    shard.0.lock().claimed.retain(|(claimed, _)| *claimed != ticket);
                }
                let mut claims = self.claims.lock();
                claims.held.retain(|(held, _)| *held != ticket);
                let waiting = claims.waiting.take();
                drop(claims);
                waiting.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    #[derive(Default)]
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether the claim is good; else it waits, and `count` counts its wake-ups.
    fn is_good(table: &WriteTable, ticket: Ticket, count: &Arc<Count>) -> bool {
        let waker = Waker::from(Arc::clone(count));
        table.poll_claim(ticket, &Context::from_waker(&waker)).is_ready()
    }

    #[test]
    fn a_claim_waits_for_earlier_writes_and_holds_up_later_ones() {
        let table = WriteTable::default();
        let count = Arc::new(Count::default());
        let write = table.try_write(3, 0..4096).unwrap();
        let apart = table.try_write(4, 8192..12288).unwrap();
        let claim = table.claim(4095..4100);
        assert!(!is_good(&table, claim, &count));
        assert_eq!(table.try_write(7, 4096..8192), None);
        let unaffected = table.try_write(7, 12288..16384).unwrap();
        table.release(apart);
        assert_eq!(count.0.load(Ordering::SeqCst), 0, "not the one it waits for");
        table.release(write);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(is_good(&table, claim, &count));
        table.release(Hold::Claim(claim));
        table.release(unaffected);
        let late = table.try_write(7, 4096..8192).unwrap();
        table.release(late);
    }

    #[test]
    fn claims_go_in_order_where_they_overlap() {
        let table = WriteTable::default();
        let counts: [Arc<Count>; 4] = Default::default();
        let first = table.claim(0..100);
        let second = table.claim(50..150);
        let third = table.claim(120..u64::MAX);
        let apart = table.claim(0..10);
        assert!(is_good(&table, first, &counts[0]));
        assert!(!is_good(&table, second, &counts[1]));
        assert!(!is_good(&table, third, &counts[2]));
        assert!(!is_good(&table, apart, &counts[3]));
        table.release(Hold::Claim(first));
        assert_eq!(counts[1].0.load(Ordering::SeqCst), 1);
        assert!(is_good(&table, apart, &counts[3]));
        assert!(is_good(&table, second, &counts[1]));
        assert!(!is_good(&table, third, &counts[2]));
        // One that gave up while it waited lets the next through.
        let fourth = table.claim(200..300);
        table.release(Hold::Claim(third));
        assert!(is_good(&table, fourth, &counts[2]));
    }
}

/// Threads under schedules that shuttle chooses, for `cargo xtask interleave`.
#[cfg(all(test, shuttle, feature = "test-faults"))]
mod interleavings {
    use super::*;
    use crate::sabotage::under;
    use shuttle::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use std::panic::catch_unwind;
    use std::sync::Arc;

    fn schedules() -> usize {
        std::env::var("ZEBU_SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(1000)
    }

    /// One block of two halves. Two read and write back a half each; two write the whole of it.
    fn one_block() {
        let table = Arc::new(WriteTable::default());
        let block: Arc<[AtomicU64; 2]> = Arc::default();
        let threads: Vec<_> = (0..4u64)
            .map(|number| {
                let (table, block) = (table.clone(), block.clone());
                shuttle::thread::spawn(move || {
                    let hold = if number < 2 { None } else { table.try_write(number as usize, 0..4096) };
                    let hold = hold.unwrap_or_else(|| {
                        let ticket = table.claim(0..4096);
                        shuttle::future::block_on(std::future::poll_fn(|cx| table.poll_claim(ticket, cx)));
                        Hold::Claim(ticket)
                    });
                    if number < 2 {
                        let mine = number as usize;
                        let other = block[1 - mine].load(SeqCst);
                        block[mine].store(number + 1, SeqCst);
                        block[1 - mine].store(other, SeqCst);
                        assert_eq!(block[mine].load(SeqCst), number + 1, "undone while it was claimed");
                    } else {
                        let before = [block[0].load(SeqCst), block[1].load(SeqCst)];
                        block[0].store(before[0].max(number + 1), SeqCst);
                        block[1].store(before[1].max(number + 1), SeqCst);
                    }
                    table.release(hold);
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_read_modify_write_excludes_every_other_write_of_its_block() {
        shuttle::check_random(one_block, schedules());
        shuttle::check_pct(one_block, schedules(), 3);
    }

    #[test]
    fn a_claim_that_is_not_shown_to_writers_is_caught() {
        let attempts = schedules().max(1000) * 10;
        let caught = under(Some(Fault::HideClaim), || {
            catch_unwind(|| shuttle::check_random(one_block, attempts)).is_err()
        });
        assert!(caught.0);
    }
}
