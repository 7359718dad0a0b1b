//! Images of other programs that zebu makes: QEMU opens, checks and compares them, and second readers see the same disk.

use std::path::Path;
use zebu_tests::filled_disk::{Fill, disk, write_sparse};
use zebu_tests::model::difference;
use zebu_tests::program::{run_in, zebu, zebu_interrupted, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::second_reader::{read_by_7zip, read_by_libvhdi, read_by_libvmdk};

const MIB: usize = 1 << 20;

/// Disks: the largest has several blocks of every format.
const SIZES: [(usize, Fill); 3] =
    [(2 * MIB, Fill::All), (5 * MIB + 7 * 512, Fill::Some), (17 * MIB, Fill::Some)];

/// Ways in which images are made: format, options.
const WAYS: &[(&str, &str)] = &[
    ("vmdk", ""),
    ("vmdk", "subformat=monolithicSparse,adapter_type=lsilogic,zeroed_grain=on"),
    ("vmdk", "subformat=streamOptimized"),
    ("vmdk", "subformat=streamOptimized,adapter_type=buslogic,hwversion=7,toolsversion=5"),
    ("vhdx", ""),
    ("vhdx", "subformat=fixed"),
    ("vhdx", "block_size=1M,block_state_zero=off"),
    ("vhdx", "block_size=32M,log_size=2M"),
    ("vpc", ""),
    ("vpc", "force_size=on"),
    ("vpc", "subformat=fixed"),
    ("vpc", "subformat=fixed,force_size=on"),
    ("vdi", ""),
    ("vdi", "static=on"),
];

fn virtual_size(qemu: &Qemu, dir: &Path, format: &str, image: &str) -> u64 {
    let info = qemu.img(dir, ["info", "-f", format, "--output=json", image]).ok();
    let info: serde_json::Value = serde_json::from_str(&info.stdout).expect("QEMU writes JSON");
    info["virtual-size"].as_u64().expect("QEMU tells the size")
}

/// Has QEMU look at an image of a disk; the disk that it shows may be longer, with zeroes.
fn look(qemu: &Qemu, dir: &Path, format: &str, image: &str, expected: &[u8]) -> Result<(), String> {
    if format != "vpc" {
        qemu.img(dir, ["check", "-f", format, image]).ok();
    }
    qemu.img(dir, ["convert", "-f", format, "-O", "raw", image, "theirs.raw"]).ok();
    let found = std::fs::read(dir.join("theirs.raw")).map_err(|e| e.to_string())?;
    same(qemu, dir, format, image, expected, &[("QEMU", found)])
}

/// Has every other reader look at it.
fn look_again(qemu: &Qemu, dir: &Path, format: &str, image: &str, expected: &[u8]) -> Result<(), String> {
    let mut seen = Vec::new();
    let whole_mib = expected.len().is_multiple_of(MIB);
    match format {
        "vmdk" => {
            seen.push(("7-Zip", read_by_7zip(dir, "VMDK", image)));
            seen.push(("libvmdk", read_by_libvmdk(dir, image)));
        }
        "vhdx" => {
            seen.push(("libvhdi", read_by_libvhdi(dir, image, &[])));
            // 7-Zip opens no other VHDX, whoever made it.
            if whole_mib {
                seen.push(("7-Zip", read_by_7zip(dir, "VHDX", image)));
            }
        }
        "vpc" => {
            seen.push(("7-Zip", read_by_7zip(dir, "VHD", image)));
            seen.push(("libvhdi", read_by_libvhdi(dir, image, &[])));
        }
        _ => seen.push(("7-Zip", read_by_7zip(dir, "VDI", image))),
    }
    same(qemu, dir, format, image, expected, &seen)?;
    let out = zebu(dir, ["compare", "-f", "raw", "-F", format, "theirs.raw", image]);
    if out.code == Some(0) { Ok(()) } else { Err(out.to_string()) }
}

fn same(
    qemu: &Qemu,
    dir: &Path,
    format: &str,
    image: &str,
    expected: &[u8],
    seen: &[(&str, Vec<u8>)],
) -> Result<(), String> {
    let size = virtual_size(qemu, dir, format, image) as usize;
    let mut longer = expected.to_vec();
    longer.resize(size.max(expected.len()), 0);
    for (reader, found) in seen {
        if let Some(text) = difference(0, &longer, found) {
            return Err(format!("{reader}: {text}"));
        }
    }
    Ok(())
}

/// The disk as it is, in a file beside the descriptor.
#[test]
fn flat_vmdks_are_two_files() {
    let Some(qemu) = Qemu::find() else { return };
    let mut random = Random::new(2803);
    for (size, fill) in SIZES {
        let scratch = Scratch::new("foreign-write");
        let dir = scratch.path();
        let expected = disk(size, fill, &mut random);
        write_sparse(&scratch.file("source.raw"), &expected);
        for (name, flat) in [("disk.vmdk", "disk-flat.vmdk"), ("Müller", "Müller-flat")] {
            // Twice: over nothing, and over what is there.
            for cache in ["none", "writeback"] {
                let line = format!(
                    "convert -f raw -O vmdk -o subformat=monolithicFlat -t {cache} source.raw {name}"
                );
                zebu(dir, line.split(' ')).ok();
                assert!(std::fs::read(scratch.file(flat)).expect("just made") == expected, "{name}");
                look(&qemu, dir, "vmdk", name, &expected).unwrap_or_else(|what| panic!("{line}: {what}"));
                let found = read_by_libvmdk(dir, name);
                assert_eq!(difference(0, &expected, &found), None, "{line}");
                zebu(dir, ["compare", "source.raw", name]).ok();
            }
        }
        let text = std::fs::read_to_string(scratch.file("disk.vmdk")).expect("text");
        assert!(text.contains("createType=\"monolithicFlat\"") && !text.contains("encoding"), "{text}");
        // The file beside a link's end.
        std::fs::create_dir(scratch.file("sub")).expect("scratch is writable");
        std::os::unix::fs::symlink("sub/new.vmdk", scratch.file("link.vmdk")).expect("scratch is writable");
        let words = ["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=monolithicFlat", "source.raw"];
        zebu(dir, words.into_iter().chain(["link.vmdk"])).ok();
        zebu(dir, ["compare", "source.raw", "link.vmdk"]).ok();
    }
    let scratch = Scratch::new("foreign-write");
    let dir = scratch.path();
    write_sparse(&scratch.file("source.raw"), &disk(MIB, Fill::All, &mut random));
    zebu(dir, "create -q -f vmdk -o subformat=monolithicFlat a.vmdk 3M".split(' ')).ok();
    look(&qemu, dir, "vmdk", "a.vmdk", &vec![0; 3 * MIB]).expect("it is empty");
    let names = || std::fs::read_dir(dir).expect("ours").count();
    let before = names();
    let flat = "convert -f raw -O vmdk -o subformat=monolithicFlat";
    for (line, word) in [
        (format!("{flat},zeroed_grain=on source.raw b.vmdk"), "zeroed_grain"),
        (format!("{flat} source.raw b\"c.vmdk"), "can't name the file"),
        // Its own source would be the file beside it.
        (format!("{flat} a-flat.vmdk a.vmdk"), "a-flat.vmdk"),
        ("create -q -f vmdk -o subformat=monolithicFlat b.vmdk 0".to_owned(), "0 bytes"),
        (format!("{flat} missing b.vmdk"), "missing"),
    ] {
        let out = zebu(dir, line.split(' ')).exits(1);
        assert!(out.stderr.contains(word), "{out}");
        assert_eq!(names(), before, "{out}");
    }
}

#[test]
fn images_are_read_by_qemu_and_others_as_they_were_made() {
    let Some(qemu) = Qemu::find() else { return };
    let mut random = Random::new(2802);
    for (format, options) in WAYS {
        for (size, fill) in SIZES {
            let scratch = Scratch::new("foreign-write");
            let dir = scratch.path();
            let expected = disk(size, fill, &mut random);
            write_sparse(&scratch.file("source.raw"), &expected);
            let cache = *random.pick(&["none", "writeback", "unsafe"]);
            let requests = *random.pick(&["1", "3", "8"]);
            let workers = *random.pick(&["1", "2"]);
            let sparse = *random.pick(&["0", "4k", "64k"]);
            let mut line = format!(
                "convert -f raw -O {format} -t {cache} -m {requests} --workers {workers} -S {sparse}"
            );
            if !options.is_empty() {
                line += &format!(" -o {options}");
            }
            let words: Vec<&str> = line.split(' ').chain(["source.raw", "image"]).collect();
            zebu(dir, &words).ok();
            look(&qemu, dir, format, "image", &expected)
                .and_then(|()| look_again(&qemu, dir, format, "image", &expected))
                .unwrap_or_else(|what| panic!("{line}, {size} bytes, {fill:?}: {what}"));
            // The disk has the size that QEMU gives it, but where Azure asks for another.
            if *options != "subformat=fixed,force_size=on" {
                let options = if options.is_empty() { String::new() } else { format!("-o {options} ") };
                qemu.img_line(dir, &format!("convert -f raw -O {format} {options}source.raw qemu")).ok();
                let sizes = ["image", "qemu"].map(|image| virtual_size(&qemu, dir, format, image));
                assert_eq!(sizes[0], sizes[1], "{line}, {size} bytes");
            }
        }
    }
}

/// The sizes at which the geometry of a VHD changes its kind, and others.
#[test]
fn disks_of_a_vhd_have_the_sizes_of_qemu() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("foreign-write");
    let dir = scratch.path();
    let mut random = Random::new(17);
    let mut sizes: Vec<u64> = vec![512, 34816, 35651584, 528482304, 1 << 30, 136899993600, 136899993088];
    sizes.extend([65535 * 16 * 63 * 512, 65535 * 16 * 63 * 512 - 512, 65535 * 16 * 255 * 512, 2040 << 30]);
    for _ in 0..6 {
        let bits = random.between(20, 40);
        sizes.push(random.below(1 << bits) / 512 * 512);
    }
    for size in sizes {
        for options in ["subformat=dynamic", "subformat=fixed", "force_size=on"] {
            let line = format!("create -q -f vpc -o {options} image {size}");
            zebu(dir, line.split(' ')).ok();
            let ours = virtual_size(&qemu, dir, "vpc", "image");
            qemu.img_line(dir, &line).ok();
            let theirs = virtual_size(&qemu, dir, "vpc", "image");
            assert_eq!(ours, theirs, "{line}");
        }
    }
    zebu(dir, ["create", "-q", "-f", "vpc", "image", "2041G"]).exits(1);
    for (asked, size) in [("1M", MIB), ("1049088", 2 * MIB), ("10M", 10 * MIB)] {
        zebu(dir, ["create", "-q", "-f", "vpc", "-o", "subformat=fixed,force_size", "image", asked]).ok();
        assert_eq!(std::fs::metadata(scratch.file("image")).map(|m| m.len()).ok(), Some(size as u64 + 512));
        assert_eq!(virtual_size(&qemu, dir, "vpc", "image"), size as u64);
    }
}

