//! Uses block devices that zebu makes, within a guest of the tests (`zebu_tests::device_guest`). It ends with 0 if all was as it
//! should be, else its panic says what was not.

use rustix::fs::OFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zebu_storage::IoBuf;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{Finished, run_in, zebu, zebu_program};
use zebu_tests::random::Random;

/// Where images are: in memory.
const IMAGES: &str = "/tmp";
const DEVICE: &str = "/dev/ublkb0";
const NBD: &str = "/dev/nbd0";
const MOUNT: &str = "/mnt";
/// Bytes of the disks.
const SIZE: u64 = 64 << 20;
/// Bytes of a cluster of theirs.
const CLUSTER: u64 = 64 << 10;
const PAGE: u64 = 4096;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["devices"] => devices(),
        ["nbd"] => nbd(),
        ["go-on", cache, flushed] => go_on(cache, flushed.parse().expect("a number")),
        ["look", cache, flushed] => look(cache, flushed.parse().expect("a number")),
        ["recovery", kind, kills, ref fault @ ..] => {
            let door = if kind == "ublk" { Door::UBLK } else { Door::NBD };
            recovery(door, kills.parse().expect("a number"), fault.first().copied());
        }
        ref other => panic!("not known: {other:?}"),
    }
}

/// A way to the kernel: the module, the option of `zebu serve`, the device.
#[derive(Clone, Copy)]
struct Door {
    module: &'static str,
    option: &'static str,
    device: &'static str,
}

impl Door {
    const UBLK: Self = Self { module: "ublk_drv", option: "--ublk=0", device: DEVICE };
    const NBD: Self = Self { module: "nbd", option: "--nbd-device /dev/nbd0", device: NBD };

    fn load(self) {
        busybox(&format!("insmod /modules/{}.ko", self.module));
    }
}

/// A server that runs, and its standard error in a file.
struct Served {
    child: Child,
    errors: PathBuf,
    _out: BufReader<ChildStdout>,
}

impl Served {
    /// Starts `zebu serve` with these words, and waits until it is ready.
    fn start(words: &str) -> Self {
        Self::start_under(None, words)
    }

    /// The same, with a deliberate fault.
    fn start_under(fault: Option<&str>, words: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let errors = Path::new(IMAGES).join(format!("errors-{}", NUMBER.fetch_add(1, Ordering::SeqCst)));
        let mut command = Command::new(zebu_program());
        command.arg("serve").args(words.split_whitespace()).current_dir(IMAGES).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(File::create(&errors).expect("a file"));
        command.envs(fault.map(|fault| ("ZEBU_FAULT", fault)));
        let mut child = command.spawn().expect("zebu runs");
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        while line != "ready\n" {
            line.clear();
            out.read_line(&mut line).expect("text");
            let errors = || fs::read_to_string(&errors).unwrap_or_default();
            assert!(!line.is_empty(), "zebu serve {words} has ended: {:?} {}", child.wait(), errors());
        }
        Self { child, errors, _out: out }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a process");
    }

    /// Waits for its end, which is to be a good one; what it said.
    fn ends(mut self) -> String {
        let status = self.child.wait().expect("a process");
        let said = fs::read_to_string(&self.errors).unwrap_or_default();
        assert!(status.success(), "{status}: {said}");
        said
    }

    fn terminate(self) -> String {
        self.signal(Signal::TERM);
        self.ends()
    }

    fn kill(mut self) {
        self.child.kill().expect("a process");
        self.child.wait().expect("a process");
    }
}

fn run(words: &str) -> Finished {
    zebu(Path::new(IMAGES), words.split_whitespace())
}

/// Runs a command that fails and says this.
#[track_caller]
fn refused(words: &str, why: &str) {
    let finished = run(words).exits(1);
    assert!(finished.stderr.contains(why), "'{why}' is missing in {finished}");
}

fn busybox(words: &str) {
    run_in(Path::new("/"), Path::new("/bin/busybox"), words.split_whitespace()).ok();
}

fn program(name: &str, words: &[&str]) {
    run_in(Path::new("/"), &Path::new("/sbin").join(name), words).ok();
}

