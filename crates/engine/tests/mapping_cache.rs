//! The mapping cache as its users see it: the budget, what is counted, what a damaged table does.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zebu::storage::{IoBuf, Worker, WorkerConfig};
use zebu::{
    Access, CreateOptions, Durability, ErrorKind, ExtentIndex, Format, Image, OpenOptions, Preallocation,
};

const CLUSTER: u64 = 65536;

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
    let options = CreateOptions {
        size: Some(size),
        cluster_size,
        preallocation: Preallocation::Metadata,
        ..CreateOptions::default()
    };
    worker.block_on(Image::create(&worker, &path, &options)).unwrap();
    Disk { _dir: dir, path, worker }
}

fn slices_alone() -> OpenOptions {
    OpenOptions { format: Some(Format::Qcow2), extent_index: ExtentIndex::Off, ..OpenOptions::default() }
}

impl Disk {
    fn open(&self, options: &OpenOptions) -> Image {
        self.worker.block_on(Image::open(&self.worker, &self.path, options)).unwrap()
    }

    /// Reads 512 bytes at each offset, all at once.
    fn read_all(&self, image: &Image, offsets: impl Iterator<Item = u64>) {
        let tasks: Vec<_> = offsets
            .map(|offset| {
                let (image, worker) = (image.clone(), self.worker.clone());
                self.worker.spawn(async move {
                    let (result, _) = image.read(&worker, offset, IoBuf::zeroed(512).into()).await;
                    result.unwrap();
                    let stats = image.stats();
                    assert!(stats.cache_bytes <= stats.cache_limit, "{stats:?}");
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
        let image = disk.open(&OpenOptions { slice_size: Some(slice_size), ..slices_alone() });
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
    let image = disk.open(&OpenOptions { cache_size: Some(full), ..slices_alone() });
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
fn too_small_a_budget_is_refused_with_the_least() {
    let disk = disk(1 << 30, CLUSTER);
    let image = disk.open(&slices_alone());
    let least = image.min_cache_size();
    for bytes in [0, 1, least - 1] {
        let error = image.set_cache_size(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(&least.to_string()), "{error}");
        let options = OpenOptions { cache_size: Some(bytes), ..slices_alone() };
        let opened = disk.worker.block_on(Image::open(&disk.worker, &disk.path, &options));
        assert!(opened.unwrap_err().to_string().contains(&least.to_string()));
    }
    image.set_cache_size(least).unwrap();
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
    let options = OpenOptions { cache_clean_interval: Some(Duration::from_secs(60)), ..slices_alone() };
    let image = disk.open(&options);
    disk.read_all(&image, (0..64).map(|i| i * 512 * CLUSTER));
    let (full, start) = (image.stats().cache_bytes, Instant::now());
    image.tidy(start + Duration::from_secs(30));
    image.tidy(start + Duration::from_secs(61));
    assert_eq!(image.stats().cache_bytes, full, "used since the image was opened");
    disk.read_all(&image, std::iter::once(0));
    image.tidy(start + Duration::from_secs(130));
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
    let options = OpenOptions { access: Access::ReadWrite, ..OpenOptions::default() };
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
    let options = OpenOptions { access: Access::ReadWrite, ..OpenOptions::default() };
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
        let options = CreateOptions { size: Some(tib << 40), ..CreateOptions::default() };
        worker.block_on(Image::create(&worker, &path, &options)).unwrap();
        let open =
            OpenOptions { format: Some(Format::Qcow2), access: Access::ReadWrite, ..OpenOptions::default() };
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
        let image = disk.open(&OpenOptions { extent_index: index, ..slices_alone() });
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

#[test]
fn a_slice_that_could_not_be_loaded_is_loaded_when_it_can_be() {
    let disk = disk(1 << 30, CLUSTER);
    // The file ends before its last table.
    let end = l2_table(&disk.path, 1) / CLUSTER * CLUSTER;
    let file = File::options().write(true).open(&disk.path).unwrap();
    let whole = std::fs::read(&disk.path).unwrap_or_default();
    let image = disk.open(&slices_alone());
    // Cut behind the back of the open image, as a network file system may lose and find its server.
    file.set_len(end).unwrap();
    let read = |offset: u64| {
        let (result, _) = disk.worker.block_on(image.read(&disk.worker, offset, IoBuf::zeroed(512).into()));
        result
    };
    let first = read(600 << 20);
    file.write_all_at(&whole[end as usize..], end).unwrap();
    if first.is_err() {
        read(600 << 20).unwrap();
    }
    read(0).unwrap();
}

#[test]
fn long_chains_are_read_with_one_lookup() {
    let dir = tempfile::tempdir().unwrap();
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let (size, depth) = (8u64 << 20, 60u64);
    let mut below = None;
    let mut path = PathBuf::new();
    for level in 0..depth {
        path = dir.path().join(format!("{level}.qcow2"));
        let create = CreateOptions {
            size: Some(size),
            cluster_size: 4096,
            backing: below.take(),
            ..CreateOptions::default()
        };
        let open = OpenOptions { access: Access::ReadWrite, ..OpenOptions::default() };
        worker.block_on(async {
            Image::create(&worker, &path, &create).await.unwrap();
            let image = Image::open(&worker, &path, &open).await.unwrap();
            for cluster in (level..size / 4096).step_by(depth as usize) {
                let data = IoBuf::copy_of(&[level as u8 + 1; 4096]).into();
                image.write(&worker, cluster * 4096, data, Durability::Volatile).await.0.unwrap();
            }
            image.close(&worker).await.unwrap();
        });
        below = Some((format!("{level}.qcow2"), Format::Qcow2));
    }
    let open = OpenOptions { access: Access::ReadWrite, ..OpenOptions::default() };
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
