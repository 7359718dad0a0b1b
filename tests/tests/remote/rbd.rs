//! Images of Ceph RBD beside `rbd` and QEMU's programs. `cargo xtask ceph` starts a cluster and runs these.

use rustix::process::Signal;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};
use zebu_tests::ceph::Ceph;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::program::{Finished, finish, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

/// Bytes of the disk: several objects, and a part of one.
const LEN: usize = (33 << 20) + 512;
/// Seconds that a request may wait, where the cluster is away.
const DEADLINE: u64 = 10;

/// The error of NBD.
const EIO: u32 = 5;

/// A disk with data and holes as `disk.raw`.
fn source(dir: &Path) -> Vec<u8> {
    let mut content = vec![0; LEN];
    for (index, byte) in content[1 << 20..7 << 20].iter_mut().enumerate() {
        *byte = (index / 512 % 251 + 1) as u8;
    }
    content[20 << 20..][..4096].fill(9);
    content[LEN - 512..].fill(3);
    std::fs::write(dir.join("disk.raw"), &content).unwrap();
    content
}

/// A test's directory and the cluster, with none of these images.
fn begin(name: &str, images: &[&str]) -> (Scratch, Ceph) {
    let (scratch, ceph) = (Scratch::new(name), Ceph::find());
    for image in images {
        remove(&ceph, image);
    }
    (scratch, ceph)
}

fn remove(ceph: &Ceph, image: &str) {
    let snapshots = ceph.rbd(&format!("snap ls @{image}"));
    if snapshots.code == Some(0) {
        ceph.rbd(&format!("snap unprotect @{image}@one"));
        ceph.rbd(&format!("snap purge @{image}"));
        ceph.rbd(&format!("rm @{image}")).ok();
    }
}

/// `zebu` under the name of a program of QEMU's.
fn as_qemu(ceph: &Ceph, dir: &Path, program: &str, line: &str) -> Finished {
    let mut command = ceph.command(dir, zebu_program(), line);
    command.arg0(program);
    finish(command)
}

/// It fails, with all of these words in its message of one line.
#[track_caller]
fn refused(finished: Finished, words: &[&str]) {
    // A comparison that could not be made has another.
    let code = if finished.line.contains(" compare ") { 2 } else { 1 };
    let finished = finished.exits(code);
    assert_eq!(finished.stderr.lines().filter(|line| !line.starts_with("Try ")).count(), 1, "{finished}");
    for word in words {
        assert!(finished.stderr.contains(word), "{word}: {finished}");
    }
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn contents_go_both_ways() {
    let (scratch, ceph) = begin("rbd-contents", &["made", "of-qemu", "of-dd", "new"]);
    let dir = scratch.path();
    let content = source(dir);
    ceph.zebu(dir, "convert -f raw -O raw disk.raw @made").ok();
    assert!(ceph.export("made") == content);
    ceph.qemu(dir, "qemu-img", "compare -f raw -F raw disk.raw @made").ok();
    // What was not written takes no space.
    let diff = ceph.rbd("diff --format json @made").ok().stdout;
    let runs: serde_json::Value = serde_json::from_str(&diff).unwrap();
    let used: u64 = runs.as_array().unwrap().iter().map(|run| run["length"].as_u64().unwrap()).sum();
    assert!(used < 20 << 20, "{diff}");

    ceph.qemu(dir, "qemu-img", "convert -f raw -O raw disk.raw @of-qemu").ok();
    ceph.zebu(dir, "convert -f raw -O raw @of-qemu back.raw").ok();
    assert!(std::fs::read(dir.join("back.raw")).unwrap() == content);
    ceph.zebu(dir, "compare -f raw -F raw @of-qemu @made").ok();
    ceph.zebu(dir, "compare -f raw -F raw @of-qemu disk.raw").ok();
    ceph.zebu(dir, "dd -f raw -O raw if=disk.raw of=rbd:disks/of-dd bs=1M").ok();
    assert!(ceph.export("of-dd") == content);

    let info = ceph.zebu(dir, "info -f raw --output json @made").ok().stdout;
    assert!(info.contains(&format!("\"virtual-size\": {LEN}")) && info.contains("\"rbd\""), "{info}");
    let options = format!("driver=rbd,pool=disks,image=made,conf={}", ceph.conf());
    let described = ceph.zebu(dir, &format!("info --output json --image-opts {options}")).ok().stdout;
    assert!(described.contains(&format!("\"virtual-size\": {LEN}")), "{described}");
    let map = ceph.zebu(dir, "map -f raw --output json @made").ok().stdout;
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let runs = map.as_array().unwrap();
    assert!(runs.len() > 2 && runs.iter().any(|run| run["zero"] == true), "{map}");
    assert_eq!(runs.iter().map(|run| run["length"].as_u64().unwrap()).sum::<u64>(), LEN as u64);
    ceph.zebu(dir, "measure -f raw -O qcow2 @made").ok();

    // An image that exists stays as it is, unless -n says that it is to be written.
    refused(ceph.zebu(dir, "convert -f raw -O raw disk.raw @made"), &["rbd rm disks/made", "-n"]);
    let mut write = ceph.command(dir, zebu_program(), "io -f raw @made -c");
    write.arg("write -P 5 0 1M");
    finish(write).ok();
    assert_eq!(ceph.export("made")[..1 << 20], vec![5; 1 << 20]);
    ceph.zebu(dir, "convert -n -f raw -O raw disk.raw @made").ok();
    assert!(ceph.export("made") == content);

    ceph.zebu(dir, "create -f raw @new 10M").ok();
    assert_eq!(ceph.export("new"), vec![0; 10 << 20]);
    refused(ceph.zebu(dir, "create -f raw @new 10M"), &["rbd rm disks/new"]);

    ceph.zebu(dir, "backup -f raw @made copy.qcow2").ok();
    ceph.qemu(dir, "qemu-img", "compare -f raw -F qcow2 disk.raw copy.qcow2").ok();
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn snapshots_and_clones_are_read_as_they_are() {
    let (scratch, ceph) = begin("rbd-snapshots", &["clone", "base"]);
    let dir = scratch.path();
    let content = source(dir);
    ceph.zebu(dir, "convert -f raw -O raw disk.raw @base").ok();
    ceph.rbd("snap create @base@one").ok();
    ceph.qemu(dir, "qemu-img", "resize -f raw --shrink @base 8M").ok();
    ceph.zebu(dir, "compare -f raw -F raw disk.raw @base@one").ok();
    let write = |image: &str, what: &str| {
        let mut command = ceph.command(dir, zebu_program(), &format!("io -f raw {image} -c"));
        command.arg(what);
        finish(command)
    };
    let written = write("@base@one", "write -P 1 0 4k");
    assert!(written.stderr.contains("open it for reading only"), "{written}");
    refused(ceph.zebu(dir, "convert -f raw -O raw disk.raw @base@new"), &["snapshots can be read"]);
    refused(ceph.zebu(dir, "info -f raw @base@two"), &["no snapshot 'two'"]);

    ceph.rbd("snap protect @base@one").ok();
    ceph.rbd("clone @base@one @clone").ok();
    ceph.zebu(dir, "compare -f raw -F raw disk.raw @clone").ok();
    write("@clone", "write -P 77 1536k 4k").ok();
    write("@clone", "write -z -u 4M 4M").ok();
    let mut expected = content.clone();
    expected[1536 << 10..][..4096].fill(77);
    expected[4 << 20..8 << 20].fill(0);
    assert!(ceph.export("clone") == expected);
    // By the map of its extents, no data of the base is taken for a hole.
    ceph.zebu(dir, "convert -f raw -O qcow2 @clone clone.qcow2").ok();
    ceph.qemu(dir, "qemu-img", "compare -f raw -F qcow2 @clone clone.qcow2").ok();
    assert!(ceph.export("base@one") == content);
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn sizes_change_and_zeroes_give_space_back() {
    let (scratch, ceph) = begin("rbd-sizes", &["sized"]);
    let dir = scratch.path();
    ceph.zebu(dir, "create -f raw @sized 8M").ok();
    let io = |what: &str| {
        let mut command = ceph.command(dir, zebu_program(), "io -f raw @sized -c");
        command.arg(what);
        finish(command)
    };
    io("write -P 6 0 8M").ok();
    ceph.zebu(dir, "resize -f raw @sized +4M").ok();
    assert!(ceph.rbd("info @sized").ok().stdout.contains("12 MiB"));
    assert_eq!(ceph.export("sized")[8 << 20..], vec![0; 4 << 20]);
    refused(ceph.zebu(dir, "resize -f raw @sized 6M"), &["--shrink"]);
    ceph.zebu(dir, "resize -f raw --shrink @sized 6M").ok();
    ceph.zebu(dir, "resize -f raw @sized 12M").ok();
    // What was cut off does not come back.
    let content = ceph.export("sized");
    assert!(content[..6 << 20] == vec![6; 6 << 20] && content[6 << 20..] == vec![0; 6 << 20]);

    let used = || {
        let diff = ceph.rbd("diff --format json @sized").ok().stdout;
        let runs: serde_json::Value = serde_json::from_str(&diff).unwrap();
        let is_used = |run: &&serde_json::Value| run["exists"] == "true";
        runs.as_array()
            .unwrap()
            .iter()
            .filter(is_used)
            .map(|run| run["length"].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(used(), 6 << 20);
    io("discard 0 4M").ok();
    assert_eq!(used(), 2 << 20);
    io("write -z 8M 4M").ok();
    assert_eq!(used(), 6 << 20, "zeroes that keep their space");
    io("write -z -u 0 12M").ok();
    assert_eq!(used(), 0);
    assert_eq!(ceph.export("sized"), vec![0; 12 << 20]);
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn an_image_of_a_format_lies_in_an_image_of_rbd() {
    let (scratch, ceph) = begin("rbd-qcow2", &["q", "q-of-qemu", "q-empty"]);
    let dir = scratch.path();
    source(dir);
    ceph.zebu(dir, "convert -f raw -O qcow2 disk.raw @q").ok();
    ceph.qemu(dir, "qemu-img", "check -f qcow2 @q").ok();
    ceph.qemu(dir, "qemu-img", "compare -f raw -F qcow2 disk.raw @q").ok();
    ceph.zebu(dir, "check -f qcow2 @q").ok();
    let io = |image: &str, what: &str| {
        let mut command = ceph.command(dir, zebu_program(), &format!("io -f qcow2 {image} -c"));
        command.arg(what);
        finish(command).ok();
    };
    // It grows.
    io("@q", "write -P 8 8M 12M");
    ceph.zebu(dir, "snapshot -c one @q").ok();
    io("@q", "write -P 9 8M 12M");
    ceph.qemu(dir, "qemu-img", "check -f qcow2 @q").ok();
    let pattern = |image: &str, what: &str| {
        let mut command = ceph.command(dir, Path::new("qemu-io"), &format!("-f qcow2 {image} -c"));
        command.arg(what);
        let told = finish(command).ok();
        assert!(!told.stdout.contains("verification failed"), "{told}");
    };
    pattern("@q", "read -P 9 8M 12M");
    ceph.qemu(dir, "qemu-img", "snapshot -a one @q").ok();
    pattern("@q", "read -P 8 8M 12M");
    ceph.zebu(dir, "resize -f qcow2 @q 64M").ok();
    assert!(ceph.qemu(dir, "qemu-img", "info -f qcow2 @q").ok().stdout.contains("64 MiB"));

    ceph.qemu(dir, "qemu-img", "convert -f raw -O qcow2 disk.raw @q-of-qemu").ok();
    ceph.zebu(dir, "compare -f raw -F qcow2 disk.raw @q-of-qemu").ok();
    ceph.zebu(dir, "convert -n -f raw -O qcow2 disk.raw @q-of-qemu").ok();
    ceph.qemu(dir, "qemu-img", "compare -f raw -F qcow2 disk.raw @q-of-qemu").ok();
    ceph.zebu(dir, "create -f qcow2 @q-empty 1G").ok();
    ceph.qemu(dir, "qemu-img", "check -f qcow2 @q-empty").ok();
    assert!(ceph.export("q-empty").len() < 2 << 20);
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn an_overlay_leads_to_an_image_only_if_that_is_allowed() {
    let (scratch, ceph) = begin("rbd-overlay", &["below"]);
    let dir = scratch.path();
    source(dir);
    ceph.zebu(dir, "convert -f raw -O raw disk.raw @below").ok();
    ceph.zebu(dir, "create -f qcow2 -b @below -F raw top.qcow2").ok();
    ceph.qemu(dir, "qemu-img", "compare -f raw -F qcow2 disk.raw top.qcow2").ok();
    refused(
        ceph.zebu(dir, "compare -f raw -F qcow2 disk.raw top.qcow2"),
        &["rbd:disks/below", "--allow-refs"],
    );
    refused(
        as_qemu(&ceph, dir, "qemu-img", "compare -f raw -F qcow2 disk.raw top.qcow2"),
        &["rbd:disks/below"],
    );
    for rule in ["all", "prefix=rbd:disks/", "prefix=rbd:disks/below"] {
        ceph.zebu(dir, &format!("compare --allow-refs {rule} -f raw -F qcow2 disk.raw top.qcow2")).ok();
    }
    refused(
        ceph.zebu(dir, "compare --allow-refs prefix=rbd:disks/be -f raw -F qcow2 disk.raw top.qcow2"),
        &["rbd:disks/below"],
    );
    // One that chooses Ceph's settings needs more than a beginning of its name.
    let chosen = ceph.name("below");
    ceph.qemu(dir, "qemu-img", &format!("create -q -f qcow2 -b {chosen} -F raw chosen.qcow2")).ok();
    refused(
        ceph.zebu(dir, "info --backing-chain --allow-refs prefix=rbd:disks/ chosen.qcow2"),
        &["settings of Ceph", "--allow-refs all"],
    );
    ceph.zebu(dir, "compare --allow-refs all -f raw -F qcow2 disk.raw chosen.qcow2").ok();
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn what_is_missing_is_named_with_its_remedy() {
    let (scratch, ceph) = begin("rbd-errors", &["there"]);
    let dir = scratch.path();
    source(dir);
    ceph.zebu(dir, "convert -f raw -O raw disk.raw @there").ok();
    let conf = ceph.conf();
    for (name, words) in [
        ("@missing", &["no image 'missing' in the pool 'disks'"][..]),
        ("rbd:disks/team/missing", &["no image 'missing'", "namespace 'team'"]),
        ("rbd:nothing/x", &["no pool 'nothing'"]),
        ("rbd:disks", &["image is missing"]),
        ("@there:conf=/nonexistent", &["configuration '/nonexistent' can't be read"]),
        ("@there:rbd_nothing=1", &["no setting 'rbd_nothing'"]),
        ("@there:id=stranger", &["client.stranger in", ":keyring=FILE", ":id=USER"]),
        ("@there:id=nobody", &["client.nobody may not", "profile rbd"]),
        ("@there:key=AQBx", &["'key' is a secret", "keyring="]),
        ("@there:mon_host=127.0.0.1\\:1:client_mount_timeout=1", &["no monitor", "1 s"]),
    ] {
        refused(ceph.zebu(dir, &format!("info -f raw {name}")), words);
        let told = as_qemu(&ceph, dir, "qemu-img", &format!("info -f raw {name}")).exits(1);
        assert!(told.stderr.contains(words[0]), "{told}");
    }
    let told = finish({
        let mut command = ceph.command(dir, zebu_program(), "info -f raw @there");
        command.env_remove("CEPH_CONF").env("HOME", dir);
        command
    });
    if !Path::new("/etc/ceph/ceph.conf").exists() {
        // librados says something itself.
        let last = told.exits(1).stderr.lines().last().map(str::to_owned).unwrap_or_default();
        assert!(last.contains("no configuration of Ceph") && last.contains(":conf=FILE"), "{last}");
    }
    for (options, word) in [
        ("driver=rbd,pool=disks", "'image' is missing"),
        ("driver=rbd,pool=disks,image=there,key-secret=s", "key-secret"),
        ("driver=rbd,pool=disks,image=there,nothing=1", "nothing"),
        ("driver=raw,file.driver=rbd,file.pool=disks,file.image=there,file.server.0.host=h", "server"),
    ] {
        let told = ceph.zebu(dir, &format!("info --image-opts {options},conf={conf}")).exits(1);
        assert!(told.stderr.contains(word), "{told}");
    }
    // Who may only read can.
    ceph.zebu(dir, "compare -f raw -F raw disk.raw @there:id=reader").ok();
    let mut written = ceph.command(dir, zebu_program(), "io -f raw @there:id=reader -c");
    written.arg("write 0 4k");
    let told = finish(written);
    assert!(told.stderr.contains("client.reader may not"), "{told}");
    refused(ceph.zebu(dir, "create -f raw rbd:disks/not-made:id=reader 1M"), &["client.reader may not"]);
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn an_image_is_served_over_nbd() {
    let (scratch, ceph) = begin("rbd-served", &["served"]);
    let dir = scratch.path();
    let mut content = source(dir);
    ceph.zebu(dir, "convert -f raw -O raw disk.raw @served").ok();
    refused(ceph.zebu(dir, "serve --nbd unix:s.sock -f raw @served"), &["librbd", "--no-sandbox"]);
    let options = format!("--no-sandbox -f raw {}", ceph.name("served"));
    let server = Server::start(dir, &options);
    let uri = server.uri("");
    ceph.qemu(dir, "qemu-img", &format!("compare -f raw -F raw disk.raw {uri}")).ok();
    let mut io = ceph.command(dir, Path::new("qemu-io"), &format!("-f raw {uri}"));
    io.args(["-c", "write -P 4 3M 6M", "-c", "write -z -u 16M 8M", "-c", "discard 1M 1M", "-c", "flush"]);
    let told = finish(io).ok();
    assert!(!told.stdout.contains("failed"), "{told}");
    content[3 << 20..9 << 20].fill(4);
    content[16 << 20..24 << 20].fill(0);
    let exported = ceph.export("served");
    assert!(exported[2 << 20..] == content[2 << 20..]);
    // The image's lock goes to whoever writes, and comes back.
    let mut beside = ceph.command(dir, Path::new("qemu-io"), "-f raw @served -c");
    beside.arg("write -P 5 0 4k");
    finish(beside).ok();
    let mut io = ceph.command(dir, Path::new("qemu-io"), &format!("-f raw {uri}"));
    io.args(["-c", "read -P 5 0 4k", "-c", "write -P 6 0 4k", "-c", "flush"]);
    let told = finish(io).ok();
    assert!(!told.stdout.contains("failed"), "{told}");
    server.stop();
    assert_eq!(ceph.export("served")[..4096], [6; 4096]);
    // Nobody has to break it.
    assert_eq!(ceph.rbd("lock ls @served").ok().stdout, "");
    assert!(ceph.rbd("status @served").ok().stdout.contains("none"));
}

#[test]
#[ignore = "needs a Ceph cluster: `cargo xtask ceph`"]
fn requests_end_where_the_cluster_is_away_and_go_on_when_it_is_back() {
    let (scratch, ceph) = begin("rbd-outage", &["outage"]);
    let dir = scratch.path();
    let content = source(dir);
    ceph.zebu(dir, "convert -f raw -O raw disk.raw @outage").ok();
    let timeouts = format!("rados_osd_op_timeout={DEADLINE}:rados_mon_op_timeout={DEADLINE}");
    let options = format!("--no-sandbox -f raw {}:{timeouts}", ceph.name("outage"));
    let server = Server::start(dir, &options);
    let mut client = Client::open(server.socket(), "").unwrap();
    assert_eq!(client.read(1 << 20, 512).unwrap(), content[1 << 20..][..512]);
    assert_eq!(client.write(0, 0, &[1; 512]).unwrap(), 0);
    let other = scratch.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let ending = Server::start(&other, &options);
    let outage = ceph.without_daemon();
    let begin = Instant::now();
    assert_eq!(client.call(0, command::READ, 2 << 20, 512).unwrap().error, EIO);
    assert!(begin.elapsed() > Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!(client.write(0, 512, &[2; 512]).unwrap(), EIO);
    // A command ends, and says why.
    let told = ceph.zebu(dir, &format!("convert -f raw -O raw @outage:{timeouts} other.raw")).exits(1);
    let silence = format!("has not answered for {DEADLINE} s");
    assert!(told.stderr.contains(&silence), "{told}");
    // A server ends, too, though it can't close the image.
    ending.end_by(Signal::TERM);
    drop(outage);
    assert_eq!(client.read(1 << 20, 512).unwrap(), content[1 << 20..][..512]);
    assert_eq!(client.write(0, 512, &[4; 512]).unwrap(), 0);
    assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    drop(client);
    let said = server.stop_with_messages();
    assert!(said.contains(&silence), "{said}");
    let after = ceph.export("outage");
    assert_eq!((&after[..512], &after[512..1024]), (&[1; 512][..], &[4; 512][..]));
    assert!(after[1024..] == content[1024..]);
}
