//! Disks in use that go elsewhere: points of one moment in a bucket, and forks in a bucket or a registry. The servers know of none.

use serde_json::Value;
use std::path::Path;
use zebu_tests::nbd_client::Client;
use zebu_tests::object_store::ObjectStore;
use zebu_tests::program::Finished;
use zebu_tests::registry::{Guests, Registry, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const MIB: usize = 1 << 20;

fn json(finished: Finished) -> Value {
    serde_json::from_str(&finished.ok().stdout).unwrap()
}

fn fill(client: &mut Client, mib: usize, byte: u8) {
    assert_eq!(client.write(0, (mib * MIB) as u64, &vec![byte; MIB]).unwrap(), 0);
}

fn make(dir: &Path, name: &str) {
    zebu(dir, &["create", "-q", "-f", "qcow2", name, "8M"]).ok();
}

fn same(dir: &Path, restored: &str, sealed: &str) {
    zebu(dir, &["compare", "-f", "raw", "-F", "qcow2", restored, sealed]).ok();
}

#[test]
fn running_disks_are_backed_up_and_forked_into_a_bucket() {
    let scratch = Scratch::new("running-disks");
    let dir = scratch.path();
    let store = ObjectStore::start(dir);
    for name in ["root.qcow2", "data.qcow2"] {
        make(dir, name);
    }
    let options = "--control ctl.sock --export-name root --export-name data -f qcow2 root.qcow2 data.qcow2";
    let server = Server::start(dir, options);
    let mut client = Client::open(server.socket(), "root").unwrap();
    fill(&mut client, 1, 1);
    let to = ["--to", "store:s3://disks/nightly/vm", "--output", "json"];
    let words = [&["ctl", "ctl.sock", "backup-start", "root", "data"], &to[..]].concat();
    let first = json(store.zebu(&words));
    fill(&mut client, 1, 2);
    let second = json(store.zebu(&words));
    for (report, way, byte) in [(&first, "full", 1), (&second, "scan", 2)] {
        let points = report["points"].as_array().unwrap();
        assert!(points.iter().all(|point| point["way"] == way && point["moment"] == report["moment"]));
        let name = format!("store:s3://disks/nightly/vm/root@{}", points[0]["point"].as_str().unwrap());
        store.zebu(&["restore", "-q", "--force", &name, "restored.raw"]).ok();
        assert_eq!(std::fs::read(dir.join("restored.raw")).unwrap()[MIB], byte);
    }
    // The same store goes on with a fork; another server takes it up from there.
    let push = ["--push", "store:s3://disks/nightly/vm/root", "-w", "--output", "json"];
    let words = [&["ctl", "ctl.sock", "fork", "root", "--to", "over.qcow2"], &push[..]].concat();
    let forked = json(store.zebu(&words));
    let point = &forked["push"]["uploaded"][0];
    assert_eq!(point["way"], "scan", "{forked}");
    fill(&mut client, 1, 3);
    let name = format!("store:s3://disks/nightly/vm/root@{}", point["point"].as_str().unwrap());
    store.zebu(&["restore", "-q", "--force", &name, "restored.raw"]).ok();
    same(dir, "restored.raw", "root.qcow2");
    let there = dir.join("there");
    std::fs::create_dir(&there).unwrap();
    let variables = store.variables();
    let variables: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let other = Server::start_with_all(&there, &variables, &format!("--overlay own.qcow2 {name}"));
    let mut guest = Client::open(other.socket(), "").unwrap();
    assert_eq!(guest.read(MIB as u64, 512).unwrap(), [2; 512]);
    drop(guest);
    other.stop_with_messages();
    // Without credentials, nothing is published, and the fork stands.
    let fork = ["ctl", "ctl.sock", "fork", "root", "--to", "more.qcow2", "-w"];
    let refused = store.zebu_with(
        &[("AWS_SECRET_ACCESS_KEY", "wrong")],
        &[&fork[..], &["--push", "store:s3://disks/nightly/vm/root"]].concat(),
    );
    assert!(refused.code == Some(1) && !dir.join("more.qcow2").exists(), "{refused}");
    drop(client);
    server.stop();
}

#[test]
fn forks_become_images_of_a_registry() {
    let scratch = Scratch::new("running-disks");
    let dir = scratch.path();
    let registry = Registry::start(dir, Guests::All);
    let image = registry.image("vm/disk:v1");
    make(dir, "disk.qcow2");
    let server = Server::start(dir, "--control ctl.sock -f qcow2 disk.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    for (round, sealed) in ["disk.qcow2", "over-0.qcow2", "over-1.qcow2"].into_iter().enumerate() {
        fill(&mut client, round, round as u8 + 1);
        let overlay = format!("over-{round}.qcow2");
        let words = ["ctl", "ctl.sock", "fork", "--to", &overlay, "--push", &image, "-w", "--output", "json"];
        let report = json(zebu(dir, &words));
        let blobs = report["push"]["uploaded"][0]["blobs"].as_array().unwrap();
        assert_eq!(blobs.len(), round + 1, "{report}");
        // Each fork sends what was written since the last one alone.
        assert!(blobs[..round].iter().all(|blob| blob["was-there"] == true), "{report}");
        assert_eq!(blobs[round]["was-there"], false, "{report}");
        zebu(dir, &["compare", &image, sealed]).ok();
    }
    // Nobody listens there.
    let words =
        ["ctl", "ctl.sock", "fork", "--to", "last.qcow2", "--push", "oci://127.0.0.1:1/vm/disk:v1", "-w"];
    let failed = zebu(dir, &words).exits(3);
    assert!(failed.stderr.contains("once more: zebu push -f qcow2"), "{failed}");
    fill(&mut client, 1, 9);
    assert!(dir.join("last.qcow2").exists());
    drop(client);
    server.stop();
}