/// A device without the page cache in between.
fn open_directly(device: &str, extra: OFlags) -> File {
    let flags = OFlags::DIRECT | extra;
    let opened = File::options().read(true).write(true).custom_flags(flags.bits() as i32).open(device);
    opened.expect("the device can be opened")
}

fn attribute(name: &str) -> String {
    let path = format!("/sys/block/ublkb0/{name}");
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")).trim().to_owned()
}

/// Requests of `ioctl` about a range of a block device (<linux/fs.h>).
#[derive(Clone, Copy)]
enum Clear {
    Discard = 0x1277,
    Zeroes = 0x127f,
}

fn clear(device: &File, how: Clear, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: both requests read two numbers of 64 bits, which live through the call.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), how as libc::Ioctl, range.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A new disk.
fn create(name: &str) {
    run(&format!("create -q -f qcow2 {name} {SIZE}")).ok();
}

/// Random requests, and what the disk must have then.
fn work(path: &str, model: &mut [u8], random: &mut Random, requests: usize) {
    let device = open_directly(path, OFlags::empty());
    let durably = open_directly(path, OFlags::DSYNC);
    let mut buf = IoBuf::zeroed(1 << 20);
    let bytes = buf.as_mut_slice();
    for _ in 0..requests {
        let pages = if random.chance(80) { random.between(1, 16) } else { random.between(17, 256) };
        let len = pages * PAGE;
        let offset = random.below((SIZE - len) / PAGE) * PAGE;
        let (from, until) = (offset as usize, (offset + len) as usize);
        match random.below(10) {
            0..4 => {
                random.fill(&mut bytes[..len as usize]);
                let file = if random.chance(25) { &durably } else { &device };
                file.write_all_at(&bytes[..len as usize], offset).expect("written");
                model[from..until].copy_from_slice(&bytes[..len as usize]);
            }
            4..7 => {
                device.read_exact_at(&mut bytes[..len as usize], offset).expect("read");
                assert!(bytes[..len as usize] == model[from..until], "{offset}+{len} differs");
            }
            7 => {
                // Of what is smaller, some stays.
                let offset = offset / CLUSTER * CLUSTER;
                clear(&device, Clear::Discard, offset, CLUSTER).expect("discarded");
                model[offset as usize..(offset + CLUSTER) as usize].fill(0);
            }
            8 => {
                clear(&device, Clear::Zeroes, offset, len).expect("zeroed");
                model[from..until].fill(0);
            }
            _ => device.sync_data().expect("flushed"),
        }
    }
}

/// All of the disk, through the page cache.
fn content(device: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(device).and_then(|mut device| device.read_to_end(&mut bytes)).expect("read");
    bytes
}

fn check(image: &str) {
    run(&format!("check -q {image}")).ok();
}

