//! Forks of disks in use: `zebu ctl fork` and `reset`, what becomes of the sealed images, and servers that end in between.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::wait_until;
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const BLOCK: u64 = 4096;
const SIZE: u64 = 16 << 20;

fn make(dir: &Path, name: &str) {
    zebu(dir, ["create", "-q", "-f", "qcow2", name, &SIZE.to_string()]).ok();
}

fn serve(dir: &Path, options: &str) -> Server {
    Server::start(dir, &format!("--control ctl.sock {options}"))
}

fn ctl(dir: &Path, words: &[&str]) -> Finished {
    zebu(dir, [&["ctl", "ctl.sock"], words].concat())
}

fn write(client: &mut Client, block: u64, number: u64) {
    let bytes = number.to_le_bytes().repeat(BLOCK as usize / 8);
    assert_eq!(client.write(0, block * BLOCK, &bytes).unwrap(), 0);
}

/// Stops a server that was started by the name of a sealed image, and has said so.
fn stop_of_sealed(server: Server) {
    let said = server.stop_with_messages();
    assert!(said.contains("is sealed: its disk continues in"), "{said}");
}

/// The number in a block of a disk.
fn number(disk: &[u8], block: u64) -> u64 {
    let block = &disk[(block * BLOCK) as usize..][..BLOCK as usize];
    assert!(block.chunks(8).all(|part| part == &block[..8]), "a block is torn");
    u64::from_le_bytes(block[..8].try_into().unwrap())
}

/// The disk as a client finds it.
fn disk_of(server: &Server, export: &str) -> Vec<u8> {
    let mut client = Client::open(server.socket(), export).unwrap();
    (0..SIZE / (1 << 20)).flat_map(|mib| client.read(mib << 20, 1 << 20).unwrap()).collect()
}

fn json(finished: Finished) -> serde_json::Value {
    serde_json::from_str(&finished.ok().stdout).unwrap()
}

/// Writers go on over the same connections through two forks; every state is that of one moment.
#[test]
fn writers_notice_nothing_and_each_image_is_the_disk_at_one_moment() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("forks-writers");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    let server = serve(dir, "--queues 2 -f qcow2 disk.qcow2");
    let done: Vec<AtomicU64> = (0..3).map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    let mut least = Vec::new();
    std::thread::scope(|scope| {
        for index in 0..done.len() {
            let (done, stop) = (&done, &stop);
            let mut client = Client::open(server.socket(), "").unwrap();
            scope.spawn(move || {
                let mut number = 0;
                while !stop.load(SeqCst) {
                    // Never ahead of the writer before: at no moment do the numbers rise from one to the next.
                    if index > 0 && done[index - 1].load(SeqCst) <= number {
                        std::thread::yield_now();
                        continue;
                    }
                    number += 1;
                    write(&mut client, index as u64 * 1024 + number % 512, number);
                    done[index].store(number, SeqCst);
                }
            });
        }
        for overlay in ["first.qcow2", "second.qcow2"] {
            let before = done[2].load(SeqCst);
            wait_until("all write", || done[2].load(SeqCst) > before + 20);
            least.push(done[0].load(SeqCst));
            let answer = json(ctl(dir, &["fork", "--to", overlay, "--output", "json"]));
            assert!(answer["gap-us"].is_u64(), "{answer}");
        }
        let before = done[2].load(SeqCst);
        wait_until("all write", || done[2].load(SeqCst) > before + 20);
        stop.store(true, SeqCst);
    });
    let last = disk_of(&server, "");
    server.stop();
    let latest = |disk: &[u8]| -> Vec<u64> {
        let of = |client: u64| (0..512).map(|block| number(disk, client * 1024 + block)).max().unwrap();
        (0..3).map(of).collect()
    };
    for (name, least) in ["disk.qcow2", "first.qcow2"].iter().zip(least) {
        qemu.check_clean(dir, name).unwrap();
        let numbers = latest(&qemu.read_all(dir, name, None));
        assert!(numbers.is_sorted_by(|before, after| before >= after), "{name}: {numbers:?} is no moment");
        assert!(numbers[0] >= least, "{name}: {numbers:?}, and {least} was written before");
    }
    qemu.check_clean(dir, "second.qcow2").unwrap();
    assert!(qemu.read_all(dir, "second.qcow2", None) == last, "QEMU finds another disk than the client");
    assert!(zebu(dir, ["info", "disk.qcow2"]).ok().stdout.contains("sealed by: "));
    let info = json(zebu(dir, ["info", "--output", "json", "first.qcow2"]));
    let sealed_by = &info["format-specific"]["data"]["sealed-by"];
    assert_eq!(sealed_by.as_str(), dir.join("second.qcow2").to_str());
    qemu.img(dir, ["info", "disk.qcow2"]).ok();
    // The base's name leads to the latest overlay.
    let again = serve(dir, "-f qcow2 disk.qcow2");
    assert!(disk_of(&again, "") == last, "another disk is served");
    stop_of_sealed(again);
}

