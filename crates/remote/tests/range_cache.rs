//! The range cache above a disk in memory that counts what is fetched from it.

use std::collections::HashMap;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use zebu_remote::range_cache::{CachedDisk, ObjectVersion, RangeCache, RangeCacheOptions};
use zebu_storage::{Alignment, Completer, IoBuf, Storage, StorageAbilities, StorageDone, StorageOp};

/// Longest wait, a guard against a test that hangs.
const LONGEST: Duration = Duration::from_secs(600);

/// Waits until what was fetched is stored. The cache itself waits for ten seconds.
fn settle(cache: &RangeCache) {
    let begin = Instant::now();
    loop {
        let turn = Instant::now();
        cache.settle();
        if turn.elapsed() < Duration::from_secs(9) {
            return;
        }
        assert!(begin.elapsed() < LONGEST, "it is not stored");
    }
}

const BLOCK: usize = 64 << 10;

/// The bytes of an object.
fn content(len: u64, seed: u64) -> Vec<u8> {
    let word = |at: u64| at.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    bytes.truncate(len as usize);
    bytes
}

/// A disk that answers after a while, from threads of its own.
struct Far {
    len: u64,
    seed: u64,
    content: Vec<u8>,
    fetched: Mutex<HashMap<u64, u32>>,
    fails: AtomicBool,
}

impl Far {
    fn new(len: u64, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            len,
            seed,
            content: content(len, seed),
            fetched: Mutex::default(),
            fails: AtomicBool::new(false),
        })
    }

    fn fetches(&self) -> u32 {
        self.fetched.lock().unwrap().values().sum()
    }

    fn most_fetches_of_a_block(&self) -> u32 {
        self.fetched.lock().unwrap().values().copied().max().unwrap_or_default()
    }
}

/// The far disk as a storage.
struct Way(Arc<Far>);

impl Storage for Way {
    fn len(&self) -> u64 {
        self.0.len
    }
    fn identity(&self) -> u64 {
        self.0.seed
    }
    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: 1, length: 1 }
    }
    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::empty()
    }
    fn submit(&self, op: StorageOp, mut done: Completer) {
        let far = Arc::clone(&self.0);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(2));
            let StorageOp::Read { offset, len } = op else { return };
            if far.fails.load(Ordering::Relaxed) {
                done.finish(Err(libc::EIO));
                return;
            }
            let mut fetched = far.fetched.lock().unwrap();
            for block in offset / BLOCK as u64..(offset + len).div_ceil(BLOCK as u64) {
                *fetched.entry(block).or_default() += 1;
            }
            drop(fetched);
            done.bufs_mut().copy_from(0, &far.content[offset as usize..][..len as usize]);
            done.finish(Ok(StorageDone::Moved(len)));
        });
    }
}

type Told = Arc<Mutex<Vec<String>>>;

fn open(dir: &Path, size: u64) -> (Arc<RangeCache>, Told) {
    let told = Told::default();
    let tell = Arc::clone(&told);
    let options = RangeCacheOptions::new(size, move |message| tell.lock().unwrap().push(message.to_owned()));
    (RangeCache::open(dir, options).unwrap(), told)
}

fn disk(cache: &Arc<RangeCache>, far: &Arc<Far>) -> Arc<CachedDisk> {
    let version = ObjectVersion::new("far", &format!("far{}", far.seed), "\"1\"", far.len);
    Arc::new(cache.disk(Arc::new(Way(Arc::clone(far))), &version, 8 << 20).unwrap())
}

/// Begins a read; the bytes come over the channel.
fn begin(disk: &dyn Storage, offset: u64, len: u64) -> mpsc::Receiver<Result<Vec<u8>, i32>> {
    let (sender, receiver) = mpsc::channel();
    let op = StorageOp::Read { offset, len };
    let bufs = IoBuf::zeroed(len as usize).into();
    disk.submit(
        op,
        Completer::new(op, bufs, move |bufs, result| {
            let mut bytes = vec![0; bufs.len()];
            bufs.copy_to(0, &mut bytes);
            let _ = sender.send(result.map(|_| bytes));
        }),
    );
    receiver
}

#[track_caller]
fn check(disk: &dyn Storage, far: &Far, offset: u64, len: u64) {
    let bytes = begin(disk, offset, len).recv().unwrap().unwrap();
    assert!(bytes == far.content[offset as usize..][..len as usize], "{offset}+{len}");
}