#[test]
fn empty_images_are_made_with_the_words_of_qemu() {
    let Some(qemu) = Qemu::find() else { return };
    for (format, options) in WAYS {
        let scratch = Scratch::new("foreign-write");
        let dir = scratch.path();
        let mut words = vec!["create", "-f", *format];
        if !options.is_empty() {
            words.extend(["-o", *options]);
        }
        words.extend(["image", "9M"]);
        let ours = zebu(dir, &words).ok();
        let size = virtual_size(&qemu, dir, format, "image");
        look(&qemu, dir, format, "image", &vec![0; size as usize])
            .and_then(|()| look_again(&qemu, dir, format, "image", &vec![0; size as usize]))
            .unwrap_or_else(|what| panic!("{format} {options}: {what}"));
        let theirs = qemu.img(dir, &words).ok();
        assert_eq!(ours.stdout, theirs.stdout, "{format} {options}");
        assert_eq!(virtual_size(&qemu, dir, format, "image"), size, "{format} {options}");
    }
}

/// Walks a streamOptimized VMDK as a reader of a pipe would: marker by marker.
fn walk_markers(bytes: &[u8]) -> Result<Vec<u64>, String> {
    let le64 = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let le32 = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    if le64(56) != u64::MAX {
        return Err("the header knows where the directory will be".into());
    }
    let mut at = le64(64) as usize * 512;
    let (mut grains, mut kinds) = (Vec::new(), Vec::new());
    loop {
        let (value, size) = (le64(at), le32(at + 8) as usize);
        if size > 0 {
            grains.push(value);
            at = (at + 12 + size).next_multiple_of(512);
            continue;
        }
        let kind = le32(at + 12);
        at += 512 + value as usize * 512;
        if kind == 0 {
            break;
        }
        kinds.push(kind);
    }
    if at != bytes.len() {
        return Err(format!("the end is at {at} of {}", bytes.len()));
    }
    let tables = kinds.len().saturating_sub(2);
    if kinds[tables..] != [2, 3] || kinds[..tables].iter().any(|kind| *kind != 1) {
        return Err(format!("markers {kinds:?}"));
    }
    Ok(grains)
}

