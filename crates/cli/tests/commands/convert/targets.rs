//! Content of targets, beside those of `qemu-img convert`.

use super::{identical, left_over, source};
use crate::common::{Scratch, noise, qemu, words};

#[test]
fn targets_hold_what_qemus_hold() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("convert -O raw a.qcow2 reference.raw")).ok();
    for options in [
        "-O raw",
        "-O qcow2",
        "-f qcow2 -O qcow2 -o cluster_size=4k",
        "-O qcow2 -o compat=v2",
        "-O qcow2 -o extended_l2=on,compression_type=zstd",
        "-O qcow2 -o preallocation=metadata",
        "-O qcow2 -o data_file=data.raw",
        "-O raw -t none -T none",
        "-O qcow2 -t writethrough -m 1",
        "-O qcow2 -W --workers 2 -m 16 --buffer-memory 1M",
        "-O qcow2 -S 0",
        "-O raw -S 64k --copy buffers",
        "-O raw -C",
        "-O qcow2 --aio threads",
        "-O raw -r 1G",
        "--image-opts -O raw",
    ] {
        let from =
            if options.contains("--image-opts") { "driver=qcow2,file.filename=a.qcow2" } else { "a.qcow2" };
        let mut line = vec!["convert"];
        line.extend(words(options));
        line.extend([from, "out"]);
        let ran = scratch.zebu(&line).ok();
        assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("", ""), "{options}");
        identical(&scratch, "reference.raw", "out");
        if options.contains("-O qcow2") {
            let check = scratch.qemu_img(&["check", "out"]);
            assert_eq!(check.code, Some(0), "{options}: {check:#?}");
        }
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
    assert_eq!(left_over(&scratch), Vec::<String>::new());
}

#[test]
fn snapshots_are_sources() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("convert -l snapshot.name=before -O raw a.qcow2 reference.raw")).ok();
    for name in ["before", "1", "snapshot.name=before", "snapshot.id=1"] {
        scratch.zebu(&["convert", "-l", name, "-O", "raw", "a.qcow2", "out"]).ok();
        identical(&scratch, "reference.raw", "out");
    }
    scratch.zebu(&words("convert -l nosuch -O raw a.qcow2 out")).fails_naming(1, &["a.qcow2", "nosuch"]);
}

#[test]
fn sources_are_joined() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("one.raw", &noise(1, 1 << 20));
    scratch.write("two.raw", &noise(2, 512 << 10));
    scratch.zebu(&words("convert -f raw -O raw one.raw two.raw out")).ok();
    assert_eq!(scratch.read("out"), [scratch.read("one.raw"), scratch.read("two.raw")].concat());
}

#[test]
fn existing_targets_are_overwritten() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("create -q -f qcow2 out 20M")).ok();
    scratch.qemu_io(&["-c", "write -P 0x77 0 20M", "out"]).ok();
    scratch.zebu(&words("convert -n -O qcow2 a.qcow2 out")).ok();
    scratch.qemu_io(&["-c", "read -P 0x77 16M 4M", "out"]).ok();
    scratch.qemu_img(&words("resize --shrink out 16M")).ok();
    identical(&scratch, "a.qcow2", "out");

    scratch.qemu_img(&words("create -q -f qcow2 out 1M")).ok();
    let ran = scratch.zebu(&words("convert -n -O qcow2 a.qcow2 out"));
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    scratch.zebu(&words("convert -n -O qcow2 a.qcow2 missing")).fails_naming(1, &["missing"]);
}

#[test]
fn empty_targets_take_only_data() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("create -q -f qcow2 out 16M")).ok();
    scratch.zebu(&words("convert -n --target-is-zero -O qcow2 a.qcow2 out")).ok();
    identical(&scratch, "a.qcow2", "out");
    let options = "driver=qcow2,file.filename=out";
    scratch.zebu(&["convert", "-n", "--target-image-opts", "a.qcow2", options]).ok();
    identical(&scratch, "a.qcow2", "out");
}

#[test]
fn overlays_hold_the_difference_only() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("base.raw", &noise(7, 8 << 20));
    scratch.qemu_img(&words("create -q -f qcow2 -b base.raw -F raw a.qcow2")).ok();
    scratch.qemu_io(&["-c", "write -P 1 1M 64k", "a.qcow2"]).ok();
    scratch.zebu(&words("convert -O qcow2 -B base.raw -F raw a.qcow2 out")).ok();
    identical(&scratch, "a.qcow2", "out");
    assert!(std::fs::metadata(scratch.file("out")).unwrap().len() < 1 << 20);
    scratch
        .zebu(&words("convert -O qcow2 -B base.raw a.qcow2 out2"))
        .fails_naming(1, &["out2", "backing format", "-F raw"]);
}

