//! vhost-user-blk with a front end and a driver of the test's own: what a guest may do, and what it must not.

use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::LONGEST;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::vhost_guest::{
    DATA, Driver, EVENT_INDEX, HAS_FLUSH, INDIRECT, MEMORY, QUEUE, VhostGuest, WRITE, is_readable,
};

const IMAGE: &str = "disk.qcow2";
const SIZE: u64 = 64 << 20;

/// Kinds of requests.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn serve(scratch: &Scratch, options: &str) -> Server {
    Server::start_vhost_user(scratch.path(), &format!("--export-name root {options} -f qcow2 {IMAGE}"))
}

fn create(scratch: &Scratch) {
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
}

/// A descriptor: address, length, flags, next.
type Raw = (u64, u32, u16, u16);

/// A range of a discard or write-zeroes request.
fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn all_requests_do_what_they_say() {
    let Some(qemu) = Qemu::find() else { return };
    for options in ["-t none --queues 2", "--queues 2 --aio threads"] {
        let scratch = Scratch::new("vhost");
        create(&scratch);
        let server = serve(&scratch, options);
        let mut guest = VhostGuest::connect(server.socket(), 2);
        assert_eq!(guest.size, SIZE);
        let mut model = vec![0; SIZE as usize];
        let mut random = Random::new(5);
        for turn in 0..400 {
            let ring = turn % 2;
            let sectors = random.between(1, 128);
            let sector = random.below(SIZE / 512 - sectors);
            let bytes = (sector * 512) as usize..((sector + sectors) * 512) as usize;
            let len = (sectors * 512) as u32;
            match random.below(6) {
                0 | 1 => {
                    random.fill(&mut model[bytes.clone()]);
                    guest.put(DATA, &model[bytes]);
                    assert_eq!(guest.call(ring, OUT, sector, len, 0), (OK, 1));
                }
                2 | 3 => {
                    guest.put(DATA, &vec![0x55; len as usize]);
                    assert_eq!(guest.call(ring, IN, sector, len, WRITE), (OK, len + 1));
                    assert!(guest.get(DATA, len as usize) == model[bytes], "{sectors} sectors at {sector}");
                }
                4 => {
                    let flags = random.below(2) as u32;
                    guest.put(DATA, &range(sector, sectors as u32, flags));
                    assert_eq!(guest.call(ring, WRITE_ZEROES, 0, 16, 0), (OK, 1));
                    model[bytes].fill(0);
                }
                _ => assert_eq!(guest.call(ring, FLUSH, 0, 0, 0), (OK, 1)),
            }
        }
        // Two ranges of whole clusters.
        guest.put(DATA, &[range(2048, 128, 0), range(4096, 256, 0)].concat());
        assert_eq!(guest.call(0, DISCARD, 0, 32, 0), (OK, 1));
        model[2048 * 512..2176 * 512].fill(0);
        model[4096 * 512..4352 * 512].fill(0);
        assert_eq!(guest.call(1, GET_ID, 0, 20, WRITE), (OK, 21));
        assert_eq!(guest.get(DATA, 20), b"root\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        // Data in many descriptors of odd sizes and places, in a table of its own.
        let content: Vec<u8> = (0..8192u32).map(|at| (at * 7) as u8).collect();
        let header = VhostGuest::header_of(0, 0);
        guest.put_request(0, 0, OUT, 1000, (0, 0, 0));
        let mut table = vec![(VhostGuest::at(header), 5, 0), (VhostGuest::at(header) + 5, 11, 0)];
        for (index, part) in content.chunks(1000).enumerate() {
            let offset = DATA + 3 + index as u64 * 5000;
            guest.put(offset, part);
            table.push((VhostGuest::at(offset), part.len() as u32, 0));
        }
        table.push((VhostGuest::at(header) + 16, 1, WRITE));
        guest.put_table(2 << 20, &table);
        guest.put_descriptor(0, 0, VhostGuest::at(2 << 20), table.len() as u32 * 16, INDIRECT, 0);
        guest.offer(0, 0);
        guest.kick(0);
        assert_eq!(guest.used(0), [(0, 1)]);
        assert_eq!(guest.status(0, 0), OK);
        model[1000 * 512..1000 * 512 + 8192].copy_from_slice(&content);
        // Many at once, on both rings.
        for ring in 0..2 {
            for slot in 0..32u16 {
                let data = DATA + (ring as u64 * 32 + u64::from(slot)) * 4096;
                let sector = 60_000 + (ring as u64 * 32 + u64::from(slot)) * 8;
                guest.put(data, &[slot as u8 + 1; 4096]);
                model[sector as usize * 512..sector as usize * 512 + 4096].fill(slot as u8 + 1);
                guest.put_request(ring, slot * 3, OUT, sector, (VhostGuest::at(data), 4096, 0));
                guest.offer(ring, slot * 3);
            }
            guest.kick(ring);
        }
        for ring in 0..2 {
            let mut heads = Vec::new();
            while heads.len() < 32 {
                heads.extend(guest.used(ring).into_iter().map(|(head, _)| head));
            }
            heads.sort_unstable();
            assert!(heads.iter().copied().eq((0..32).map(|slot| slot * 3)));
            assert!((0..32).all(|slot| guest.status(ring, slot * 3) == OK));
        }
        drop(guest);
        server.stop();
        qemu.check_clean(scratch.path(), IMAGE).unwrap();
        std::fs::write(scratch.file("model.raw"), &model).unwrap();
        qemu.same_content(scratch.path(), "model.raw", IMAGE).unwrap();
    }
}

#[test]
fn hostile_requests_are_refused_and_others_served() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "--queues 2");
    let mut guest = VhostGuest::connect(server.socket(), 2);
    let last = SIZE / 512;
    let far = u64::MAX - 4095;
    for (kind, sector, data, expected) in [
        (IN, last, (VhostGuest::at(DATA), 512, WRITE), IO_ERROR),
        (IN, last - 1, (VhostGuest::at(DATA), 1024, WRITE), IO_ERROR),
        (OUT, u64::MAX, (VhostGuest::at(DATA), 512, 0), IO_ERROR),
        (OUT, last, (VhostGuest::at(DATA), 512, 0), IO_ERROR),
        (OUT, 0, (VhostGuest::at(DATA), 511, 0), IO_ERROR),
        (IN, 0, (VhostGuest::at(DATA), 513, WRITE), IO_ERROR),
        (OUT, 0, (VhostGuest::at(MEMORY), 512, 0), IO_ERROR),
        (OUT, 0, (VhostGuest::at(MEMORY) - 256, 512, 0), IO_ERROR),
        (OUT, 0, (0, 512, 0), IO_ERROR),
        (OUT, 0, (far, 4096, 0), IO_ERROR),
        (OUT, 0, (VhostGuest::at(DATA), u32::MAX - 511, 0), IO_ERROR),
        (IN, 0, (VhostGuest::at(DATA), 0x8000_0000, WRITE), IO_ERROR),
        (DISCARD, 0, (VhostGuest::at(DATA), 15, 0), IO_ERROR),
        (DISCARD, 0, (VhostGuest::at(DATA), 0, 0), IO_ERROR),
        (DISCARD, 0, (VhostGuest::at(DATA), 16 * 17, 0), IO_ERROR),
        (WRITE_ZEROES, 0, (0, 16, 0), IO_ERROR),
        (2, 0, (VhostGuest::at(DATA), 512, 0), UNSUPPORTED),
        (u32::MAX, 0, (VhostGuest::at(DATA), 512, 0), UNSUPPORTED),
    ] {
        guest.put_request(0, 0, kind, sector, data);
        guest.offer(0, 0);
        guest.kick(0);
        assert_eq!(guest.used(0), [(0, 1)], "kind {kind}, {data:?}");
        assert_eq!(guest.status(0, 0), expected, "kind {kind}, sector {sector}, {data:x?}");
    }
    for (bytes, kind, expected) in [
        (range(last - 1, 2, 0), DISCARD, IO_ERROR),
        (range(0, 8, 1), DISCARD, UNSUPPORTED),
        (range(0, 8, 2), WRITE_ZEROES, UNSUPPORTED),
        (range(u64::MAX, 8, 0), WRITE_ZEROES, UNSUPPORTED),
    ] {
        guest.put(DATA, &bytes);
        assert_eq!(guest.call(0, kind, 0, 16, 0).0, expected);
    }
    // Chains that are none: they come back, and nothing else happens.
    let header = VhostGuest::at(VhostGuest::header_of(0, 0));
    guest.put_request(0, 0, OUT, 0, (VhostGuest::at(DATA), 512, 0));
    let chains: [(&str, Vec<Raw>); 7] = [
        ("no status", vec![(header, 16, 0, 0)]),
        ("a header too short", vec![(header, 15, 1, 1), (header + 16, 1, WRITE, 0)]),
        ("a header out of memory", vec![(1 << 60, 16, 1, 1), (header + 16, 1, WRITE, 0)]),
        ("a loop", vec![(header, 16, 1, 1), (header, 16, 1, 0)]),
        ("a next that is too far", vec![(header, 16, 1, 60_000)]),
        ("a table of no descriptors", vec![(header, 0, INDIRECT, 0)]),
        ("a table out of memory", vec![(1 << 60, 160, INDIRECT, 0)]),
    ];
    for (what, chain) in chains {
        for (index, (address, len, flags, next)) in chain.into_iter().enumerate() {
            guest.put_descriptor(0, index as u16, address, len, flags, next);
        }
        guest.offer(0, 0);
        guest.kick(0);
        assert_eq!(guest.used(0).len(), 1, "{what}");
    }
    // A table in a table.
    guest.put_descriptor(2 << 20, 0, VhostGuest::at(2 << 20), 16, INDIRECT, 0);
    guest.put_descriptor(0, 0, VhostGuest::at(2 << 20), 16, INDIRECT, 0);
    guest.offer(0, 0);
    guest.kick(0);
    assert_eq!(guest.used(0).len(), 1);
    assert_eq!(guest.call(0, IN, 0, 512, WRITE), (OK, 513));
    assert_eq!(guest.get(DATA, 512), [0; 512]);
    // A head or an index that the ring does not have ends the ring, but not the device.
    let error = guest.watch_errors(0);
    guest.offer(0, 50_000);
    guest.kick(0);
    assert!(is_readable(error.as_raw_fd(), LONGEST), "the front end is not told");
    assert_eq!(error.read().unwrap(), 1);
    guest.put(DATA, &[7; 512]);
    assert_eq!(guest.call(1, OUT, 5, 512, 0), (OK, 1));
    assert_eq!(guest.stop(1), 1);
    guest.stop(0);
    drop(guest);
    let mut guest = VhostGuest::connect(server.socket(), 2);
    let error = guest.watch_errors(0);
    guest.claim_available(0, 30_000);
    guest.kick(0);
    assert!(is_readable(error.as_raw_fd(), LONGEST), "the front end is not told");
    guest.put(DATA, &[7; 512]);
    assert_eq!(guest.call(1, OUT, 5, 512, 0), (OK, 1));
    assert_eq!(guest.stop(1), 1);
    guest.stop(0);
    drop(guest);
    // The next one finds a device in good order.
    let mut guest = VhostGuest::connect(server.socket(), 1);
    assert_eq!(guest.call(0, IN, 5, 512, WRITE), (OK, 513));
    assert_eq!(guest.get(DATA, 512), [7; 512]);
    drop(guest);
    let said = server.stop_with_messages();
    assert!(said.contains("broke its ring"), "{said}");
    qemu.check_clean(scratch.path(), IMAGE).unwrap();
}