/// A device from its making to its end, and what is refused.
fn devices() {
    create("disk.qcow2");
    create("other.qcow2");
    create("third.qcow2");
    refused("serve --ublk -f qcow2 disk.qcow2", "modprobe ublk_drv");
    Door::UBLK.load();
    assert_eq!(run("devices").ok().stdout, "");

    let served = Served::start("--ublk=0 --queues 2 --control control -f qcow2 disk.qcow2");
    let size = File::open(DEVICE).and_then(|mut device| device.seek(SeekFrom::End(0)));
    assert_eq!(size.expect("its end"), SIZE);
    for (name, value) in [
        ("ro", "0"),
        ("queue/write_cache", "write back"),
        ("queue/fua", "1"),
        ("queue/logical_block_size", "512"),
        ("queue/physical_block_size", "4096"),
        ("queue/discard_granularity", "65536"),
    ] {
        assert_eq!(attribute(name), value, "{name}");
    }
    for name in ["queue/discard_max_bytes", "queue/write_zeroes_max_bytes"] {
        assert_ne!(attribute(name), "0", "{name}");
    }
    let (mut model, mut random) = (vec![0; SIZE as usize], Random::new(51));
    work(DEVICE, &mut model, &mut random, 400);
    assert!(content(DEVICE) == model, "the disk differs");
    let stats = run("ctl control stats").ok().stdout;
    let stats: serde_json::Value = serde_json::from_str(&stats).expect("JSON");
    for kind in ["read", "write", "flush", "discard", "write-zeroes"] {
        let counted = &stats["exports"][0]["requests"][kind];
        assert!(counted["requests"].as_u64() > Some(0), "{kind}: {counted}");
        assert_eq!(counted["errors"], 0, "{kind}");
    }

    refused("serve --ublk=0 -f qcow2 other.qcow2", "is there already, and process");
    refused("serve --ublk=0 --recover -f qcow2 other.qcow2", "it was made of another file");
    refused("serve --ublk=7 --recover -f qcow2 other.qcow2", "there is no ublk device 7");
    refused("serve --ublk --recover -f qcow2 other.qcow2", "needs the number of each device");
    refused("serve --ublk --aio threads -f qcow2 other.qcow2", "needs io_uring");
    refused(
        "serve --ublk --ublk --queues 2 --max-memory 64M -f qcow2 other.qcow2 third.qcow2",
        "its buffers need 32 MiB",
    );
    refused("detach 0", "serves /dev/ublkb0");
    refused("detach 7", "there is no ublk device 7");
    let listed = run("devices").ok().stdout;
    assert_eq!(listed, format!("{DEVICE}: {SIZE} bytes, served by process {}\n", served.child.id()));

    served.terminate();
    assert!(!Path::new(DEVICE).exists(), "a device that nobody uses goes with its server");
    assert_eq!(run("devices --output json").ok().stdout.trim(), "[]");
    check("disk.qcow2");
    run("convert -f qcow2 -O raw disk.qcow2 disk.raw").ok();
    assert!(fs::read("/tmp/disk.raw").expect("read") == model, "the image differs");
    fs::remove_file("/tmp/disk.raw").expect("removed");

    let served = Served::start("--ublk=0 --read-only -f qcow2 disk.qcow2");
    assert_eq!(attribute("ro"), "1");
    let written =
        open_directly(DEVICE, OFlags::empty()).write_all_at(IoBuf::zeroed(PAGE as usize).as_slice(), 0);
    assert_eq!(written.expect_err("it is read-only").kind(), io::ErrorKind::PermissionDenied);
    assert!(content(DEVICE) == model, "the disk differs");
    served.terminate();

    let served = Served::start("--ublk=0 -f qcow2 other.qcow2");
    assert!(content(DEVICE).iter().all(|byte| *byte == 0), "pages of another disk are seen");
    run("detach --force 0").ok();
    assert!(!Path::new(DEVICE).exists());
    let said = served.terminate();
    assert!(said.contains("was removed by somebody else"), "{said}");

    // In the background.
    assert_eq!(run("attach -f qcow2 third.qcow2").ok().stdout, "/dev/ublkb0\n");
    refused("attach -f qcow2 other.qcow2 /dev/ublkb0", "is attached already");
    refused("attach --recover /dev/ublkb1", "was not attached");
    let block = IoBuf::copy_of(&[7; PAGE as usize]);
    open_directly(DEVICE, OFlags::empty()).write_all_at(block.as_slice(), 0).expect("written");
    let listed = run("devices --output json").ok().stdout;
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let server =
        listed[0]["server"].as_i64().and_then(|server| Pid::from_raw(server as i32)).expect("a process");
    kill_process(server, Signal::KILL).expect("killed");
    run("attach --recover /dev/ublkb0").ok();
    assert!(content(DEVICE)[..PAGE as usize] == *block.as_slice(), "what was answered is gone");
    run("detach /dev/ublkb0").ok();
    assert!(!Path::new(DEVICE).exists());
    mounts();
    let checked = run("check -q third.qcow2");
    assert!(matches!(checked.code, Some(0 | 3)), "{checked}");
}

/// A page of the file that is written under kills: where it is, and which version it has.
fn stamp(page: u64, version: u64) -> Vec<u8> {
    [page, version].map(u64::to_le_bytes).concat().repeat(PAGE as usize / 16)
}

/// Versions of a page: of the last write, and of the last that was flushed.
#[derive(Clone, Copy, Default)]
struct Versions {
    written: u64,
    flushed: u64,
}

/// Pages of the file.
const PAGES: u64 = 1024;

