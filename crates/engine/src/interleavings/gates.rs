//! Gate, turnstile, grace periods.

use super::{block_on, explore, give_up_after_one_poll, is_caught, spawn};
use crate::gate::Gate;
use crate::qcow2::grace::Grace;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use crate::turnstile::Turnstile;
use std::sync::Arc;
use zebu_storage::sabotage::Fault;

/// Two pass a gate twice each, and one comes, waits, and goes away.
fn gate() {
    let (gate, inside) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
    let mut threads: Vec<_> = (0..2)
        .map(|_| {
            let (gate, inside) = (gate.clone(), inside.clone());
            spawn(move || {
                for _ in 0..2 {
                    let _guard = block_on(gate.enter());
                    assert_eq!(inside.fetch_add(1, SeqCst), 0, "two are inside");
                    inside.fetch_sub(1, SeqCst);
                }
            })
        })
        .collect();
    let theirs = gate.clone();
    threads.push(spawn(move || block_on(give_up_after_one_poll(theirs.enter()))));
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn one_is_inside_a_gate_and_nobody_waits_for_ever() {
    explore(gate);
}

#[test]
fn a_gate_that_wakes_one_is_caught() {
    is_caught(Fault::WakeOneAtGate, gate);
}

/// Two go through a turnstile, two want to be alone.
fn turnstile() {
    let turnstile = Arc::new(Turnstile::default());
    let (inside, alone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let (turnstile, inside, alone) = (turnstile.clone(), inside.clone(), alone.clone());
            spawn(move || {
                if number < 2 {
                    let _inside = block_on(turnstile.enter(number));
                    inside.fetch_add(1, SeqCst);
                    assert!(!alone.load(SeqCst), "inside beside the one who is alone");
                    inside.fetch_sub(1, SeqCst);
                } else {
                    let _alone = block_on(turnstile.alone());
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
fn turnstile_given_up() {
    let turnstile = Arc::new(Turnstile::default());
    let theirs = turnstile.clone();
    let thread = spawn(move || block_on(give_up_after_one_poll(theirs.alone())));
    for worker in 0..2 {
        drop(block_on(turnstile.enter(worker)));
    }
    thread.join().unwrap();
}

#[test]
fn nobody_meets_the_one_who_is_alone_and_nobody_waits_for_ever() {
    explore(turnstile);
    explore(turnstile_given_up);
}

#[test]
fn a_turnstile_that_looks_before_it_counts_is_caught() {
    is_caught(Fault::LookBeforeCount, turnstile);
}

#[test]
fn a_turnstile_that_does_not_look_again_is_caught() {
    is_caught(Fault::LookOnce, turnstile);
}

/// Readers follow a pointer; what it pointed to is given up after a grace period, again and again.
fn grace() {
    const PLACES: usize = 4;
    let grace = Arc::new(Grace::default());
    let pointer = Arc::new(AtomicUsize::new(0));
    let gone: Arc<[AtomicBool; PLACES]> = Arc::default();
    let readers: Vec<_> = (0..2)
        .map(|worker| {
            let (grace, pointer, gone) = (grace.clone(), pointer.clone(), gone.clone());
            spawn(move || {
                for _ in 0..2 {
                    let _inside = grace.enter(worker);
                    let place = pointer.load(SeqCst);
                    assert!(!gone[place].load(SeqCst), "place {place} was given up while it was in use");
                }
            })
        })
        .collect();
    for next in 1..PLACES {
        let old = pointer.swap(next, SeqCst);
        block_on(grace.wait());
        gone[old].store(true, SeqCst);
    }
    for reader in readers {
        reader.join().unwrap();
    }
}

#[test]
fn nothing_is_given_up_while_a_request_uses_it() {
    explore(grace);
}

#[test]
fn a_grace_period_of_one_phase_is_caught() {
    is_caught(Fault::FlipOnce, grace);
}