/// Writes segments of 512 bytes at sector 0, so many that their table has `descriptors`; the status.
fn write_segments(guest: &mut VhostGuest, descriptors: u32) -> u8 {
    let header = VhostGuest::at(VhostGuest::header_of(0, 0));
    guest.put_request(0, 0, OUT, 0, (0, 0, 0));
    let mut table = vec![(header, 16, 0)];
    table.resize(descriptors as usize - 1, (VhostGuest::at(DATA), 512, 0));
    table.push((header + 16, 1, WRITE));
    guest.put_table(2 << 20, &table);
    guest.put_descriptor(0, 0, VhostGuest::at(2 << 20), descriptors * 16, INDIRECT, 0);
    guest.offer(0, 0);
    guest.kick(0);
    assert_eq!(guest.used(0), [(0, 1)], "{descriptors} descriptors");
    guest.status(0, 0)
}

// Linux makes as many segments as the device offers (126), however small the ring is.
#[test]
fn a_table_may_have_more_descriptors_than_its_ring() {
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "");
    for entries in [16, 64, 256] {
        let mut guest = VhostGuest::connect_with(server.socket(), 1, Driver { entries, ..Driver::default() });
        for descriptors in [128, 1024] {
            let content = [(descriptors / 8 + u32::from(entries)) as u8 | 1; 512];
            guest.put(DATA, &content);
            assert_eq!(write_segments(&mut guest, descriptors), OK);
            for sector in [0, u64::from(descriptors) - 3] {
                assert_eq!(guest.call(0, IN, sector, 512, WRITE), (OK, 513));
                assert_eq!(guest.get(DATA, 512), content, "{descriptors} descriptors, sector {sector}");
            }
        }
        // More than that is refused, and said so.
        guest.put(DATA, &[0xaa; 512]);
        for descriptors in [1025, 5000] {
            assert_eq!(write_segments(&mut guest, descriptors), IO_ERROR);
        }
        assert_eq!(guest.call(0, IN, 0, 512, WRITE), (OK, 513));
        assert_ne!(guest.get(DATA, 512), [0xaa; 512], "what is refused is written");
    }
    server.stop();
}

