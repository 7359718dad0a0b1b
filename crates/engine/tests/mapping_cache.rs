//! The mapping cache as its users see it: the budget, what is counted, what a damaged table does.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zebu_engine::jobs::{ForkDisk, fork};
use zebu_engine::storage::{Create, IoBuf, LockMode, OpenFlags, Worker, WorkerConfig};
use zebu_engine::{
    Access, CreateOptions, Durability, ErrorKind, ExtentIndex, Format, Image, OpenOptions, Preallocation,
    ZeroMode,
};

const CLUSTER: u64 = 65536;
/// Time that a load waits for room.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longer than any test takes: nothing is given up by itself meanwhile.
const INTERVAL: Duration = Duration::from_secs(1_000_000);

struct Disk {
    _dir: tempfile::TempDir,
    path: PathBuf,
    worker: Worker,
}

/// An image with all clusters allocated, one after the other.
fn disk(size: u64, cluster_size: u64) -> Disk {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let options = CreateOptions::default()
        .size(Some(size))
        .cluster_size(cluster_size)
        .preallocation(Preallocation::Metadata);
    worker.block_on(Image::create(&worker, &path, &options)).unwrap();
    Disk { _dir: dir, path, worker }
}

fn slices_alone() -> OpenOptions {
    OpenOptions::default().format(Some(Format::Qcow2)).extent_index(ExtentIndex::Off)
}

impl Disk {
    fn open(&self, options: &OpenOptions) -> Image {
        self.worker.block_on(Image::open(&self.worker, &self.path, options)).unwrap()
    }

    /// Reads 512 bytes at each offset, many at once. A load that has waited for a second may exceed the limit, no other.
    fn read_all(&self, image: &Image, offsets: impl Iterator<Item = u64>) {
        let offsets: Vec<u64> = offsets.collect();
        let mut may_exceed = false;
        for some in offsets.chunks(256) {
            let start = Instant::now();
            self.read_at_once(image, some, if may_exceed { Duration::ZERO } else { PATIENCE });
            // What it has taken is given back by later loads.
            may_exceed |= start.elapsed() >= PATIENCE;
        }
    }

    /// Reads of which none exceeds the limit before so much time is over.
    fn read_at_once(&self, image: &Image, offsets: &[u64], patience: Duration) {
        let start = Instant::now();
        let tasks: Vec<_> = offsets
            .iter()
            .map(|&offset| {
                let (image, worker) = (image.clone(), self.worker.clone());
                self.worker.spawn(async move {
                    let (result, _) = image.read(&worker, offset, IoBuf::zeroed(512).into()).await;
                    result.unwrap();
                    let stats = image.stats();
                    let is_within = stats.cache_bytes <= stats.cache_limit;
                    assert!(is_within || start.elapsed() >= patience, "{stats:?}");
                })
            })
            .collect();
        self.worker.block_on(async {
            for task in tasks {
                task.await;
            }
        });
    }
}

fn put(path: &Path, offset: u64, word: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&word.to_be_bytes(), offset).unwrap();
}

fn get(path: &Path, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    u64::from_be_bytes(bytes)
}

fn l2_table(path: &Path, index: u64) -> u64 {
    get(path, get(path, 40) + index * 8) & 0x00ff_ffff_ffff_fe00
}

#[test]
fn the_budget_is_kept_with_many_reads_at_once() {
    let disk = disk(4 << 30, CLUSTER);
    for slice_size in [512, 4096, 65536] {
        let image = disk.open(&slices_alone().slice_size(Some(slice_size)));
        image.set_cache_size(image.min_cache_size()).unwrap();
        for round in 0..8u64 {
            let offsets = (0..32).map(|i| (i * 977 + round * 131) * 3 * CLUSTER % (4 << 30));
            disk.read_all(&image, offsets);
        }
        let stats = image.stats();
        assert!(stats.cache_evictions > 50 && stats.cache_loads > 50, "{slice_size}: {stats:?}");
    }
}