fn numbers(mut state: u64) -> impl FnMut(u64) -> u64 {
    move |below| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    }
}

/// Reads everything before `end`, no faster than it is stored: the cache leaves out what has no room for long.
#[track_caller]
fn check_and_store(cache: &RangeCache, disk: &dyn Storage, far: &Far, end: u64) {
    for offset in (0..end).step_by(1 << 20) {
        check(disk, far, offset, (end - offset).min(1 << 20));
        settle(cache);
    }
}

/// The files called `name` below a directory, one for each object.
fn files(dir: &Path, name: &str) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(RangeCache::objects_in(dir)).unwrap().map(|entry| entry.unwrap().path().join(name));
    entries.filter(|path| path.exists()).collect()
}

fn data_on_disk(dir: &Path) -> u64 {
    files(dir, "data").iter().map(|path| path.metadata().unwrap().blocks() * 512).sum()
}

/// Checks the size. What a file system needs itself for files in many pieces is less than a block.
#[track_caller]
fn check_size(dir: &Path, size: u64) {
    let found = data_on_disk(dir);
    assert!(found < size + BLOCK as u64, "{found} bytes");
}

#[test]
fn what_was_read_once_comes_from_the_cache_also_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new((20 << 20) + 12345, 1);
    let (cache, told) = open(dir.path(), 64 << 20);
    let near = disk(&cache, &far);
    let mut next = numbers(3);
    let reads: Vec<_> = (0..200)
        .map(|_| (next(far.len - 300_000), [1, 512, 4096, 70_000, 300_000][next(5) as usize]))
        .chain([(0, far.len), (far.len - 1, 1)])
        .collect();
    for &(offset, len) in &reads {
        check(&*near, &far, offset, len);
    }
    assert_eq!(far.most_fetches_of_a_block(), 1);
    settle(&cache);
    let fetches = far.fetches();
    // A second process, while the first has it open, and a third when nobody has.
    let (second, _) = open(dir.path(), 64 << 20);
    let other = disk(&second, &far);
    for &(offset, len) in &reads {
        check(&*other, &far, offset, len);
    }
    drop((near, cache, other, second));
    let (third, _) = open(dir.path(), 64 << 20);
    let again = disk(&third, &far);
    check(&*again, &far, 0, far.len);
    assert_eq!(far.fetches(), fetches);
    assert_eq!(third.stats().hits, far.len);
    assert!(told.lock().unwrap().is_empty());
    // Another version shares nothing.
    let version = ObjectVersion::new("far", "far1", "\"2\"", far.len);
    let changed = third.disk(Arc::new(Way(Arc::clone(&far))), &version, 8 << 20).unwrap();
    check(&changed, &far, 0, 4096);
    assert_eq!(far.fetches(), fetches + 1);
    // A failure is the reader's, and is not kept.
    far.fails.store(true, Ordering::Relaxed);
    assert_eq!(begin(&changed, 1 << 20, 512).recv().unwrap(), Err(libc::EIO));
    far.fails.store(false, Ordering::Relaxed);
    check(&changed, &far, 1 << 20, 512);
}

/// A second start of the same machine asks the network for nothing.
#[test]
fn a_reader_of_what_is_cached_has_nothing_fetched_ahead_of_it() {
    const BLOCKS: u64 = 32;
    let block = BLOCK as u64;
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new(64 << 20, 5);
    let (cache, _) = open(dir.path(), 64 << 20);
    let near = disk(&cache, &far);
    // Backwards: nobody goes forward.
    for number in (0..BLOCKS).rev() {
        check(&*near, &far, number * block, block);
    }
    settle(&cache);
    drop((near, cache));
    let fetched = far.fetches();
    assert_eq!(u64::from(fetched), BLOCKS);
    let (cache, _) = open(dir.path(), 64 << 20);
    let near = disk(&cache, &far);
    for offset in (0..BLOCKS * block).step_by(16 << 10) {
        check(&*near, &far, offset, 16 << 10);
    }
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(far.fetches(), fetched, "blocks that nobody read");
    // Beyond, the reader is one that waits for the network.
    for number in BLOCKS..BLOCKS + 3 {
        check(&*near, &far, number * block, block);
    }
    let begin = Instant::now();
    while far.fetches() <= fetched + 3 {
        assert!(begin.elapsed() < LONGEST, "nothing is fetched ahead");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(far.most_fetches_of_a_block(), 1);
}

#[test]
fn many_who_want_one_block_have_it_fetched_once() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new(8 << 20, 2);
    let (cache, _) = open(dir.path(), 64 << 20);
    let near = disk(&cache, &far);
    for round in 0..16u64 {
        let place = round * 500_000;
        let waiting: Vec<_> = (0..50).map(|n| begin(&*near, place + n * 13, 1000)).collect();
        for (n, waiting) in (0..50).zip(waiting) {
            let bytes = waiting.recv().unwrap().unwrap();
            assert!(bytes == far.content[(place + n * 13) as usize..][..1000]);
        }
    }
    assert_eq!(far.most_fetches_of_a_block(), 1);
}

