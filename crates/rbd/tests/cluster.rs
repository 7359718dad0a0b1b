//! Images of a real cluster, through the library. `cargo xtask ceph` starts one and runs these.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use zebu_rbd::{RbdDisk, RbdName, RbdOptions};
use zebu_storage::{Access, File, IoBuf, OpenFlags, Storage, Worker, WorkerConfig};

/// Bytes of the image of the random operations: several objects, and a part of one.
const LEN: usize = (18 << 20) + 12345;

fn dir() -> PathBuf {
    std::env::var_os("ZEBU_CEPH")
        .map(PathBuf::from)
        .expect("no cluster (ZEBU_CEPH): `cargo xtask ceph` starts one")
}

fn name(image: &str) -> RbdName {
    let mut name = RbdName::new("disks", image);
    name.conf = Some(dir().join("ceph.conf").display().to_string());
    name
}

fn rbd(words: &[&str]) -> String {
    let out = Command::new("rbd").arg("--conf").arg(dir().join("ceph.conf")).args(words).output().unwrap();
    assert!(out.status.success(), "rbd {words:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The image as `rbd export` reads it.
fn exported(image: &str) -> Vec<u8> {
    let conf = dir().join("ceph.conf");
    let place = format!("disks/{image}");
    let out = Command::new("rbd")
        .arg("--conf")
        .arg(conf)
        .args(["export", "--no-progress", &place, "-"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    out.stdout
}

fn open(disk: RbdDisk) -> (Arc<RbdDisk>, File) {
    let disk = Arc::new(disk);
    let shown = disk.name().to_string();
    let flags = OpenFlags::default().access(disk.access());
    let file = File::from_storage(Arc::clone(&disk) as Arc<dyn Storage>, &shown, &flags).unwrap();
    (disk, file)
}

/// Numbers that a seed decides.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn random_requests_leave_what_a_model_has() {
    for (seed, features) in [(1, "layering"), (2, "layering,exclusive-lock,object-map,fast-diff")] {
        let image = format!("random-{seed}");
        let size = format!("{LEN}B");
        rbd(&["create", &format!("disks/{image}"), "--size", &size, "--image-feature", features]);
        let (disk, file) =
            open(RbdDisk::open(name(&image), Access::ReadWrite, &RbdOptions::default()).unwrap());
        assert_eq!(disk.len(), LEN as u64);
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        let mut model = vec![0u8; LEN];
        let mut random = Random(seed);
        for round in 0..150 {
            let offset = random.below(LEN as u64);
            let most = [1000, 100_000, 6 << 20][random.below(3) as usize];
            let len = (1 + random.below(most)).min(LEN as u64 - offset);
            let range = offset as usize..(offset + len) as usize;
            worker.block_on(async {
                match random.below(5) {
                    0 => {
                        let byte = 1 + random.below(255) as u8;
                        // In two parts.
                        let mut bufs: zebu_storage::IoBufs =
                            IoBuf::copy_of(&vec![byte; len as usize / 2]).into();
                        bufs.push(IoBuf::copy_of(&vec![byte; len as usize - len as usize / 2]));
                        worker.write(&file, offset, bufs).await.0.unwrap();
                        model[range].fill(byte);
                    }
                    1 => {
                        worker.punch_hole(&file, offset, len).await.unwrap();
                        model[range].fill(0);
                    }
                    2 => {
                        worker.zero_range(&file, offset, len).await.unwrap();
                        model[range].fill(0);
                    }
                    3 => worker.flush(&file).await.unwrap(),
                    _ => {
                        let (result, bufs) =
                            worker.read(&file, offset, IoBuf::zeroed(len as usize).into()).await;
                        result.unwrap();
                        let mut got = vec![0; len as usize];
                        bufs.copy_to(0, &mut got);
                        assert!(got == model[range], "round {round} of {seed}: {offset} {len}");
                    }
                }
            });
            if round % 10 == 9 {
                no_hole_has_data(&worker, &file, &model);
            }
        }
        assert!(disk.given_up().is_none(), "{:?}", disk.given_up());
        let stats = disk.stats();
        assert!(stats.requests > 50 && stats.written_bytes > 0 && stats.read_bytes > 0, "{stats:?}");
        drop((file, worker, disk));
        assert!(exported(&image) == model, "{seed}");
        rbd(&["rm", "--no-progress", &format!("disks/{image}")]);
    }
}

/// The extents cover the disk, and what counts as a hole reads as zero.
fn no_hole_has_data(worker: &Worker, file: &File, model: &[u8]) {
    let mut offset = 0;
    while offset < model.len() as u64 {
        let extent = worker.block_on(worker.extent_at(file, offset)).unwrap();
        let end = (offset + extent.len).min(model.len() as u64);
        assert!(end > offset);
        if extent.hole {
            let range = offset as usize..end as usize;
            assert!(model[range].iter().all(|byte| *byte == 0), "{offset}..{end}");
        }
        offset = end;
    }
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn many_requests_are_under_way_at_once_and_an_image_grows() {
    let image = "grown";
    let (disk, file) = open(RbdDisk::create(name(image), 0, &RbdOptions::default()).unwrap());
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let end = 199 * 65536 + 4096;
    worker.block_on(async {
        // It grows by a write, which leads to more than was written.
        worker.write(&file, 5 << 20, IoBuf::copy_of(&[7; 3]).into()).await.0.unwrap();
        worker.write(&file, end as u64 - 1, IoBuf::copy_of(&[8; 1]).into()).await.0.unwrap();
    });
    let before = threads();
    let writes: Vec<_> = (0..200u64)
        .map(|index| {
            let (on, file) = (worker.clone(), file.clone());
            worker.spawn(async move {
                on.write(&file, index * 65536, IoBuf::copy_of(&[index as u8; 4096]).into()).await.0
            })
        })
        .collect();
    worker.block_on(async {
        for write in writes {
            write.await.unwrap();
        }
    });
    assert!(threads() <= before + 8, "{} threads, {before} before", threads());
    drop((file, worker, disk));
    let content = exported(image);
    assert_eq!(content.len(), end, "cut to what was written");
    assert_eq!((&content[5 << 20..][..4096], content[end - 1]), (&[80; 4096][..], 199));
    // It is there now, so it is not made again.
    let again = RbdDisk::create(name(image), 0, &RbdOptions::default()).err().unwrap();
    assert_eq!(again.errno(), libc::EEXIST);
    assert!(again.reason().contains("rbd rm disks/grown"), "{again}");
    rbd(&["rm", "--no-progress", "disks/grown"]);
}