#[test]
fn what_info_says_is_enough_for_everything() {
    let disk = disk(2 << 30, 4096);
    let full = disk.open(&slices_alone()).info().unwrap().qcow2.unwrap().full_cache_bytes;
    let image = disk.open(&slices_alone().cache_size(Some(full)));
    // An entry of 8 bytes for each cluster of 4 KiB, 512 of them in a slice.
    let slices = (2 << 30) / 4096 / 512;
    for _ in 0..2 {
        for start in (0..slices).step_by(32) {
            disk.read_all(&image, (start..start + 32).map(|slice| slice * 512 * 4096));
        }
    }
    let stats = image.stats();
    assert_eq!((stats.cache_loads, stats.cache_evictions), (slices, 0));
    assert_eq!(stats.cache_hits + stats.cache_misses, 2 * slices, "{stats:?}");
    // And not much more than enough.
    assert!(stats.cache_bytes * 2 > full, "{stats:?} of {full}");
}

#[test]
fn the_budget_follows_the_size_of_the_disk_unless_it_is_set() {
    let read_only = OpenOptions::default().format(Some(Format::Qcow2));
    let written = read_only.clone().access(Access::ReadWrite);
    // (disk, bytes of L2 tables and of refcounts)
    for (size, mapping) in [(64u64 << 20, 10u64 << 10), (64 << 30, 10 << 20), (1 << 40, 160 << 20)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let create = CreateOptions::default().size(Some(size));
        worker.block_on(Image::create(&worker, &path, &create)).unwrap();
        // What is only read will not grow: there is no more to cache than the file holds.
        for (options, has_tables, wanted) in
            [(&read_only, false, 1 << 20), (&read_only, true, mapping), (&written, true, 4 * mapping)]
        {
            if has_tables {
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                file.set_len(mapping.next_multiple_of(65536).max(file.metadata().unwrap().len())).unwrap();
            }
            let image = worker.block_on(Image::open(&worker, &path, options)).unwrap();
            let limit = image.stats().cache_limit;
            let wanted = wanted.clamp(1 << 20, 32 << 20);
            // What slices cost beyond their content, and tables.
            assert!((wanted..wanted + wanted / 8 + 65536).contains(&limit), "{size}: {limit}, not {wanted}");
            let set = options.clone().cache_size(Some(3 << 20));
            worker.block_on(image.close(&worker)).unwrap();
            let image = worker.block_on(Image::open(&worker, &path, &set)).unwrap();
            assert_eq!(image.stats().cache_limit, 3 << 20);
            worker.block_on(image.close(&worker)).unwrap();
        }
    }
}

#[test]
fn too_small_a_budget_is_refused_with_the_least() {
    let disk = disk(1 << 30, CLUSTER);
    let image = disk.open(&slices_alone());
    let least = image.min_cache_size();
    for bytes in [0, 1, least - 1] {
        let error = image.set_cache_size(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(&least.to_string()), "{error}");
        let options = slices_alone().cache_size(Some(bytes));
        let opened = disk.worker.block_on(Image::open(&disk.worker, &disk.path, &options));
        assert!(opened.unwrap_err().to_string().contains(&least.to_string()));
    }
    image.set_cache_size(least).unwrap();
}

#[test]
fn each_queue_has_room_for_a_slice() {
    let disk = disk(1 << 30, CLUSTER);
    let two = disk.open(&slices_alone()).min_cache_size();
    let options = slices_alone().queues(16);
    let sixteen = disk.open(&options).min_cache_size();
    assert!((14 * 4096..15 * 4096).contains(&(sixteen - two)), "{two} for two slices, {sixteen} for sixteen");
    let small = options.cache_size(Some(sixteen - 1));
    let error = disk.worker.block_on(Image::open(&disk.worker, &disk.path, &small)).unwrap_err();
    assert!(error.to_string().contains(&sixteen.to_string()), "{error}");
}

#[test]
fn a_smaller_budget_takes_effect_at_once() {
    let disk = disk(4 << 30, CLUSTER);
    let image = disk.open(&slices_alone());
    disk.read_all(&image, (0..128).map(|i| i * 512 * CLUSTER % (4 << 30)));
    let before = image.stats().cache_bytes;
    let wanted = image.min_cache_size() * 2;
    assert!(before > wanted);
    image.set_cache_size(wanted).unwrap();
    assert!(image.stats().cache_bytes <= wanted);
    disk.read_all(&image, (0..128).map(|i| i * 512 * CLUSTER % (4 << 30)));
}

