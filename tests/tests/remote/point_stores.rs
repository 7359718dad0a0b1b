//! Stores of points in a bucket: points made, raced, pruned, merged, verified, restored and served lazily.

use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use zebu_tests::object_store::{BUCKET, ObjectStore};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const STORE: &str = "store:s3://disks/nightly/vm1";
const MIB: u64 = 1 << 20;

fn report(store: &ObjectStore, words: &[&str]) -> Value {
    let line: Vec<&str> = words.iter().copied().chain(["--output", "json"]).collect();
    serde_json::from_str(&store.zebu(&line).ok().stdout).unwrap()
}

fn name_of(report: &Value) -> String {
    format!("{STORE}@{}", report["point"].as_str().unwrap())
}

/// Keys of the objects in a part of the store.
fn keys(store: &ObjectStore, part: &str) -> Vec<String> {
    let path = format!("{BUCKET}/?list-type=2&prefix=nightly%2Fvm1%2F{part}%2F");
    let list = store.request("GET", &path, &["--fail"]).ok().stdout;
    list.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next()).map(str::to_owned).collect()
}

/// Fills a mebibyte of the disk with noise, so that nothing of it is compressed.
fn write_noise(dir: &Path, store: &ObjectStore, random: &mut Random, at: u64) {
    let mut noise = vec![0; MIB as usize];
    random.fill(&mut noise);
    std::fs::write(dir.join("noise"), noise).unwrap();
    let command = format!("write -s noise {at} 1M");
    store.zebu(&["io", "-c", &command, "disk.qcow2"]).ok();
}

fn same(qemu: &Qemu, dir: &Path, copy: &str, store: &ObjectStore, point: &str) {
    store.zebu(&["restore", "-q", "--force", point, "restored.raw"]).ok();
    qemu.img(dir, ["compare", "-f", "raw", "-F", "raw", copy, "restored.raw"]).ok();
}

#[test]
fn a_round_in_a_bucket() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("point-stores");
    let dir = scratch.path();
    let store = ObjectStore::start(dir);
    let mut random = Random::new(77);
    qemu.create(dir, "disk.qcow2", "qcow2", "", 64 * MIB);
    let mut points: Vec<(String, String)> = Vec::new();
    for round in 0..5u64 {
        // More than a part of an upload at first.
        for piece in 0..if round == 0 { 24 } else { 1 } {
            write_noise(dir, &store, &mut random, (round * 7 + piece) * MIB);
        }
        let copy = format!("copy{round}.raw");
        qemu.img(dir, ["convert", "-f", "qcow2", "-O", "raw", "disk.qcow2", &copy]).ok();
        let made = report(&store, &["backup", "--bitmap", "b", "disk.qcow2", STORE]);
        assert_eq!(made["way"], if round == 0 { "full" } else { "bitmap" }, "{made}");
        assert!(round == 0 || made["added"].as_u64().unwrap() < 2 * MIB, "{made}");
        points.push((name_of(&made), copy));
    }
    for (point, copy) in &points {
        same(&qemu, dir, copy, &store, point);
    }
    store.zebu(&["verify", STORE]).ok();
    let delta = report(&store, &["delta", &points[1].0, &points[2].0]);
    assert_eq!(delta["changed"], MIB);

    // A part of the newest point, lazily: what is read is not the whole of it.
    let (newest, copy) = points[4].clone();
    let sockets = scratch.file("s");
    let log = store.command(
        &[],
        &["serve", "-v", "--nbd", &format!("unix:{}", sockets.display()), "--overlay", "top.qcow2", &newest],
    );
    let mut log = log;
    let mut server = log.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    let mut lines = std::io::BufReader::new(server.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut lines, &mut ready).unwrap();
    assert_eq!(ready.trim(), "ready");
    let url = format!("nbd+unix:///?socket={}", sockets.display());
    let read = ["io", "-f", "raw", "-c", "write -P 5 60M 64k", "-c", "read 1M 64k", &url];
    store.zebu(&read).ok();
    rustix::process::kill_process(rustix::process::Pid::from_child(&server), rustix::process::Signal::TERM)
        .unwrap();
    let ended = server.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.success(), "{told}");
    let bytes: u64 = told
        .lines()
        .filter(|line| line.contains(" bytes read,"))
        .filter_map(|line| line.split(" requests, ").nth(1)?.split(' ').next()?.parse::<u64>().ok())
        .sum();
    assert!(bytes > 0 && bytes < 16 * MIB, "{bytes}: {told}");
    // The overlay has what was written, and stands on the point.
    store.zebu(&["io", "-r", "--allow-refs", "all", "-c", "read -P 5 60M 64k", "top.qcow2"]).ok();
    same(&qemu, dir, &copy, &store, &newest);

    // Two are forgotten; what they alone needed goes when it is merged.
    for point in [&points[1].0, &points[2].0] {
        store.zebu(&["forget", point]).ok();
    }
    store.zebu(&["forget", "--prune", STORE]).ok();
    assert_eq!(keys(&store, "layers").len(), 5);
    let merged = report(&store, &["compact", "--depth", "1", STORE]);
    assert_eq!((&merged["merged"], &merged["points"]), (&Value::from(3), &Value::from(2)), "{merged}");
    let pruned = report(&store, &["forget", "--prune", STORE]);
    assert_eq!(pruned["pruned"]["objects"], 6, "{pruned}");
    for at in [0, 3, 4] {
        same(&qemu, dir, &points[at].1, &store, &points[at].0);
    }
    store.zebu(&["verify", STORE]).ok();

    // A backup that is killed leaves its claim, which a prune spares until it is told.
    let mut killed = 0;
    while keys(&store, "claims").is_empty() {
        write_noise(dir, &store, &mut random, 40 * MIB);
        let mut command = store.command(&[], &["backup", "-q", "disk.qcow2", STORE]);
        let mut child = command.stdin(Stdio::null()).spawn().unwrap();
        while child.try_wait().unwrap().is_none() {
            if !keys(&store, "claims").is_empty() {
                let _ = child.kill();
            }
        }
        killed += 1;
        assert!(killed < 20);
    }
    let spared = store.zebu(&["forget", "--prune", STORE]).ok();
    assert!(spared.stderr.contains("--break-lock"), "{spared}");
    store.zebu(&["forget", "--prune", "--break-lock", STORE]).ok();
    assert!(keys(&store, "claims").is_empty() && keys(&store, "marks").is_empty());

    // Several at once are several points.
    let before = keys(&store, "points").len();
    let begin = || {
        let mut command = store.command(&[], &["backup", "-U", "-q", "disk.qcow2", STORE]);
        command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let running = [begin(), begin(), begin()];
    store.zebu(&["forget", "--prune", STORE]).ok();
    for child in running {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    assert_eq!(keys(&store, "points").len(), before + 3);
    store.zebu(&["verify", STORE]).ok();

    // An object that is lost is named.
    let layer = keys(&store, "layers").remove(0);
    store.request("DELETE", &format!("{BUCKET}/{layer}"), &["--fail"]).ok();
    let found = store.zebu(&["verify", STORE]).exits(2);
    assert!(found.stderr.contains(layer.strip_prefix("nightly/vm1/").unwrap()), "{found}");
}