#[test]
fn the_size_is_kept_to_and_what_was_used_last_stays() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new(64 << 20, 3);
    let (cache, told) = open(dir.path(), 16 << 20);
    let near = disk(&cache, &far);
    for piece in 0..64 {
        check(&*near, &far, piece << 20, 1 << 20);
        settle(&cache);
        check_size(dir.path(), 16 << 20);
        if piece == 15 {
            // Ranges are told apart by the second of their use.
            std::thread::sleep(Duration::from_millis(1100));
        }
    }
    let stats = cache.stats();
    assert!(stats.evicted >= 48 << 20 && stats.not_stored == 0, "{stats:?}");
    let before = far.fetches();
    check(&*near, &far, 63 << 20, 1 << 20);
    assert_eq!(far.fetches(), before, "the last one is there");
    check(&*near, &far, 0, 4096);
    assert!(far.fetches() > before, "the first one is not");
    // A smaller size holds at once, and for the objects of others.
    drop((near, cache));
    let (cache, _) = open(dir.path(), 16 << 20);
    let other = Far::new(64 << 20, 4);
    let near = disk(&cache, &other);
    check_and_store(&cache, &*near, &other, 15 << 20);
    check_size(dir.path(), 16 << 20);
    assert!(told.lock().unwrap().is_empty());
    assert_eq!(cache.stats().not_stored, 0);
}

#[test]
fn two_that_evict_from_each_other_show_no_wrong_byte() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new(40 << 20, 5);
    let rounds = std::env::var("ZEBU_CACHE_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(400);
    // Two that have nothing in common but the directory: as two processes do.
    let sides: Vec<_> = (0..2).map(|_| open(dir.path(), 16 << 20).0).collect();
    std::thread::scope(|scope| {
        for (side, cache) in sides.iter().enumerate() {
            for thread in 0..2 {
                let near = disk(cache, &far);
                let far = &far;
                scope.spawn(move || {
                    let mut next = numbers(side as u64 * 7 + thread);
                    for _ in 0..rounds {
                        let len = [4096, 65536, 200_000][next(3) as usize];
                        check(&*near, far, next(far.len - len), len);
                    }
                });
            }
        }
    });
    for cache in &sides {
        settle(cache);
    }
    check_size(dir.path(), 16 << 20);
    assert!(sides.iter().all(|cache| cache.stats().bad_blocks == 0 && cache.stats().evicted > 0));
}

/// Ranges that another process has stored after this one began are evicted as well, so that neither is without a cache for good.
#[test]
fn a_cache_that_another_process_has_filled_takes_what_is_read_now() {
    let dir = tempfile::tempdir().unwrap();
    let (mine, others) = (Far::new(12 << 20, 8), Far::new(40 << 20, 9));
    let (cache, told) = open(dir.path(), 16 << 20);
    let near = disk(&cache, &mine);
    check_and_store(&cache, &*near, &mine, 11 << 20);
    let (other, others_told) = open(dir.path(), 16 << 20);
    let theirs = disk(&other, &others);
    check_and_store(&other, &*theirs, &others, others.len);
    drop((theirs, other));
    // Ranges are told apart by the second of their use.
    std::thread::sleep(Duration::from_millis(1100));
    // A busy disk takes what is read in several turns.
    let begin = Instant::now();
    loop {
        let before = mine.fetches();
        check_and_store(&cache, &*near, &mine, mine.len);
        if mine.fetches() == before {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(600), "not all of it is ever there");
    }
    check_size(dir.path(), 16 << 20);
    assert!(told.lock().unwrap().is_empty() && others_told.lock().unwrap().is_empty());
}

