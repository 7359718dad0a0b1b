//! The states of the mapping cache: loading, present, dirty, in writing; eviction; what is derived.

use super::{block_on, explore, explore_fairly, is_caught, spawn};
use crate::Result;
use crate::chain::map::{ChainMap, DerivedFrom, MERGED_BYTES};
use crate::chain::place::{ClusterPlace, PlaceKind};
use crate::qcow2::cache::resident_table::ResidentTable;
use crate::qcow2::cache::shard::SLOT_OVERHEAD;
use crate::qcow2::cache::slice_cache::{SliceCache, Slot, Written};
use crate::qcow2::cache::slice_store::{Class, SliceStore};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use crate::sync::{Clock, Standing};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::drive::Drive;
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
    Ok(disk.lock()[key as usize].into())
}

/// Byte 0 of slice `key`, loading it as often as it takes.
async fn first_byte(cache: &SliceCache, disk: &Disk, key: u64) -> u8 {
    loop {
        if let Some(slice) = cache.get(&mut cache.lock(key), key) {
            return slice.bytes()[0];
        }
        cache.ensure(&Standing, key, || load(disk, key)).await.unwrap();
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
                block_on(cache.ensure(&Standing, 7, || async {
                    loads.fetch_add(1, SeqCst);
                    shuttle::future::yield_now().await;
                    Ok(vec![7; SLICE].into())
                }))
                .unwrap();
                assert_eq!(cache.get(&mut cache.lock(7), 7).unwrap().bytes()[0], 7);
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

/// A clock by which every wait is long.
struct Hasty;

impl Clock for Hasty {
    async fn patience(&self) {}

    fn drive(&self) -> Option<&Arc<Drive>> {
        None
    }
}

/// Two load the same slice at once, because neither waits for the other; each changes a byte of what it finds.
fn two_loads() {
    let store = store(1 << 20);
    let cache = cache(&store);
    let threads: Vec<_> = (0..2)
        .map(|byte| {
            let cache = cache.clone();
            spawn(move || {
                block_on(async {
                    let load = || async {
                        shuttle::future::yield_now().await;
                        Ok(vec![0; SLICE].into())
                    };
                    let _pin = cache.ensure(&Hasty, 7, load).await.unwrap();
                    assert!(cache.change(&mut cache.lock(7), 7, byte, 1, |bytes| bytes[0] = 7));
                });
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let frozen = cache.freeze();
    let changed: Vec<&[u8]> = frozen.iter().map(|slice| &slice.bytes()[..2]).collect();
    assert_eq!(changed, [[7, 7]], "a change is gone");
    cache.thaw(&frozen, Written::Durable);
    assert_eq!(store.budget().used(), cache.slice_cost());
}

#[test]
fn of_two_loads_of_a_slice_one_counts() {
    explore(two_loads);
}

#[test]
fn a_load_that_counts_beside_another_is_caught() {
    is_caught(Fault::EndLoadsLate, two_loads);
}

/// One sets an entry of a table in memory. Another builds on it, and has it made durable.
fn entry_beside_a_freeze() {
    let table = Arc::new(ResidentTable::new(64, 512, &store(1 << 20)));
    let setter = {
        let table = table.clone();
        spawn(move || assert!(table.set(3, 7)))
    };
    if table.get(3) == 7 {
        let frozen = table.freeze();
        assert_eq!(frozen.len(), 1, "an entry is seen that no commit writes");
    }
    setter.join().unwrap();
}

#[test]
fn an_entry_that_is_seen_is_noted() {
    explore(entry_beside_a_freeze);
}

#[test]
fn an_entry_that_is_noted_late_is_caught() {
    is_caught(Fault::NoteEntriesLate, entry_beside_a_freeze);
}

/// The first load fails; who waited for it loads.
fn failed_load() {
    let cache = cache(&store(1 << 20));
    let attempts = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (cache, attempts) = (cache.clone(), attempts.clone());
            spawn(move || {
                let loaded = block_on(cache.ensure(&Standing, 7, || async {
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
    assert!(!store.budget().is_exceeded());
    drop(cache);
    assert_eq!(store.budget().used(), 0, "what was taken was given back");
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
            disk.lock()[slice.key() as usize].copy_from_slice(slice.bytes());
        }
        cache.thaw(&frozen, Written::Durable);
    };
    for _ in 0..2 {
        commit();
    }
    writer.join().unwrap();
    presser.join().unwrap();
    commit();
    assert_eq!(disk.lock()[0][0], CHANGES, "the last commit holds every change");
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
    let index = Arc::new(ChainMap::new(store.clone(), 1 << 30, 16, 8, DerivedFrom::Chain));
    let owner = index.merged_owner().unwrap();
    let merged = Arc::new(SliceCache::of_owner(store.clone(), Class::Derived, owner, MERGED_BYTES));
    let tables = Arc::new(SliceCache::new(store.clone(), Class::Table, SLICE).watched_by(Some(index)));
    block_on(tables.ensure(&Standing, 0, || async { Ok(vec![1; SLICE].into()) })).unwrap();
    let makers: Vec<_> = (0..2)
        .map(|_| {
            let (tables, merged, store) = (tables.clone(), merged.clone(), store.clone());
            spawn(move || {
                let Slot::Vacant(ticket) = block_on(merged.want(&Standing, 0)) else { return };
                let room = store.derived_room(merged.slice_cost()).unwrap();
                let generation = merged.lock(0).generation();
                let value = tables.get(&mut tables.lock(0), 0).unwrap().bytes()[0];
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
        assert_ne!(slice.bytes()[0], 1, "what was derived is older than the table");
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

/// One wants a slice and looks at it; another presses everything out of the cache.
fn pressed_out() {
    let store = store(2 * SLICE as u64 + SLOT_OVERHEAD);
    let cache = cache(&store);
    let disk: Arc<Disk> = Arc::new(Mutex::new((0..2).map(|key| [key; SLICE]).collect()));
    let presses = {
        let store = store.clone();
        spawn(move || {
            for _ in 0..2 {
                drop(block_on(store.room(&Standing, SLICE as u64)));
                store.budget().set_limit(0);
                store.shrink_to_budget();
            }
        })
    };
    block_on(async {
        let _pin = cache.ensure(&Standing, 1, || load(&disk, 1)).await.unwrap();
        assert!(cache.get(&mut cache.lock(1), 1).is_some(), "it was loaded for this look");
    });
    presses.join().unwrap();
}

#[test]
fn a_slice_stays_until_who_loaded_it_has_looked() {
    explore(pressed_out);
}

#[test]
fn a_slice_that_does_not_stay_is_caught() {
    is_caught(Fault::LoadUnpinned, pressed_out);
}

/// Two want room for what is derived, and there is none.
fn no_room_for_derived() {
    let store = store(MERGED_BYTES as u64);
    store.budget().take(MERGED_BYTES as u64);
    let other = {
        let store = store.clone();
        spawn(move || assert!(store.derived_room(512).is_none()))
    };
    assert!(store.derived_room(512).is_none());
    other.join().unwrap();
    assert_eq!(store.budget().used(), MERGED_BYTES as u64);
}

#[test]
fn room_that_is_not_there_is_not_given_back() {
    explore(no_room_for_derived);
}

#[test]
fn room_given_back_untaken_is_caught() {
    is_caught(Fault::GiveBackUntaken, no_room_for_derived);
}

/// One adds a long run to the index and finds it, another one forgets everything and then what is not used.
fn index_is_cleared() {
    let interval = Duration::from_secs(1);
    let store = Arc::new(SliceStore::new(1 << 20, interval));
    let index = Arc::new(ChainMap::new(store.clone(), 1 << 30, 16, 8, DerivedFrom::Tables));
    index.extents().top_up();
    let theirs = index.clone();
    let adds = spawn(move || {
        let place = ClusterPlace { kind: PlaceKind::Data { host: 1 << 30, copied: false }, depth: 0 };
        theirs.extents().insert(0..8, place);
        theirs.find(0, 512);
    });
    index.clear();
    index.extents().tidy(Instant::now() + 2 * interval);
    adds.join().unwrap();
    index.clear();
    assert_eq!((store.budget().index(), store.budget().used()), (0, 0));
}

#[test]
fn memory_of_the_index_is_given_back_once() {
    explore(index_is_cleared);
}