// As if it was killed between the two.
#[test]
fn a_guest_is_told_of_what_was_used_before_a_restart() {
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let mut server = serve(&scratch, "");
    let mut guest = VhostGuest::connect(server.socket(), 1);
    for round in 0..3u64 {
        assert!(guest.ask_for_call(0));
        guest.put_request(0, 0, OUT, round * 8, (VhostGuest::at(DATA), 4096, 0));
        guest.offer(0, 0);
        guest.kick(0);
        guest.wait_for_used(0);
        guest.miss_call(0);
        server.kill();
        server = serve(&scratch, "");
        guest.reconnect(server.socket());
        assert_eq!(guest.used_by_call(0), [(0, 1)], "round {round}");
        assert_eq!(guest.status(0, 0), OK);
    }
    drop(guest);
    server.stop();
}

#[test]
fn a_guest_without_the_event_index_is_told_unless_it_does_not_want_to_be() {
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "");
    let driver = Driver { declined: EVENT_INDEX, ..Driver::default() };
    let mut guest = VhostGuest::connect_with(server.socket(), 1, driver);
    for round in 0..300u64 {
        guest.put(DATA, &[round as u8; 4096]);
        guest.put_request(0, 0, OUT, round * 8, (VhostGuest::at(DATA), 4096, 0));
        guest.offer(0, 0);
        guest.kick(0);
        let mut used = Vec::new();
        while used.is_empty() {
            // A ring that starts tells its guest to look, too.
            guest.miss_call(0);
            used = guest.used_now(0);
        }
        assert_eq!(used, [(0, 1)], "round {round}");
        assert_eq!(guest.status(0, 0), OK);
    }
    guest.want_calls(0, false);
    for round in 0..300u64 {
        guest.put_request(0, 0, IN, round * 8, (VhostGuest::at(DATA), 4096, WRITE));
        guest.offer(0, 0);
        guest.kick(0);
        guest.wait_for_used(0);
        assert_eq!(guest.used_now(0), [(0, 4097)], "round {round}");
        assert!(guest.get(DATA, 4096) == [round as u8; 4096], "round {round}");
    }
    assert!(!guest.was_called(0), "a driver that polls was told");
    drop(guest);
    server.stop();
}

