//! The states of the mapping cache: loading, present, dirty, in writing; eviction; what is derived.

use super::{block_on, explore, explore_fairly, is_caught, spawn};
use crate::Result;
use crate::qcow2::index::{ChainIndex, DerivedFrom, MERGED_BYTES};
use crate::qcow2::slices::{SliceCache, Written};
use crate::qcow2::store::{Class, SLOT_OVERHEAD, SliceStore};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::Arc;
use std::time::Duration;
use zebu_storage::sabotage::Fault;

const SLICE: usize = 512;

fn store(limit: u64) -> Arc<SliceStore> {
    Arc::new(SliceStore::new(limit, Duration::ZERO))
}

fn cache(store: &Arc<SliceStore>) -> Arc<SliceCache> {
    Arc::new(SliceCache::new(store.clone(), Class::Table, SLICE))
}

/// A disk of slices. A load takes a moment: others may go on.
type Disk = Mutex<Vec<[u8; SLICE]>>;

async fn load(disk: &Disk, key: u64) -> Result<Box<[u8]>> {
    shuttle::future::yield_now().await;
    Ok(disk.lock().unwrap()[key as usize].into())
}

/// What byte 0 of slice `key` is, loading it as often as it takes.
async fn first_byte(cache: &SliceCache, disk: &Disk, key: u64) -> u8 {
    loop {
        if let Some(slice) = cache.get(&mut cache.lock(key), key) {
            return slice.bytes[0];
        }
        cache.ensure(key, || load(disk, key)).await.unwrap();
    }
}

/// Three want the same slice.
fn same_slice() {
    let cache = cache(&store(1 << 20));
    let loads = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (cache, loads) = (cache.clone(), loads.clone());
            spawn(move || {
                block_on(cache.ensure(7, || async {
                    loads.fetch_add(1, SeqCst);
                    shuttle::future::yield_now().await;
                    Ok(vec![7; SLICE].into())
                }))
                .unwrap();
                assert_eq!(cache.get(&mut cache.lock(7), 7).unwrap().bytes[0], 7);
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(loads.load(SeqCst), 1, "a slice was loaded more than once");
}

#[test]
fn a_slice_that_many_want_is_loaded_once_and_all_are_woken() {
    explore(same_slice);
}

#[test]
fn a_load_whose_waiters_are_forgotten_is_caught() {
    is_caught(Fault::ForgetLoadWaiters, same_slice);
}

#[test]
fn a_slice_loaded_twice_is_caught() {
    is_caught(Fault::LoadTwice, same_slice);
}

/// The first load fails; who waited for it loads.
fn failed_load() {
    let cache = cache(&store(1 << 20));
    let attempts = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (cache, attempts) = (cache.clone(), attempts.clone());
            spawn(move || {
                let loaded = block_on(cache.ensure(7, || async {
                    shuttle::future::yield_now().await;
                    if attempts.fetch_add(1, SeqCst) == 0 {
                        return Err(crate::Error::new(crate::ErrorKind::Corrupt, "the first fails"));
                    }
                    Ok(vec![7; SLICE].into())
                }));
                usize::from(loaded.is_err())
            })
        })
        .collect();
    let failures: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!((failures, attempts.load(SeqCst)), (1, 2));
}

#[test]
fn a_load_that_fails_is_the_failure_of_one() {
    explore(failed_load);
}