#[test]
fn a_stream_optimized_vmdk_can_be_read_from_a_pipe() {
    let mut random = Random::new(5);
    for (size, fill) in [(70 * MIB + 512, Fill::Some), (3 * MIB, Fill::Nothing), (40 * MIB, Fill::All)] {
        let scratch = Scratch::new("foreign-write");
        let dir = scratch.path();
        let expected = disk(size, fill, &mut random);
        write_sparse(&scratch.file("source.raw"), &expected);
        zebu(dir, ["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "source.raw", "image"]).ok();
        let bytes = std::fs::read(scratch.file("image")).expect("just made");
        let grains = walk_markers(&bytes).unwrap_or_else(|what| panic!("{size} {fill:?}: {what}"));
        let filled = expected.chunks(65536).enumerate().filter(|(_, grain)| grain.iter().any(|b| *b != 0));
        let filled: Vec<u64> = filled.map(|(index, _)| index as u64 * 128).collect();
        assert_eq!(grains, filled);
    }
}

#[test]
fn sources_are_joined_and_snapshots_and_overlays_taken() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("foreign-write");
    let dir = scratch.path();
    let mut random = Random::new(11);
    let (first, second) =
        (disk(3 * MIB, Fill::Some, &mut random), disk(2 * MIB + 512, Fill::All, &mut random));
    write_sparse(&scratch.file("a.raw"), &first);
    write_sparse(&scratch.file("b.raw"), &second);
    zebu(dir, ["convert", "-f", "raw", "-O", "qcow2", "a.raw", "a.qcow2"]).ok();
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    qemu.io(dir, "-f qcow2", "top.qcow2", &["write -P 9 70000 200000", "write -z 1M 64k"]).ok();
    zebu(dir, ["convert", "-f", "qcow2", "-O", "raw", "top.qcow2", "top.raw"]).ok();
    let top = std::fs::read(scratch.file("top.raw")).expect("just made");
    let both: Vec<u8> = top.iter().chain(&second).copied().collect();
    for (format, options) in WAYS {
        let mut words = vec!["convert", "-O", format];
        if !options.is_empty() {
            words.extend(["-o", *options]);
        }
        words.extend(["top.qcow2", "b.raw", "image"]);
        zebu(dir, &words).ok();
        look(&qemu, dir, format, "image", &both).unwrap_or_else(|what| panic!("{format} {options}: {what}"));
    }
    // A source that ends within a grain, with another behind it.
    let words = ["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "b.raw", "a.raw", "other"];
    zebu(dir, words).ok();
    let both: Vec<u8> = second.iter().chain(&first).copied().collect();
    look(&qemu, dir, "vmdk", "other", &both).unwrap();
}

#[test]
fn a_conversion_that_is_stopped_leaves_nothing() {
    let scratch = Scratch::new("foreign-write");
    let dir = scratch.path();
    write_sparse(&scratch.file("source.raw"), &disk(64 * MIB, Fill::All, &mut Random::new(1)));
    for options in [["vmdk", "subformat=streamOptimized"], ["vhdx", "subformat=dynamic"]] {
        let [format, options] = options;
        let words = ["convert", "-r", "8M", "-f", "raw", "-O", format, "-o", options, "source.raw", "image"];
        let out = zebu_interrupted(dir, &words, 65536);
        assert_ne!(out.code, Some(0), "{out}");
        let left: Vec<_> = std::fs::read_dir(dir).expect("ours").flatten().map(|e| e.file_name()).collect();
        assert_eq!(left, ["source.raw"], "{format}");
    }
}

#[test]
fn an_existing_file_is_made_anew() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("foreign-write");
    let dir = scratch.path();
    let expected = disk(3 * MIB, Fill::Some, &mut Random::new(8));
    write_sparse(&scratch.file("source.raw"), &expected);
    for (format, options) in WAYS {
        std::fs::write(scratch.file("image"), vec![0xee; 9 * MIB]).expect("scratch is writable");
        let mut words = vec!["convert", "-O", format];
        if !options.is_empty() {
            words.extend(["-o", *options]);
        }
        words.extend(["source.raw", "image"]);
        zebu(dir, &words).ok();
        look(&qemu, dir, format, "image", &expected)
            .unwrap_or_else(|what| panic!("{format} {options}: {what}"));
    }
}

#[test]
fn what_a_format_has_not_is_refused_by_name() {
    let scratch = Scratch::new("foreign-write");
    let dir = scratch.path();
    write_sparse(&scratch.file("source.raw"), &vec![1; MIB]);
    zebu(dir, ["create", "-q", "-f", "qcow2", "base.qcow2", "1M"]).ok();
    for (line, word) in [
        ("convert -c -O vhdx source.raw image", "Compression"),
        ("convert -c -O vmdk source.raw image", "Compression"),
        ("convert --bitmaps -O vdi source.raw image", "bitmaps"),
        ("convert -O vdi -B base.qcow2 -F qcow2 source.raw image", "Backing file"),
        ("convert --copy reflink -O vhdx source.raw image", "reflink"),
        ("convert -O vhdx -o preallocation=full source.raw image", "subformat=fixed"),
        ("convert -O vmdk -o subformat=twoGbMaxExtentFlat source.raw image", "streamOptimized"),
        ("convert -O vmdk -o compat=v3 source.raw image", "compat"),
        ("convert -O vmdk -o encrypt.format=luks source.raw image", "encrypt"),
        ("convert -O vhdx -o block_size=3M source.raw image", "power of two"),
        ("convert -O vhdx -o log_size=5 source.raw image", "1 MiB"),
        ("convert -O qed source.raw image", "read, not written"),
        ("create -f dmg image 1M", "read, not written"),
        ("create -f vdi -b base.qcow2 -F qcow2 image", "Backing file"),
        ("measure -O vhdx --size 1M", "size measurement"),
        ("convert -n -O vdi source.raw base.qcow2", "vdi"),
    ] {
        let out = zebu(dir, line.split(' '));
        assert!(out.code != Some(0) && out.stderr.contains(word), "{line}: {out}");
        assert!(!scratch.file("image").exists(), "{line}");
    }
    for format in ["vmdk", "vhdx", "vpc", "vdi"] {
        let out = zebu(dir, ["create", "-f", format, "-o", "help", "image"]).ok();
        assert!(out.stdout.starts_with(&format!("Supported {format} options:\n")), "{out}");
        assert!(out.stdout.contains("size=<size>") && !out.stdout.contains("cluster_size"), "{out}");
    }
}

/// A file system, or a user, that allows no file longer than the image will be.
#[test]
fn files_are_never_longer_than_the_limit_on_their_size_needs() {
    let scratch = Scratch::new("limit");
    let dir = scratch.path();
    let content = disk(3 * MIB, Fill::All, &mut Random::new(5));
    std::fs::write(scratch.file("source.raw"), &content).expect("scratch is writable");
    let limited = |limit_kib: u64, way: &str| {
        let line = format!(
            "ulimit -f {}; exec \"$0\" convert --force -f raw -O {way} source.raw image",
            2 * limit_kib
        );
        run_in(dir, Path::new("sh"), ["-c", &line, &zebu_program().to_string_lossy()])
    };
    for (way, limit_kib) in [
        ("vmdk", 4096),
        ("vmdk -o subformat=streamOptimized", 4096),
        ("vhdx -o block_size=1M", 12 << 10),
        ("vhdx -o subformat=fixed", 24 << 10),
        ("vpc", 6 << 10),
        ("vpc -o subformat=fixed", 4096),
        ("vdi", 6 << 10),
        ("vdi -o static=on", 6 << 10),
    ] {
        limited(limit_kib, way).ok();
        zebu(dir, ["compare", "image", "source.raw"]).ok();
        std::fs::remove_file(scratch.file("image")).expect("just made");
        let refused = limited(1024, way).exits(1);
        assert!(refused.stderr.contains("ulimit -f"), "{way}: {refused}");
        assert!(!scratch.file("image").exists(), "{way}");
    }
}

/// Disks of 0 bytes: QEMU opens what is made of them, or nothing is. QEMU makes VMDKs and fixed VHDs that it can't open.
#[test]
fn empty_disks_are_images_that_qemu_opens_or_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("empty");
    let dir = scratch.path();
    std::fs::write(scratch.file("source.raw"), "").expect("scratch is writable");
    for (format, options) in WAYS {
        let has_none = *format == "vmdk" || *format == "vpc" && options.starts_with("subformat=fixed");
        let mut convert = vec!["convert", "-f", "raw", "-O", format];
        let mut create = vec!["create", "-f", format];
        if !options.is_empty() {
            convert.extend(["-o", options]);
            create.extend(["-o", options]);
        }
        convert.extend(["source.raw", "image"]);
        create.extend(["image", "0"]);
        for words in [convert, create] {
            let made = zebu(dir, words);
            if has_none {
                let refused = made.exits(1);
                assert!(refused.stderr.contains("no disks of 0 bytes"), "{refused}");
                assert!(!scratch.file("image").exists(), "{format} {options}");
                continue;
            }
            made.ok();
            assert_eq!(virtual_size(&qemu, dir, format, "image"), 0, "{format} {options}");
            look(&qemu, dir, format, "image", &[])
                .unwrap_or_else(|what| panic!("{format} {options}: {what}"));
            zebu(dir, ["compare", "-f", format, "-F", "raw", "image", "source.raw"]).ok();
            std::fs::remove_file(scratch.file("image")).expect("just made");
        }
    }
    for format in ["vhdx", "vpc", "vdi", "qed", "parallels"] {
        qemu.create(dir, "theirs", format, "", 0);
        zebu(dir, ["compare", "-f", format, "-F", "raw", "theirs", "source.raw"]).ok();
        zebu(dir, ["convert", "-O", "qcow2", "theirs", "ours.qcow2"]).ok();
        qemu.img(dir, ["compare", "-f", "qcow2", "-F", "raw", "ours.qcow2", "source.raw"]).ok();
    }
}