/// Each has a table of one cluster; the directory is written once, not once more for each of them.
#[test]
fn many_bitmaps_are_copied_at_once_or_not_at_all() {
    const MANY: u64 = 300;
    let bitmaps = |scratch: &Scratch, name: &str| {
        let info = scratch.zebu(&["info", "--output", "json", name]).ok().json();
        info["format-specific"]["data"]["bitmaps"].as_array().map_or(0, Vec::len) as u64
    };
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for number in 0..MANY {
        scratch.zebu(&words(&format!("bitmap --add a.qcow2 b{number:03}"))).ok();
    }
    scratch.zebu(&words("convert --bitmaps -O qcow2 a.qcow2 out")).ok();
    assert_eq!(bitmaps(&scratch, "out"), MANY);
    scratch.zebu(&words("check out")).ok();
    let len = scratch.file("out").metadata().unwrap().len();
    assert!(len <= (MANY + 32) * 65536, "{len}");

    scratch.zebu(&words("create -q -f qcow2 target 1M")).ok();
    scratch.zebu(&words("bitmap --add target b150")).ok();
    scratch.zebu(&words("convert -n --bitmaps -O qcow2 a.qcow2 target")).fails_naming(1, &["b150"]);
    assert_eq!(bitmaps(&scratch, "target"), 1);
    scratch.zebu(&words("check target")).ok();
}

#[test]
fn compressed_targets_are_what_qemu_reads() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    // Half noise, half text, a hole, and an end that cuts a cluster short.
    let mut content = noise(5, 3 << 20);
    for (i, piece) in content.chunks_mut(40_000).enumerate() {
        match i % 4 {
            0 => piece.fill(b'x'),
            1 => piece.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 9) as u8),
            2 if i > 20 => piece.fill(0),
            _ => {}
        }
    }
    content.truncate((3 << 20) - 1536);
    scratch.write("a.raw", &content);
    for options in [
        "",
        "-t none -T none -W -m 16",
        "-o compression_type=zstd --compression-level 19",
        "-o compat=0.10,cluster_size=4k",
        "-o cluster_size=2M,compression_type=zstd",
        "-o extended_l2=on",
        "-o refcount_bits=1",
        "-S 0",
        "--workers 2",
    ] {
        scratch.zebu(&words(&format!("convert -c -f raw -O qcow2 {options} a.raw out"))).ok();
        scratch.qemu_img(&words("compare -f raw -F qcow2 a.raw out")).ok();
        scratch.qemu_img(&words("check out")).ok();
        let map = scratch.qemu_img(&words("map --output=json out")).ok().json();
        let compressed = map.as_array().unwrap().iter().filter(|extent| extent["compressed"] == true);
        assert!(compressed.count() > 0, "{options}: nothing is compressed");
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
}

#[test]
fn a_compressed_image_takes_the_changes_of_an_overlay() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("a.raw", &vec![b'a'; 1 << 20]);
    scratch.zebu(&words("convert -c -f raw -O qcow2 a.raw base")).ok();
    scratch.qemu_img(&words("create -q -f qcow2 -b base -F qcow2 top")).ok();
    scratch.qemu_io(&["-c", "write -P 7 70000 5000", "top"]).ok();
    scratch.zebu(&words("convert -c -O qcow2 -B base -F qcow2 top out")).ok();
    scratch.qemu_img(&words("compare top out")).ok();
    scratch.qemu_img(&words("check out")).ok();
    // Allocated clusters may be written compressed, again and again.
    scratch.zebu(&words("convert -c -n -O qcow2 top out")).ok();
    scratch.qemu_img(&words("compare top out")).ok();
    scratch.qemu_img(&words("check out")).ok();
}

#[test]
fn a_raw_image_has_no_snapshots() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("reference.raw", &vec![7; 1 << 20]);
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.zebu(&words("snapshot -c one a.qcow2")).ok();
    let theirs = scratch.qemu_img(&words("convert -l nosuch -f raw -O raw reference.raw out"));
    assert_eq!(theirs.code, Some(1), "{theirs:#?}");
    for line in [
        "convert -l nosuch -O raw reference.raw out",
        "convert -l nosuch -f raw -O raw reference.raw out",
        "convert -l snapshot.name=one -f raw -O qcow2 a.qcow2 out",
        "measure -l nosuch -O qcow2 reference.raw",
        "measure -f raw -l one -O qcow2 a.qcow2",
        "backup -l nosuch reference.raw out",
        "backup -f raw -l one a.qcow2 out",
        "serve -f raw --snapshot one --nbd unix:socket a.qcow2",
    ] {
        let ran = scratch.run("timeout", &[&["600", env!("CARGO_BIN_EXE_zebu")], &words(line)[..]].concat());
        ran.fails_naming(1, &["raw", "snapshot"]);
        assert_eq!(left_over(&scratch), Vec::<String>::new(), "{line}");
        assert!(!scratch.file("out").exists(), "{line}");
    }
    // What else only a qcow2 image has.
    for (key, word) in [("data-file.filename", "data file"), ("backing.file.filename", "backing file")] {
        let line = format!("info --image-opts driver=raw,file.filename=reference.raw,{key}=a.qcow2");
        scratch.zebu(&words(&line)).fails_naming(1, &["reference.raw", "raw", word]);
        assert_eq!(scratch.qemu_img(&words(&line)).code, Some(1));
    }
}
