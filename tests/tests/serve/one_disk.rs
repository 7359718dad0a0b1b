//! One disk under several things at once: forks, resets, checkpoints, backups, and the end of its export.

use std::path::Path;
use zebu_tests::nbd_client::Client;
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const SIZE: u64 = 8 << 20;

fn start(dir: &Path) -> Server {
    zebu(dir, ["create", "-q", "-f", "qcow2", "first.qcow2", "8M"]).ok();
    Server::start(dir, "--control ctl.sock --export-name first -f qcow2 first.qcow2")
}

fn ctl(dir: &Path, line: &str) -> Finished {
    zebu(dir, ["ctl", "ctl.sock"].into_iter().chain(line.split_whitespace()))
}

fn refused(dir: &Path, line: &str, expected: &str) {
    let out = ctl(dir, line).exits(1);
    assert!(out.stderr.contains(expected), "{line}: {out}");
}

fn read(server: &Server, export: &str, at: u64) -> u8 {
    Client::open(server.socket(), export).unwrap().read(at, 4096).unwrap()[0]
}

#[test]
fn a_disk_is_not_forked_or_reset_while_a_checkpoint_shows_it() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("one-disk");
    let dir = scratch.path();
    let server = start(dir);
    let mut client = Client::open(server.socket(), "first").unwrap();
    assert_eq!(client.write(0, 0, &[1; 4096]).unwrap(), 0);
    ctl(dir, "checkpoint first --serve one").ok();
    refused(dir, "fork first --to early.qcow2", "checkpoint");
    assert!(!dir.join("early.qcow2").exists(), "an overlay of a fork that was refused is left");
    ctl(dir, "checkpoint-end one").ok();
    ctl(dir, "fork first --to second.qcow2").ok();
    // The overlay is the disk now, for checkpoints and backups, too.
    assert_eq!(client.write(0, 0, &[2; 4096]).unwrap(), 0);
    ctl(dir, "checkpoint first --serve two --bitmap b").ok();
    assert_eq!(client.write(0, 0, &[3; 4096]).unwrap(), 0);
    assert_eq!((read(&server, "two", 0), read(&server, "first", 0)), (2, 3));
    refused(dir, "reset first --force", "checkpoint");
    refused(dir, "fork first --to third.qcow2", "checkpoint");
    assert_eq!((read(&server, "two", 0), read(&server, "first", 0)), (2, 3));
    ctl(dir, "checkpoint-end two").ok();
    refused(dir, "fork first --to third.qcow2", "records");
    ctl(dir, "bitmap-remove first b").ok();
    ctl(dir, "backup-start -w first copy.qcow2").ok();
    ctl(dir, "reset first --force").ok();
    assert_eq!(read(&server, "first", 0), 1);
    drop(client);
    server.stop();
    for image in ["first.qcow2", "second.qcow2", "copy.qcow2"] {
        qemu.check_clean(dir, image).unwrap();
    }
    assert_eq!(qemu.read_all(dir, "copy.qcow2", None)[..4096], [3; 4096]);
    assert_eq!(qemu.read_all(dir, "second.qcow2", None).len() as u64, SIZE);
}

#[test]
fn an_export_that_a_checkpoint_shows_goes_by_force_alone_and_takes_the_checkpoint_with_it() {
    let scratch = Scratch::new("one-disk-removed");
    let dir = scratch.path();
    let server = start(dir);
    zebu(dir, ["create", "-q", "-f", "qcow2", "other.qcow2", "8M"]).ok();
    ctl(dir, "export-add other -f qcow2 other.qcow2").ok();
    ctl(dir, "checkpoint other --serve shown").ok();
    let mut puller = Client::open(server.socket(), "shown").unwrap();
    assert_eq!(puller.read(0, 512).unwrap(), [0; 512]);
    refused(dir, "export-remove other", "a checkpoint of the export 'other' is running");
    refused(dir, "export-add shown -f qcow2 nowhere.qcow2", "could not open");
    ctl(dir, "export-remove other --force").ok();
    assert!(puller.read(0, 512).is_err(), "a checkpoint shows a disk that is closed");
    let ended = ctl(dir, "checkpoint-query shown").ok().stdout;
    assert!(ended.contains("\"ended\""), "{ended}");
    // Nobody has it any more.
    zebu(dir, ["check", "-q", "-r", "all", "other.qcow2"]).ok();
    // A disk that was added is forked as every other.
    ctl(dir, "export-add other -f qcow2 other.qcow2").ok();
    let mut client = Client::open(server.socket(), "other").unwrap();
    assert_eq!(client.write(0, 0, &[5; 4096]).unwrap(), 0);
    ctl(dir, "fork other --to over.qcow2").ok();
    assert_eq!(client.write(0, 4096, &[6; 4096]).unwrap(), 0);
    drop(client);
    ctl(dir, "export-remove other").ok();
    refused(dir, "export-add other -f qcow2 other.qcow2", "over.qcow2");
    ctl(dir, "limit first iops=100000").ok();
    ctl(dir, "checkpoint first --serve limited").ok();
    assert_eq!(read(&server, "limited", 0), 0);
    server.stop();
    zebu(dir, ["check", "-q", "over.qcow2"]).ok();
}
