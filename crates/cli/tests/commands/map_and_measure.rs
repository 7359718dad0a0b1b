//! `zebu map` and `zebu measure` against qemu-img's.

use crate::common::{Scratch, noise, qemu, words};

fn images(scratch: &Scratch) -> Vec<&'static str> {
    for line in [
        "create -q -f qcow2 plain.qcow2 64M",
        "create -q -f qcow2 -o compat=v2,cluster_size=4k v2.qcow2 8M",
        "create -q -f qcow2 -o extended_l2=on ext.qcow2 8M",
        "create -q -f qcow2 -o preallocation=metadata meta.qcow2 1M",
        "create -q -f qcow2 -o data_file=data.raw external.qcow2 1M",
        "create -q -f qcow2 empty.qcow2 1000000",
        "create -q -f raw sparse.raw 1536k",
        "create -q -f qcow2 compressed.qcow2 1M",
    ] {
        scratch.qemu_img(&words(line)).ok();
    }
    let write = |name: &str, commands: &[&str]| {
        for command in commands {
            scratch.qemu_io(&["-c", command, name]).ok();
        }
    };
    write("plain.qcow2", &["write -P 1 0 1M", "write -z 2M 1M", "write -P 2 5M 64k", "write -P 3 4M 64k"]);
    write("v2.qcow2", &["write -P 1 4k 12k", "write -P 1 1M 4k"]);
    write("ext.qcow2", &["write -P 1 2k 6k", "write -z 64k 64k"]);
    write("external.qcow2", &["write -P 1 0 64k"]);
    write("sparse.raw", &["write -P 1 1M 64k"]);
    write("compressed.qcow2", &["write -c -P 1 64k 64k"]);
    scratch.qemu_img(&words("create -q -f qcow2 -b plain.qcow2 -F qcow2 mid.qcow2")).ok();
    scratch.qemu_img(&words("create -q -f qcow2 -b mid.qcow2 -F qcow2 top.qcow2 80M")).ok();
    write("mid.qcow2", &["write -P 5 128k 64k"]);
    write("top.qcow2", &["write -P 6 0 64k", "write -z 1M 64k"]);
    scratch.write("full.raw", &noise(1, 1 << 20));
    vec![
        "plain.qcow2",
        "v2.qcow2",
        "ext.qcow2",
        "meta.qcow2",
        "external.qcow2",
        "empty.qcow2",
        "sparse.raw",
        "compressed.qcow2",
        "mid.qcow2",
        "top.qcow2",
        "full.raw",
    ]
}

/// QEMU's map without offsets of ranges that are not there: of subclusters that are not allocated within a cluster
/// that is, QEMU tells where they would be.
fn without_offsets_of_nothing(map: &str) -> String {
    map.split_inclusive('\n')
        .map(|line| match line.find(", \"offset\"") {
            Some(start) if line.contains("\"present\": false") => {
                format!("{}{}", &line[..start], &line[line.find('}').unwrap()..])
            }
            _ => line.to_owned(),
        })
        .collect()
}

#[test]
fn maps_are_qemus() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    for name in images(&scratch) {
        for options in
            ["--output=json", "--output=json -s 100k -l 1M", "--output=json --start-offset 512k", ""]
        {
            let arguments: Vec<&str> = ["map"].into_iter().chain(words(options)).chain([name]).collect();
            let (ours, theirs) = (scratch.zebu(&arguments), scratch.qemu_img(&arguments));
            assert_eq!(ours.code, theirs.code, "{name} {options}: {ours:#?} {theirs:#?}");
            assert_eq!(ours.stdout, without_offsets_of_nothing(&theirs.stdout), "{name} {options}");
        }
    }
}

#[test]
fn measures_are_qemus() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    let names = images(&scratch);
    scratch.qemu_img(&words("bitmap --add plain.qcow2 b")).ok();
    let mut lines: Vec<String> = Vec::new();
    for name in names {
        for options in ["", "-O qcow2", "-O qcow2 -o cluster_size=4k", "-O qcow2 -o preallocation=falloc"] {
            lines.push(format!("{options} {name}"));
        }
    }
    for size in ["0", "1", "64M", "1G", "1T", "100000000000"] {
        for options in [
            "",
            "-O qcow2",
            "-O qcow2 -o cluster_size=512",
            "-O qcow2 -o cluster_size=2M,refcount_bits=64",
            "-O qcow2 -o extended_l2=on",
            "-O qcow2 -o compat=0.10",
            "-O qcow2 -o preallocation=metadata",
        ] {
            if !(size == "1T" && options.contains("512")) {
                lines.push(format!("{options} --size {size}"));
            }
        }
    }
    for line in &lines {
        for output in ["human", "json"] {
            let arguments: Vec<&str> =
                ["measure", "--output", output].into_iter().chain(words(line)).collect();
            let (ours, theirs) = (scratch.zebu(&arguments), scratch.qemu_img(&arguments));
            assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
            if theirs.code != Some(0) {
                continue;
            }
            if output == "json" {
                assert_eq!(ours.json(), theirs.json(), "{line}");
            } else {
                assert_eq!(ours.stdout, theirs.stdout, "{line}");
            }
        }
    }
}

#[test]
fn snapshots_are_measured() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 8M")).ok();
    scratch.qemu_img(&words("snapshot -c before a.qcow2")).ok();
    scratch.qemu_io(&["-c", "write 0 4M", "a.qcow2"]).ok();
    for line in ["measure -O qcow2 a.qcow2", "measure -O qcow2 -l before a.qcow2"] {
        assert_eq!(
            scratch.zebu(&words(line)).ok().stdout,
            scratch.qemu_img(&words(line)).ok().stdout,
            "{line}"
        );
    }
}

#[test]
fn wrong_requests_are_refused() {
    let scratch = Scratch::new();
    for (line, named) in [
        ("measure", "--size"),
        ("measure --size 1M a.raw", "--size"),
        ("measure --size 1x", "1x"),
        ("measure -O qcow2 -o nosuch=1 --size 1M", "nosuch"),
        ("map missing.raw", "missing.raw"),
        ("map -s 1x a.raw", "1x"),
    ] {
        scratch.zebu(&words(line)).fails_naming(1, &[named]);
    }
}
