//! Short stalls; `cargo xtask stalls` has long ones.

use std::io;
use std::path::Path;
use std::time::Duration;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::server::Server;
use zebu_tests::stalling_disk::StallingDisk;
use zebu_tests::stalls::Stall;

const BLOCK: usize = 4096;

/// Starts a server of a disk that will stand still and of another one.
fn serve_beside(dir: &Path, stalling: &str, options: &str) -> Server {
    zebu(dir, ["create", "-q", "-f", "raw", "good.raw", "16M"]).ok();
    let names = "--export-name still --export-name good";
    Server::start(dir, &format!("{options} {names} -f raw {stalling} good.raw"))
}

/// Writes, flushes and reads the other disk.
fn use_other(server: &Server) -> io::Result<()> {
    let mut client = Client::open(server.socket(), "good")?;
    client.stream().set_read_timeout(Some(Duration::from_secs(20)))?;
    for at in [0, 8 << 20] {
        assert_eq!(client.write(0, at, &[1; BLOCK])?, 0);
        assert_eq!(client.call(0, command::FLUSH, 0, 0)?.error, 0);
        assert_eq!(client.read(at, BLOCK as u64)?, [1; BLOCK]);
    }
    Ok(())
}

#[test]
fn a_disk_that_stands_still_for_a_moment_fails_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    for seed in 1..=8 {
        let stall = Stall::chosen_by(seed, Duration::from_millis(500));
        stall.run(&qemu).unwrap_or_else(|what| panic!("{stall}: {what}"));
    }
}

#[test]
fn flushes_of_a_disk_that_stands_still_keep_no_other_from_working() {
    for options in ["", "--aio threads"] {
        let Some(disk) = StallingDisk::new(16 << 20) else { return };
        let server = serve_beside(disk.dir(), disk.name(), options);
        let mut clients: Vec<_> = (0..20).map(|_| Client::open(server.socket(), "still").unwrap()).collect();
        disk.hold(None);
        for (number, client) in (0..).zip(&mut clients) {
            assert_eq!(client.write(0, number << 16, &[1; BLOCK]).unwrap(), 0);
        }
        for client in &mut clients {
            client.request(0, command::FLUSH, 7, 0, 0).unwrap();
        }
        disk.wait_for_held();
        let other = use_other(&server);
        disk.release();
        other.expect("the other disk goes on");
        for client in &mut clients {
            assert_eq!(client.reply().unwrap().error, 0);
        }
        server.stop();
    }
}

#[test]
fn reads_of_a_disk_that_stands_still_keep_no_other_from_working() {
    let Some(disk) = StallingDisk::new(16 << 20) else { return };
    let server = serve_beside(disk.dir(), disk.name(), "-t none");
    let mut client = Client::open(server.socket(), "still").unwrap();
    disk.hold(None);
    for number in 0..300 {
        client.request(0, command::READ, number, number * BLOCK as u64, BLOCK as u64).unwrap();
    }
    disk.wait_for_held();
    let other = use_other(&server);
    disk.release();
    other.expect("the other disk goes on");
    drop(client);
    server.stop();
}
