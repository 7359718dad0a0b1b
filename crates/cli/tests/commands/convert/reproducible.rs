//! The same disk makes the same file, however it is read and written, and lies there in order.

use super::identical;
use crate::common::{Background, Scratch, noise, qemu, send, wait_for, words};
use rustix::process::Signal;
use std::os::unix::fs::FileExt;

const SIZE: u64 = 24 << 20;

/// A raw disk with data of all lengths, zeroes that are written, and holes.
fn scattered(scratch: &Scratch, name: &str, seed: u64) {
    let file = std::fs::File::create(scratch.file(name)).unwrap();
    file.set_len(SIZE + 1536).unwrap();
    let numbers = noise(seed, 300 * 4);
    for number in numbers.chunks(4) {
        let at = u64::from(u16::from_le_bytes([number[0], number[1]])) * 37 * 4096 % (SIZE - (128 << 10));
        let len = usize::from(number[2] % 30 + 1) * 4096;
        match number[3] % 3 {
            0 => file.write_all_at(&vec![0; len], at).unwrap(),
            1 => file.write_all_at(&vec![number[3]; len], at).unwrap(),
            _ => file.write_all_at(&noise(u64::from(number[3]), len), at).unwrap(),
        }
    }
    file.write_all_at(&noise(seed, 1536), SIZE).unwrap();
}

/// Converts with each of these additions, five times in all at least; all files must be the same.
#[track_caller]
fn makes_one_file(scratch: &Scratch, line: &str, additions: &[&str]) -> Vec<u8> {
    let mut first: Option<Vec<u8>> = None;
    for round in 0..additions.len().max(5) {
        let addition = additions[round % additions.len()];
        let _ = std::fs::remove_file(scratch.file("out"));
        scratch.zebu(&words(&format!("convert {addition} {line} out"))).ok();
        let made = scratch.read("out");
        let first = first.get_or_insert_with(|| made.clone());
        assert!(*first == made, "'{line}': another file with '{addition}' in round {round}");
    }
    first.unwrap()
}

const HOWEVER: [&str; 6] =
    ["-m 8", "-m 1", "-m 16", "--workers 4 -m 16", "-t writeback", "-T none -t none -m 3"];

#[test]
fn a_disk_makes_the_same_qcow2_image_every_time() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scattered(&scratch, "a.raw", 1);
    for options in [
        "",
        "-S 0",
        "-S 64k",
        "--copy range",
        "-o cluster_size=4k",
        "-o cluster_size=512",
        "-o cluster_size=2M",
        "-o compat=0.10",
        "-o extended_l2=on",
        "-o refcount_bits=1",
        "-o lazy_refcounts=on",
        "-o preallocation=metadata",
    ] {
        let line = format!("-f raw -O qcow2 {options} a.raw");
        makes_one_file(&scratch, &line, &HOWEVER);
        identical(&scratch, "a.raw", "out");
        scratch.qemu_img(&words("check out")).ok();
        scratch.zebu(&words("check out")).ok();
    }
}

#[test]
fn a_disk_makes_the_same_compressed_image_every_time() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scattered(&scratch, "a.raw", 2);
    for options in ["", "-o compression_type=zstd", "-o cluster_size=4k", "-o compat=0.10", "-S 0"] {
        let line = format!("-c -f raw -O qcow2 {options} a.raw");
        makes_one_file(&scratch, &line, &HOWEVER);
        identical(&scratch, "a.raw", "out");
        scratch.qemu_img(&words("check out")).ok();
    }
}

#[test]
fn a_raw_disk_is_the_same_every_time() {
    let scratch = Scratch::new();
    scattered(&scratch, "a.raw", 3);
    let made = makes_one_file(&scratch, "-f raw -O raw a.raw", &HOWEVER);
    assert!(made == scratch.read("a.raw"));
}

/// A chain of a raw disk, an overlay with all kinds of clusters, and one above it.
fn chain(scratch: &Scratch) {
    scattered(scratch, "base.raw", 4);
    scratch.qemu_img(&words("create -q -f qcow2 -b base.raw -F raw middle.qcow2 28M")).ok();
    for command in ["write -c -P 3 1M 64k", "write -z 2M 1M", "write -P 4 20M 5M", "write -P 5 27M 12k"] {
        scratch.qemu_io(&["-c", command, "middle.qcow2"]).ok();
    }
    scratch.qemu_img(&words("create -q -f qcow2 -b middle.qcow2 -F qcow2 top.qcow2")).ok();
    for command in ["write -P 6 3M 100k", "write -z 4M 300k", "write -z 20M 2M", "write -P 7 5000k 4k"] {
        scratch.qemu_io(&["-c", command, "top.qcow2"]).ok();
    }
}

#[test]
fn a_chain_makes_the_same_image_every_time() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    chain(&scratch);
    for options in [
        "",
        "-c",
        "-c -o compression_type=zstd",
        "-B middle.qcow2 -F qcow2",
        "-B middle.qcow2 -F qcow2 -S 0",
        "-B middle.qcow2 -F qcow2 -o cluster_size=2M",
        "-B middle.qcow2 -F qcow2 -o cluster_size=4k",
        "-B middle.qcow2 -F qcow2 -o compat=0.10",
        "-B middle.qcow2 -F qcow2 -o extended_l2=on",
        "-c -B middle.qcow2 -F qcow2",
    ] {
        let line = format!("-O qcow2 {options} top.qcow2");
        makes_one_file(&scratch, &line, &HOWEVER);
        identical(&scratch, "top.qcow2", "out");
        scratch.qemu_img(&words("check out")).ok();
    }
}

