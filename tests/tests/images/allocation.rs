//! The number of requests of a first write into a cluster, and the growth of files that was unsafe once.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zebu_engine::storage::Engine;
use zebu_engine::{CacheMode, ZeroPolicy};
use zebu_tests::growth::Growth;
use zebu_tests::images::{Feature, Shape};
use zebu_tests::mount::Mounted;
use zebu_tests::program::{traced, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::run::Case;
use zebu_tests::scratch::Scratch;

/// Runs a program under strace, and counts its calls by name. io_uring hides them: zebu runs on threads here.
struct Calls(String);

impl Calls {
    fn of(dir: &Path, program: &Path, args: &[String]) -> Self {
        let calls = "trace=fdatasync,fsync,pread64,preadv,pwrite64,pwritev,fallocate,ftruncate,lseek";
        Self(traced(dir, &["-y", "-e", calls], program, args))
    }

    fn count(&self, names: &[&str]) -> usize {
        let is_one = |line: &str| {
            line.split_once(char::is_whitespace)
                .is_some_and(|(_, call)| names.iter().any(|name| call.starts_with(&format!("{name}("))))
        };
        self.0.lines().filter(|line| is_one(line)).count()
    }

    fn syncs(&self) -> usize {
        self.count(&["fdatasync", "fsync"])
    }
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

/// `zebu io` on threads, with O_DIRECT.
fn io(commands: impl Iterator<Item = String>) -> Vec<String> {
    let mut args = words("io -f qcow2 -t none --aio threads disk.qcow2");
    for command in commands {
        args.extend(["-c".to_owned(), command]);
    }
    args
}

#[test]
fn a_first_write_to_each_of_500_tables_and_a_flush_take_four_syncs() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("allocation");
    let dir = scratch.path();
    // A table of 64 KiB maps 512 MiB.
    qemu.create(dir, "disk.qcow2", "qcow2", "", 256 << 30);
    let writes = (0..500).map(|i: u64| format!("write -q -P {} {}M 4k", i % 250 + 1, i * 512));
    let calls = Calls::of(dir, zebu_program(), &io(writes.chain(["flush".to_owned()])));
    assert!(calls.syncs() <= 4, "{} syncs", calls.syncs());
    let checks: Vec<String> =
        (0..500).step_by(83).map(|i: u64| format!("read -P {} {}M 4k", i % 250 + 1, i * 512)).collect();
    qemu.io(dir, "-f qcow2", "disk.qcow2", &checks).ok();
    qemu.check_clean(dir, "disk.qcow2").expect("clean");
}

#[test]
fn a_hundred_pairs_of_discard_and_write_take_six_syncs() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("allocation");
    let dir = scratch.path();
    qemu.create(dir, "disk.qcow2", "qcow2", "", 64 << 20);
    qemu.io(dir, "-f qcow2", "disk.qcow2", &["write -q -P 5 0 16M"]).ok();
    let pairs = (0..100)
        .flat_map(|i: u64| [format!("discard {}k 64k", i * 64), format!("write -q -P 9 {}k 64k", i * 64)]);
    let calls = Calls::of(dir, zebu_program(), &io(pairs));
    assert!(calls.syncs() <= 6, "{} syncs", calls.syncs());
    qemu.io(dir, "-f qcow2", "disk.qcow2", &["read -P 9 0 6400k", "read -P 5 6400k 9984k"]).ok();
    qemu.check_clean(dir, "disk.qcow2").expect("clean");
}

#[test]
fn a_cluster_allocated_by_a_small_write_takes_one_request() {
    const CLUSTERS: usize = 2000;
    let Some(qemu) = Qemu::find() else { return };
    for cluster in ["64k", "1M"] {
        let scratch = Scratch::new("allocation");
        let dir = scratch.path();
        qemu.create(dir, "disk.qcow2", "qcow2", &format!("cluster_size={cluster}"), 4 << 30);
        let line = format!(
            "bench -w -f qcow2 -t none --aio threads -d 32 -c {CLUSTERS} -s 4096 -S {cluster} disk.qcow2"
        );
        let calls = Calls::of(dir, zebu_program(), &words(&line));
        let (writes, reads) = (calls.count(&["pwrite64", "pwritev"]), calls.count(&["pread64", "preadv"]));
        // Metadata: a table each 2 GiB or more, a few refcount blocks, the header.
        assert!((CLUSTERS..CLUSTERS + 60).contains(&writes), "{cluster}: {writes} writes");
        assert!(reads < 30, "{cluster}: {reads} reads");
        assert!(
            calls.count(&["fallocate"]) < 10 && calls.count(&["ftruncate"]) < 200,
            "{cluster}: {}",
            calls.0
        );
        qemu.check_clean(dir, "disk.qcow2").expect("clean");
    }
}

