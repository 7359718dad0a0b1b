//! Arguments that make no sense. Each is refused with an error that says what is allowed, or does what its documentation
//! says; nothing panics, hangs, or ends the process.

use super::{ENGINES, create, for_writing, must_be_clean, open};
use std::cell::Cell;
use std::fmt::Debug;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};
use zebu_engine::check::{CheckOptions, Repair};
use zebu_engine::jobs::{
    BackupEnd, BackupOptions, CompareOptions, ConvertOptions, ConvertTarget, HydrateOptions, JobControl,
    LiveBackup, LiveBackupOptions, NewTarget, RebaseOptions, VerifyOptions, backup, compare, convert,
    hydrate, rebase, verify,
};
use zebu_engine::storage::{Engine, IoBuf, IoBufs, Worker};
use zebu_engine::{
    BitmapRecording, CacheMode, CreateOptions, Disk, Durability, ErrorKind, Format, Image, NewBitmap,
    NewSnapshot, OpenOptions, Preallocation, Request, Result, Shrink, SnapshotRef, ZeroMode,
};

/// Errors of the system have its error codes, which `std::io::Error` knows.
const OF_THE_SYSTEM: Answer = Fails(&[ErrorKind::Io]);

/// The time within which whatever does not hang has ended, on a machine with other work.
const AGES: Duration = Duration::from_secs(600);

/// The outcome that a call may have.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Answer {
    /// It succeeds: the argument has a meaning.
    Done,
    /// It fails with one of these.
    Fails(&'static [ErrorKind]),
}

use Answer::{Done, Fails};

const INVALID: Answer = Fails(&[ErrorKind::InvalidArgument]);
const OUTSIDE: Answer = Fails(&[ErrorKind::OutOfRange]);
const NOT_FOUND: Answer = Fails(&[ErrorKind::NotFound]);

/// The result of `work` on a thread of its own, which neither panics nor hangs.
fn soon<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    let thread = std::thread::spawn(move || drop(tell.send(work())));
    match told.recv_timeout(AGES) {
        Ok(value) => {
            thread.join().unwrap();
            value
        }
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name}: hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => panic!("{name}: panicked"),
    }
}