/// Three want three slices, and there is room for the load of one.
fn no_room() {
    let store = store(2 * SLICE as u64 + SLOT_OVERHEAD);
    let cache = cache(&store);
    let disk: Arc<Disk> = Arc::new(Mutex::new((0..3).map(|key| [key; SLICE]).collect()));
    let threads: Vec<_> = (0..3u64)
        .map(|key| {
            let (cache, disk) = (cache.clone(), disk.clone());
            spawn(move || assert_eq!(u64::from(block_on(first_byte(&cache, &disk, key))), key))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    store.shrink_to_budget();
    assert!(!store.budget.is_exceeded());
    drop(cache);
    assert_eq!(store.budget.used(), 0, "what was taken was given back");
}

#[test]
fn loads_that_wait_for_room_go_on_when_there_is_some() {
    explore_fairly(no_room);
}

#[test]
fn a_load_that_does_not_look_again_for_room_is_caught() {
    is_caught(Fault::LookOnce, no_room);
}

/// One changes a slice, one commits it again and again, one presses it out of the cache.
fn commit_beside_changes() {
    const CHANGES: u8 = 3;
    let store = store(2 * (2 * SLICE as u64 + SLOT_OVERHEAD));
    let cache = cache(&store);
    let disk: Arc<Disk> = Arc::new(Mutex::new((0..4).map(|_| [0; SLICE]).collect()));
    let (theirs, their_disk) = (cache.clone(), disk.clone());
    let writer = spawn(move || {
        block_on(async {
            for value in 1..=CHANGES {
                // As links do: whatever was changed before is seen.
                loop {
                    assert_eq!(first_byte(&theirs, &their_disk, 0).await, value - 1, "a change is gone");
                    let mut shard = theirs.lock(0);
                    if theirs.change(&mut shard, 0, 0, 1, |bytes| bytes[0] = value) {
                        break;
                    }
                }
            }
        });
    });
    let (theirs, their_disk) = (cache.clone(), disk.clone());
    let presser = spawn(move || {
        for key in [1, 2, 3, 1, 2, 3] {
            block_on(first_byte(&theirs, &their_disk, key));
        }
    });
    let commit = || {
        let frozen = cache.freeze();
        for slice in &frozen {
            // The write takes its time.
            for _ in 0..4 {
                shuttle::thread::yield_now();
            }
            disk.lock().unwrap()[slice.key as usize].copy_from_slice(&slice.bytes);
        }
        cache.thaw(&frozen, Written::Durable);
    };
    for _ in 0..2 {
        commit();
    }
    writer.join().unwrap();
    presser.join().unwrap();
    commit();
    assert_eq!(disk.lock().unwrap()[0][0], CHANGES, "the last commit holds every change");
    assert_eq!(cache.dirty_slices(), 0);
}

#[test]
fn a_change_beside_a_commit_and_evictions_is_neither_lost_nor_undone() {
    explore(commit_beside_changes);
}

#[test]
fn a_slice_evicted_while_it_is_written_is_caught() {
    is_caught(Fault::EvictInWriting, commit_beside_changes);
}

#[test]
fn a_change_forgotten_while_its_slice_is_written_is_caught() {
    is_caught(Fault::ForgetChangeInWriting, commit_beside_changes);
}

/// One changes a slice while two make what is derived from it.
fn derived_beside_a_change() {
    let store = store(1 << 20);
    let index = Arc::new(ChainIndex::new(store.clone(), 1 << 30, 16, 8, DerivedFrom::Chain));
    let owner = index.merged_owner().unwrap();
    let merged = Arc::new(SliceCache::of_owner(store.clone(), Class::Derived, owner, MERGED_BYTES));
    let tables = Arc::new(SliceCache::new(store.clone(), Class::Table, SLICE).watched_by(Some(index)));
    block_on(tables.ensure(0, || async { Ok(vec![1; SLICE].into()) })).unwrap();
    let makers: Vec<_> = (0..2)
        .map(|_| {
            let (tables, merged, store) = (tables.clone(), merged.clone(), store.clone());
            spawn(move || {
                let Some(ticket) = block_on(merged.want(0)) else { return };
                let room = store.derived_room(merged.slice_cost()).unwrap();
                let generation = merged.lock(0).generation;
                let value = tables.get(&mut tables.lock(0), 0).unwrap().bytes[0];
                ticket.finish_derived(vec![value; MERGED_BYTES].into(), room, generation);
            })
        })
        .collect();
    {
        let mut shard = tables.lock(0);
        assert!(tables.change(&mut shard, 0, 0, 8, |bytes| bytes.fill(2)));
    }
    for maker in makers {
        maker.join().unwrap();
    }
    // Unknown (0) or right, never what was before.
    let mut shard = merged.lock(0);
    if let Some(slice) = merged.get(&mut shard, 0) {
        assert_ne!(slice.bytes[0], 1, "what was derived is older than the table");
    }
}

#[test]
fn what_is_derived_is_never_older_than_the_table() {
    explore(derived_beside_a_change);
}

#[test]
fn what_is_derived_from_an_old_table_and_kept_is_caught() {
    is_caught(Fault::KeepStaleDerived, derived_beside_a_change);
}