/// On ext4 the windows of streams are set aside first; what small writes leave empty is not, and what a stream did not
/// use goes back.
#[test]
fn on_ext4_only_streams_that_fill_their_clusters_set_room_aside() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(mounted) = Mounted::on_loop("mkfs.ext4", 600 << 20) else { return };
    let dir = &mounted.path();
    let taken = || std::fs::metadata(dir.join("disk.qcow2")).expect("it is there").blocks() * 512;

    qemu.create(dir, "disk.qcow2", "qcow2", "cluster_size=1M", 1 << 30);
    let sparse = "bench -w -f qcow2 -t none --aio threads -d 32 -c 400 -s 4096 -S 1M disk.qcow2";
    let calls = Calls::of(dir, zebu_program(), &words(sparse));
    assert!(calls.count(&["fallocate"]) < 10, "{}", calls.0);
    assert!(taken() < 16 << 20, "{} bytes for 400 times 4 KiB", taken());

    qemu.create(dir, "disk.qcow2", "qcow2", "", 1 << 30);
    let offset = |i: u64| ((i % 2 * 512) << 10) + i / 2 * 64;
    let writes = (0..1000u64).map(|i| format!("write -q -P {} {}k 64k", i % 250 + 1, offset(i)));
    let calls = Calls::of(dir, zebu_program(), &io(writes));
    let set_aside = calls.count(&["fallocate"]);
    assert!((5..60).contains(&set_aside), "{}", calls.0);
    // 1000 clusters, and a few for tables.
    assert!(taken() < 1016 << 16, "{} bytes for 1000 times 64 KiB", taken());
    qemu.check_clean(dir, "disk.qcow2").expect("clean");
    let checks: Vec<String> =
        (0..1000u64).map(|i| format!("read -q -P {} {}k 64k", i % 250 + 1, offset(i))).collect();
    qemu.io(dir, "-f qcow2", "disk.qcow2", &checks).ok();
}

/// tmpfs zeroes no range in place, ext2 sets nothing aside: what a file system refuses is asked once, and then done by
/// other means.
#[test]
fn a_mode_of_fallocate_that_is_refused_is_not_tried_again() {
    let Some(qemu) = Qemu::find() else { return };
    for (mounted, refused) in [
        (Mounted::tmpfs(256 << 20), &["FALLOC_FL_ZERO_RANGE"][..]),
        (Mounted::on_loop("mkfs.ext2", 256 << 20), &["FALLOC_FL_ZERO_RANGE", "0,"]),
    ] {
        let Some(mounted) = mounted else { return };
        let dir = &mounted.path();
        qemu.create(dir, "disk.qcow2", "qcow2", "", 128 << 20);
        // A stream for which room could be set aside; zero clusters that keep their places, which small writes have to
        // make zero around themselves; discards.
        let stream = (0..512).map(|i: u64| format!("write -q -P 5 {}k 64k", i * 64));
        let zeroes = ["write -q -z 0 16M".to_owned()].into_iter();
        let small = (0..256).map(|i: u64| format!("write -q -P 9 {}k 4k", i * 64 + 8));
        let discards = (0..64).map(|i: u64| format!("discard {}k 64k", (16 << 10) + i * 128));
        let mut args = io(stream.chain(zeroes).chain(small).chain(discards).chain(["flush".to_owned()]));
        args.splice(1..1, words("--zero-policy fallocate"));
        let calls = Calls::of(dir, zebu_program(), &args);
        let refusals: Vec<&str> = calls.0.lines().filter(|call| call.contains("EOPNOTSUPP")).collect();
        for mode in refused {
            // On `fallocate(9</path>, MODE, offset, len) = -1 ...`.
            let of_mode = |line: &&&str| line.split(">, ").nth(1).is_some_and(|rest| rest.starts_with(mode));
            assert_eq!(refusals.iter().filter(of_mode).count(), 1, "{mode}: {}", refusals.join("\n"));
        }
        let reads = (0..256).flat_map(|i: u64| {
            let at = i * 64;
            [
                format!("read -q -P 0 {at}k 8k"),
                format!("read -q -P 9 {}k 4k", at + 8),
                format!("read -q -P 0 {}k 52k", at + 12),
            ]
        });
        let kept = (0..64).flat_map(|i: u64| {
            let at = (16 << 10) + i * 128;
            [format!("read -q -P 0 {at}k 64k"), format!("read -q -P 5 {}k 64k", at + 64)]
        });
        qemu.io(dir, "-f qcow2", "disk.qcow2", &reads.chain(kept).collect::<Vec<_>>()).ok();
        qemu.check_clean(dir, "disk.qcow2").expect("clean");
    }
}

