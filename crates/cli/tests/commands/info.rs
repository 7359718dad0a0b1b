//! `zebu info` against `qemu-img info`.

use crate::common::{Scratch, assert_has_all, qemu, wait_for_listener, words};

/// Images of many kinds, made by QEMU. The names of those that stand alone.
fn images(scratch: &Scratch) -> Vec<&'static str> {
    for line in [
        "create -q -f qcow2 plain.qcow2 64M",
        "create -q -f qcow2 -o compat=v2,cluster_size=4k v2.qcow2 64M",
        "create -q -f qcow2 -o extended_l2=on,compression_type=zstd,refcount_bits=1,lazy_refcounts=on ext.qcow2 1G",
        "create -q -f qcow2 snap.qcow2 10M",
        "create -q -f qcow2 bitmaps.qcow2 10M",
        "create -q -f qcow2 -o data_file=data.raw,data_file_raw=on external.qcow2 10M",
        "create -q -f raw disk.raw 1.5M",
        "create -q -f qcow2 -b snap.qcow2 -F qcow2 mid.qcow2",
        "create -q -f qcow2 -b mid.qcow2 -F qcow2 top.qcow2",
    ] {
        scratch.qemu_img(&words(line)).ok();
    }
    scratch.qemu_io(&["-c", "write -P 1 0 1M", "-c", "write -c -P 2 2M 64k", "plain.qcow2"]).ok();
    scratch.qemu_io(&["-c", "write -P 1 0 1M", "snap.qcow2"]).ok();
    scratch.qemu_img(&words("snapshot -c first snap.qcow2")).ok();
    scratch.qemu_io(&["-c", "write -P 2 0 1M", "snap.qcow2"]).ok();
    scratch.qemu_img(&words("snapshot -c second snap.qcow2")).ok();
    scratch.qemu_img(&words("bitmap --add bitmaps.qcow2 one")).ok();
    scratch.qemu_img(&words("bitmap --add --disable -g 128k bitmaps.qcow2 two")).ok();
    vec![
        "plain.qcow2",
        "v2.qcow2",
        "ext.qcow2",
        "snap.qcow2",
        "bitmaps.qcow2",
        "external.qcow2",
        "disk.raw",
        "top.qcow2",
    ]
}

#[test]
fn json_has_qemus_keys_and_values() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    for name in images(&scratch) {
        let theirs = scratch.qemu_img(&["info", "--output=json", name]).ok().json();
        let ours = scratch.zebu(&["info", "--output=json", name]).ok().json();
        assert_has_all(&ours, &theirs, &[]);
    }
}

#[test]
fn text_has_qemus_lines_in_their_order() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    for name in images(&scratch) {
        let theirs = scratch.qemu_img(&["info", name]).ok().stdout;
        let ours = scratch.zebu(&["info", name]).ok().stdout;
        let mut lines = ours.lines();
        for line in theirs.lines() {
            assert!(
                lines.any(|own| own == line),
                "{name}: no line {line:?} in its place in\n{ours}\nof\n{theirs}"
            );
        }
    }
}

#[test]
fn the_chain_is_told_top_first() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    images(&scratch);
    let line = words("info --backing-chain --output=json top.qcow2");
    let (ours, theirs) = (scratch.zebu(&line).ok().json(), scratch.qemu_img(&line).ok().json());
    assert_has_all(&ours, &theirs, &[]);
    let text = scratch.zebu(&words("info --backing-chain top.qcow2")).ok().stdout;
    let names: Vec<&str> = text.lines().filter(|line| line.starts_with("image: ")).collect();
    assert_eq!(names, ["image: top.qcow2", "image: mid.qcow2", "image: snap.qcow2"]);
}