// It has no other way to say what must last: a first write has to have its metadata in the file, too.
#[test]
fn what_a_guest_without_flushes_writes_is_durable_when_it_is_used() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "");
    let driver = Driver { declined: HAS_FLUSH, ..Driver::default() };
    let mut guest = VhostGuest::connect_with(server.socket(), 1, driver);
    for number in 0..64u8 {
        guest.put(DATA, &[number + 1; 4096]);
        assert_eq!(guest.call(0, OUT, u64::from(number) * 256, 4096, 0), (OK, 1));
    }
    guest.put(DATA, &range(0, 256, 1));
    assert_eq!(guest.call(0, WRITE_ZEROES, 0, 16, 0), (OK, 1));
    server.kill();
    let written = (1..64).map(|number| format!("read -q -P {} {}k 4k", number + 1, number * 128));
    let reads: Vec<String> = written.chain(["read -q -P 0 0 128k".to_owned()]).collect();
    // What was killed may hold its locks for a moment.
    qemu.io(scratch.path(), "-U -r -f qcow2", IMAGE, &reads).ok();
    let out = qemu.img(scratch.path(), ["check", "-U", "-f", "qcow2", IMAGE]);
    assert!(matches!(out.code, Some(0 | 3)), "{out}");
}

#[test]
fn what_is_discarded_and_zeroed_is_counted() {
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "--control ctl.sock");
    let mut guest = VhostGuest::connect(server.socket(), 1);
    guest.put(DATA, &[range(0, 256, 0), range(2048, 128, 0)].concat());
    assert_eq!(guest.call(0, DISCARD, 0, 32, 0), (OK, 1));
    guest.put(DATA, &range(8, 24, 1));
    assert_eq!(guest.call(0, WRITE_ZEROES, 0, 16, 0), (OK, 1));
    // One that fails counts no bytes.
    guest.put(DATA, &range(SIZE / 512, 8, 0));
    assert_eq!(guest.call(0, WRITE_ZEROES, 0, 16, 0).0, IO_ERROR);
    assert_eq!(guest.call(0, OUT, 0, 4096, 0), (OK, 1));
    assert_eq!(guest.call(0, IN, 0, 8192, WRITE), (OK, 8193));
    let stats = zebu(scratch.path(), ["ctl", "ctl.sock", "stats", "root"]).ok().stdout;
    let stats: Value = serde_json::from_str(&stats).unwrap();
    let of = |kind: &str| ["requests", "bytes"].map(|what| stats["requests"][kind][what].as_u64().unwrap());
    assert_eq!(of("discard"), [1, 384 * 512]);
    assert_eq!(of("write-zeroes"), [2, 24 * 512]);
    assert_eq!((of("write"), of("read")), ([1, 4096], [1, 8192]));
    server.stop();
}

