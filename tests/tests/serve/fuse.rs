//! An image as a file: used by ordinary programs, and by a file system on a loop device on top.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{find, finish, is_root, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const IMAGE: &str = "disk.qcow2";
const FILE: &str = "disk.raw";
const MIB: u64 = 1 << 20;

/// Whether file systems can be mounted here; says so if not.
fn can_mount() -> bool {
    let can = is_root() && OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
    if !can {
        eprintln!("skipped: mounting needs root and /dev/fuse");
    }
    can
}

fn serve(dir: &Path, options: &str) -> Server {
    Server::start(dir, &format!("--fuse {FILE} {options} -f qcow2 {IMAGE}"))
}

fn is_mounted(path: &Path) -> bool {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(&path.display().to_string()))
}

fn run(dir: &Path, line: &str) -> String {
    let mut words = line.split_whitespace();
    let program = words.next().expect("a program");
    let program = find(program).unwrap_or_else(|| panic!("{program} is missing"));
    run_in(dir, &program, words).ok().stdout
}

#[test]
fn ordinary_programs_use_the_file() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_mount() {
        return;
    }
    for options in ["-t none --queues 2", "--aio threads"] {
        let scratch = Scratch::new("fuse");
        let dir = scratch.path();
        qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
        let server = serve(dir, options);
        let path = dir.join(FILE);
        assert!(is_mounted(&path));
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 64 * MIB);
        // A model of the disk beside it.
        let mut model = vec![0; 64 << 20];
        let mut random = Random::new(3);
        for _ in 0..200 {
            let len = random.between(1, 300_000);
            let at = random.below(64 * MIB - len);
            let range = at as usize..(at + len) as usize;
            match random.below(4) {
                0 | 1 => {
                    random.fill(&mut model[range.clone()]);
                    file.write_all_at(&model[range], at).unwrap();
                }
                2 => {
                    let mode = *random.pick(&["-p", "-z"]);
                    run(dir, &format!("fallocate {mode} -o {at} -l {len} {FILE}"));
                    model[range].fill(0);
                }
                _ => {
                    let mut read = vec![1; len as usize];
                    file.read_exact_at(&mut read, at).unwrap();
                    assert!(read == model[range], "{len} bytes at {at}");
                }
            }
        }
        file.sync_all().unwrap();
        let mut end = [0; 10];
        assert_eq!(file.read_at(&mut end, 64 * MIB - 3).unwrap(), 3, "the end of the file");
        assert!(file.write_at(&end, 64 * MIB).is_err());
        assert!(file.set_len(MIB).is_err() && file.set_len(128 * MIB).is_err());
        // cp finds the holes.
        run(dir, &format!("fallocate -p -o 0 -l {} {FILE}", 32 * MIB));
        model[..32 << 20].fill(0);
        run(dir, &format!("cp --sparse=auto {FILE} copy.raw"));
        assert!(fs::read(dir.join("copy.raw")).unwrap() == model, "{options}");
        assert!(fs::metadata(dir.join("copy.raw")).unwrap().blocks() * 512 <= 33 * MIB);
        drop(file);
        server.stop();
        assert!(!is_mounted(&path) && !path.exists(), "it was not there before");
        fs::write(dir.join("model.raw"), &model).unwrap();
        qemu.same_content(dir, "model.raw", IMAGE).unwrap();
        qemu.check_clean(dir, IMAGE).unwrap();
    }
}

#[test]
fn a_file_system_on_a_loop_device_on_top() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("fuse");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 256 * MIB);
    let server = serve(dir, "");
    run(dir, &format!("mkfs.ext4 -q {FILE}"));
    fs::create_dir(dir.join("mnt")).unwrap();
    let mut mount = Command::new("mount");
    let mounted = finish({
        mount.args(["-o", "loop,discard"]).args([dir.join(FILE), dir.join("mnt")]);
        mount
    });
    if mounted.code != Some(0) {
        eprintln!("skipped: no loop device can be mounted here: {}", mounted.stderr);
        server.stop();
        return;
    }
    let content: Vec<u8> = (0..5_000_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(dir.join("mnt/file"), &content).unwrap();
    run(dir, "umount mnt");
    run(dir, &format!("fsck.ext4 -f -n {FILE}"));
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
    // What was written is there for the next one.
    let server = serve(dir, "--read-only");
    let mut mount = Command::new("mount");
    mount.args(["-o", "loop,ro,noload"]).args([dir.join(FILE), dir.join("mnt")]);
    finish(mount).ok();
    let same = fs::read(dir.join("mnt/file")).unwrap() == content;
    run(dir, "umount mnt");
    assert!(same);
    assert!(OpenOptions::new().write(true).open(dir.join(FILE)).is_err(), "read-only");
    server.stop();
}