#[test]
fn what_is_not_used_for_a_while_goes() {
    let disk = disk(4 << 30, CLUSTER);
    let options = slices_alone().cache_clean_interval(Some(INTERVAL));
    let image = disk.open(&options);
    disk.read_all(&image, (0..64).map(|i| i * 512 * CLUSTER));
    let (full, start) = (image.stats().cache_bytes, Instant::now());
    image.tidy(start + INTERVAL / 2);
    image.tidy(start + INTERVAL);
    assert_eq!(image.stats().cache_bytes, full, "used since the image was opened");
    disk.read_all(&image, std::iter::once(0));
    image.tidy(start + 2 * INTERVAL);
    let left = image.stats().cache_bytes - image.stats().table_bytes;
    assert!((4096..10_000).contains(&left), "one slice was used: {left}");
    disk.read_all(&image, (0..64).map(|i| i * 512 * CLUSTER));
    assert_eq!(image.stats().cache_bytes, full);
}

#[test]
fn one_slice_is_loaded_once_however_many_want_it() {
    let disk = disk(1 << 30, CLUSTER);
    let image = disk.open(&slices_alone());
    disk.read_all(&image, (0..200).map(|i| i * CLUSTER));
    let stats = image.stats();
    assert_eq!((stats.cache_loads, stats.cache_misses, stats.cache_hits), (1, 1, 199), "{stats:?}");
}

#[test]
fn slices_are_read_ahead_of_a_sequence() {
    let disk = disk(32 << 30, CLUSTER);
    let image = disk.open(&slices_alone());
    let slices = (32 << 30) / CLUSTER / 512;
    let before = disk.worker.stats().reads;
    for slice in 0..slices {
        disk.read_all(&image, std::iter::once(slice * 512 * CLUSTER));
    }
    let stats = image.stats();
    assert!(stats.cache_read_ahead * 2 > slices, "{stats:?}");
    // The guest's own reads, and far fewer than one more for each slice.
    let reads = disk.worker.stats().reads - before - slices;
    assert!(reads * 2 < slices, "{reads} reads for {slices} slices");
    let scattered = disk.open(&slices_alone());
    disk.read_all(&scattered, (0..64).map(|i| i * 37 % 64 * 8 * 512 * CLUSTER));
    assert_eq!(scattered.stats().cache_read_ahead, 0);
}

#[test]
fn a_sequential_image_is_known_by_a_few_extents() {
    let disk = disk(16 << 30, CLUSTER);
    let options = OpenOptions::default().access(Access::ReadWrite);
    let image = disk.open(&options);
    for start in (0..16 << 30).step_by(64 << 20) {
        disk.read_all(&image, (0..2).map(|i| start + i * (32 << 20)));
    }
    let loads = image.stats().cache_loads;
    for start in (0..16 << 30).step_by(64 << 20) {
        disk.read_all(&image, (0..2).map(|i| start + i * (32 << 20) + 5 * CLUSTER));
    }
    let stats = image.stats();
    assert_eq!(stats.cache_loads, loads, "the index answers");
    assert!(stats.index_hits >= 512 && stats.index_bytes < 32 << 10, "{stats:?}");
    // Writes in place need no slice either.
    disk.worker.block_on(async {
        let data = IoBuf::copy_of(&[9; 512]).into();
        image.write(&disk.worker, 7 << 30, data, Durability::Volatile).await.0.unwrap();
    });
    assert_eq!(image.stats().clusters_allocated, 0);
    assert!(image.stats().index_hits > stats.index_hits);
}