#[test]
fn a_guest_is_told_of_a_new_size() {
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "--control ctl.sock");
    for (at, size) in [(SIZE, "80M"), (80 << 20, "96M")] {
        let mut guest = VhostGuest::connect(server.socket(), 1);
        assert_eq!(guest.size, at);
        zebu(scratch.path(), ["ctl", "ctl.sock", "resize", "root", size]).ok();
        guest.wait_for_new_size();
        assert!(guest.size > at);
        assert_eq!(guest.call(0, IN, guest.size / 512 - 1, 512, WRITE), (OK, 513));
    }
    // Nobody is there to be told.
    zebu(scratch.path(), ["ctl", "ctl.sock", "resize", "root", "100M"]).ok();
    server.stop();
}

#[test]
fn devices_of_one_process_do_not_get_into_each_others_way() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("vhost");
    let dir = scratch.path();
    create(&scratch);
    zebu(dir, ["create", "-q", "-f", "qcow2", "first.qcow2", "32M"]).ok();
    let server = serve(&scratch, "--queues 2 --vhost-user-blk second.sock --export-name second first.qcow2");
    let mut guests =
        [server.socket().to_owned(), dir.join("second.sock")].map(|path| VhostGuest::connect(&path, 2));
    assert_eq!(guests.each_ref().map(|guest| guest.size), [32 << 20, SIZE]);
    let mut models = guests.each_ref().map(|guest| vec![0; guest.size as usize]);
    let mut random = Random::new(6);
    for turn in 0..300 {
        let which = turn % 2;
        let (guest, model) = (&mut guests[which], &mut models[which]);
        let sectors = random.between(1, 128);
        let sector = random.below(guest.size / 512 - sectors);
        let bytes = (sector * 512) as usize..((sector + sectors) * 512) as usize;
        let len = (sectors * 512) as u32;
        let ring = random.below(2) as usize;
        if random.chance(60) {
            random.fill(&mut model[bytes.clone()]);
            guest.put(DATA, &model[bytes]);
            assert_eq!(guest.call(ring, OUT, sector, len, 0), (OK, 1));
        } else {
            assert_eq!(guest.call(ring, IN, sector, len, WRITE), (OK, len + 1));
            assert!(guest.get(DATA, len as usize) == model[bytes], "{sectors} sectors at {sector}");
        }
        // A guest that goes away is no matter to the other.
        if turn == 150 {
            guests[0].reconnect(server.socket());
        }
    }
    for (guest, name) in guests.iter_mut().zip(["root", "second"]) {
        assert_eq!(guest.call(0, GET_ID, 0, 20, WRITE), (OK, 21));
        assert!(guest.get(DATA, name.len()) == name.as_bytes(), "{name}");
        assert_eq!(guest.call(0, FLUSH, 0, 0, 0), (OK, 1));
    }
    drop(guests);
    server.stop();
    for (name, model) in ["first.qcow2", IMAGE].into_iter().zip(models) {
        qemu.check_clean(dir, name).unwrap();
        assert!(qemu.read_all(dir, name, None) == model, "{name}");
    }
}