/// A server that is killed after a fork is started by the old name: nothing that was flushed is missing.
#[test]
fn a_killed_server_goes_on_in_the_overlay() {
    let scratch = Scratch::new("forks-killed");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    for round in 1..=4u64 {
        let server = serve(dir, "-f qcow2 disk.qcow2");
        let mut client = Client::open(server.socket(), "").unwrap();
        write(&mut client, round, round);
        ctl(dir, &["fork", "", "--to", &format!("round-{round}.qcow2")]).ok();
        write(&mut client, 100 + round, round);
        assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        let sealed = std::fs::read(dir.join("disk.qcow2")).unwrap();
        server.kill();
        let again = serve(dir, "-f qcow2 disk.qcow2");
        let disk = disk_of(&again, "");
        for earlier in 1..=round {
            assert_eq!((number(&disk, earlier), number(&disk, 100 + earlier)), (earlier, earlier));
        }
        stop_of_sealed(again);
        assert!(std::fs::read(dir.join("disk.qcow2")).unwrap() == sealed, "the sealed image was written");
    }
}

/// A counter goes from disk to disk; three forks at one moment never hold a later number on a later disk.
#[test]
fn three_disks_are_forked_at_one_moment() {
    let scratch = Scratch::new("forks-three");
    let dir = scratch.path();
    let names = ["a", "b", "c"];
    for name in names {
        make(dir, &format!("{name}.qcow2"));
    }
    let server =
        serve(dir, "--export-name a --export-name b --export-name c -f qcow2 a.qcow2 b.qcow2 c.qcow2");
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let mut clients: Vec<Client> =
            names.iter().map(|name| Client::open(server.socket(), name).unwrap()).collect();
        let (stop, count) = (&stop, &count);
        scope.spawn(move || {
            while !stop.load(SeqCst) {
                let next = count.load(SeqCst) + 1;
                for client in &mut clients {
                    write(client, 7, next);
                }
                count.store(next, SeqCst);
            }
        });
        for round in 0..5 {
            let before = count.load(SeqCst);
            wait_until("the counter goes on", || count.load(SeqCst) > before + 5);
            let [a, b, c] = names.map(|name| format!("{name}-{round}.qcow2"));
            let (b, c) = (format!("b={b}"), format!("c={c}"));
            ctl(dir, &["fork", "a", "--to", &a, "--also", &b, "--also", &c]).ok();
        }
        stop.store(true, SeqCst);
    });
    server.stop();
    let mut files = vec![names.map(|name| format!("{name}.qcow2"))];
    files.extend((0..4).map(|round| names.map(|name| format!("{name}-{round}.qcow2"))));
    for trio in files {
        let read = |name: &String| {
            let raw = format!("{name}.raw");
            zebu(dir, ["convert", "-f", "qcow2", "-O", "raw", name, &raw]).ok();
            number(&std::fs::read(dir.join(raw)).unwrap(), 7)
        };
        let [a, b, c] = trio.each_ref().map(read);
        assert!(a >= b && b >= c && a - c <= 1 && a > 0, "{trio:?}: {a}, {b}, {c} is no moment");
    }
}