#[test]
fn writes_alone_make_the_extents_known_too() {
    let disk = disk(16 << 30, CLUSTER);
    let options = OpenOptions::default().access(Access::ReadWrite);
    let image = disk.open(&options);
    let write_all = |shift: u64| {
        disk.worker.block_on(async {
            for start in (0..16 << 30).step_by(32 << 20) {
                let data = IoBuf::copy_of(&[9; 512]).into();
                image.write(&disk.worker, start + shift, data, Durability::Volatile).await.0.unwrap();
            }
        });
    };
    write_all(0);
    let loads = image.stats().cache_loads;
    write_all(5 * CLUSTER);
    let stats = image.stats();
    assert_eq!((stats.cache_loads, stats.clusters_allocated), (loads, 0), "the index answers");
    assert!(stats.index_hits >= 512 && stats.index_bytes < 32 << 10, "{stats:?}");
}

#[test]
fn large_disks_open_with_little() {
    let dir = tempfile::tempdir().unwrap();
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    for tib in [16, 64] {
        let path = dir.path().join(format!("{tib}.qcow2"));
        let options = CreateOptions::default().size(Some(tib << 40));
        worker.block_on(Image::create(&worker, &path, &options)).unwrap();
        let open = OpenOptions::default().format(Some(Format::Qcow2)).access(Access::ReadWrite);
        let image = worker.block_on(Image::open(&worker, &path, &open)).unwrap();
        let stats = image.stats();
        assert!(stats.table_bytes < 1 << 20, "{stats:?}");
        let before = worker.stats().read_bytes;
        worker.block_on(async {
            let data = IoBuf::copy_of(&[9; 512]).into();
            image.write(&worker, (tib << 40) - 512, data, Durability::Volatile).await.0.unwrap();
            image.close(&worker).await.unwrap();
        });
        assert!(worker.stats().read_bytes - before < 4 << 20);
    }
}

#[test]
fn damaged_tables_fail_the_requests_that_need_them_and_no_others() {
    let disk = disk(4 << 30, CLUSTER);
    let l1 = get(&disk.path, 40);
    let good = l2_table(&disk.path, 1);
    let copied = 1 << 63;
    let table_bytes = 8192 * CLUSTER;
    // Table 1 lies outside the file, table 2 is not where a table can be, table 3 is table 4; an entry of table 5 is
    // not where a cluster can be.
    put(&disk.path, l1 + 8, 1 << 50 | copied);
    put(&disk.path, l1 + 16, (good + 512) | copied);
    put(&disk.path, l1 + 24, l2_table(&disk.path, 4) | copied);
    put(&disk.path, l2_table(&disk.path, 5) + 8 * 100, 512 | copied);
    for index in [ExtentIndex::On, ExtentIndex::Off] {
        let image = disk.open(&slices_alone().extent_index(index));
        let read =
            |offset: u64| disk.worker.block_on(image.read(&disk.worker, offset, IoBuf::zeroed(512).into())).0;
        for offset in [table_bytes + 7 * CLUSTER, 2 * table_bytes + 512, 5 * table_bytes + 100 * CLUSTER] {
            for _ in 0..2 {
                let error = read(offset).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                let named = error.guest_offset().unwrap();
                assert!(named <= offset && offset - named < CLUSTER, "{error}, not {offset}");
            }
        }
        for offset in [0, 3 * table_bytes, 4 * table_bytes, 5 * table_bytes + 99 * CLUSTER, 6 * table_bytes] {
            read(offset).unwrap();
        }
        let loads = image.stats().cache_loads;
        assert!(read(table_bytes).is_err());
        assert_eq!(image.stats().cache_loads, loads + 1, "what failed is tried again");
    }
}

const CHANGES: [&str; 6] =
    ["a part", "the whole", "the whole, compressed", "zeroes", "unmapping zeroes", "a discard"];

/// A change that a guest can make to a cluster.
async fn change(worker: &Worker, image: &Image, guest: u64, change: &str) -> zebu_engine::Result<()> {
    let bytes = |len: u64| IoBuf::copy_of(&vec![7; len as usize]).into();
    match change {
        "a part" => image.write(worker, guest + 4096, bytes(512), Durability::Volatile).await.0,
        "the whole" => image.write(worker, guest, bytes(CLUSTER), Durability::Volatile).await.0,
        "zeroes" => image.write_zeroes(worker, guest, CLUSTER, ZeroMode::Keep).await,
        "unmapping zeroes" => image.write_zeroes(worker, guest, CLUSTER, ZeroMode::Unmap).await,
        "a discard" => image.discard(worker, guest, CLUSTER).await,
        _ => image.write_compressed(worker, guest, bytes(CLUSTER), Durability::Volatile).await.0,
    }
}