#[test]
fn files_that_an_image_names_are_left_alone() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    for line in [
        "create -q -f qcow2 -u -b missing.qcow2 -F qcow2 overlay.qcow2 1M",
        "create -q -f qcow2 -u -b nbd://localhost:1/x -F raw remote.qcow2 1M",
        "create -q -f qcow2 -o data_file=data.raw external.qcow2 1M",
    ] {
        scratch.qemu_img(&words(line)).ok();
    }
    std::fs::remove_file(scratch.file("data.raw")).unwrap();
    for name in ["overlay.qcow2", "remote.qcow2", "external.qcow2"] {
        let info = scratch.zebu(&["info", "--output", "json", name]).ok().json();
        assert_eq!(info["virtual-size"], 1 << 20, "{name}");
    }
    scratch
        .zebu(&words("info --backing-chain overlay.qcow2"))
        .fails_naming(1, &["overlay.qcow2", "missing.qcow2"]);
}

#[test]
fn a_reference_outside_the_directory_needs_leave() {
    if !qemu() {
        return;
    }
    let (inside, outside) = (Scratch::new(), Scratch::new());
    outside.qemu_img(&words("create -q -f qcow2 base.qcow2 1M")).ok();
    let base = outside.file("base.qcow2");
    let base = base.to_str().unwrap();
    inside.qemu_img(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", "top.qcow2"]).ok();
    let line = words("info --backing-chain top.qcow2");
    inside.zebu(&line).fails_naming(1, &["base.qcow2", "--allow-refs"]);
    let directory = format!("dir={}", outside.path().display());
    for rule in ["all", &directory] {
        inside.zebu(&[&line[..], &["--allow-refs", rule]].concat()).ok();
    }
    inside.zebu(&[&line[..], &["--allow-refs", "none"]].concat()).fails_naming(1, &["base.qcow2"]);
}

#[test]
fn memory_and_limits_are_told() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    images(&scratch);
    let plain = scratch.zebu(&words("info --output json plain.qcow2")).ok().json();
    // 64 MiB of 64 KiB clusters are 1024 entries of 8 bytes.
    assert!(plain["full-cache-size"].as_u64().unwrap() >= 8192, "{plain:#}");
    assert_eq!(plain["limitations"], serde_json::json!([]));
}

#[test]
fn encrypted_images_can_be_looked_at() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    let luks = "-f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 luks.qcow2 1M";
    let aes = "-f qcow2 -o encrypt.format=aes,encrypt.key-secret=s aes.qcow2 1M";
    for line in [luks, aes] {
        scratch.qemu_img(&words(&format!("create -q --object secret,id=s,data=secret {line}"))).ok();
    }
    for (name, format) in [("luks.qcow2", "luks"), ("aes.qcow2", "aes")] {
        let info = scratch.zebu(&["info", "--output", "json", name]).ok().json();
        assert_eq!(info["encrypted"], true, "{info:#}");
        assert_eq!(info["format-specific"]["data"]["encrypt"]["format"], format, "{info:#}");
        assert!(scratch.zebu(&["info", name]).ok().stdout.contains("encrypted: yes\n"));
        scratch.zebu(&["convert", name, "out.raw"]).fails_naming(1, &[name, "encrypt.key-secret"]);
    }
}

#[test]
fn image_options_name_the_file() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.zebu(&words("info --image-opts driver=qcow2,file.filename=a.qcow2,l2-cache-size=1M")).ok();
    for (options, named) in [
        ("driver=qcow2,file.filename=a.qcow2,foo=bar", "foo"),
        ("driver=qcow2,file.filename=a.qcow2,l2-cache-size=1x", "l2-cache-size"),
        ("driver=foo,file.filename=a.qcow2", "foo"),
        ("driver=qcow2", "file.filename"),
        ("a.qcow2", "a.qcow2"),
        ("driver=qcow2,file.filename=a.qcow2,refcount-cache-size=1M", "refcount-cache-size"),
    ] {
        scratch.zebu(&["info", "--image-opts", options]).fails_naming(1, &[named]);
    }
    scratch
        .zebu(&words("info --image-opts -f qcow2 file.filename=a.qcow2"))
        .fails_naming(1, &["--image-opts and --format are mutually exclusive"]);
}

