//! What a first write into a cluster costs in requests, and that growing the file is safe where it once was not.

use std::path::Path;
use std::process::Command;
use zebu::CacheMode;
use zebu::storage::Engine;
use zebu_tests::images::{Feature, Shape};
use zebu_tests::mount::Mounted;
use zebu_tests::program::{find, finish, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::run::Case;
use zebu_tests::scratch::Scratch;

/// Runs a program under strace, and counts its calls by name. io_uring hides them: zebu runs on threads here.
struct Calls(String);

impl Calls {
    fn of(dir: &Path, program: &Path, args: &[String]) -> Self {
        let strace = find("strace").expect("strace is missing: `cargo xtask setup` installs it");
        let mut command = Command::new(strace);
        let calls = "trace=fdatasync,fsync,pread64,preadv,pwrite64,pwritev,fallocate,ftruncate,lseek";
        command.args(["-f", "-qq", "-o", "trace", "-e", calls]);
        command.arg(program).args(args).current_dir(dir);
        finish(command).ok();
        Self(std::fs::read_to_string(dir.join("trace")).expect("strace wrote it"))
    }

    fn count(&self, names: &[&str]) -> usize {
        let is_one = |line: &str| {
            line.split_once(char::is_whitespace).is_some_and(|(_, call)| {
                names.iter().any(|name| call.trim_start().starts_with(&format!("{name}(")))
            })
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
        assert!(calls.count(&["lseek"]) < 10, "{options}: {} calls of lseek", calls.count(&["lseek"]));
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