/// A call with its name and what may come of it.
type Case<A> = (&'static str, Box<dyn FnOnce(A) -> Result<()> + Send>, Answer);

fn case<A, T: Debug>(
    name: &'static str,
    call: impl FnOnce(A) -> Result<T> + Send + 'static,
    answer: Answer,
) -> Case<A> {
    (name, Box::new(move |argument| call(argument).map(drop)), answer)
}

/// Calls each with its own clone of what `argument` gives; all that is wrong is told at once.
fn all_answer<A: Send + 'static>(cases: Vec<Case<A>>, argument: impl Fn() -> A) {
    let mut wrong = Vec::new();
    for (name, call, answer) in cases {
        let argument = argument();
        let result = soon(name, move || call(argument));
        let is_right = match (&result, answer) {
            (Ok(()), Done) => true,
            (Err(error), Fails(kinds)) => kinds.contains(&error.kind()) && !error.to_string().is_empty(),
            _ => false,
        };
        if !is_right {
            wrong.push(format!("{name}: {result:?} instead of {answer:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn ranges_of_requests() {
    const END: u64 = 64 << 20;
    let cases: Vec<Case<Disk>> = vec![
        case("read nothing", |disk: Disk| disk.read(0, &mut []), Done),
        case("read nothing at the end", |disk: Disk| disk.read(END, &mut []), Done),
        case("read nothing past the end", |disk: Disk| disk.read(u64::MAX, &mut []), OUTSIDE),
        case("read into no buffers", |disk: Disk| disk.read_vectored(0, &mut []), Done),
        case(
            "read into empty buffers",
            |disk: Disk| disk.read_vectored(0, &mut [IoSliceMut::new(&mut []), IoSliceMut::new(&mut [])]),
            Done,
        ),
        case("read at the last offset", |disk: Disk| disk.read(u64::MAX, &mut [0]), OUTSIDE),
        case("write nothing", |disk: Disk| disk.write(0, &[]), Done),
        case("write nothing past the end", |disk: Disk| disk.write(u64::MAX, &[]), OUTSIDE),
        case(
            "write empty buffers durably",
            |disk: Disk| disk.write_vectored(512, &[IoSlice::new(&[])], Durability::Durable),
            Done,
        ),
        case("write at the last offset", |disk: Disk| disk.write(u64::MAX, &[1]), OUTSIDE),
        case("write over the last offset", |disk: Disk| disk.write(u64::MAX - 1, &[1; 512]), OUTSIDE),
        case("pack nothing", |disk: Disk| disk.write_compressed(0, &[]), Done),
        case("pack at the last offset", |disk: Disk| disk.write_compressed(u64::MAX, &[1]), OUTSIDE),
        case("zero nothing", |disk: Disk| disk.write_zeroes(0, 0, ZeroMode::Unmap), Done),
        case("zero all there could be", |disk: Disk| disk.write_zeroes(0, u64::MAX, ZeroMode::Keep), OUTSIDE),
        case("zero what wraps", |disk: Disk| disk.write_zeroes(u64::MAX, u64::MAX, ZeroMode::Keep), OUTSIDE),
        case(
            "zero a negative length",
            |disk: Disk| disk.write_zeroes(0, -1i64 as u64, ZeroMode::Unmap),
            OUTSIDE,
        ),
        case("discard nothing", |disk: Disk| disk.discard(END, 0), Done),
        case("discard all there could be", |disk: Disk| disk.discard(0, u64::MAX), OUTSIDE),
        case("discard what wraps", |disk: Disk| disk.discard(u64::MAX - 511, 512), OUTSIDE),
        case("the extent of nothing", |disk: Disk| disk.extent(0, 0), INVALID),
        case("the extent at the last offset", |disk: Disk| disk.extent(u64::MAX, 1), OUTSIDE),
        case("the extent of what wraps", |disk: Disk| disk.extent(u64::MAX, u64::MAX), OUTSIDE),
        case("the extents of nothing", |disk: Disk| disk.extents(7..7).collect::<Result<Vec<_>>>(), Done),
        case(
            "the extents of a range backwards",
            #[allow(clippy::reversed_empty_ranges)]
            |disk: Disk| disk.extents(9..7).collect::<Result<Vec<_>>>(),
            Done,
        ),
        case(
            "the extents of all there could be",
            |disk: Disk| disk.extents(0..u64::MAX).collect::<Result<Vec<_>>>(),
            OUTSIDE,
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    disk.write(0, &[1; 512]).unwrap();
    all_answer(cases, || disk.clone());
    disk.close().unwrap();
    must_be_clean(&path);
}

#[test]
fn requests_of_a_queue() {
    for engine in ENGINES {
        for (depth, threads) in [(0, 0), (1, 1), (u32::MAX, usize::MAX)] {
            let dir = tempfile::tempdir().unwrap();
            let path = create(dir.path());
            let disk = open(engine, &path);
            soon("a queue", move || {
                let queue = disk.queue().engine(engine).depth(depth).threads(threads).build().unwrap();
                let volatile = Durability::Volatile;
                let empty = || vec![IoBuf::zeroed(0), IoBuf::zeroed(0)].into_iter().collect::<IoBufs>();
                let one = || IoBufs::from(IoBuf::zeroed(1));
                let requests = [
                    (Request::Read { offset: 0, bufs: IoBufs::new() }, None),
                    (Request::Read { offset: 64 << 20, bufs: empty() }, None),
                    (Request::Read { offset: u64::MAX, bufs: one() }, Some(ErrorKind::OutOfRange)),
                    (Request::Write { offset: 5, bufs: empty(), durability: volatile }, None),
                    (
                        Request::Write { offset: u64::MAX, bufs: one(), durability: volatile },
                        Some(ErrorKind::OutOfRange),
                    ),
                    (Request::Discard { offset: u64::MAX, len: u64::MAX }, Some(ErrorKind::OutOfRange)),
                    (Request::WriteZeroes { offset: 1, len: 0, mode: ZeroMode::Keep }, None),
                    (
                        Request::WriteZeroes { offset: 1, len: u64::MAX, mode: ZeroMode::Keep },
                        Some(ErrorKind::OutOfRange),
                    ),
                    (Request::Flush, None),
                ];
                // More than the depth, beside requests that make sense.
                let expected: Vec<_> = requests.iter().map(|(_, kind)| *kind).collect();
                for (number, (request, _)) in (0..).zip(requests) {
                    queue.submit(request, number);
                }
                for number in 0..300 {
                    let bufs = IoBuf::copy_of(&[1; 512]).into();
                    let offset = number * 65536;
                    queue.submit(Request::Write { offset, bufs, durability: volatile }, u64::MAX);
                }
                let mut done = Vec::new();
                assert_eq!(queue.wait(&mut done, Some(Duration::ZERO)), done.len());
                while queue.pending() > 0 {
                    queue.wait(&mut done, Some(Duration::MAX));
                }
                for completion in done {
                    let kind = completion.result.err().map(|error| error.kind());
                    let expected = expected.get(completion.user_data as usize).copied().flatten();
                    assert_eq!(kind, expected, "{engine:?}, depth {depth}: {}", completion.user_data);
                }
                // Nothing is under way, and nothing is waited for.
                assert_eq!(queue.wait(&mut Vec::new(), None), 0);
                disk.close().unwrap();
            });
            must_be_clean(&path);
        }
    }
}

#[test]
fn descriptors_that_are_no_eventfds() {
    let dir = tempfile::tempdir().unwrap();
    let disk = open(Engine::Auto, &create(dir.path()));
    let file = std::fs::File::open(dir.path().join("disk.qcow2")).unwrap();
    let socket = std::os::unix::net::UnixStream::pair().unwrap().0;
    for fd in [OwnedFd::from(file), OwnedFd::from(socket)] {
        let error = disk.queue().event_fd(fd).build().unwrap_err();
        assert!(error.to_string().contains("eventfd"), "{error}");
    }
}

#[test]
fn sizes_of_disks() {
    let grow = |size| move |disk: Disk| disk.resize(size, Shrink::Allow);
    let full = |size| {
        move |disk: Disk| {
            disk.resize_controlled(size, Shrink::Refuse, Preallocation::Full, &JobControl::default())
        }
    };
    let cases: Vec<Case<Disk>> = vec![
        case("a disk of no byte", grow(0), Done),
        case("a disk of a byte", grow(1), INVALID),
        case("a disk of the largest number", grow(u64::MAX), INVALID),
        case("a disk of the largest number of sectors", grow(u64::MAX - 511), INVALID),
        case("a disk of a negative size", grow(-512i64 as u64), INVALID),
        case("a disk of the largest offset", grow(i64::MAX as u64 & !511), INVALID),
        case("smaller, which is refused", |disk: Disk| disk.resize(0, Shrink::Refuse), INVALID),
        case("preallocation of the largest number", full(u64::MAX), INVALID),
        case("preallocation of more than any disk has", full(1 << 60), INVALID),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let numbers = Cell::new(0);
    all_answer(cases, || {
        numbers.set(numbers.get() + 1);
        let path = dir.path().join(format!("{}.qcow2", numbers.get()));
        Disk::create(&path, &CreateOptions::default().size(64 << 20)).unwrap();
        open(Engine::Auto, &path)
    });
    must_be_clean(&path);
    for number in 1..=numbers.get() {
        must_be_clean(&dir.path().join(format!("{number}.qcow2")));
    }
}

#[test]
fn names_and_numbers_of_snapshots() {
    let take = |name: String| move |disk: Disk| disk.create_snapshot(NewSnapshot::named(name));
    let delete = |which| move |disk: Disk| disk.delete_snapshot(&which);
    let empty = String::new;
    let cases: Vec<Case<Disk>> = vec![
        case("delete what has an empty name", delete(SnapshotRef::Name(empty())), NOT_FOUND),
        case("delete what has an empty id", delete(SnapshotRef::Id(empty())), NOT_FOUND),
        case(
            "apply what is not there",
            |disk: Disk| disk.apply_snapshot(&SnapshotRef::IdOrName(String::new())),
            NOT_FOUND,
        ),
        case("an empty name", take(empty()), Done),
        case("delete the one with an empty name", delete(SnapshotRef::Name(empty())), Done),
        case("a name of 256 bytes", take("n".repeat(256)), INVALID),
        case("a name of 70,000 bytes", take("n".repeat(70_000)), INVALID),
        case("a name of 255 bytes", take("n".repeat(255)), Done),
        case("a name with a zero byte", take("a\0b".to_owned()), INVALID),
        case("the same name", take("n".repeat(255)), Done),
        case("delete it", delete(SnapshotRef::Name("n".repeat(255))), Done),
        case("delete the other", delete(SnapshotRef::Name("n".repeat(255))), Done),
        case("delete it once more", delete(SnapshotRef::Name("n".repeat(255))), NOT_FOUND),
        case(
            "a date before all dates",
            |disk: Disk| {
                let date = SystemTime::UNIX_EPOCH - Duration::from_secs(1 << 40);
                disk.create_snapshot(NewSnapshot::named("early").date(date))
            },
            Done,
        ),
        case(
            "a date after all dates",
            |disk: Disk| {
                let date = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 40);
                disk.create_snapshot(NewSnapshot::named("late").date(date))
            },
            Done,
        ),
        case(
            "the largest numbers",
            |disk: Disk| {
                let new = NewSnapshot::named("numbers").vm_clock_nsec(u64::MAX).icount(u64::MAX - 1);
                disk.create_snapshot(new)
            },
            Done,
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    all_answer(cases, || disk.clone());
    disk.close().unwrap();
    must_be_clean(&path);
}

#[test]
fn names_and_numbers_of_bitmaps() {
    let add = |new: NewBitmap| move |disk: Disk| disk.add_bitmap(&new);
    let named = |name: &str| NewBitmap::named(name);
    let cases: Vec<Case<Disk>> = vec![
        case("an empty name", add(named("")), INVALID),
        case("a name of 1024 bytes", add(named(&"n".repeat(1024))), INVALID),
        case("a name of 1 MiB", add(named(&"n".repeat(1 << 20))), INVALID),
        case("a name of 1023 bytes", add(named(&"n".repeat(1023))), Done),
        case("a name with a zero byte", add(named("a\0b")), INVALID),
        case("a bitmap", add(named("one")), Done),
        case("the same bitmap", add(named("one")), Fails(&[ErrorKind::Exists])),
        case("a bit for nothing", add(named("two").granularity(0)), INVALID),
        case("a bit for a byte", add(named("two").granularity(1)), INVALID),
        case("a bit for 3 KiB", add(named("two").granularity(3072)), INVALID),
        case("a bit for the largest number", add(named("two").granularity(u64::MAX)), INVALID),
        case("a bit for the largest power of two", add(named("two").granularity(1 << 63)), INVALID),
        case("remove one", |disk: Disk| disk.remove_bitmap("one"), Done),
        case("remove it again", |disk: Disk| disk.remove_bitmap("one"), NOT_FOUND),
        case("remove what has no name", |disk: Disk| disk.remove_bitmap(""), NOT_FOUND),
        case("clear what is not there", |disk: Disk| disk.clear_bitmap("one"), NOT_FOUND),
        case("read what is not there", |disk: Disk| disk.bitmap_bits(""), NOT_FOUND),
        case(
            "record in what is not there",
            |disk: Disk| disk.set_bitmap_recording("", BitmapRecording::Off),
            NOT_FOUND,
        ),
        case(
            "merge a bitmap of another size",
            |disk: Disk| {
                disk.add_bitmap(&NewBitmap::named("old"))?;
                let bits = disk.bitmap_bits("old")?;
                disk.resize(128 << 20, Shrink::Refuse)?;
                disk.merge_bitmap("old", &bits)
            },
            INVALID,
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    all_answer(cases, || disk.clone());
    let bits = disk.bitmap_bits("old").unwrap();
    soon("bits past the end", move || {
        assert_eq!(bits.next_dirty(u64::MAX), None);
        assert!(!bits.run_at(u64::MAX).0);
        assert_eq!(bits.next_dirty(bits.disk_size()), None);
    });
    disk.close().unwrap();
    must_be_clean(&path);
}

#[test]
fn options_of_opening() {
    let open_with = |options: OpenOptions| move |path: PathBuf| Disk::open(&path, &options);
    let sized = |bytes| for_writing().cache_size(bytes);
    let sliced = |bytes| for_writing().slice_size(bytes);
    let cases: Vec<Case<PathBuf>> = vec![
        case("a cache of nothing", open_with(sized(0)), INVALID),
        case("a cache of a byte", open_with(sized(1)), INVALID),
        case("a cache of the largest number", open_with(sized(u64::MAX)), Done),
        case("slices of nothing", open_with(sliced(0)), INVALID),
        case("slices of 3 KiB", open_with(sliced(3072)), INVALID),
        case("slices of the largest number", open_with(sliced(u32::MAX)), INVALID),
        case("no queues", open_with(for_writing().queues(0)), Done),
        case("more queues than memory", open_with(for_writing().queues(u32::MAX)), Done),
        case("mapping that is not kept", open_with(for_writing().cache_clean_interval(Duration::ZERO)), Done),
        case(
            "mapping that is kept for ever",
            open_with(for_writing().cache_clean_interval(Duration::MAX)),
            Done,
        ),
        case("a snapshot without a name", open_with(OpenOptions::default().snapshot(String::new())), INVALID),
        case("a snapshot to be written to", open_with(for_writing().snapshot("one".to_owned())), INVALID),
        case(
            "a backing file without a name",
            open_with(for_writing().backing((PathBuf::new(), Some(Format::Raw)))),
            Done,
        ),
        case("a data file without a name", open_with(for_writing().data_file(PathBuf::new())), INVALID),
        case("no path", |_| Disk::open(Path::new(""), &for_writing()), OF_THE_SYSTEM),
        case("a folder", |path: PathBuf| Disk::open(path.parent().unwrap(), &for_writing()), OF_THE_SYSTEM),
        case("a path with a zero byte", |_| Disk::open(Path::new("a\0b"), &for_writing()), OF_THE_SYSTEM),
        case("no files", |_| Disk::open_files(Vec::new(), &for_writing()), INVALID),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    all_answer(cases, || path.clone());
    let disk = open(Engine::Auto, &path);
    let image = disk.image().clone();
    soon("caches of an open image", move || {
        for bytes in [0, 1] {
            assert_eq!(image.set_cache_size(bytes).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        image.set_cache_size(u64::MAX).unwrap();
        image.set_cache_size(image.min_cache_size()).unwrap();
    });
    disk.write(0, &vec![1; 65536]).unwrap();
    disk.close().unwrap();
    must_be_clean(&path);
}

#[test]
fn options_of_new_images() {
    let new = || CreateOptions::default().size(1 << 20);
    // What was made can be opened.
    let create_with = |options: CreateOptions| {
        move |path: PathBuf| {
            Disk::create(&path, &options)?;
            Disk::open(&path, &for_writing())
        }
    };
    let refused = Fails(&[ErrorKind::InvalidArgument, ErrorKind::Unsupported]);
    let cases: Vec<Case<PathBuf>> = vec![
        case("no size", create_with(CreateOptions::default()), INVALID),
        case("a size of nothing", create_with(new().size(0)), Done),
        case("a size of the largest number", create_with(new().size(u64::MAX)), INVALID),
        case("the largest number of sectors", create_with(new().size(u64::MAX - 511)), INVALID),
        case("clusters of nothing", create_with(new().cluster_size(0)), INVALID),
        case("clusters of a byte", create_with(new().cluster_size(1)), INVALID),
        case("clusters of 3 KiB", create_with(new().cluster_size(3072)), INVALID),
        case("clusters of the largest number", create_with(new().cluster_size(u64::MAX)), INVALID),
        case("counts of no bit", create_with(new().refcount_bits(0)), INVALID),
        case("counts of three bits", create_with(new().refcount_bits(3)), INVALID),
        case("counts of 128 bits", create_with(new().refcount_bits(128)), INVALID),
        case("version 0", create_with(new().version(0)), refused),
        case("the largest version", create_with(new().version(u32::MAX)), refused),
        case("an empty backing name", create_with(new().backing((String::new(), Format::Raw))), Done),
        case(
            "a backing name of 2 KiB",
            create_with(new().backing(("n".repeat(2048), Format::Raw))),
            Fails(&[ErrorKind::InvalidArgument, ErrorKind::NotFound]),
        ),
        case("an empty data file", create_with(new().data_file(String::new())), OF_THE_SYSTEM),
        case(
            "a hint of the largest number",
            create_with(new().extent_size_hint(u32::MAX)),
            Fails(&[ErrorKind::InvalidArgument, ErrorKind::Unsupported]),
        ),
        case("no path", move |_| Disk::create(Path::new(""), &new()), OF_THE_SYSTEM),
        case("a folder", move |path: PathBuf| Disk::create(path.parent().unwrap(), &new()), OF_THE_SYSTEM),
    ];
    let dir = tempfile::tempdir().unwrap();
    let numbers = Cell::new(0);
    all_answer(cases, || {
        numbers.set(numbers.get() + 1);
        dir.path().join(format!("{}.qcow2", numbers.get()))
    });
}

/// A job of which one number makes no sense, on an image with a backing file.
fn job<T: Send + 'static>(
    name: &'static str,
    work: impl AsyncFnOnce(Image, Worker) -> Result<T> + Send + 'static,
    answer: Answer,
) -> Case<Disk> {
    case(name, move |disk: Disk| disk.run(work).map(drop), answer)
}

/// The jobs with requests in flight, each with so many of them.
fn jobs_with(requests: usize, dir: &Path, answer: Answer) -> Vec<Case<Disk>> {
    let name = |what: &str| dir.join(format!("{what}-{requests}"));
    let (converted, live) = (name("converted"), name("live"));
    vec![
        job(
            "requests of compare",
            async move |image, worker| {
                let options = CompareOptions::default().requests(requests);
                compare(&worker, &image, &image, &options).await.map_err(|failed| failed.error)
            },
            answer,
        ),
        job(
            "requests of hydrate",
            async move |image, worker| {
                hydrate(&worker, &image, &HydrateOptions::default().requests(requests)).await
            },
            answer,
        ),
        job(
            "requests of convert",
            async move |image, worker| {
                let target = ConvertTarget::New(Box::new(NewTarget::new(converted)));
                let options = ConvertOptions::default().requests(requests);
                convert(&worker, &[image], target, &options).await
            },
            answer,
        ),
        job(
            "requests of a live backup",
            async move |image, worker| {
                Image::create(&worker, &live, &CreateOptions::default().size(image.virtual_size())).await?;
                let target = Image::open(&worker, &live, &for_writing()).await?;
                let options = LiveBackupOptions::default().requests(requests);
                let backup = LiveBackup::start(&worker, &image, &target, options).await?;
                let report = backup.run(&worker).await;
                backup.end(BackupEnd::Complete).await;
                target.close(&worker).await?;
                report
            },
            answer,
        ),
        job(
            "requests of rebase",
            async move |image, worker| {
                rebase(&worker, &image, None, &RebaseOptions::default().requests(requests)).await
            },
            answer,
        ),
    ]
}

#[test]
fn numbers_of_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let base = create(dir.path());
    let disk = open(Engine::Auto, &base);
    (0..32).for_each(|i| disk.write(i << 20, &vec![1; 65536]).unwrap());
    disk.close().unwrap();
    let mut cases = jobs_with(0, dir.path(), INVALID);
    // Twice the second one is more than there are numbers.
    cases
        .extend([usize::MAX, 1 << 63].into_iter().flat_map(|requests| jobs_with(requests, dir.path(), Done)));
    for (memory, answer) in [(0, INVALID), (usize::MAX, Done)] {
        let target = dir.path().join(format!("backup-{memory}"));
        cases.push(job(
            "memory of a backup",
            async move |image, worker| {
                let options = BackupOptions::new(target).cache(CacheMode::Writeback).buffer_memory(memory);
                Box::pin(backup(&worker, &image, &options)).await
            },
            answer,
        ));
        let target = dir.path().join(format!("copy-{memory}"));
        cases.push(job(
            "memory of convert",
            async move |image, worker| {
                let target = ConvertTarget::New(Box::new(NewTarget::new(target)));
                let options = ConvertOptions::default().buffer_memory(memory);
                convert(&worker, &[image], target, &options).await
            },
            answer,
        ));
        cases.push(job(
            "memory of verify",
            async move |image, worker| {
                verify(&worker, &image, &VerifyOptions::default().buffer_memory(memory)).await
            },
            Done,
        ));
        cases.push(job(
            "memory of compare",
            async move |image, worker| {
                let options = CompareOptions::default().buffer_memory(memory);
                compare(&worker, &image, &image, &options).await.map_err(|failed| failed.error)
            },
            Done,
        ));
        cases.push(job(
            "memory of rebase",
            async move |image, worker| {
                rebase(&worker, &image, None, &RebaseOptions::default().buffer_memory(memory)).await
            },
            Done,
        ));
    }
    for (workers, answer) in [(0, INVALID), (usize::MAX, Done)] {
        let target = dir.path().join(format!("workers-{workers}"));
        cases.push(job(
            "threads of convert",
            async move |image, worker| {
                let target = ConvertTarget::New(Box::new(NewTarget::new(target)));
                convert(&worker, &[image], target, &ConvertOptions::default().workers(workers)).await
            },
            answer,
        ));
    }
    // At most 32 MiB.
    for (sparse, answer) in [(1, INVALID), (u64::MAX, INVALID), (u64::MAX - 511, INVALID)] {
        let target = dir.path().join(format!("sparse-{sparse}"));
        cases.push(job(
            "zeroes of convert",
            async move |image, worker| {
                let target = ConvertTarget::New(Box::new(NewTarget::new(target)));
                convert(&worker, &[image], target, &ConvertOptions::default().sparse_size(sparse)).await
            },
            answer,
        ));
    }
    let numbers = Cell::new(0);
    all_answer(cases, || {
        numbers.set(numbers.get() + 1);
        let top = dir.path().join(format!("{}.qcow2", numbers.get()));
        let backing = (base.to_str().unwrap().to_owned(), Format::Qcow2);
        Disk::create(&top, &CreateOptions::default().backing(backing)).unwrap();
        open(Engine::Auto, &top)
    });
}

#[test]
fn numbers_of_checks() {
    let dir = tempfile::tempdir().unwrap();
    let path = create(dir.path());
    let disk = open(Engine::Auto, &path);
    disk.write(0, &vec![1; 65536]).unwrap();
    disk.close().unwrap();
    let new = CheckOptions::default;
    let check = |options: CheckOptions| move |path: PathBuf| Disk::check(&path, &options);
    let cases: Vec<Case<PathBuf>> = vec![
        case("no reads", check(new().parallel(0)), Done),
        case("reads without end", check(new().parallel(usize::MAX)), Done),
        case("no memory", check(new().memory(0)), Done),
        case("all memory", check(new().memory(usize::MAX)), Done),
        case("no findings", check(new().max_findings(0)), Done),
        case("a repair without memory", check(new().repair(Repair::Leaks).memory(0)), Done),
    ];
    all_answer(cases, || path.clone());
}