/// A file system may walk over all extents of a file to say where its next hole is.
#[test]
fn first_writes_in_an_overlay_do_not_ask_where_the_base_has_holes() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("allocation");
    let dir = scratch.path();
    qemu.create(dir, "base.qcow2", "qcow2", "", 16 << 20);
    qemu.io(dir, "-f qcow2", "base.qcow2", &["write -q -P 5 0 16M"]).ok();
    for options in ["cluster_size=64k", "cluster_size=128k,extended_l2=on"] {
        let create = format!("create -q -f qcow2 -o {options} -b base.qcow2 -F qcow2 disk.qcow2");
        qemu.img_line(dir, &create).ok();
        let writes = (0..100).map(|i: u64| format!("write -q -P 9 {}k 4k", i * 128));
        let calls = Calls::of(dir, zebu_program(), &io(writes));
        let asked = calls.0.lines().filter(|call| call.contains("lseek") && call.contains("base.qcow2"));
        assert!(asked.clone().count() < 10, "{options}: {}", asked.collect::<Vec<_>>().join("\n"));
        let checks = (0..100).flat_map(|i: u64| {
            [format!("read -q -P 9 {}k 4k", i * 128), format!("read -q -P 5 {}k 124k", i * 128 + 4)]
        });
        qemu.io(dir, "-f qcow2", "disk.qcow2", &checks.collect::<Vec<_>>()).ok();
    }
}

/// In 2019 a write past the end of a file on XFS lost data to an fallocate past the end that ran beside it. Here the
/// file grows before anything is written to the new part; builds with assertions check that of every request.
#[test]
fn growing_on_xfs_under_many_writes_and_zeroes_loses_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 16 << 30) else { return };
    let dir = xfs.path();
    for (cluster, steps) in [(64 << 10, 300), (1 << 20, 128)] {
        for engine in [Engine::IoUring, Engine::Threads] {
            // Without a hint XFS allocates by the block, as it did then.
            for (zero_policy, hint) in [(ZeroPolicy::Auto, None), (ZeroPolicy::Fallocate, Some(0))] {
                let growth = Growth { cluster, engine, zero_policy, extent_size_hint: hint, steps };
                let promises =
                    growth.run(&dir.join("disk.qcow2")).unwrap_or_else(|e| panic!("{growth}: {e}"));
                assert!(promises.data_bytes() > steps * (64 << 10), "{growth}: too little was written");
                xfs.mount_again();
                growth
                    .verify(&qemu, &dir, "disk.qcow2", &promises)
                    .unwrap_or_else(|what| panic!("{growth}: {what}"));
                std::fs::remove_file(dir.join("disk.qcow2")).expect("the file system is writable");
            }
        }
    }
}

#[test]
fn what_growing_loses_is_found() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("allocation");
    let dir = scratch.path();
    let growth = Growth {
        cluster: 64 << 10,
        engine: Engine::IoUring,
        zero_policy: ZeroPolicy::Auto,
        extent_size_hint: None,
        steps: 100,
    };
    let promises = growth.run(&dir.join("disk.qcow2")).expect("the requests succeed");
    growth.verify(&qemu, dir, "disk.qcow2", &promises).expect("nothing is lost");
    // A block that was written, one that never was, and a write that reads as zero: what was lost then.
    let (written, untouched) = (512_u64 << 20, 513_u64 << 20 | 0xc000);
    for command in [
        format!("write -q -P 0xa5 {written} 4k"),
        format!("write -q -P 0xa5 {untouched} 4k"),
        format!("write -q -z {written} 4k"),
    ] {
        std::fs::copy(dir.join("disk.qcow2"), dir.join("hurt.qcow2")).expect("scratch is writable");
        qemu.io(dir, "-f qcow2", "hurt.qcow2", &[command.as_str()]).ok();
        let found = growth.verify(&qemu, dir, "hurt.qcow2", &promises).expect_err(&command);
        assert!(found.contains("Content mismatch"), "{command}: {found}");
        let found = growth.verify_by_zebu(&dir.join("hurt.qcow2"), &promises).expect_err(&command);
        assert!(found.contains("acknowledged"), "{command}: {found}");
    }
}