#[test]
fn fragmentation_is_counted_on_request() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 64M")).ok();
    // In the file: clusters 0, 1, 3, 2. In the order of the disk: 0 and 1, then 2, then 3.
    scratch.qemu_io(&["-c", "write 0 128k", "-c", "write 192k 64k", "-c", "write 128k 64k", "a.qcow2"]).ok();
    let info = scratch.zebu(&words("info --fragmentation --output json a.qcow2")).ok().json();
    assert_eq!(info["fragmentation"], serde_json::json!({ "data-bytes": 256 << 10, "extents": 3 }));
    let text = scratch.zebu(&words("info --fragmentation a.qcow2")).ok().stdout;
    assert!(text.contains("fragmentation: 256 KiB of data in 3 pieces\n"), "{text}");
    assert!(scratch.zebu(&words("info --output json a.qcow2")).ok().json().get("fragmentation").is_none());
}

/// Names as an image from a stranger may have them: with codes that a terminal obeys, and a line end.
const HOSTILE: &str = "x\u{1b}[31m\nimage fake\u{9b}2J";

#[test]
fn names_in_an_image_do_not_reach_the_terminal_as_they_are() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch
        .qemu_img(&["create", "-q", "-f", "qcow2", "-u", "-b", HOSTILE, "-F", "qcow2", "a.qcow2", "1M"])
        .ok();
    scratch.qemu_img(&["create", "-q", "-f", "qcow2", HOSTILE, "1M"]).ok();
    scratch.qemu_img(&["snapshot", "-c", HOSTILE, HOSTILE]).ok();
    scratch.qemu_io(&["-c", "write 0 64k", HOSTILE]).ok();
    scratch.qemu_img(&["bitmap", "--add", HOSTILE, HOSTILE]).ok();
    scratch
        .zebu(&["create", "-q", "-f", "qcow2", "-o", &format!("data_file={HOSTILE}.raw"), "d.qcow2", "1M"])
        .ok();
    for arguments in [
        vec!["info", "a.qcow2"],
        vec!["info", "--backing-chain", "a.qcow2"],
        vec!["info", "--verdict", "a.qcow2"],
        vec!["info", "d.qcow2"],
        vec!["info", HOSTILE],
        vec!["snapshot", "-l", HOSTILE],
        vec!["map", HOSTILE],
        vec!["map", "a.qcow2"],
        vec!["map", "d.qcow2"],
        vec!["check", HOSTILE],
        vec!["clone", HOSTILE, "clone"],
        vec!["compare", HOSTILE, "a.qcow2"],
        vec!["io", "-c", "open -o nosuch=1 x\u{1b}[31m", "-c", "info", HOSTILE],
        vec!["bitmap", "--add", HOSTILE, HOSTILE],
        vec!["snapshot", "-d", "\u{1b}[31m", HOSTILE],
    ] {
        let ran = scratch.zebu(&arguments);
        for text in [&ran.stdout, &ran.stderr] {
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{arguments:?}: {ran:#?}");
            assert!(!text.contains("\nimage fake"), "{arguments:?}: {ran:#?}");
        }
    }
    // Programs get the name itself.
    let info = scratch.zebu(&words("info --output=json a.qcow2")).ok().json();
    assert_eq!(info["backing-filename"], HOSTILE);
}

