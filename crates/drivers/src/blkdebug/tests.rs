use super::*;
use crate::NullDisk;
use std::sync::mpsc;
use std::time::Duration;
use zebu_storage::IoBuf;

fn quiet(_: &str) {}

fn over_null(text: &str) -> Blkdebug {
    let mut config = BlkdebugConfig::default();
    config.add_file(text).unwrap();
    let null = NullDisk::new(1 << 20, true, Duration::ZERO).unwrap();
    Blkdebug::new(Arc::new(null), config, quiet, Engine::Threads).unwrap()
}

/// Begins an operation; its answer comes through the channel.
fn begin(disk: &Blkdebug, op: StorageOp) -> mpsc::Receiver<Result<StorageDone, i32>> {
    let (sender, receiver) = mpsc::channel();
    let len = range(op).map_or(0, |(_, len)| len) as usize;
    let bufs = IoBuf::zeroed(len).into();
    disk.submit(
        op,
        Completer::new(op, bufs, move |_, result| {
            let _ = sender.send(result);
        }),
    );
    receiver
}

fn run(disk: &Blkdebug, op: StorageOp) -> Option<i32> {
    begin(disk, op).recv().unwrap().err()
}

const READ: StorageOp = StorageOp::Read { offset: 0, len: 512 };
const WRITE: StorageOp = StorageOp::Write { offset: 4096, len: 512 };

#[test]
fn an_error_is_active_from_its_event_on() {
    let disk = over_null("[inject-error]\nevent = \"l2_load\"\nerrno = \"28\"\n");
    assert_eq!(run(&disk, READ), None);
    disk.announce("l2_load");
    assert_eq!(run(&disk, READ), Some(28));
    // It stays so, for all requests.
    assert_eq!(run(&disk, WRITE), Some(28));
}

#[test]
fn an_error_once_fails_one_request_of_its_kind_and_place() {
    let disk = over_null(
        "[inject-error]\nevent = \"none\"\niotype = \"write\"\nsector = \"8\"\nonce = \"on\"\n# the end\n",
    );
    assert_eq!(run(&disk, READ), None);
    assert_eq!(run(&disk, StorageOp::Write { offset: 0, len: 4096 }), None);
    assert_eq!(run(&disk, WRITE), Some(libc::EIO));
    assert_eq!(run(&disk, WRITE), None);
}

#[test]
fn states_tell_the_first_request_from_the_second() {
    let disk = over_null(
        "[set-state]\nstate = \"1\"\nevent = \"write_aio\"\nnew_state = \"2\"\n\
         [inject-error]\nstate = \"2\"\nevent = \"write_aio\"\nerrno = \"5\"\n",
    );
    assert_eq!(run(&disk, WRITE), None);
    assert_eq!(run(&disk, WRITE), Some(5));
}

#[test]
fn a_breakpoint_stops_one_request_until_it_is_resumed() {
    let disk = over_null("");
    disk.add_breakpoint("write_aio", "A");
    let first = begin(&disk, WRITE);
    assert!(disk.is_stopped("A") && first.try_recv().is_err());
    assert_eq!(run(&disk, WRITE), None);
    assert!(!disk.resume("B") && disk.resume("A"));
    assert!(first.recv().unwrap().is_ok());
    disk.add_breakpoint("flush_to_disk", "B");
    assert!(disk.remove_breakpoint("B") && !disk.remove_breakpoint("B"));
    assert_eq!(run(&disk, StorageOp::Flush), None);
}

#[test]
fn limits_cut_requests_and_errors_hit_pieces() {
    let mut limits = Limits::default();
    for (key, bytes) in [("align", 512), ("max-transfer", 1024), ("opt-discard", 1536)] {
        limits.set(key, bytes).unwrap();
    }
    limits.check().unwrap();
    let pieces = |op| limits.pieces(op).unwrap_or_default();
    assert_eq!(pieces(StorageOp::Read { offset: 512, len: 2560 }), [(512, 1024), (1536, 1024), (2560, 512)]);
    assert_eq!(pieces(StorageOp::Punch { offset: 512, len: 6144 }), [(512, 1024), (1536, 4608), (6144, 512)]);
    assert!(limits.pieces(READ).is_none() && limits.pieces(StorageOp::Flush).is_none());
    assert!(limits.set("align", 3).is_err());
    limits.max_transfer = 100;
    assert!(limits.check().unwrap_err().contains("max-transfer"));

    let mut config =
        BlkdebugConfig { limits: Limits { max_transfer: 512, ..Limits::default() }, rules: Vec::new() };
    config.add_file("[inject-error]\nevent = \"none\"\nsector = \"9\"\n").unwrap();
    let null = NullDisk::new(1 << 20, true, Duration::ZERO).unwrap();
    let disk = Blkdebug::new(Arc::new(null), config, quiet, Engine::Threads).unwrap();
    assert_eq!(run(&disk, StorageOp::Write { offset: 0, len: 2048 }), None);
    assert_eq!(run(&disk, StorageOp::Read { offset: 4096, len: 2048 }), Some(libc::EIO));
}

#[test]
fn wrong_files_are_refused_with_the_line() {
    for (text, word) in [
        ("event = \"l2_load\"", "line 1"),
        ("[inject-error]\nevent = l2_load", "line 2"),
        ("[inject-error]\nevent = \"nothing\"", "nothing"),
        ("[inject-error]\n", "event"),
        ("[inject-error]\nevent = \"none\"\nwhat = \"1\"", "what"),
        ("[inject-error]\nevent = \"none\"\nonce = \"yes\"", "once"),
        ("[inject-error\n", "line 1"),
        ("[nothing]\n", "nothing"),
    ] {
        let error = BlkdebugConfig::default().add_file(text).unwrap_err();
        assert!(error.contains(word), "{text}: {error}");
    }
}