#[test]
fn a_killed_server_leaves_no_mount_behind() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("fuse");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
    fs::write(dir.join(FILE), "kept").unwrap();
    let server = serve(dir, "");
    assert_eq!(fs::metadata(dir.join(FILE)).unwrap().len(), MIB);
    server.kill();
    wait_until("it is unmounted", || fs::read(dir.join(FILE)).is_ok_and(|content| content == b"kept"));
}

/// A service manager tells all processes of a service to end, at once; and a file may be in use then.
#[test]
fn a_server_in_the_sandbox_is_unmounted_by_a_process_that_only_its_end_ends() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("fuse");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
    let server = serve(dir, "");
    let path = dir.join(FILE);
    let user = fs::File::open(&path).unwrap();
    let filters = server.system_call_filters();
    assert!(filters.len() > 1 && filters.iter().all(|filter| filter == "2"), "{filters:?}");
    let children = server.children();
    assert!(!children.is_empty());
    let pids = children.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    run(dir, &format!("kill -TERM {pids}"));
    wait_until("the signals have come", || !children.iter().any(|pid| awaits(*pid, libc::SIGTERM)));
    assert!(is_mounted(&path), "the server goes on");
    let said = server.stop_with_messages();
    assert!(said.contains("in use: unmounted all the same"), "{said}");
    assert!(!is_mounted(&path) && !path.exists());
    let mut byte = [0];
    assert!(user.read_at(&mut byte, 0).is_err());
}

/// Whether a signal has come to a process that lives and does not block it, and was not taken yet (proc_pid_status(5)). A zombie keeps
/// what came too late.
fn awaits(pid: u32, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let is_in = |name: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (signal - 1) != 0
    };
    let is_zombie = status.lines().any(|line| line.starts_with("State:") && line.contains('Z'));
    !is_zombie && is_in("ShdPnd:") && !is_in("SigBlk:")
}

#[test]
fn root_needs_no_helper_to_mount() {
    if !can_mount() || !is_root() {
        return;
    }
    let scratch = Scratch::new("fuse");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
    let absent = ("FUSERMOUNT_PATH", "/nonexistent/fusermount3");
    for options in ["", "--no-sandbox"] {
        let server = Server::start_with(dir, absent, &format!("--fuse {FILE} {options} -f qcow2 {IMAGE}"));
        assert_eq!(fs::metadata(dir.join(FILE)).unwrap().len(), MIB);
        server.stop();
        assert!(!is_mounted(&dir.join(FILE)));
    }
}

#[test]
fn mounting_over_what_is_no_file_is_refused() {
    let scratch = Scratch::new("fuse");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
    let out = zebu(dir, ["serve", "--fuse", ".", "-f", "qcow2", IMAGE]).exits(1);
    assert!(out.stderr.contains("regular file"), "{out}");
    let out = zebu(dir, ["serve", "--fuse", "nosuch/file", "-f", "qcow2", IMAGE]).exits(1);
    assert!(out.stderr.contains("nosuch/file"), "{out}");
}