/// Writing a sealed image is refused with the overlay's name; reading it and standing on it is not.
#[test]
fn a_sealed_image_is_only_read_until_it_is_unsealed() {
    let scratch = Scratch::new("forks-sealed");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    let server = serve(dir, "-f qcow2 disk.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    write(&mut client, 1, 11);
    ctl(dir, &["fork", "--to", "over.qcow2"]).ok();
    // Others may read the image and stand on it, while the server goes on.
    zebu(dir, ["clone", "disk.qcow2", "child.qcow2"]).ok();
    zebu(dir, ["io", "-f", "qcow2", "-c", "read 4k 4k", "child.qcow2"]).ok();
    drop(client);
    server.stop();
    let refused: [&[&str]; 8] = [
        &["io", "-f", "qcow2", "-c", "write 0 4k", "disk.qcow2"],
        &["resize", "disk.qcow2", "+1M"],
        &["commit", "over.qcow2"],
        &["snapshot", "-c", "one", "disk.qcow2"],
        &["check", "-r", "all", "disk.qcow2"],
        &["bitmap", "--add", "disk.qcow2", "one"],
        &["amend", "-o", "lazy_refcounts=on", "disk.qcow2"],
        &["amend", "--unseal", "disk.qcow2"],
    ];
    let before = std::fs::read(dir.join("disk.qcow2")).unwrap();
    for words in refused {
        let failed = zebu(dir, words);
        assert!(failed.code != Some(0), "{words:?}");
        assert!(failed.stderr.contains("over.qcow2"), "{words:?}: {}", failed.stderr);
    }
    assert!(std::fs::read(dir.join("disk.qcow2")).unwrap() == before, "it was written");
    // An overlay that is gone: a server does not go on without it.
    std::fs::rename(dir.join("over.qcow2"), dir.join("elsewhere")).unwrap();
    let said = Server::try_start(dir, "-f qcow2 disk.qcow2").unwrap_err();
    assert!(said.contains("over.qcow2") && said.contains("--unseal"), "{said}");
    std::fs::copy(dir.join("disk.qcow2"), dir.join("over.qcow2")).unwrap();
    let said = Server::try_start(dir, "-f qcow2 disk.qcow2").unwrap_err();
    assert!(said.contains("does not stand on this image"), "{said}");
    std::fs::rename(dir.join("elsewhere"), dir.join("over.qcow2")).unwrap();
    zebu(dir, ["amend", "--unseal", "--force", "disk.qcow2"]).ok();
    zebu(dir, ["io", "-f", "qcow2", "-c", "write 0 4k", "disk.qcow2"]).ok();
    zebu(dir, ["check", "disk.qcow2"]).ok();
}

/// A reset shows the base again; not under a client that is not told, nor where nothing was forked.
#[test]
fn a_reset_throws_the_overlay_away() {
    let scratch = Scratch::new("forks-reset");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    let server = serve(dir, "-f qcow2 disk.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    write(&mut client, 1, 11);
    let failed = ctl(dir, &["reset", "", "--force"]);
    assert!(failed.stderr.contains("only a disk that was forked"), "{}", failed.stderr);
    ctl(dir, &["fork", "--to", "over.qcow2"]).ok();
    write(&mut client, 1, 12);
    write(&mut client, 2, 13);
    // Without the base, a reset would leave nothing, and its seal would lead nowhere.
    let failed = ctl(dir, &["hydrate", "-w", "--drop-backing"]).exits(1);
    assert!(failed.stderr.contains("sealed"), "{failed}");
    let others = |name: &str| std::fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o077;
    assert_eq!(others("over.qcow2") & !others("disk.qcow2"), 0, "others may read the overlay");
    let failed = ctl(dir, &["reset", ""]);
    assert!(failed.stderr.contains("--force"), "{}", failed.stderr);
    ctl(dir, &["reset", "", "--force"]).ok();
    write(&mut client, 3, 14);
    let disk = disk_of(&server, "");
    assert_eq!([1, 2, 3].map(|block| number(&disk, block)), [11, 0, 14]);
    drop(client);
    server.stop();
    let again = serve(dir, "-f qcow2 disk.qcow2");
    assert!(disk_of(&again, "") == disk);
    wait_until("no client is left", || json(ctl(dir, &["stats", ""]))["clients"] == 0);
    ctl(dir, &["reset", ""]).ok();
    let disk = disk_of(&again, "");
    assert_eq!([1, 2, 3].map(|block| number(&disk, block)), [11, 0, 0]);
    stop_of_sealed(again);
}

/// The hook freezes before and thaws after, whatever becomes of the fork; refusals leave no file behind.
#[test]
fn hooks_and_refusals() {
    let scratch = Scratch::new("forks-refused");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    std::fs::write(dir.join("raw.img"), vec![0; SIZE as usize]).unwrap();
    let server = serve(dir, "-f qcow2 disk.qcow2");
    let hook = "echo >> hook.log";
    ctl(dir, &["fork", "--to", "one.qcow2", "--freeze-hook", hook]).ok();
    let log = || {
        std::fs::read_to_string(dir.join("hook.log"))
            .unwrap()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(log(), "freeze thaw");
    assert_ne!(ctl(dir, &["fork", "--to", "one.qcow2", "--freeze-hook", hook]).code, Some(0));
    assert_eq!(log(), "freeze thaw", "nothing is frozen for a fork that can't begin");
    let failed = ctl(dir, &["fork", "--to", "two.qcow2", "--freeze-hook", "false"]);
    assert!(failed.stderr.contains("the hook 'false freeze' failed"), "{}", failed.stderr);
    assert!(!dir.join("two.qcow2").exists());
    ctl(dir, &["bitmap-add", "", "changes"]).ok();
    let failed = ctl(dir, &["fork", "--to", "two.qcow2", "--freeze-hook", hook]);
    assert!(failed.stderr.contains("the bitmap 'changes' records"), "{}", failed.stderr);
    assert_eq!(log(), "freeze thaw freeze thaw");
    assert!(!dir.join("two.qcow2").exists());
    server.stop();
    let raw = serve(dir, "-f raw raw.img");
    let failed = ctl(dir, &["fork", "--to", "two.qcow2"]);
    assert!(failed.stderr.contains("only a qcow2 image can be forked"), "{}", failed.stderr);
    assert!(!dir.join("two.qcow2").exists());
    raw.stop();
}
