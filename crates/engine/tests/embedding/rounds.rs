//! Many rounds of loops that register a descriptor once: nothing may be lost, and nothing may hang.
//!
//! 100 rounds of each, or as many as `ZEBU_EMBEDDING_ROUNDS` says.

use super::{ENGINES, create, must_be_clean, open};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::retry_on_intr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use zebu_engine::storage::IoBuf;
use zebu_engine::{Disk, Durability, Request, ZeroMode};

/// A wait without an event takes longer than anything on a machine with other work.
const AGES: Timespec = Timespec { tv_sec: 600, tv_nsec: 0 };
/// Bytes that a round works on, by every other half cluster.
const ROUND: u64 = 4 << 20;

pub(crate) fn rounds() -> u64 {
    std::env::var("ZEBU_EMBEDDING_ROUNDS").map_or(100, |rounds| rounds.parse().unwrap())
}

/// Does on another thread, until it is told to end, what has to wake the worker of a queue: commits, changes that are alone
/// with the image, and requests in its way.
pub(crate) fn disturb(disk: &Disk, until: &Arc<AtomicBool>) -> std::thread::JoinHandle<u64> {
    let (disk, until) = (disk.clone(), Arc::clone(until));
    std::thread::spawn(move || {
        let mut times = 0;
        while !until.load(SeqCst) {
            let offset = (times % 64) * 65536 + 32768;
            disk.write(offset, &[0xee; 512]).unwrap();
            disk.flush().unwrap();
            if times % 7 == 0 {
                disk.discard((56 << 20) + offset, 65536).unwrap();
            }
            times += 1;
        }
        times
    })
}

/// The requests of a round: writes in odd places, zeroes, reads, a flush in the middle.
pub(crate) fn requests(round: u64) -> Vec<Request> {
    let mut requests = Vec::new();
    for i in 0..24 {
        let offset = (round % 8) * ROUND + i * 65536;
        requests.push(match i % 8 {
            7 => Request::WriteZeroes { offset, len: 3000, mode: ZeroMode::Unmap },
            6 => Request::Flush,
            5 => Request::Read { offset, bufs: IoBuf::zeroed(4096).into() },
            _ => Request::Write {
                offset,
                bufs: IoBuf::copy_of(&[round as u8; 4096]).into(),
                durability: if i % 16 == 3 { Durability::Durable } else { Durability::Volatile },
            },
        });
    }
    requests
}

fn register(epoll: &OwnedFd, fds: &[BorrowedFd<'_>]) {
    for (number, fd) in fds.iter().enumerate() {
        epoll::add(epoll, fd, EventData::new_u64(number as u64), EventFlags::IN).unwrap();
    }
}

#[test]
fn loops_of_epoll_alone_lose_nothing() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let until = Arc::default();
        let other = disturb(&disk, &until);
        let queue = disk.queue().engine(engine).build().unwrap();
        // Another thread hands over the rounds.
        let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let (begun, ended) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let guest = {
            let (kick, begun, ended) = (kick.clone(), begun.clone(), ended.clone());
            std::thread::spawn(move || {
                for round in 0..rounds() {
                    begun.store(round + 1, SeqCst);
                    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
                    // Now and then the next round comes while one is under way.
                    while ended.load(SeqCst) + round % 3 < round + 1 {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                }
            })
        };
        let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
        register(&epoll, &[queue.as_fd(), kick.as_fd()]);
        let (mut taken, mut answers, mut done) = (0, 0, Vec::new());
        while ended.load(SeqCst) < rounds() {
            let mut events = Vec::with_capacity(4);
            retry_on_intr(|| epoll::wait(&epoll, spare_capacity(&mut events), Some(&AGES))).unwrap();
            assert!(!events.is_empty(), "{engine:?}: nothing shows, with {} pending", queue.pending());
            for event in events.iter().map(|event| event.data.u64()) {
                if event == 1 {
                    rustix::io::read(&kick, &mut [0; 8]).unwrap();
                    let until = begun.load(SeqCst);
                    for round in taken..until {
                        for request in requests(round) {
                            queue.submit(request, round);
                        }
                    }
                    taken = until;
                    if taken % 2 == 0 {
                        // Half of the rounds start with the next turn of the loop only.
                        queue.poll(&mut done);
                    }
                } else {
                    queue.poll(&mut done);
                }
            }
            for completion in done.drain(..) {
                completion.result.unwrap();
                answers += 1;
            }
            ended.store(answers / 24, SeqCst);
        }
        guest.join().unwrap();
        until.store(true, SeqCst);
        assert!(other.join().unwrap() > 0);
        drop((queue, disk));
        must_be_clean(&path);
    }
}