/// A disk as full as it gets, as when it is wiped: what fits is written (write(2)).
#[test]
fn a_write_across_the_end_writes_what_fits() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("fuse");
    let dir = scratch.path();
    let size = 2 * MIB + 65536;
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, &size.to_string()]).ok();
    let server = serve(dir, "");
    let file = OpenOptions::new().read(true).write(true).open(dir.join(FILE)).unwrap();
    file.write_all_at(&vec![0x5a; size as usize], 0).unwrap();
    for (before, len) in [(65536, MIB), (4096, 8192), (512, 1024), (1, 2), (3, 3)] {
        let written = file.write_at(&vec![0; len as usize], size - before).unwrap();
        assert_eq!(written as u64, before, "{len} bytes at {before} before the end");
    }
    let at_end = file.write_at(&[0; 2], size).unwrap_err();
    assert_eq!(at_end.raw_os_error(), Some(libc::ENOSPC));
    let mut content = vec![1; size as usize];
    file.read_exact_at(&mut content, 0).unwrap();
    let kept = (2 * MIB) as usize;
    assert!(
        content[..kept].iter().all(|byte| *byte == 0x5a) && content[kept..].iter().all(|byte| *byte == 0)
    );
    drop(file);
    server.stop();
}

#[test]
fn a_second_server_is_refused_where_an_image_is_mounted() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("fuse");
    let dir = scratch.path();
    for image in [IMAGE, "other.qcow2"] {
        zebu(dir, ["create", "-q", "-f", "qcow2", image, "1M"]).ok();
    }
    std::os::unix::fs::symlink(FILE, dir.join("link")).unwrap();
    let server = serve(dir, "");
    for path in [FILE, "link"] {
        let out = zebu(dir, ["serve", "--fuse", path, "-f", "qcow2", "other.qcow2"]).exits(1);
        assert!(out.stderr.contains("an image is mounted there already"), "{out}");
        assert!(is_mounted(&dir.join(FILE)));
    }
    server.stop();
    // Nothing of it stays in the way.
    serve(dir, "").stop();
}

/// Of two servers that begin at once one has the file, and the other is refused; the end of the second leaves the first alone.
#[test]
fn of_two_servers_at_the_same_moment_one_is_refused() {
    if !can_mount() {
        return;
    }
    for _ in 0..5 {
        let scratch = Scratch::new("fuse");
        let place = scratch.path().join(FILE);
        let begin = |dir: &Path| {
            zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
            Server::try_start(dir, &format!("--fuse {} -f qcow2 {IMAGE}", place.display()))
        };
        let homes = [Scratch::new("fuse"), Scratch::new("fuse")];
        let begun = std::thread::scope(|scope| {
            let begun = homes.each_ref().map(|home| scope.spawn(|| begin(home.path())));
            begun.map(|thread| thread.join().unwrap())
        });
        let mut refusals = 0;
        for server in begun {
            match server {
                Ok(server) => {
                    assert!(is_mounted(&place));
                    server.stop();
                }
                Err(said) => {
                    assert!(said.contains("an image is mounted there already"), "{said}");
                    refusals += 1;
                }
            }
        }
        assert_eq!(refusals, 1);
    }
}

#[test]
fn a_mount_that_somebody_else_took_away_is_told_of() {
    if !can_mount() {
        return;
    }
    for options in ["", "--no-sandbox"] {
        let scratch = Scratch::new("fuse");
        let dir = scratch.path();
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
        let server = serve(dir, options);
        run(dir, &format!("umount {FILE}"));
        server.wait_for_words("was unmounted by somebody else");
        let said = server.stop_with_messages();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!dir.join(FILE).exists());
    }
}

/// The place of a mount that somebody took away is free for another server; the end of the first leaves that one alone.
#[test]
fn the_next_servers_mount_stays_when_the_first_ends() {
    if !can_mount() {
        return;
    }
    for options in ["", "--no-sandbox"] {
        let scratch = Scratch::new("fuse");
        let dir = scratch.path();
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
        let place_of_next = Scratch::new("fuse");
        // By its name and its device, its mount is as the first one.
        zebu(place_of_next.path(), ["create", "-q", "-f", "qcow2", IMAGE, "2M"]).ok();
        let first = serve(dir, options);
        run(dir, &format!("umount {FILE}"));
        first.wait_for_words("was unmounted by somebody else");
        let same_file = dir.join(FILE);
        let line = format!("--fuse {} {options} -f qcow2 {IMAGE}", same_file.display());
        let next = Server::start(place_of_next.path(), &line);
        first.stop_with_messages();
        assert_eq!(fs::metadata(&same_file).unwrap().len(), 2 * MIB, "{options}");
        next.stop();
        assert!(!is_mounted(&same_file), "{options}");
    }
}