#[test]
fn a_read_only_device_is_not_written() {
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "--read-only");
    let mut guest = VhostGuest::connect(server.socket(), 1);
    assert_eq!(guest.call(0, OUT, 0, 512, 0).0, IO_ERROR);
    guest.put(DATA, &range(0, 8, 0));
    assert_eq!(guest.call(0, DISCARD, 0, 16, 0).0, IO_ERROR);
    assert_eq!(guest.call(0, WRITE_ZEROES, 0, 16, 0).0, IO_ERROR);
    assert_eq!(guest.call(0, FLUSH, 0, 0, 0).0, OK);
    assert_eq!(guest.call(0, IN, 0, 512, WRITE).0, OK);
    drop(guest);
    server.stop();
}

// Every write is made durable before it is used: otherwise a kill loses what was not flushed, as a power failure does.
#[test]
fn what_was_in_flight_is_done_after_a_restart() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let mut random = Random::new(9);
    let mut server = serve(&scratch, "-t directsync --queues 2");
    let mut guest = VhostGuest::connect(server.socket(), 2);
    let slots = QUEUE / 3;
    for round in 0..8u64 {
        assert!(guest.ask_for_call(0) && guest.ask_for_call(1));
        // Every slot writes a place of its own, with what tells the round.
        for ring in 0..2 {
            for slot in 0..slots {
                let number = ring as u64 * u64::from(slots) + u64::from(slot);
                let data = DATA + number * 4096;
                guest.put(data, &[(round * 29 + number) as u8; 4096]);
                guest.put_request(ring, slot * 3, OUT, number * 136, (VhostGuest::at(data), 4096, 0));
                guest.offer(ring, slot * 3);
            }
            guest.kick(ring);
        }
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        server.kill();
        server = serve(&scratch, "-t directsync --queues 2");
        guest.reconnect(server.socket());
        for ring in 0..2 {
            // Whatever was not taken yet is found without a kick, too.
            guest.kick(ring);
            let mut heads = Vec::new();
            while heads.len() < usize::from(slots) {
                heads.extend(guest.used_by_call(ring).into_iter().map(|(head, _)| head));
            }
            heads.sort_unstable();
            assert!(heads.iter().copied().eq((0..slots).map(|slot| slot * 3)), "round {round}: {heads:?}");
            assert!((0..slots).all(|slot| guest.status(ring, slot * 3) == OK), "round {round}");
        }
        for number in 0..u64::from(slots) * 2 {
            guest.put(DATA, &[0; 4096]);
            assert_eq!(guest.call(0, IN, number * 136, 4096, WRITE), (OK, 4097));
            let expected = (round * 29 + number) as u8;
            assert!(guest.get(DATA, 4096) == [expected; 4096], "round {round}, place {number}");
        }
    }
    drop(guest);
    server.stop();
    let out = qemu.img(scratch.path(), ["check", "-f", "qcow2", IMAGE]);
    assert!(matches!(out.code, Some(0 | 3)), "{out}");
}