/// Writes pages and flushes, until it is told to end.
fn write_under_kills(is_over: &AtomicBool, begun: &AtomicU64) -> Vec<Versions> {
    let flags = OFlags::DIRECT.bits() as i32;
    let path = Path::new(MOUNT).join("pages");
    let file =
        File::options().create(true).truncate(false).read(true).write(true).custom_flags(flags).open(&path);
    let (file, mut random) = (file.expect("a file"), Random::new(7));
    let mut versions = vec![Versions::default(); PAGES as usize];
    let mut buf = IoBuf::zeroed(PAGE as usize);
    for round in 1.. {
        if is_over.load(Ordering::SeqCst) {
            break;
        }
        for _ in 0..random.between(1, 24) {
            let page = random.below(PAGES);
            buf.as_mut_slice().copy_from_slice(&stamp(page, round));
            file.write_all_at(buf.as_slice(), page * PAGE).expect("no write fails");
            versions[page as usize].written = round;
            begun.fetch_add(1, Ordering::SeqCst);
        }
        // What the page cache has goes the same way.
        let name = Path::new(MOUNT).join(format!("file-{}", round % 32));
        fs::write(&name, stamp(round, round)).expect("no write fails");
        file.sync_data().expect("no flush fails");
        for page in &mut versions {
            page.flushed = page.written;
        }
    }
    versions
}

fn drop_caches() {
    busybox("sync");
    fs::write("/proc/sys/vm/drop_caches", "3").expect("dropped");
}

/// A `zebu mount` that is ready.
fn mounted(words: &str) -> Child {
    let mut command = Command::new(zebu_program());
    command.arg("mount").args(words.split_whitespace()).current_dir(IMAGES).stdout(Stdio::piped());
    let mut child = command.spawn().expect("zebu runs");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("text");
    assert_eq!(line, "ready\n", "zebu mount {words}");
    child
}

/// File systems of images that are mounted until Ctrl-C, or by others.
fn mounts() {
    let ends = |mut child: Child| assert!(child.wait().expect("a process").success());
    refused("mount -f qcow2 third.qcow2 /mnt", "could not mount it");
    run("attach -f qcow2 third.qcow2").ok();
    program("mkfs.ext4", &["-q", DEVICE]);
    run("detach 0").ok();
    let child = mounted("--write -f qcow2 third.qcow2 /mnt");
    fs::write("/mnt/file", "kept").expect("written");
    kill_process(Pid::from_child(&child), Signal::INT).expect("a process");
    ends(child);
    assert!(!Path::new("/mnt/file").exists() && !Path::new(DEVICE).exists());
    let child = mounted("-f qcow2 third.qcow2 /mnt");
    assert_eq!(fs::read_to_string("/mnt/file").expect("read"), "kept");
    assert!(fs::write("/mnt/file", "changed").is_err());
    unmount(MOUNT, UnmountFlags::empty()).expect("unmounted");
    ends(child);
    assert!(!Path::new(DEVICE).exists());
}