/// QEMU's server of `base.raw` on a socket.
struct Served(std::process::Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn served(scratch: &Scratch, socket: &str, options: &[&str]) -> Served {
    let path = scratch.file(socket);
    let mut server = std::process::Command::new("qemu-nbd");
    server.args(["--persistent", "--shared=0", "--read-only", "-f", "raw", "-k"]).arg(&path);
    let server = Served(server.args(options).arg(scratch.file("base.raw")).spawn().unwrap());
    wait_for_listener(&path);
    server
}

#[test]
fn under_qemus_name_the_nodes_below_an_image_are_told_to_the_letter() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    for line in [
        "create -q -f qcow2 lower.qcow2 4M",
        "create -q -f qcow2 -b lower.qcow2 -F qcow2 upper.qcow2",
        "create -q -f raw base.raw 4M",
        "create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 4M",
        "create -q -f vmdk -o subformat=twoGbMaxExtentSparse two.vmdk 3G",
    ] {
        scratch.qemu_img(&words(line)).ok();
    }
    scratch.write("rules", b"[inject-error]\nevent = \"l2_load\"\n");
    let link = scratch.file("qemu-img");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zebu"), &link).unwrap();
    let _servers = [served(&scratch, "server", &[]), served(&scratch, "named", &["-x", "disk"])];
    for line in [
        "upper.qcow2",
        "--backing-chain upper.qcow2",
        "flat.vmdk",
        "two.vmdk",
        "null-co://",
        "blkdebug::upper.qcow2",
        "blkdebug:rules:base.raw",
        "blkverify:base.raw:upper.qcow2",
        "blkverify:base.raw:base.raw",
        "--image-opts driver=null-co,size=64k",
        "--image-opts driver=raw,offset=1024,size=65536,file.filename=base.raw",
        "--image-opts driver=qcow2,file.driver=raw,file.size=196608,file.file.filename=upper.qcow2",
        "--image-opts driver=qcow2,file.driver=preallocate,file.file.filename=upper.qcow2",
        "--image-opts driver=qcow2,file.driver=blkdebug,file.align=4k,file.image.filename=lower.qcow2",
        "--image-opts driver=blkdebug,image.driver=qcow2,image.file.filename=upper.qcow2",
        "--image-opts driver=compress,file.driver=qcow2,file.file.filename=upper.qcow2",
        // Numbers and switches stay what they are, text stays text.
        "json:{\"driver\":\"raw\",\"offset\":512,\"size\":\"1k\",\"file\":{\"filename\":\"base.raw\"}}",
        "json:{\"driver\":\"raw\",\"offset\":1e3,\"size\":512.0,\"file\":{\"filename\":\"base.raw\"}}",
        "json:{\"driver\":\"null-co\",\"size\":65536,\"read-zeroes\":true}",
        "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"raw\",\"size\":196608,\"file\":{\"filename\":\"upper.qcow2\"}}}",
        "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"blkdebug\",\"align\":4096,\"inject-error\":[{\"event\":\"l2_load\",\"once\":true}],\"image\":{\"driver\":\"file\",\"filename\":\"lower.qcow2\"}}}",
        "json:{\"driver\":\"blkdebug\",\"align\":512,\"image\":{\"driver\":\"qcow2\",\"file\":{\"filename\":\"upper.qcow2\"}}}",
        "nbd+unix:///?socket=server",
        "nbd+unix:///disk?socket=named",
        "nbd:unix:server",
        "--image-opts driver=nbd,server.type=unix,server.path=server",
    ] {
        for output in ["--output=human", "--output=json"] {
            let arguments = [vec!["info", output], words(line)].concat();
            let ours = scratch.run(link.to_str().unwrap(), &arguments).ok();
            let theirs = scratch.qemu_img(&arguments).ok();
            assert_eq!(ours.stdout, theirs.stdout, "{arguments:?}");
        }
    }
    std::fs::remove_file(scratch.file("two-s002.vmdk")).unwrap();
    let ran = scratch.run(link.to_str().unwrap(), &["info", "two.vmdk"]);
    assert_eq!(ran.code, Some(1), "QEMU tells nothing of an image of which it can't open a file");
    assert!(ran.stderr.contains("two-s002.vmdk"), "{ran:#?}");
}

#[test]
fn few_descriptors_are_enough_or_one_line_says_that_they_are_not() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    for line in [
        "create -q -f qcow2 lower.qcow2 4M",
        "create -q -f qcow2 -b lower.qcow2 -F qcow2 middle.qcow2",
        "create -q -f qcow2 -b middle.qcow2 -F qcow2 upper.qcow2",
    ] {
        scratch.qemu_img(&words(line)).ok();
    }
    let limited = |number: u32, arguments: &str| {
        let line = format!("ulimit -n {number}; exec {} {arguments}", env!("CARGO_BIN_EXE_zebu"));
        scratch.run("sh", &["-c", &line])
    };
    for arguments in ["info upper.qcow2", "create -q -f qcow2 new.qcow2 1M", "convert -O raw upper.qcow2 a"] {
        limited(32, arguments).ok();
    }
    let ran = limited(9, "convert -O raw upper.qcow2 never");
    assert_eq!((ran.code, ran.stderr.lines().count()), (Some(1), 1), "{ran:#?}");
    assert!(ran.stderr.contains("Too many open files"), "{ran:#?}");
    assert!(!scratch.file("never").exists());
}