// The server goes on meanwhile: what it took is done for the guest that is there still.
#[test]
fn a_front_end_that_reconnects_in_the_middle_finds_every_request_used_once() {
    let Some(qemu) = Qemu::find() else { return };
    for options in ["--queues 2 -t none", "--queues 2 --aio threads"] {
        let scratch = Scratch::new("vhost");
        create(&scratch);
        let mut random = Random::new(12);
        let server = serve(&scratch, options);
        let mut guest = VhostGuest::connect(server.socket(), 2);
        let slots = QUEUE / 3;
        for round in 0..20u64 {
            for ring in 0..2 {
                for slot in 0..slots {
                    let number = ring as u64 * u64::from(slots) + u64::from(slot);
                    let data = DATA + number * 4096;
                    guest.put(data, &[(round * 29 + number) as u8; 4096]);
                    guest.put_request(ring, slot * 3, OUT, number * 136, (VhostGuest::at(data), 4096, 0));
                    guest.offer(ring, slot * 3);
                }
                guest.kick(ring);
            }
            std::thread::sleep(Duration::from_micros(random.below(2000)));
            guest.reconnect(server.socket());
            for ring in 0..2 {
                guest.kick(ring);
                let mut heads = Vec::new();
                while heads.len() < usize::from(slots) {
                    heads.extend(guest.used(ring).into_iter().map(|(head, _)| head));
                }
                heads.sort_unstable();
                assert!(
                    heads.iter().copied().eq((0..slots).map(|slot| slot * 3)),
                    "round {round}: {heads:?}"
                );
                assert!((0..slots).all(|slot| guest.status(ring, slot * 3) == OK), "round {round}");
                assert!(!guest.has_used(ring), "round {round}: something is used twice");
            }
            for number in 0..u64::from(slots) * 2 {
                assert_eq!(guest.call(0, IN, number * 136, 4096, WRITE), (OK, 4097));
                assert!(guest.get(DATA, 4096) == [(round * 29 + number) as u8; 4096], "round {round}");
            }
        }
        drop(guest);
        server.stop();
        qemu.check_clean(scratch.path(), IMAGE).unwrap();
    }
}

#[test]
fn protocol_features_that_were_not_offered_are_refused() {
    use vhost::vhost_user::message::VhostUserProtocolFeatures;
    let scratch = Scratch::new("vhost");
    create(&scratch);
    let server = serve(&scratch, "");
    let mut guest = VhostGuest::connect(server.socket(), 1);
    let page_faults = VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::PAGEFAULT;
    let _ = guest.choose_protocol_features(page_faults);
    guest.wait_for_end();
    let said = server.stop_with_messages();
    assert!(said.contains("not offered"), "{said}");
}

/// A server with a device and an image of somebody else, over NBD.
fn serve_two(options: &str) -> (Scratch, Server, Client) {
    let scratch = Scratch::new("vhost");
    create(&scratch);
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", "other.qcow2", "64M"]).ok();
    let two = format!("--nbd unix:other.sock --export-name root --export-name other {options}");
    let server = Server::start_vhost_user(scratch.path(), &format!("{two} -f qcow2 {IMAGE} other.qcow2"));
    let client = Client::open(&scratch.file("other.sock"), "other").unwrap();
    (scratch, server, client)
}

const BOTH_ENGINES: [&str; 2] = ["--aio io_uring", "--aio threads"];

#[test]
fn a_call_descriptor_that_is_full_and_blocking_holds_nobody_up() {
    for options in BOTH_ENGINES {
        let (_scratch, server, mut other) = serve_two(options);
        let mut guest = VhostGuest::connect(server.socket(), 1);
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let shared = rustix::io::dup(&full).unwrap();
        guest.set_call(0, full).unwrap();
        // Whatever the device made of it.
        rustix::io::ioctl_fionbio(&shared, false).unwrap();
        for _ in 0..3 {
            assert_eq!(guest.call(0, GET_ID, 0, 20, WRITE), (OK, 21), "{options}");
            assert_eq!(other.write(0, 0, &[7; 4096]).unwrap(), 0);
        }
        // In the sandbox, too, the kernel signals without a thread for it.
        assert!(!server.threads().contains(&"zebu-event".to_owned()));
        drop(guest);
        server.stop();
    }
}