/// A device of the kernel's NBD client, and what QEMU's program is asked for it.
fn nbd() {
    create("disk.qcow2");
    create("other.qcow2");
    refused("serve --nbd-device /dev/nbd0 -f qcow2 disk.qcow2", "modprobe nbd");
    Door::NBD.load();
    let served = Served::start("--nbd-device /dev/nbd0 --queues 2 --control control -f qcow2 disk.qcow2");
    let (mut model, mut random) = (vec![0; SIZE as usize], Random::new(52));
    work(NBD, &mut model, &mut random, 200);
    assert!(content(NBD) == model, "the disk differs");
    refused("serve --nbd-device /dev/nbd0 -f qcow2 other.qcow2", "it is connected to another server");
    refused("serve --nbd-device /dev/nbd99 -f qcow2 other.qcow2", "there is no /dev/nbd99");
    let grown = SIZE + (1 << 20);
    run_in(Path::new(IMAGES), zebu_program(), ["ctl", "control", "resize", "", "+1M"]).ok();
    let size = || File::open(NBD).and_then(|mut device| device.seek(SeekFrom::End(0))).expect("its end");
    assert_eq!(size(), grown);
    served.terminate();
    assert_eq!(size(), 0, "a device that nobody uses is disconnected");
    check("disk.qcow2");

    busybox("mkdir -p /names");
    run("install-names /names").ok();
    let qemu_nbd =
        |words: &str| run_in(Path::new(IMAGES), Path::new("/names/qemu-nbd"), words.split_whitespace());
    qemu_nbd("-c /dev/nbd0 -f qcow2 --cache=none --discard=unmap other.qcow2").ok();
    // One partition, from 1 MiB on, of 62 MiB.
    let mut table = IoBuf::zeroed(PAGE as usize);
    let entry =
        [&[0, 0, 0, 0, 0x83, 0, 0, 0][..], &2048u32.to_le_bytes(), &(62u32 * 2048).to_le_bytes()].concat();
    table.as_mut_slice()[446..462].copy_from_slice(&entry);
    table.as_mut_slice()[510..512].copy_from_slice(&[0x55, 0xaa]);
    open_directly(NBD, OFlags::empty()).write_all_at(table.as_slice(), 0).expect("written");
    let disconnected = qemu_nbd("-d /dev/nbd0").ok();
    assert_eq!(disconnected.stdout, "/dev/nbd0 disconnected\n");
    let is_free = || run("info -f qcow2 other.qcow2").code == Some(0);
    wait_until("the server's end", is_free);
    qemu_nbd("-c /dev/nbd0 -f qcow2 other.qcow2").ok();
    program("mkfs.ext4", &["-q", "/dev/nbd0p1"]);
    mount("/dev/nbd0p1", MOUNT, c"ext4", MountFlags::empty(), None).expect("mounted");
    fs::write("/mnt/file", "kept").expect("written");
    unmount(MOUNT, UnmountFlags::empty()).expect("unmounted");
    qemu_nbd("-d /dev/nbd0").ok();
    wait_until("the server's end", is_free);
    check("other.qcow2");
}

/// A file system whose server is killed again and again. Those that take over may have a deliberate fault.
fn recovery(door: Door, kills: u64, fault: Option<&str>) {
    let Door { option, device, .. } = door;
    let serve = |image: &str| format!("{option} --queues 2 -f qcow2 {image}");
    let recover = |image: &str| format!("{option} --recover --queues 2 -f qcow2 {image}");
    create("disk.qcow2");
    create("other.qcow2");
    door.load();
    let served = Served::start(&serve("disk.qcow2"));
    program("mkfs.ext4", &["-q", device]);
    mount(device, MOUNT, c"ext4", MountFlags::empty(), c"errors=panic").expect("mounted");
    let (is_over, begun) = (AtomicBool::new(false), AtomicU64::new(0));
    let (served, versions) = std::thread::scope(|scope| {
        let mut served = served;
        let writer = scope.spawn(|| write_under_kills(&is_over, &begun));
        let mut random = Random::new(kills);
        for kill in 0..kills {
            let target = begun.load(Ordering::SeqCst) + random.between(1, 40);
            wait_until("writes", || begun.load(Ordering::SeqCst) >= target || writer.is_finished());
            served.kill();
            if kill % 8 == 0 && device == DEVICE {
                refused(&format!("serve {}", recover("other.qcow2")), "it was made of another file");
                let waits = || run("devices").ok().stdout.contains("waits for a server");
                wait_until("the kernel to notice", waits);
                refused("detach 0", "is in use");
            } else if kill % 8 == 0 {
                refused(&format!("serve {}", recover("other.qcow2")), "or to another image than this");
            }
            served = Served::start_under(fault, &recover("disk.qcow2"));
        }
        is_over.store(true, Ordering::SeqCst);
        (served, writer.join().expect("the writer has seen no error"))
    });
    // In good order, too.
    let said = served.terminate();
    assert!(said.contains("is in use and stays"), "{said}");
    let reader = std::thread::spawn(|| {
        drop_caches();
        fs::read(Path::new(MOUNT).join("pages")).expect("no read fails")
    });
    let served = Served::start(&recover("disk.qcow2"));
    let pages = reader.join().expect("read");
    for (number, page) in versions.iter().enumerate().filter(|(_, page)| page.written > 0) {
        let at = number * PAGE as usize;
        let found = &pages[at..at + PAGE as usize];
        let version = u64::from_le_bytes(found[8..16].try_into().expect("eight bytes"));
        assert!(
            version >= page.flushed,
            "page {number}: version {version}, but {} was flushed",
            page.flushed
        );
        assert!(found == stamp(number as u64, version), "page {number} is torn");
    }
    unmount(MOUNT, UnmountFlags::empty()).expect("unmounted");
    program("e2fsck", &["-f", "-n", device]);
    served.terminate();
    assert!(device == NBD || !Path::new(device).exists());
    // A kill leaves clusters behind that nothing refers to (3), and nothing else.
    let checked = run("check -q disk.qcow2");
    assert!(matches!(checked.code, Some(0 | 3)), "{checked}");
    println!("{kills} kills, {} writes", begun.load(Ordering::SeqCst));
}