#[test]
fn what_is_made_in_a_file_that_exists_is_what_is_made_in_a_new_one() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scattered(&scratch, "a.raw", 5);
    scratch.zebu(&words("convert -f raw -O qcow2 a.raw new")).ok();
    scratch.write("out", &noise(9, 40 << 20));
    scratch.zebu(&words("convert -f raw -O qcow2 a.raw out")).ok();
    assert!(scratch.read("out") == scratch.read("new"));
}

#[test]
fn several_disks_one_behind_the_other_make_the_same_image_every_time() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    // They end within clusters.
    scattered(&scratch, "a.raw", 6);
    scattered(&scratch, "b.raw", 7);
    scratch.qemu_img(&words("convert -f raw -O raw a.raw b.raw a.raw all.raw")).ok();
    for options in ["", "-c", "-c -S 0", "-c -o cluster_size=2M", "-o cluster_size=2M", "-o cluster_size=512"]
    {
        makes_one_file(&scratch, &format!("-f raw -O qcow2 {options} a.raw b.raw a.raw"), &HOWEVER);
        identical(&scratch, "all.raw", "out");
        scratch.qemu_img(&words("check out")).ok();
    }
    let packed = "--seed 1 -f raw -O vmdk -o subformat=streamOptimized a.raw b.raw a.raw";
    makes_one_file(&scratch, packed, &HOWEVER);
    identical(&scratch, "all.raw", "out");
}

#[test]
fn a_seed_makes_the_same_image_of_another_program_every_time() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scattered(&scratch, "a.raw", 8);
    for (format, options) in [
        ("vmdk", ""),
        ("vmdk", "-o subformat=streamOptimized"),
        ("vhdx", ""),
        ("vhdx", "-o subformat=fixed"),
        ("vpc", "-o force_size=on"),
        ("vdi", ""),
    ] {
        let line = format!("-f raw -O {format} {options} a.raw");
        let made = makes_one_file(&scratch, &format!("--seed 7 {line}"), &HOWEVER);
        identical(&scratch, "a.raw", "out");
        scratch.zebu(&words(&format!("convert --seed 8 {line} other"))).ok();
        assert!(scratch.read("other") != made, "{format} {options}: another seed is another identity");
        std::fs::remove_file(scratch.file("other")).unwrap();
    }
}

#[test]
fn identities_come_from_the_source_if_it_has_one() {
    let scratch = Scratch::new();
    scattered(&scratch, "a.raw", 9);
    for source in ["vmdk", "vhdx", "vpc", "vdi"] {
        scratch.zebu(&words(&format!("convert -f raw -O {source} a.raw source"))).ok();
        for target in ["vmdk", "vhdx", "vpc", "vdi"] {
            makes_one_file(&scratch, &format!("-f {source} -O {target} source"), &["-m 8", "-m 1"]);
        }
        std::fs::remove_file(scratch.file("source")).unwrap();
    }
}

/// Another file perhaps, the same disk in any case.
#[test]
fn clusters_may_come_in_any_order() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scattered(&scratch, "a.raw", 10);
    for options in ["", "-c", "-o cluster_size=4k"] {
        scratch.zebu(&words(&format!("convert -W -m 16 -f raw -O qcow2 {options} a.raw out"))).ok();
        identical(&scratch, "a.raw", "out");
        scratch.qemu_img(&words("check out")).ok();
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
}

#[test]
fn the_data_of_a_disk_lies_in_one_piece() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(11, 40 << 20));
    for line in ["convert -f raw -O qcow2 a.raw out", "convert -m 16 --workers 3 -f raw -O qcow2 a.raw out"] {
        scratch.zebu(&words(line)).ok();
        for map in
            [scratch.zebu(&words("map --output json out")), scratch.qemu_img(&words("map --output=json out"))]
        {
            let map = map.ok().json();
            let runs: Vec<_> = map.as_array().unwrap().iter().filter(|run| run["data"] == true).collect();
            assert_eq!(runs.len(), 1, "{line}: {map:#}");
        }
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
}

#[test]
fn bitmaps_come_along() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    chain(&scratch);
    scratch.qemu_img(&words("bitmap --add top.qcow2 b0")).ok();
    scratch.qemu_io(&["-c", "write -P 9 9M 1M", "top.qcow2"]).ok();
    for options in ["", "-c"] {
        let line = format!("--bitmaps {options} -O qcow2 top.qcow2");
        makes_one_file(&scratch, &line, &HOWEVER);
        identical(&scratch, "top.qcow2", "out");
        scratch.qemu_img(&words("check out")).ok();
        let info = scratch.qemu_img(&words("info --output=json out")).ok().json();
        assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["name"], "b0", "{info:#}");
    }
}

/// A file that is overwritten is no image before it is whole, whatever ends the job.
#[test]
fn what_is_not_whole_does_not_look_whole() {
    for options in ["", "-c"] {
        let scratch = Scratch::new();
        scratch.write("big.raw", &noise(1, 64 << 20));
        scratch.zebu(&words("create -q -f qcow2 out 1M")).ok();
        let line = format!("convert --force -r 1M -f raw -O qcow2 --copy buffers {options} big.raw out");
        let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&line));
        let mut child = Background::start(&mut command);
        wait_for("the first data", || std::fs::metadata(scratch.file("out")).unwrap().len() > 300_000);
        send(&child, Signal::KILL);
        child.wait().unwrap();
        assert!(scratch.read("out").iter().take(65536).all(|byte| *byte == 0), "{options}");
    }
}
