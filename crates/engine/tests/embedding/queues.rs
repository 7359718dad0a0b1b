//! Queues that are made on one thread and used on another.

use super::{ENGINES, create, for_writing, must_be_clean, open};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{read, retry_on_intr};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::os::fd::{AsFd, AsRawFd};
use zebu_engine::storage::IoBuf;
use zebu_engine::{Completion, Disk, Durability, ErrorKind, Queue, Request};

/// Writes and reads back by a loop as a virtual machine monitor has it: it waits for the descriptor, reads it, and takes
/// completions one by one.
fn drive(queue: &Queue, event: impl AsFd, count: u64) -> Vec<Completion> {
    for i in 0..count {
        let bufs = IoBuf::copy_of(&[i as u8; 4096]).into();
        queue.submit(Request::Write { offset: i * 65536, bufs, durability: Durability::Volatile }, i);
    }
    queue.submit(Request::Flush, count);
    let mut done = Vec::new();
    done.extend(std::iter::from_fn(|| queue.next_completion()));
    while queue.pending() > 0 {
        retry_on_intr(|| poll(&mut [PollFd::new(&event, PollFlags::IN)], None)).unwrap();
        read(&event, &mut [0; 8]).unwrap();
        done.extend(std::iter::from_fn(|| queue.next_completion()));
    }
    done
}

#[test]
fn a_queue_with_the_callers_event_works_where_it_lands() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let theirs = event.try_clone().unwrap();
        let detached = disk.queue().engine(engine).event_fd(event).detached().unwrap();
        let mine = detached.as_fd().as_raw_fd();
        let done = std::thread::spawn(move || {
            let queue = detached.attach();
            assert_eq!(queue.as_fd().as_raw_fd(), mine);
            drive(&queue, &theirs, 64)
        })
        .join()
        .unwrap();
        assert_eq!(done.len(), 65);
        assert!(done.iter().all(|completion| completion.result.is_ok()));
        let mut byte = [0];
        disk.read(63 * 65536, &mut byte).unwrap();
        assert_eq!(byte, [63]);
        drop(disk);
        must_be_clean(&path);
    }
}

#[test]
fn a_queue_keeps_its_disk_open_and_ends_what_it_began() {
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let builder = disk.queue().engine(engine).depth(16).promise_to_drive();
        drop(disk);
        std::thread::spawn(move || {
            let queue = builder.build().unwrap();
            assert_eq!(drive(&queue, &queue, 8).len(), 9);
            // And now without looking at what became of it.
            for i in 100..200 {
                let bufs = IoBuf::copy_of(&[i as u8; 4096]).into();
                queue.submit(Request::Write { offset: i * 65536, bufs, durability: Durability::Volatile }, i);
            }
            let mut done = Vec::new();
            queue.poll(&mut done);
            for i in 200..300 {
                let bufs = IoBuf::copy_of(&[i as u8; 4096]).into();
                queue.submit(Request::Write { offset: i * 65536, bufs, durability: Durability::Volatile }, i);
            }
        })
        .join()
        .unwrap();
        must_be_clean(&path);
        let disk = Disk::open(&path, &for_writing()).unwrap();
        for i in [100, 150, 199, 200, 299u64] {
            let mut byte = [0];
            disk.read(i * 65536, &mut byte).unwrap();
            assert_eq!(byte, [i as u8]);
        }
    }
}

#[test]
fn requests_on_a_closed_image_fail_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let disk = open(ENGINES[1], &create(dir.path()));
    let queue = disk.queue().build().unwrap();
    disk.close().unwrap();
    let done = drive(&queue, &queue, 3);
    assert_eq!(done.len(), 4);
    for completion in done {
        assert_eq!(completion.result.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn errors_are_those_of_the_standard_library_where_these_are_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let error = Disk::open(&dir.path().join("none"), &for_writing()).unwrap_err();
    let text = error.to_string();
    let error = std::io::Error::from(error);
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    assert_eq!(error.to_string(), text);
    assert!(error.get_ref().unwrap().is::<zebu_engine::Error>());
}

fn filter(calls: &[std::ffi::c_long], others: SeccompAction, these: SeccompAction) -> BpfProgram {
    let rules = calls.iter().map(|&call| (call, Vec::new())).collect();
    let architecture = std::env::consts::ARCH.try_into().unwrap();
    SeccompFilter::new(rules, others, these, architecture).unwrap().try_into().unwrap()
}

/// In a process of its own, which a system call that is not listed ends.
#[test]
fn a_queue_that_was_made_before_needs_no_other_system_calls_than_those_listed() {
    const CHILD: &str = "ZEBU_TEST_JAIL";
    if std::env::var_os(CHILD).is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "queues::a_queue_that_was_made_before_needs_no_other_system_calls_than_those_listed",
            ])
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    let (listed, refused) =
        (zebu_engine::storage::SYSTEM_CALLS, zebu_engine::storage::SYSTEM_CALLS_TO_REFUSE);
    let kill = filter(&[listed, refused].concat(), SeccompAction::KillProcess, SeccompAction::Allow);
    let refuse = filter(refused, SeccompAction::Allow, SeccompAction::Errno(1));
    for engine in ENGINES {
        let dir = tempfile::tempdir().unwrap();
        let path = create(dir.path());
        let disk = open(engine, &path);
        let detached = disk.queue().engine(engine).detached().unwrap();
        let (kill, refuse) = (kill.clone(), refuse.clone());
        std::thread::spawn(move || {
            seccompiler::apply_filter(&refuse).unwrap();
            seccompiler::apply_filter(&kill).unwrap();
            let queue = detached.attach();
            let mut done = Vec::new();
            for i in 0..256 {
                let bufs = IoBuf::copy_of(&[i as u8; 4096]).into();
                queue
                    .submit(Request::Write { offset: i * 70_001, bufs, durability: Durability::Volatile }, i);
                queue.submit(Request::Discard { offset: (i / 2) * 70_001, len: 65536 }, i);
                queue.submit(Request::Flush, i);
                queue.submit(Request::Read { offset: i * 70_001, bufs: IoBuf::zeroed(512).into() }, i);
                if i % 16 == 0 {
                    while queue.pending() > 0 {
                        queue.wait(&mut done, None);
                    }
                }
            }
            while queue.pending() > 0 {
                queue.wait(&mut done, None);
            }
            assert!(done.iter().all(|completion| completion.result.is_ok()));
        })
        .join()
        .unwrap();
        disk.close().unwrap();
        must_be_clean(&path);
    }
}

#[test]
fn the_descriptors_of_a_queue_are_those_of_its_ring_its_events_and_its_files() {
    for (engine, own) in [(ENGINES[0], 2), (ENGINES[1], 3)] {
        let dir = tempfile::tempdir().unwrap();
        let disk = open(engine, &create(dir.path()));
        let queue = disk.queue().engine(engine).build().unwrap();
        // The file has one for its locks, too.
        assert_eq!((disk.image().descriptors().len(), queue.descriptors().len()), (2, own + 2));
        assert!(queue.descriptors().iter().any(|fd| fd.as_raw_fd() == queue.as_fd().as_raw_fd()));
    }
}
