//! The ways to wait: the mutex for tasks, the barrier of requests, the epochs of readers.

use super::{block_on, explore, give_up_after_one_poll, is_caught, spawn};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use crate::sync::{AsyncMutex, ReadEpochs, RequestBarrier, Standing, drive};
use std::sync::Arc;
use zebu_storage::sabotage::Fault;

/// Two take a mutex twice each, and one comes, waits, and goes away.
fn async_mutex() {
    let (mutex, inside) = (Arc::new(AsyncMutex::default()), Arc::new(AtomicUsize::new(0)));
    let mut threads: Vec<_> = (0..2)
        .map(|_| {
            let (mutex, inside) = (mutex.clone(), inside.clone());
            spawn(move || {
                for _ in 0..2 {
                    let _guard = block_on(mutex.lock());
                    assert_eq!(inside.fetch_add(1, SeqCst), 0, "two are inside");
                    inside.fetch_sub(1, SeqCst);
                }
            })
        })
        .collect();
    let theirs = mutex.clone();
    threads.push(spawn(move || block_on(give_up_after_one_poll(theirs.lock()))));
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn one_holds_a_mutex_and_nobody_waits_for_ever() {
    explore(async_mutex);
}

#[test]
fn a_mutex_that_wakes_one_is_caught() {
    is_caught(Fault::WakeOneAtMutex, async_mutex);
}

/// Two go through the barrier, two want to be alone.
fn barrier() {
    let barrier = Arc::new(RequestBarrier::default());
    let (inside, alone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let (barrier, inside, alone) = (barrier.clone(), inside.clone(), alone.clone());
            spawn(move || {
                if number < 2 {
                    let _inside = block_on(barrier.enter(&drive(number)));
                    inside.fetch_add(1, SeqCst);
                    assert!(!alone.load(SeqCst), "inside beside the one who is alone");
                    inside.fetch_sub(1, SeqCst);
                } else {
                    let _alone = block_on(barrier.alone(&Standing, Vec::new, async || {}));
                    assert!(!alone.swap(true, SeqCst), "two are alone");
                    assert_eq!(inside.load(SeqCst), 0, "somebody is inside");
                    alone.store(false, SeqCst);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// One goes through while one wants to be alone and gives up.
fn barrier_given_up() {
    let barrier = Arc::new(RequestBarrier::default());
    let theirs = barrier.clone();
    let thread =
        spawn(move || block_on(give_up_after_one_poll(theirs.alone(&Standing, Vec::new, async || {}))));
    for worker in 0..2 {
        drop(block_on(barrier.enter(&drive(worker))));
    }
    thread.join().unwrap();
}

#[test]
fn nobody_meets_the_one_who_is_alone_and_nobody_waits_for_ever() {
    explore(barrier);
    explore(barrier_given_up);
}

#[test]
fn a_barrier_that_looks_before_it_counts_is_caught() {
    is_caught(Fault::LookBeforeCount, barrier);
}

#[test]
fn a_barrier_that_does_not_look_again_is_caught() {
    is_caught(Fault::LookOnce, barrier);
}

/// Readers follow a pointer; what it pointed to is given up after they have left, again and again.
fn read_epochs() {
    const PLACES: usize = 4;
    let epochs = Arc::new(ReadEpochs::default());
    let pointer = Arc::new(AtomicUsize::new(0));
    let gone: Arc<[AtomicBool; PLACES]> = Arc::default();
    let readers: Vec<_> = (0..2)
        .map(|worker| {
            let (epochs, pointer, gone) = (epochs.clone(), pointer.clone(), gone.clone());
            spawn(move || {
                let drive = drive(worker);
                for _ in 0..2 {
                    let _inside = epochs.enter(&drive);
                    let place = pointer.load(SeqCst);
                    assert!(!gone[place].load(SeqCst), "place {place} was given up while it was in use");
                }
            })
        })
        .collect();
    for next in 1..PLACES {
        let old = pointer.swap(next, SeqCst);
        block_on(epochs.wait(&Standing));
        gone[old].store(true, SeqCst);
    }
    for reader in readers {
        reader.join().unwrap();
    }
}

#[test]
fn nothing_is_given_up_while_a_request_uses_it() {
    explore(read_epochs);
}

#[test]
fn an_epoch_of_one_phase_is_caught() {
    is_caught(Fault::FlipOnce, read_epochs);
}