/// Several processes that read one object, which is larger than the cache.
#[test]
fn of_several_that_share_an_object_all_store() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new(40 << 20, 10);
    let sides: Vec<_> = (0..6).map(|_| open(dir.path(), 16 << 20)).collect();
    std::thread::scope(|scope| {
        for (cache, _) in &sides {
            let far = &far;
            scope.spawn(move || {
                check_and_store(cache, &*disk(cache, far), far, far.len);
            });
        }
    });
    check_size(dir.path(), 16 << 20);
    assert!(sides.iter().all(|(_, told)| told.lock().unwrap().is_empty()));
}

#[test]
fn flipped_bits_are_found_reported_and_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new((8 << 20) + 777, 6);
    {
        let (cache, _) = open(dir.path(), 64 << 20);
        check(&*disk(&cache, &far), &far, 0, far.len);
        settle(&cache);
    }
    let mut next = numbers(11);
    let mut bad_blocks = 0;
    for round in 0..40 {
        // Data mostly, now and then the map: wherever blocks have their sums.
        let name = if round % 4 == 3 { "map" } else { "data" };
        let path = files(dir.path(), name).pop().unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        for _ in 0..25 {
            let at = if name == "data" { next(far.len) } else { 4096 + next(8) * 512 + 16 + next(256) };
            let mut old = [0];
            file.read_exact_at(&mut old, at).unwrap();
            file.write_all_at(&[old[0] ^ 1 << next(8)], at).unwrap();
        }
        let (cache, told) = open(dir.path(), 64 << 20);
        let near = disk(&cache, &far);
        let before = far.fetches();
        check(&*near, &far, 0, far.len);
        settle(&cache);
        let found = cache.stats().bad_blocks;
        assert!(found > 0 && found <= 26, "{found}");
        assert!(u64::from(far.fetches() - before) >= found);
        assert_eq!(told.lock().unwrap().len() as u64, found.min(16));
        assert!(told.lock().unwrap()[0].contains("fetched again"));
        bad_blocks += found;
    }
    assert!(bad_blocks > 500, "{bad_blocks}");
    // All of them are whole again.
    let (cache, told) = open(dir.path(), 64 << 20);
    let before = far.fetches();
    check(&*disk(&cache, &far), &far, 0, far.len);
    assert!(far.fetches() == before && told.lock().unwrap().is_empty());
}

#[test]
fn any_change_of_heads_and_headers_costs_blocks_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new(4 << 20, 7);
    let mut next = numbers(5);
    for round in 0..60 {
        {
            let (cache, _) = open(dir.path(), 64 << 20);
            check(&*disk(&cache, &far), &far, 0, far.len);
            settle(&cache);
        }
        let path = files(dir.path(), "map").pop().unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        match round % 3 {
            // Bits that say that a block is there which is not, and others.
            0 => (0..4).for_each(|range| file.write_all_at(&[0xff; 6], 4096 + range * 512).unwrap()),
            1 => file.write_all_at(&[next(256) as u8], next(4096)).unwrap(),
            _ => file.set_len(next(6000)).unwrap(),
        }
        if round % 3 == 0 {
            let data = files(dir.path(), "data").pop().unwrap();
            let data = std::fs::File::options().write(true).open(data).unwrap();
            data.set_len(next(4 << 20)).unwrap();
            data.set_len(4 << 20).unwrap();
        }
        let (cache, _) = open(dir.path(), 64 << 20);
        check(&*disk(&cache, &far), &far, 0, far.len);
    }
}

#[test]
fn directories_that_can_not_be_trusted_or_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path, size| {
        let error = RangeCache::open(path, RangeCacheOptions::new(size, |_| {})).err().unwrap();
        error.to_string()
    };
    assert!(refused(dir.path(), 1 << 20).contains("16 MiB"));
    assert!(refused(&dir.path().join("a/b"), 16 << 20).contains("No such file"));
    std::fs::write(dir.path().join("file"), "").unwrap();
    assert!(refused(&dir.path().join("file"), 16 << 20).contains("no directory"));
    let shared = dir.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o770)).unwrap();
    assert!(refused(&shared, 16 << 20).contains("0700"));
    let cache = dir.path().join("cache");
    drop(open(&cache, 16 << 20));
    assert_eq!(cache.metadata().unwrap().mode() & 0o777, 0o700);
    let state = std::fs::File::options().write(true).open(cache.join("state")).unwrap();
    state.write_all_at(&[9], 8).unwrap();
    let message = refused(&cache, 16 << 20);
    assert!(message.contains("format 9") && message.contains("another directory"), "{message}");
    state.write_all_at(&[9], 0).unwrap();
    assert!(refused(&cache, 16 << 20).contains("none of a cache"));
    std::fs::write(cache.join("state"), "mine").unwrap();
    assert!(refused(&cache, 16 << 20).contains("none of a cache"));
}