#[test]
fn random_requests_on_xfs_do_what_they_should() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 2 << 30) else { return };
    for (seed, cluster, engine) in [
        (1, 64 << 10, Engine::IoUring),
        (2, 64 << 10, Engine::Threads),
        (3, 1 << 20, Engine::IoUring),
        (4, 1 << 20, Engine::Threads),
    ] {
        let case = Case {
            shape: Shape { version: 3, cluster, refcount_bits: 16, feature: Feature::Plain },
            engine,
            cache: CacheMode::None,
            seed,
            ops: 1500,
            depth: 48,
            queues: 2,
            cache_size: None,
        };
        let dir = xfs.path().join(format!("case-{seed}"));
        std::fs::create_dir(&dir).expect("the file system is writable");
        case.run_in(&qemu, &dir).unwrap_or_else(|what| panic!("{case}: {what}"));
        std::fs::remove_dir_all(&dir).expect("the file system is writable");
    }
}

/// Where a sequential stream breaks off on the host, and goes on elsewhere.
fn breaks(dir: &Path, cluster: u64, disk: u64, streams: u64) -> usize {
    let map = zebu(dir, ["map", "-f", "qcow2", "--output=json", "disk.qcow2"]).ok();
    let extents: serde_json::Value = serde_json::from_str(&map.stdout).expect("JSON");
    let mut places: Vec<Option<u64>> = vec![None; (disk / cluster) as usize];
    for extent in extents.as_array().expect("an array") {
        let number = |key: &str| extent[key].as_u64();
        let (start, length) = (number("start").expect("a number"), number("length").expect("a number"));
        if extent["data"] == true {
            for at in (0..length).step_by(cluster as usize) {
                places[((start + at) / cluster) as usize] = number("offset").map(|offset| offset + at);
            }
        }
    }
    let holes = places.iter().filter(|place| place.is_none()).count();
    assert!(holes < 64, "{holes} clusters were not written");
    let per_stream = (disk / streams / cluster) as usize;
    let of_stream = |stream: &[Option<u64>]| {
        let written: Vec<u64> = stream.iter().copied().flatten().collect();
        written.windows(2).filter(|pair| pair[1] != pair[0] + cluster).count()
    };
    places.chunks(per_stream).map(of_stream).sum()
}

#[test]
fn sequential_streams_that_are_written_in_turn_lie_in_a_row_each() {
    const DISK: u64 = 512 << 20;
    const CLUSTER: u64 = 64 << 10;
    let Some(qemu) = Qemu::find() else { return };
    for streams in [2u64, 4, 8] {
        for depth in [1, 32] {
            // The streams begin a `streams`th of a block behind each other: on a cluster, where blocks are larger.
            for block in [32 << 10, 64 << 10, streams * CLUSTER] {
                let scratch = Scratch::new("allocation");
                let dir = scratch.path();
                qemu.create(dir, "disk.qcow2", "qcow2", "", DISK);
                // Modulo the disk, each request is in the next stream; after one of each, a block further.
                let (step, count) = (DISK / streams + block / streams, DISK / block);
                let line = format!(
                    "bench -w -f qcow2 -t none -d {depth} -c {count} -s {block} -S {step} disk.qcow2"
                );
                zebu(dir, words(&line)).ok();
                let breaks = breaks(dir, CLUSTER, DISK, streams);
                // Windows of 1, 2, 4 .. 256 clusters, as many of these as it takes, and what came before it was a stream.
                let windows = (9 + DISK / streams / (16 << 20) + 4) * streams;
                // Beside others, requests overtake each other where a window ends; on a busy machine, many of them.
                let most = if depth > 1 { DISK / CLUSTER / 4 } else { windows };
                assert!(breaks as u64 <= most, "{streams} of {block} bytes, depth {depth}: {breaks}");
                qemu.check_clean(dir, "disk.qcow2").expect("clean");
            }
        }
    }
}

