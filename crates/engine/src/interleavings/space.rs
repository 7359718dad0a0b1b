//! The bookkeeping of host clusters: windows, allocations in flight, what is freed and given back after a grace period.
//!
//! The writers here do with the engine's own parts what `write/`, `alloc.rs` and `quarantine.rs` do, without a disk.

use super::{block_on, explore, is_caught, spawn};
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::cache::slice_store::{Class, SliceStore};
use crate::qcow2::space::free::{Allocated, FreeSpace, SpaceContent};
use crate::qcow2::space::windows::Windows;
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{AsyncMutex, Mutex, ReadEpochs, Standing, drive};
use std::future::poll_fn;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use zebu_storage::drive::Drive;
use zebu_storage::sabotage::{Fault, under};

const GUESTS: u64 = 2;
const HOSTS: u64 = 8;

#[derive(Default)]
struct Space {
    free: FreeSpace,
    windows: Windows,
}

struct Image {
    /// Its shard guards what is in flight.
    slices: SliceCache,
    space: Mutex<Space>,
    space_mutex: AsyncMutex,
    readers: ReadEpochs,
    drives: [Arc<Drive>; 4],
    /// The host cluster of each guest cluster.
    mapping: Mutex<Vec<Option<u64>>>,
    freed: Mutex<Vec<u64>>,
    /// The content of each host cluster: one more than its guest cluster.
    contents: Vec<AtomicU64>,
    /// How many allocations of each guest cluster are in flight.
    in_flight: Vec<AtomicU64>,
}

impl Image {
    fn new() -> Arc<Self> {
        let store = Arc::new(SliceStore::new(1 << 20, Duration::ZERO));
        let mut space = Space::default();
        space.free.insert(0..HOSTS, SpaceContent::Fresh);
        Arc::new(Self {
            slices: SliceCache::new(store, Class::Table, 512),
            space: Mutex::new(space),
            space_mutex: AsyncMutex::default(),
            readers: ReadEpochs::default(),
            drives: std::array::from_fn(drive),
            mapping: Mutex::new(vec![None; GUESTS as usize]),
            freed: Mutex::default(),
            contents: (0..HOSTS).map(|_| AtomicU64::new(0)).collect(),
            in_flight: (0..GUESTS).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Writes a guest cluster to a new place, as every write of a shared or compressed cluster does.
    async fn write(&self, worker: usize, guest: u64) {
        loop {
            let inside = self.readers.enter(&self.drives[worker]);
            let allocated = {
                let mut shard = self.slices.lock(0);
                if shard.in_flight().contains(guest) {
                    drop((shard, inside));
                    self.not_in_flight(guest).await;
                    continue;
                }
                let allocated = self.space.lock().windows.take_data(guest, 1);
                if allocated.is_some() {
                    shard.in_flight().begin(guest);
                }
                allocated
            };
            let Some(range) = allocated.map(Allocated::into_range) else {
                drop(inside);
                self.refill(guest).await;
                continue;
            };
            assert_eq!(self.in_flight[guest as usize].fetch_add(1, SeqCst), 0, "allocated twice at once");
            let host = range.start;
            let before = self.contents[host as usize].swap(guest + 1, SeqCst);
            assert_eq!(before, 0, "host cluster {host} was given away while it was used");
            self.in_flight[guest as usize].fetch_sub(1, SeqCst);
            let waiting = {
                let mut shard = self.slices.lock(0);
                if let Some(old) = self.mapping.lock()[guest as usize].replace(host) {
                    self.freed.lock().push(old);
                }
                shard.in_flight().end(guest)
            };
            waiting.wake();
            return;
        }
    }

    async fn not_in_flight(&self, guest: u64) {
        poll_fn(|cx| {
            if self.slices.lock(0).in_flight().wait(guest, cx.waker()) {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
        .await;
    }

    async fn refill(&self, guest: u64) {
        let turn = self.space_mutex.lock().await;
        let found = self.space.lock().free.take(2, 1);
        let Some((range, content)) = found else {
            drop(turn);
            // What another one is about to give back needs its turn, which PCT would not have to give it.
            shuttle::future::yield_now().await;
            return self.release().await;
        };
        let leftover = {
            let windows = &mut self.space.lock().windows;
            let stream = windows.stream_of(guest);
            windows.install(stream, Allocated::new(range, content), 4)
        };
        drop(turn);
        // As in the engine: what no window has room for waits for a grace period with the rest.
        self.freed.lock().extend(leftover.into_iter().flat_map(Allocated::into_range));
    }

    async fn release(&self) {
        let freed = std::mem::take(&mut *self.freed.lock());
        self.readers.wait(&Standing).await;
        let _turn = self.space_mutex.lock().await;
        for host in freed {
            self.contents[host as usize].store(0, SeqCst);
            self.space.lock().free.insert(host..host + 1, SpaceContent::Recycled);
        }
    }

    fn read(&self, worker: usize, guest: u64) {
        let _inside = self.readers.enter(&self.drives[worker]);
        let host = self.mapping.lock()[guest as usize];
        if let Some(host) = host {
            let content = self.contents[host as usize].load(SeqCst);
            assert_eq!(content, guest + 1, "host cluster {host} was given away while it was read");
        }
    }

    /// Every host cluster is in one place.
    fn check(&self) {
        let mut space = self.space.lock();
        let mut all: Vec<u64> = self.freed.lock().clone();
        all.extend(self.mapping.lock().iter().flatten());
        all.extend(space.windows.drain().into_iter().flat_map(Allocated::into_range));
        while let Some((run, _)) = space.free.take(HOSTS, 1) {
            all.extend(run);
        }
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..HOSTS), "host clusters in one place each: {all:?}");
    }
}

/// Two write the same clusters, one reads them, one gives back what was replaced.
fn writers() {
    let image = Image::new();
    let mut threads: Vec<_> = (0..2)
        .map(|worker| {
            let image = image.clone();
            spawn(move || {
                for step in 0..3 {
                    block_on(image.write(worker, (worker as u64 + step) % GUESTS));
                }
            })
        })
        .collect();
    let theirs = image.clone();
    threads.push(spawn(move || {
        for guest in [0, 1, 0, 1] {
            theirs.read(1, guest);
        }
    }));
    for _ in 0..2 {
        block_on(image.release());
    }
    for thread in threads {
        thread.join().unwrap();
    }
    image.check();
}

#[test]
fn a_host_cluster_is_in_one_place_and_stays_while_it_is_used() {
    explore(writers);
}

#[test]
fn a_window_that_hands_a_cluster_out_twice_is_caught() {
    is_caught(Fault::WindowOffByOne, writers);
}

/// A run that is set aside is found free by a scan. One thread is enough for that.
fn set_aside_and_found() {
    let mut free = FreeSpace::default();
    free.set_aside(10..20, SpaceContent::Recycled);
    free.insert_missing(0..30, SpaceContent::Recycled);
    free.restore();
    assert_eq!(free.total(), 30);
}

#[test]
fn a_run_that_is_set_aside_is_free_once() {
    set_aside_and_found();
}

#[test]
fn a_run_that_is_free_twice_is_caught() {
    let (result, _) = under(Some(Fault::ForgetSetAside), || catch_unwind(set_aside_and_found));
    assert!(result.is_err());
}
