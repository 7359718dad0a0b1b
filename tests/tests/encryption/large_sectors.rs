//! Disks whose cipher has sectors of more than 512 bytes, which cryptsetup makes: clients and guests are told of these blocks, whoever asks
//! for less is served or refused as the protocol has it, and neighbours keep what they have.

use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use zebu_tests::encrypted::{cryptsetup, of, run_zebu, with_objects};
use zebu_tests::foreign_server::ForeignServer;
use zebu_tests::program::{finish, is_root, required, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::vhost_guest::{DATA, VhostGuest, WRITE};

const SIZE: usize = 1 << 20;
/// Kinds of requests of virtio-blk.
const IN: u32 = 0;
const OUT: u32 = 1;

/// Makes `disk.luks` with cryptsetup, and has zebu fill it. Its bytes.
fn make(dir: &Path, options: &str) -> Vec<u8> {
    std::fs::write(dir.join("one"), "first").unwrap();
    // Behind a header of 16 MiB.
    std::fs::File::create(dir.join("disk.luks")).unwrap().set_len((16 << 20) + SIZE as u64).unwrap();
    let cheap = "--pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file one";
    cryptsetup(dir, &format!("luksFormat -q --type luks2 {cheap} {options} disk.luks"));
    let mut plain = vec![0; SIZE];
    Random::new(4).fill(&mut plain);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    let mut words = with_objects(&format!("io --image-opts {}", of("disk.luks", "one")));
    words.extend(["-c", "write -s plain 0 1M"].map(str::to_owned));
    zebu(dir, words).ok();
    plain
}

/// Requires that the disk has these bytes.
fn holds(dir: &Path, plain: &[u8]) {
    run_zebu(dir, &format!("convert --image-opts {} -O raw read", of("disk.luks", "one"))).ok();
    assert!(std::fs::read(dir.join("read")).unwrap() == plain);
}

/// Options of a server of the disk.
fn served() -> String {
    format!("--object secret,id=one,file=one --image-opts {}", of("disk.luks", "one"))
}

/// The sizes of blocks that a server tells: least, preferred, most.
fn blocks(dir: &Path, uri: &str) -> [u64; 3] {
    let info = run_in(dir, &required("nbdinfo"), ["--json", uri]).ok();
    let info: Value = serde_json::from_str(&info.stdout).unwrap();
    ["minimum", "preferred", "maximum"].map(|name| {
        info["exports"][0][format!("block_size_{name}")].as_u64().unwrap_or_else(|| panic!("{name}: {info}"))
    })
}

/// Runs a script with libnbd's handle `h`.
fn nbdsh(dir: &Path, script: &str) {
    let mut command = Command::new(required("nbdsh"));
    // The distribution's Python has the module; another one that comes first may not.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:{path}")).current_dir(dir).args(["-c", script]);
    finish(command).ok();
}

/// A client that asks without wishing to know of blocks is refused, with the error that `libnbd` calls EINVAL.
fn refuses_who_does_not_ask(dir: &Path, uri: &str) {
    nbdsh(
        dir,
        &format!(
            r"
import errno
h.set_request_block_size(False)
h.set_opt_mode(True)
h.connect_uri('{uri}')
try:
    h.opt_info()
    assert False, 'no error'
except nbd.Error as ex:
    assert ex.errnum == errno.EINVAL, ex
h.opt_go()
assert h.get_block_size(nbd.SIZE_MINIMUM) in (0, 1)
"
        ),
    );
}

/// The cipher's sector is the smallest block, and what is told is what QEMU tells of a disk that has such blocks.
#[test]
fn nbd_clients_are_told_as_qemu_tells() {
    let Some(_) = Qemu::find() else { return };
    for (options, block) in [("512", 1), ("1024", 1024), ("2048", 2048), ("4096", 4096)] {
        let scratch = Scratch::new("large-sectors");
        let dir = scratch.path();
        let plain = make(dir, &format!("--sector-size {options}"));
        let server = Server::start(dir, &served());
        let told = blocks(dir, &server.uri(""));
        assert_eq!(told[0], block);
        let align = block.max(512);
        let reference = format!(
            "--image-opts driver=blkdebug,align={align},image.driver=file,image.filename={}",
            dir.join("plain").display()
        );
        if block > 1 {
            let reference = ForeignServer::qemu(dir, &reference);
            assert_eq!(told, blocks(dir, reference.uri().as_str()));
            refuses_who_does_not_ask(dir, reference.uri().as_str());
            refuses_who_does_not_ask(dir, &server.uri(""));
        }
        server.stop();
        holds(dir, &plain);
    }
}

/// Requests for less than a block get EINVAL from a server that told its client of blocks, and nothing changes. A client that was not told is
/// served, and neighbours keep what they have.
#[test]
fn requests_for_parts_of_blocks() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("large-sectors");
    let dir = scratch.path();
    let mut plain = make(dir, "--sector-size 4096 --cipher aes-cbc-essiv:sha256 --key-size 256");
    let server = Server::start(dir, &served());
    let uri = server.uri("");
    nbdsh(
        dir,
        &format!(
            r"
import errno
h.add_meta_context('base:allocation')
h.connect_uri('{uri}')
assert h.get_block_size(nbd.SIZE_MINIMUM) == 4096
h.set_strict_mode(0)
refused = [
    lambda: h.pwrite(b'\x07' * 512, 512),
    lambda: h.pwrite(b'\x07' * 4096, 512),
    lambda: h.pwrite(b'\x07' * 4608, 4096),
    lambda: h.pread(512, 0),
    lambda: h.zero(512, 4096),
    lambda: h.trim(4096, 512),
    lambda: h.cache(512, 0),
    lambda: h.block_status(512, 0, lambda *a: 0),
]
for call in refused:
    try:
        call()
        assert False, 'no error'
    except nbd.Error as ex:
        assert ex.errnum == errno.EINVAL, ex
h.pwrite(b'\x07' * 8192, 4096)
assert h.pread(8192, 4096) == b'\x07' * 8192
entries = []
h.block_status(1 << 20, 0, lambda *a: entries.extend(a[2]) or 0)
assert all(length % 4096 == 0 for length in entries[::2]), entries
h.shutdown()
"
        ),
    );
    plain[4096..12288].fill(7);
    nbdsh(
        dir,
        &format!(
            r"
h.set_request_block_size(False)
h.connect_uri('{uri}')
h.set_strict_mode(0)
h.pwrite(b'\x08' * 512, 20480 + 512)
h.pwrite(b'\x09' * 5000, 40001)
h.zero(100, 8190)
assert h.pread(3, 20480 + 511) != b'\x08' * 3
h.shutdown()
"
        ),
    );
    plain[20480 + 512..20480 + 1024].fill(8);
    plain[40001..45001].fill(9);
    plain[8190..8290].fill(0);
    server.stop();
    holds(dir, &plain);
}