#[test]
fn a_state_that_was_made_and_never_filled_is_filled() {
    let dir = tempfile::tempdir().unwrap();
    let far = Far::new(1 << 20, 3);
    for len in [0, 4096] {
        std::fs::write(dir.path().join("state"), vec![0; len]).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let (cache, _) = open(dir.path(), 16 << 20);
        check(&*disk(&cache, &far), &far, 0, far.len);
        assert_eq!(std::fs::read(dir.path().join("state")).unwrap()[..8], *b"zebucach", "{len}");
    }
}

#[test]
fn one_object_that_can_not_be_opened_leaves_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let (bad, good) = (Far::new(1 << 20, 4), Far::new(1 << 20, 5));
    let (cache, _) = open(dir.path(), 16 << 20);
    check(&*disk(&cache, &bad), &bad, 0, bad.len);
    settle(&cache);
    drop(cache);
    let data = files(dir.path(), "data").remove(0);
    // A symbolic link is made anew, whatever it leads to.
    let other = dir.path().join("other");
    std::fs::rename(&data, &other).unwrap();
    std::os::unix::fs::symlink(&other, &data).unwrap();
    let before = std::fs::read(&other).unwrap();
    let (cache, told) = open(dir.path(), 16 << 20);
    check(&*disk(&cache, &bad), &bad, 0, bad.len);
    settle(&cache);
    assert!(data.symlink_metadata().unwrap().is_file() && std::fs::read(&other).unwrap() == before);
    assert!(told.lock().unwrap().is_empty());
    drop(cache);
    // What can't be opened at all is told of, and left out.
    std::fs::remove_file(&data).unwrap();
    std::fs::create_dir(&data).unwrap();
    let (cache, told) = open(dir.path(), 16 << 20);
    check(&*disk(&cache, &good), &good, 0, good.len);
    let said = told.lock().unwrap().join("\n");
    assert!(said.contains(data.parent().unwrap().to_str().unwrap()) && said.contains("left out"), "{said}");
}

#[test]
fn an_object_whose_files_can_not_be_made_leaves_nothing() {
    const LEN: u64 = i64::MAX as u64;
    let dir = tempfile::tempdir().unwrap();
    if tempfile::tempfile_in(dir.path()).unwrap().set_len(LEN).is_ok() {
        eprintln!("skipped: the file system takes files of any length");
        return;
    }
    let (cache, _) = open(dir.path(), 16 << 20);
    let way = Arc::new(Way(Far::new(1 << 20, 6)));
    let version = ObjectVersion::new("far", "far", "\"1\"", LEN);
    let error = cache.disk(way, &version, 8 << 20).err().unwrap();
    assert_eq!(error.errno(), libc::EFBIG, "{error}");
    assert_eq!(std::fs::read_dir(RangeCache::objects_in(dir.path())).unwrap().count(), 0);
}

#[test]
fn many_objects_are_counted_and_the_oldest_leave_room() {
    let dir = tempfile::tempdir().unwrap();
    let size = 16 << 20;
    // More than a process keeps open, and than it may have files.
    for first in [0, 200, 400] {
        let (cache, _) = open(dir.path(), 64 << 20);
        for seed in first..first + 200 {
            let far = Far::new(1, seed);
            check(&*disk(&cache, &far), &far, 0, 1);
        }
        settle(&cache);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let few = rustix::process::Rlimit { current: Some(1000), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let (cache, told) = open(dir.path(), size);
    assert!(told.lock().unwrap().is_empty(), "{:?}", told.lock().unwrap());
    let state = std::fs::read(dir.path().join("state")).unwrap();
    let usage = u64::from_le_bytes(state[16..24].try_into().unwrap());
    let has_data = |path: &&PathBuf| path.metadata().unwrap().blocks() > 0;
    let there = files(dir.path(), "data").iter().filter(has_data).count() as u64;
    assert_eq!(usage, there * BLOCK as u64);
    assert!(usage <= size && there >= 128, "{usage} bytes in {there} objects");
    // What is read now has its place.
    let far = Far::new(6 << 20, 1000);
    check_and_store(&cache, &*disk(&cache, &far), &far, far.len);
    assert_eq!(cache.stats().not_stored, 0, "{:?}", told.lock().unwrap());
}
