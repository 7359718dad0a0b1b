//! A real guest makes a file system on a disk that zebu serves, and a second boot finds everything there.

use std::process::Command;
use zebu_tests::guest::Guest;
use zebu_tests::program::{finish, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::{Scratch, cache};
use zebu_tests::server::Server;

const IMAGE: &str = "disk.qcow2";

/// Boots a guest that writes, and one that verifies, each on a server of its own.
fn write_and_verify(start: impl Fn(&std::path::Path) -> Server, disk: impl Fn(&Server) -> Vec<String>) {
    let Some(qemu) = Qemu::find() else { return };
    let guest = Guest::prepare(&cache("guest")).unwrap_or_else(|missing| panic!("{missing}"));
    let scratch = Scratch::new("guest");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "512M"]).ok();
    for step in ["write", "verify"] {
        let server = start(dir);
        let options = disk(&server);
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let said = guest.boot(step, &options).unwrap_or_else(|what| panic!("{step}: {what}"));
        assert!(said.contains("disk: 1048576 sectors, queues: 2"), "{said}");
        server.stop();
        qemu.check_clean(dir, IMAGE).unwrap();
    }
    // QEMU alone finds a file system in good order, too.
    qemu.img(dir, ["convert", "-f", "qcow2", "-O", "raw", IMAGE, "disk.raw"]).ok();
    let mut fsck = Command::new("/sbin/fsck.ext4");
    fsck.args(["-f", "-n"]).arg(dir.join("disk.raw"));
    finish(fsck).ok();
}

#[test]
fn over_vhost_user() {
    write_and_verify(
        |dir| {
            Server::start_vhost_user(dir, &format!("--queues 2 -t none --export-name root -f qcow2 {IMAGE}"))
        },
        |server| {
            let socket = server.socket().display();
            vec![
                "-chardev".into(),
                format!("socket,id=disk,path={socket}"),
                "-device".into(),
                "vhost-user-blk-pci,chardev=disk,num-queues=2".into(),
            ]
        },
    );
}

#[test]
fn over_nbd() {
    write_and_verify(
        |dir| Server::start(dir, &format!("--queues 2 -t none -f qcow2 {IMAGE}")),
        |server| {
            let socket = server.socket().display();
            vec![
                "-blockdev".into(),
                format!("driver=nbd,node-name=disk,server.type=unix,server.path={socket},discard=unmap"),
                "-device".into(),
                "virtio-blk-pci,drive=disk,num-queues=2".into(),
            ]
        },
    );
}