/// The clients of QEMU and zebu ask for whole blocks, whatever they are asked for themselves.
#[test]
fn clients_of_qemu_and_zebu_read_and_write() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("large-sectors");
    let dir = scratch.path();
    let mut plain = make(dir, "--sector-size 4096");
    let server = Server::start(dir, &served());
    let uri = server.uri("");
    let out = qemu
        .io(
            dir,
            "-f raw",
            &uri,
            &["write -P 7 512 512", "write -P 8 10000 7", "write -z 30000 9000", "flush"],
        )
        .ok();
    assert!(!out.stdout.contains("failed") && !out.stderr.contains("error"), "{out}");
    plain[512..1024].fill(7);
    plain[10_000..10_007].fill(8);
    plain[30_000..39_000].fill(0);
    zebu(dir, ["io", "-f", "raw", &uri, "-c", "write -P 9 50000 100", "-c", "write -P 10 65536 4096"]).ok();
    plain[50_000..50_100].fill(9);
    plain[65_536..69_632].fill(10);
    qemu.img(dir, ["convert", "-f", "raw", "-O", "raw", &uri, "by-qemu"]).ok();
    assert!(std::fs::read(dir.join("by-qemu")).unwrap() == plain);
    zebu(dir, ["convert", "-f", "raw", "-O", "raw", &uri, "by-zebu"]).ok();
    assert!(std::fs::read(dir.join("by-zebu")).unwrap() == plain);
    run_in(dir, &required("nbdcopy"), [uri.as_str(), "by-nbdcopy"]).ok();
    assert!(std::fs::read(dir.join("by-nbdcopy")).unwrap() == plain);
    server.stop();
    holds(dir, &plain);
}

/// A guest over vhost-user-blk finds the cipher's sector in `blk_size`. One that asks for less, as virtio allows, is served.
#[test]
fn guests_find_the_blocks_in_the_configuration_space() {
    let Some(_) = Qemu::find() else { return };
    for block in [512u32, 2048, 4096] {
        let scratch = Scratch::new("large-sectors");
        let dir = scratch.path();
        let mut plain = make(dir, &format!("--sector-size {block}"));
        let server = Server::start_vhost_user(dir, &served());
        let mut guest = VhostGuest::connect(server.socket(), 1);
        assert_eq!((guest.logical_block, guest.size), (block, SIZE as u64));
        guest.put(DATA, &[5; 4096]);
        assert_eq!(guest.call(0, OUT, 16, 4096, 0).0, 0);
        assert_eq!(guest.call(0, OUT, 33, 512, 0).0, 0);
        plain[8192..12_288].fill(5);
        plain[33 * 512..34 * 512].fill(5);
        assert_eq!(guest.call(0, IN, 32, 4096, WRITE).0, 0);
        assert!(guest.get(DATA, 4096) == plain[32 * 512..40 * 512]);
        drop(guest);
        server.stop();
        holds(dir, &plain);
    }
}

/// The sector of a cipher is no unit of a partition table: guests had 512 bytes before, and have them in a copy.
#[test]
fn a_copy_has_the_logical_sectors_that_guests_had() {
    let scratch = Scratch::new("large-sectors");
    let dir = scratch.path();
    make(dir, "--sector-size 4096");
    for format in ["vhdx", "raw"] {
        let line = format!("convert --image-opts {} -O {format} copy", of("disk.luks", "one"));
        let out = run_zebu(dir, &line).ok();
        assert!(!out.stderr.contains("logical"), "{out}");
        let info = zebu(dir, ["info", "-f", format, "--output", "json", "copy"]).ok().stdout;
        assert!(!info.contains("logical-sector-size"), "{info}");
    }
}

/// The file of a mount names a block size that whole sectors fill.
#[test]
fn a_file_has_whole_sectors_in_its_blocks() {
    let can_mount = is_root() && std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
    if !can_mount {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return;
    }
    let scratch = Scratch::new("large-sectors");
    let dir = scratch.path();
    let mut plain = make(dir, "--sector-size 4096");
    let server = Server::start(dir, &format!("--fuse disk.raw {}", served()));
    let metadata = std::fs::metadata(dir.join("disk.raw")).unwrap();
    assert!(metadata.blksize().is_multiple_of(4096) && metadata.len() == SIZE as u64);
    let file = std::fs::OpenOptions::new().write(true).open(dir.join("disk.raw")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[3; 700], 5000).unwrap();
    file.sync_all().unwrap();
    drop(file);
    plain[5000..5700].fill(3);
    server.stop();
    holds(dir, &plain);
}