/// Bytes that each write call on the image moved.
fn write_sizes(calls: &Calls) -> Vec<u64> {
    let is_write = |line: &&str| line.contains("pwrite64(") || line.contains("pwritev(");
    calls
        .0
        .lines()
        .filter(is_write)
        .filter_map(|line| line.rsplit("= ").next()?.trim().parse().ok())
        .collect()
}

#[test]
fn a_copy_from_the_base_and_a_small_write_are_one_request_and_holes_are_not_copied() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("allocation");
    let dir = scratch.path();
    // Data in the first half; the other half is a hole.
    qemu.create(dir, "base.raw", "raw", "", 16 << 20);
    qemu.io(dir, "-f raw", "base.raw", &["write -q -P 5 0 8M"]).ok();
    for (options, copied) in [("cluster_size=64k", 65536), ("cluster_size=64k,extended_l2=on", 2048)] {
        qemu.img_line(dir, &format!("create -q -f qcow2 -o {options} -b base.raw -F raw disk.qcow2")).ok();
        for (from, expected) in [(0, copied), (8 << 10, 1024)] {
            let writes = (0..100).map(|i: u64| format!("write -q -P 9 {}k 1k", from + i * 64));
            let mut args = io(writes);
            // Without O_DIRECT, which would make whole blocks of what is not copied.
            args[4] = "writeback".into();
            let calls = Calls::of(dir, zebu_program(), &args);
            let sizes = write_sizes(&calls);
            let of_data = sizes.iter().filter(|size| **size == expected).count();
            assert_eq!(of_data, 100, "{options}, from {from}k: {sizes:?}");
            assert!(sizes.len() < 120, "{options}, from {from}k: {} writes", sizes.len());
        }
        let reads = (0..100).flat_map(|i: u64| {
            let (data, hole) = (i * 64, (8 << 10) + i * 64);
            [
                format!("read -q -P 9 {data}k 1k"),
                format!("read -q -P 5 {}k 63k", data + 1),
                format!("read -q -P 9 {hole}k 1k"),
                format!("read -q -P 0 {}k 63k", hole + 1),
            ]
        });
        qemu.io(dir, "-f qcow2", "disk.qcow2", &reads.collect::<Vec<_>>()).ok();
        qemu.check_clean(dir, "disk.qcow2").expect("clean");
    }
}

#[test]
fn discarded_space_needs_no_zeroes_around_small_writes() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("allocation");
    let dir = scratch.path();
    qemu.create(dir, "disk.qcow2", "qcow2", "", 64 << 20);
    qemu.io(dir, "-f qcow2", "disk.qcow2", &["write -q -P 5 0 16M"]).ok();
    let len = |name: &str| std::fs::metadata(scratch.file(name)).expect("there").len();
    let before = len("disk.qcow2");
    let discards = ["discard 0 16M".to_owned(), "flush".to_owned()];
    let writes = (0..100).map(|i: u64| format!("write -q -P 9 {}k 4k", (32 << 10) + i * 64));
    let calls = Calls::of(dir, zebu_program(), &io(discards.into_iter().chain(writes)));
    let sizes = write_sizes(&calls);
    assert!(sizes.iter().filter(|size| **size == 4096).count() >= 100, "{sizes:?}");
    // Tables and refcount blocks apart.
    assert!(sizes.iter().filter(|size| **size > 4096).count() < 10, "{sizes:?}");
    // What was discarded comes back a moment after the flush; 6 MiB are written.
    assert!(len("disk.qcow2") <= before + (2 << 20), "{} from {before}: it grew", len("disk.qcow2"));
    let reads = (0..100).flat_map(|i: u64| {
        let at = (32 << 10) + i * 64;
        [format!("read -q -P 9 {at}k 4k"), format!("read -q -P 0 {}k 60k", at + 4)]
    });
    qemu.io(dir, "-f qcow2", "disk.qcow2", &reads.collect::<Vec<_>>()).ok();
    qemu.check_clean(dir, "disk.qcow2").expect("clean");
}
