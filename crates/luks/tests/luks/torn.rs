//! Crashes while key slots change: any sectors of a step are there or not, and no key that was not changed is lost.

use crate::support::{cheap, open_luks1, random_bytes};
use zebu_luks::{CipherSpec, HashName, HeaderStep, LastKey, Limits, Luks1Header, LuksError, SystemRandom};

const SECTOR: usize = 512;

/// A device with two keys, in the slots 1 and `slot`.
fn with_keys(slot: u32) -> (Luks1Header, Vec<u8>) {
    let mut options = cheap(CipherSpec::AES_256_XTS, HashName::Sha256);
    (options.slot_iterations, options.digest_iterations) = (1, 1);
    let (mut header, key, mut device) = Luks1Header::create(&options, b"first", &mut SystemRandom).unwrap();
    for (slot, passphrase) in [(1, "one"), (slot, "changed")] {
        let steps = header.add_key(Some(slot), &key, passphrase.as_bytes(), 1, &mut SystemRandom).unwrap();
        crate::support::apply(&mut device, &steps);
    }
    crate::support::apply(&mut device, &header.remove_key(0, LastKey::Keep, &mut SystemRandom).unwrap());
    (header, device)
}

/// The device after some sectors of a step, which `coins` choose.
fn torn(device: &[u8], step: &HeaderStep, mut coin: impl FnMut() -> bool) -> Vec<u8> {
    let mut whole = device.to_vec();
    crate::support::apply(&mut whole, std::slice::from_ref(step));
    let mut torn = device.to_vec();
    for (old, new) in torn.chunks_mut(SECTOR).zip(whole.chunks(SECTOR)) {
        if old != new && coin() {
            old.copy_from_slice(new);
        }
    }
    torn
}

fn survives(device: &[u8], steps: &[HeaderStep], what: &str) -> Vec<u8> {
    let mut device = device.to_vec();
    for (number, step) in steps.iter().enumerate() {
        for _ in 0..10 {
            let coins = random_bytes(1024);
            let mut coins = coins.iter().cycle();
            let state = torn(&device, step, || coins.next().is_some_and(|coin| coin & 1 == 0));
            assert!(open_luks1(&state, b"one").is_some(), "{what}: step {number}, torn");
        }
        // The header's sectors are the first that differ.
        for sector in 0..2 {
            let mut at = 0;
            let state = torn(&device, step, || {
                at += 1;
                at - 1 == sector
            });
            assert!(open_luks1(&state, b"one").is_some(), "{what}: step {number}, sector {sector} alone");
        }
        crate::support::apply(&mut device, std::slice::from_ref(step));
        assert!(open_luks1(&device, b"one").is_some(), "{what}: after step {number}");
    }
    device
}

#[test]
fn other_keys_survive_any_tear() {
    // The entry of slot 6 lies across a sector's end.
    for slot in [2, 6, 7] {
        let (mut header, device) = with_keys(slot);
        let (_, key, _) = open_luks1(&device, b"one").unwrap();
        let steps = header.remove_key(slot, LastKey::Keep, &mut SystemRandom).unwrap();
        let removed = survives(&device, &steps, "remove");
        assert!(open_luks1(&removed, b"changed").is_none());

        let steps = header.add_key(Some(slot), &key, b"new", 1, &mut SystemRandom).unwrap();
        let added = survives(&removed, &steps, "add");
        assert_eq!(open_luks1(&added, b"new").unwrap().2, slot);
        assert_eq!(Luks1Header::parse(&added, &Limits::default()).unwrap(), header);
    }
}

#[test]
fn a_slot_is_active_only_with_its_whole_key() {
    for slot in [3, 6] {
        let (mut header, device) = with_keys(2);
        let (_, key, _) = open_luks1(&device, b"one").unwrap();
        let steps = header.add_key(Some(slot), &key, b"new", 1, &mut SystemRandom).unwrap();
        for _ in 0..10 {
            let coins = random_bytes(1024);
            let mut coins = coins.iter().cycle();
            let state = torn(&device, &steps[0], || coins.next().is_some_and(|coin| coin & 1 == 0));
            let torn = Luks1Header::parse(&state, &Limits::default()).unwrap();
            assert!(!torn.slots()[slot as usize].is_active);
        }
    }
}

#[test]
fn a_removed_key_leaves_no_material() {
    let (mut header, device) = with_keys(2);
    let range = header.material(2).unwrap();
    let steps = header.remove_key(2, LastKey::Keep, &mut SystemRandom).unwrap();
    let mut changed = device.clone();
    crate::support::apply(&mut changed, &steps);
    let range = range.start as usize..range.end as usize;
    let same =
        device[range.clone()].chunks(16).zip(changed[range].chunks(16)).filter(|(old, new)| old == new);
    assert_eq!(same.count(), 0);
}

#[test]
fn the_last_key_stays_unless_it_is_forced() {
    let (mut header, _) = with_keys(2);
    header.remove_key(2, LastKey::Keep, &mut SystemRandom).unwrap();
    let before = header.clone();
    let refused = header.remove_key(1, LastKey::Keep, &mut SystemRandom);
    assert!(matches!(refused, Err(LuksError::LastSlot { slot: 1 })));
    assert_eq!(header, before);
    header.remove_key(1, LastKey::Remove, &mut SystemRandom).unwrap();
    assert_eq!(header.active_slots().count(), 0);
}

#[test]
fn slots_are_used_once_and_for_this_key_alone() {
    let (mut header, device) = with_keys(2);
    let (_, key, _) = open_luks1(&device, b"one").unwrap();
    let random = &mut SystemRandom;
    assert!(matches!(header.add_key(Some(2), &key, b"x", 1, random), Err(LuksError::SlotInUse { slot: 2 })));
    assert!(matches!(header.add_key(Some(8), &key, b"x", 1, random), Err(LuksError::NoSuchSlot { slot: 8 })));
    assert!(matches!(header.remove_key(4, LastKey::Keep, random), Err(LuksError::SlotInactive { slot: 4 })));
    let (_, other) = with_keys(2);
    let (_, other, _) = open_luks1(&other, b"one").unwrap();
    assert!(matches!(header.add_key(None, &other, b"x", 1, random), Err(LuksError::WrongMasterKey)));
    for _ in 0..6 {
        header.add_key(None, &key, b"x", 1, random).unwrap();
    }
    assert!(matches!(header.add_key(None, &key, b"x", 1, random), Err(LuksError::NoFreeSlot { slots: 8 })));
}