/// Where the image is whose guest is cut off: on the guest's own disk.
const OWN_DISK: &str = "/images";
/// Pages of the file that is written until the guest is cut off.
const CUT_PAGES: u64 = 16;

/// Serves the image on the guest's own disk, and mounts it. They are made the first time.
fn disk_on_disk(cache: &str) -> Served {
    Door::UBLK.load();
    fs::create_dir_all(OWN_DISK).expect("made");
    wait_until("the disk", || Path::new("/dev/vda").exists());
    mount("/dev/vda", OWN_DISK, c"ext4", MountFlags::empty(), None).expect("the guest's own disk");
    let image = Path::new(OWN_DISK).join("disk.qcow2");
    let is_new = !image.exists();
    let image = image.display();
    if is_new {
        run(&format!("create -q -f qcow2 {image} {SIZE}")).ok();
    } else {
        let checked = run(&format!("check -q {image}"));
        assert!(matches!(checked.code, Some(0 | 3)), "{checked}");
    }
    let served = Served::start(&format!("--ublk=0 -t {cache} -f qcow2 {image}"));
    if is_new {
        program("mkfs.ext4", &["-q", DEVICE]);
    }
    mount(DEVICE, MOUNT, c"ext4", MountFlags::empty(), c"errors=panic").expect("mounted");
    served
}

/// The last version of the file, all of which must be there if it is not newer than what was flushed.
fn version_of(file: &File, flushed: u64) -> u64 {
    let mut newest = 0;
    for number in 0..CUT_PAGES {
        let mut page = vec![0; PAGE as usize];
        let read = file.read_at(&mut page, number * PAGE).expect("no read fails");
        assert!(read == page.len() || flushed == 0, "page {number} is missing");
        let version = u64::from_le_bytes(page[8..16].try_into().expect("eight bytes"));
        assert!(version >= flushed, "page {number}: version {version}, but {flushed} was flushed");
        assert!(version == 0 || page == stamp(number, version), "page {number} is torn");
        newest = newest.max(version);
    }
    newest
}

/// Writes a file and flushes it, version by version, and says each, until the guest is cut off.
fn go_on(cache: &str, flushed: u64) {
    let _served = disk_on_disk(cache);
    let path = Path::new(MOUNT).join("file");
    let file =
        File::options().create(true).truncate(false).read(true).write(true).open(path).expect("a file");
    for version in version_of(&file, flushed) + 1.. {
        for number in 0..CUT_PAGES {
            file.write_all_at(&stamp(number, version), number * PAGE).expect("no write fails");
        }
        // New clusters, too.
        fs::write(Path::new(MOUNT).join(format!("file-{}", version % 64)), stamp(version, version))
            .expect("written");
        file.sync_all().expect("no flush fails");
        println!("flushed {version}");
    }
}

/// Looks whether all is there that was flushed.
fn look(cache: &str, flushed: u64) {
    let served = disk_on_disk(cache);
    version_of(&File::open(Path::new(MOUNT).join("file")).expect("a file"), flushed);
    unmount(MOUNT, UnmountFlags::empty()).expect("unmounted");
    program("e2fsck", &["-f", "-n", DEVICE]);
    served.terminate();
    // The kernel lets go of the files of a ring some time after its process is gone.
    wait_until("the end of the ring", || unmount(OWN_DISK, UnmountFlags::empty()).is_ok());
}