#[test]
fn a_kick_descriptor_that_is_made_blocking_holds_nobody_up() {
    for options in BOTH_ENGINES {
        let (_scratch, server, mut other) = serve_two(options);
        let mut guest = VhostGuest::connect(server.socket(), 1);
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let shared = rustix::io::dup(&kick).unwrap();
        guest.set_kick(0, kick).unwrap();
        rustix::io::ioctl_fionbio(&shared, false).unwrap();
        for _ in 0..3 {
            assert_eq!(guest.call(0, GET_ID, 0, 20, WRITE), (OK, 21), "{options}");
            assert_eq!(other.write(0, 0, &[7; 4096]).unwrap(), 0);
        }
        drop(guest);
        server.stop();
    }
}

#[test]
fn descriptors_that_are_no_eventfds_are_refused() {
    let (_scratch, server, mut other) = serve_two("");
    let pipes: [fn() -> OwnedFd; 2] =
        [|| std::io::pipe().unwrap().1.into(), || std::fs::File::open("/dev/zero").unwrap().into()];
    for pipe in pipes {
        let mut guest = VhostGuest::connect(server.socket(), 1);
        assert!(guest.set_call(0, pipe()).is_err());
        guest.wait_for_end();
        let mut guest = VhostGuest::connect(server.socket(), 1);
        assert!(guest.set_kick(0, pipe()).is_err());
        guest.wait_for_end();
    }
    assert_eq!(other.write(0, 0, &[7; 4096]).unwrap(), 0);
    let messages = server.stop_with_messages();
    assert_eq!(messages.lines().filter(|line| line.contains("is no eventfd")).count(), 4, "{messages}");
}

#[test]
fn kicks_for_nothing_take_little_of_the_processor() {
    for options in BOTH_ENGINES {
        let (_scratch, server, mut other) = serve_two(options);
        let mut guest = VhostGuest::connect(server.socket(), 1);
        // Each look takes one of it.
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).unwrap();
        rustix::io::write(&kick, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        guest.set_kick(0, kick).unwrap();
        let (begin, before) = (Instant::now(), server.processor_ticks());
        std::thread::sleep(Duration::from_secs(1));
        let ticks = server.processor_ticks() - before;
        let most = begin.elapsed().as_millis() as u64 * 40 / 1000;
        assert!(ticks < most, "{ticks} hundredths of a second, of {most}: {options}");
        assert_eq!(other.write(0, 0, &[7; 4096]).unwrap(), 0);
        drop(guest);
        server.stop();
    }
}

#[test]
fn memory_that_a_front_end_takes_away_ends_its_device_alone() {
    let Some(qemu) = Qemu::find() else { return };
    for options in BOTH_ENGINES {
        for cut in [VhostGuest::cut_memory, VhostGuest::cut_log] {
            let (scratch, server, mut other) = serve_two(options);
            let mut guest = VhostGuest::connect(server.socket(), 1);
            assert_eq!(guest.call(0, GET_ID, 0, 20, WRITE), (OK, 21));
            assert_eq!(other.write(0, 65536, &vec![7; 65536]).unwrap(), 0);
            guest.put_request(0, 0, OUT, 0, (VhostGuest::at(DATA), 4096, 0));
            guest.offer(0, 0);
            cut(&guest);
            guest.kick(0);
            guest.wait_for_end();
            assert_eq!(other.write(0, 1 << 20, &vec![8; 65536]).unwrap(), 0);
            drop(guest);
            // The next front end is served.
            let mut guest = VhostGuest::connect(server.socket(), 1);
            assert_eq!(guest.call(0, GET_ID, 0, 20, WRITE), (OK, 21));
            drop(guest);
            let messages = server.stop_with_messages();
            assert_eq!(messages.matches("took away memory").count(), 1, "{options}: {messages}");
            let mut model = vec![0; SIZE as usize];
            model[65536..131072].fill(7);
            model[1 << 20..(1 << 20) + 65536].fill(8);
            assert!(qemu.read_all(scratch.path(), "other.qcow2", None) == model);
            qemu.check_clean(scratch.path(), IMAGE).unwrap();
        }
    }
}