#[test]
fn tables_that_lie_on_each_other_are_not_changed() {
    let table_bytes = 8192 * CLUSTER;
    let disk = disk(16 * table_bytes, CLUSTER);
    let copied = 1 << 63;
    let (l1, reftable) = (get(&disk.path, 40), get(&disk.path, 48));
    let refblock = get(&disk.path, reftable);
    // Table 1 is the refcount table, 2 a refcount block, 3 the L1 table, 5 is table 6; 9 is shared, and table 10.
    for (index, place) in [
        (1, reftable | copied),
        (2, refblock | copied),
        (3, l1 | copied),
        (5, l2_table(&disk.path, 6) | copied),
        (9, l2_table(&disk.path, 10)),
    ] {
        put(&disk.path, l1 + index * 8, place);
    }
    let cluster_at = |offset: u64| {
        let mut bytes = vec![0; CLUSTER as usize];
        File::open(&disk.path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    let tables = [l1, reftable, refblock, l2_table(&disk.path, 6), l2_table(&disk.path, 10)];
    let before = tables.map(cluster_at);
    let options = slices_alone().access(Access::ReadWrite);
    for index in [ExtentIndex::Off, ExtentIndex::On] {
        let image = disk.open(&options.clone().extent_index(index));
        disk.worker.block_on(async {
            let worker = &disk.worker;
            for table in [1, 2, 3, 5, 6, 9, 10] {
                let guest = table * table_bytes + 3 * CLUSTER;
                for what in CHANGES {
                    let error = change(worker, &image, guest, what).await.expect_err(what);
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "table {table}, {what}: {error}");
                    let named = error.guest_offset().unwrap_or(u64::MAX);
                    assert!((guest..guest + CLUSTER).contains(&named), "table {table}, {what}: {error}");
                }
            }
            // Others are served.
            for table in [0, 4, 7, 15] {
                let bytes = IoBuf::copy_of(&[8; 4096]).into();
                let offset = table * table_bytes + 9 * CLUSTER;
                image.write(worker, offset, bytes, Durability::Volatile).await.0.unwrap();
            }
            image.flush(worker).await.unwrap();
            image.close(worker).await.unwrap();
        });
    }
    for (place, before) in tables.into_iter().zip(before) {
        assert!(cluster_at(place) == before, "what lies at {place} was changed");
    }
}

#[test]
fn entries_that_lead_to_a_table_do_not_have_it_changed() {
    let disk = disk(1 << 30, CLUSTER);
    let copied = 1 << 63;
    let (l1, reftable) = (get(&disk.path, 40), get(&disk.path, 48));
    let refblock = get(&disk.path, reftable);
    let table = l2_table(&disk.path, 0);
    // Clusters of data, one that is zero and keeps its place, and one that may be shared.
    let entries =
        [l1 | copied, reftable | copied, refblock | copied | 1, table | copied, l1 | copied | 1, refblock];
    let cluster_at = |offset: u64| {
        let mut bytes = vec![0; CLUSTER as usize];
        File::open(&disk.path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    for what in CHANGES {
        for (index, entry) in (1..).zip(entries) {
            put(&disk.path, table + index * 8, entry);
        }
        let tables = [l1, reftable];
        let before = tables.map(cluster_at);
        let image = disk.open(&slices_alone().access(Access::ReadWrite));
        disk.worker.block_on(async {
            let worker = &disk.worker;
            for index in 1..=entries.len() as u64 {
                // One that succeeds has made the entry go.
                if let Err(error) = change(worker, &image, index * CLUSTER, what).await {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
                }
            }
            let bytes = IoBuf::copy_of(&[8; 4096]).into();
            image.write(worker, 100 * CLUSTER, bytes, Durability::Volatile).await.0.unwrap();
            image.close(worker).await.unwrap();
        });
        for (place, before) in tables.into_iter().zip(before) {
            assert!(cluster_at(place) == before, "what lies at {place} was changed");
        }
        // The refcounts of the tables are what they were: none was given away.
        for place in [0, l1, reftable, refblock, table] {
            let mut count = [0; 2];
            let at = refblock + place / CLUSTER * 2;
            File::open(&disk.path).unwrap().read_exact_at(&mut count, at).unwrap();
            assert_eq!(u16::from_be_bytes(count), 1, "of what lies at {place}");
        }
    }
}

#[test]
fn the_extent_index_gives_its_memory_back() {
    let disk = disk(4 << 30, CLUSTER);
    let runs = |image: &Image| image.stats().cache_bytes - image.stats().table_bytes;
    let options = OpenOptions::default()
        .format(Some(Format::Qcow2))
        .access(Access::ReadWrite)
        .cache_clean_interval(Some(INTERVAL))
        .cache_size(Some(32 << 20));
    let image = disk.open(&options);
    // Every tenth cluster goes, so that what is left are runs of nine.
    disk.worker.block_on(async {
        for cluster in (0..65536).step_by(10) {
            image.discard(&disk.worker, cluster * CLUSTER, CLUSTER).await.unwrap();
        }
        image.flush(&disk.worker).await.unwrap();
        // The counts of what is given back are slices, too: written, they can go.
        while image.stats().clusters_released < image.stats().clusters_freed {
            disk.worker.sleep(Duration::from_millis(10)).await;
        }
        image.flush(&disk.worker).await.unwrap();
    });
    let (start, offsets) = (Instant::now(), || (1..65536).step_by(10).map(|cluster| cluster * CLUSTER));
    disk.read_all(&image, offsets());
    image.tidy(start + INTERVAL);
    let full = runs(&image);
    assert!(full > 6000 * 48, "{full} bytes");
    // A small budget leaves room for slices.
    let small = 256 << 10;
    assert!(small < full);
    image.set_cache_size(small).unwrap();
    assert!(image.stats().cache_bytes <= small, "{:?}", image.stats());
    disk.read_all(&image, offsets());
    image.set_cache_size(32 << 20).unwrap();
    disk.read_all(&image, offsets());
    image.tidy(start + 2 * INTERVAL);
    image.tidy(start + 3 * INTERVAL);
    assert!(runs(&image) < 10_000, "{} bytes of what nobody used", runs(&image));
    disk.worker.block_on(image.close(&disk.worker)).unwrap();
}

#[test]
fn a_fork_leaves_the_index_to_the_overlay() {
    let disk = disk(4 << 30, CLUSTER);
    let options = OpenOptions::default().format(Some(Format::Qcow2)).access(Access::ReadWrite);
    let image = disk.open(&options);
    disk.read_all(&image, (0..4 << 30).step_by(64 << 20));
    assert!(image.stats().index_bytes > 0, "{:?}", image.stats());
    let path = disk.path.with_file_name("overlay.qcow2");
    let flags = OpenFlags::default().access(Access::ReadWrite).create(Create::New).lock(LockMode::Write);
    let overlay = zebu_engine::storage::File::open(&path, &flags).unwrap();
    let forked = fork(&disk.worker, vec![ForkDisk::new(&image, overlay, &path, &options)]);
    disk.worker.block_on(forked).unwrap();
    assert_eq!(image.current().stats().index_bytes, 0, "of the image that nobody looks up any more");
    disk.read_all(&image, (0..4 << 30).step_by(64 << 20));
    assert!(image.current().stats().index_bytes > 0, "{:?}", image.current().stats());
    disk.worker.block_on(image.close(&disk.worker)).unwrap();
}

/// A chain of images of 4 KiB clusters, in which each holds, filled with its number from 1 on, the clusters that it is
/// given. The path of the top one.
fn chain(dir: &Path, worker: &Worker, size: u64, depth: u64, clusters: impl Fn(u64) -> Vec<u64>) -> PathBuf {
    let mut below = None;
    let mut path = PathBuf::new();
    for level in 0..depth {
        path = dir.join(format!("{level}.qcow2"));
        let create = CreateOptions::default().size(Some(size)).cluster_size(4096).backing(below.take());
        let open = OpenOptions::default().access(Access::ReadWrite);
        worker.block_on(async {
            Image::create(worker, &path, &create).await.unwrap();
            let image = Image::open(worker, &path, &open).await.unwrap();
            for cluster in clusters(level) {
                let data = IoBuf::copy_of(&[level as u8 + 1; 4096]).into();
                image.write(worker, cluster * 4096, data, Durability::Volatile).await.0.unwrap();
            }
            image.close(worker).await.unwrap();
        });
        below = Some((format!("{level}.qcow2"), Format::Qcow2));
    }
    path
}

/// Knowledge about a chain as a whole stays, however many slices of its images' tables had to be looked at for it.
#[test]
fn a_chain_whose_tables_do_not_fit_is_not_asked_twice() {
    let dir = tempfile::tempdir().unwrap();
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let (size, depth, cluster) = (128u64 << 20, 24u64, 4096);
    // A cluster of every slice of each image's tables.
    let of_each = |level| (0..size / cluster / 512).map(|table| table * 512 + level).collect();
    let path = chain(dir.path(), &worker, size, depth, of_each);
    // Room for the merged slices and a few of the others: there are 64 of each image.
    let open = OpenOptions::default().format(Some(Format::Qcow2)).cache_size(Some(600 << 10));
    let image = worker.block_on(Image::open(&worker, &path, &open)).unwrap();
    let read_all = || {
        for step in 0..size / cluster {
            let offset = step * 12_289 % (size / cluster) * cluster;
            let (result, _) = worker.block_on(image.read(&worker, offset, IoBuf::zeroed(512).into()));
            result.unwrap();
        }
        image.stats().cache_loads
    };
    let first = read_all();
    let second = read_all();
    assert_eq!(second, first, "slices were loaded again");
    assert!(image.stats().cache_bytes <= 600 << 10);
}

#[test]
fn long_chains_are_read_with_one_lookup() {
    let dir = tempfile::tempdir().unwrap();
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let (size, depth) = (8u64 << 20, 60u64);
    let in_turn = |level| (level..size / 4096).step_by(depth as usize).collect();
    let path = chain(dir.path(), &worker, size, depth, in_turn);
    let open = OpenOptions::default().access(Access::ReadWrite);
    let image = worker.block_on(Image::open(&worker, &path, &open)).unwrap();
    let check = |clusters: std::ops::Range<u64>| {
        for cluster in clusters {
            let (result, bufs) =
                worker.block_on(image.read(&worker, cluster * 4096, IoBuf::zeroed(4096).into()));
            result.unwrap();
            let mut bytes = [0; 4096];
            bufs.copy_to(0, &mut bytes);
            assert_eq!(bytes, [(cluster % depth) as u8 + 1; 4096], "cluster {cluster}");
        }
    };
    check(0..size / 4096);
    let (loads, hits) = (image.stats().cache_loads, image.stats().cache_hits);
    check(0..size / 4096);
    assert_eq!(image.stats().cache_loads, loads);
    assert_eq!(image.stats().cache_hits - hits, size / 4096, "one lookup a read");
    // A write to the overlay is seen at once, and by itself.
    worker.block_on(async {
        let data = IoBuf::copy_of(&[(7 % depth) as u8 + 1; 4096]).into();
        image.write(&worker, (depth + 7) * 4096, data, Durability::Volatile).await.0.unwrap();
        let data = IoBuf::copy_of(&[200; 4096]).into();
        image.write(&worker, 3 * 4096, data, Durability::Volatile).await.0.unwrap();
        let (result, bufs) = image.read(&worker, 3 * 4096, IoBuf::zeroed(4096).into()).await;
        result.unwrap();
        let mut byte = [0];
        bufs.copy_to(0, &mut byte);
        assert_eq!(byte, [200]);
    });
    check(4..size / 4096);
    assert!(image.stats().cache_bytes <= image.stats().cache_limit);
    worker.block_on(image.close(&worker)).unwrap();
}
