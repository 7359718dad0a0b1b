//! Images in the formats of other programs, made by QEMU and by hand, read by zebu: equal to what QEMU reads, byte for byte.

use std::path::Path;
use std::time::Duration;
use zebu_engine::storage::Engine;
use zebu_engine::{Access, CacheMode, Format, Image, OpenOptions};
use zebu_tests::driver::{read_all, worker};
use zebu_tests::filled_disk::{Fill, disk, write_sparse};
use zebu_tests::hostile::foreign_samples::{self, Sample};
use zebu_tests::model::difference;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::tenth;
use zebu_tests::usage::run_measured;

const MIB: usize = 1 << 20;

/// Ways in which QEMU makes images: format, options of `convert`.
const WAYS: &[(&str, &str)] = &[
    ("vdi", ""),
    ("vdi", "-o static=on"),
    ("vpc", "-o subformat=dynamic"),
    ("vpc", "-o subformat=dynamic,force_size=on"),
    ("vpc", "-o subformat=fixed"),
    ("vpc", "-o subformat=fixed,force_size=on"),
    ("vhdx", "-o subformat=dynamic"),
    ("vhdx", "-o subformat=fixed"),
    ("vhdx", "-o block_size=8M"),
    ("vhdx", "-o block_size=1M,block_state_zero=off"),
    ("vmdk", "-o subformat=monolithicSparse"),
    ("vmdk", "-o subformat=monolithicSparse,zeroed_grain=on"),
    ("vmdk", "-o subformat=streamOptimized"),
    ("vmdk", "-o subformat=monolithicFlat"),
    ("vmdk", "-o subformat=twoGbMaxExtentSparse"),
    ("vmdk", "-o subformat=twoGbMaxExtentFlat"),
    ("qed", ""),
    ("qed", "-o cluster_size=16k,table_size=2"),
    ("parallels", ""),
    ("parallels", "-o cluster_size=64k"),
    ("qcow", ""),
];

/// The bytes that QEMU reads in an image.
fn read_by_qemu(qemu: &Qemu, dir: &Path, format: &str, image: &str) -> Vec<u8> {
    qemu.img(dir, ["convert", "-f", format, "-O", "raw", image, "theirs.raw"]).ok();
    std::fs::read(dir.join("theirs.raw")).expect("just made")
}

/// Reads an image in every way that zebu has.
fn check(dir: &Path, image: &str, format: &str, expected: &[u8], random: &mut Random) -> Result<(), String> {
    // By the command, which guesses the format.
    let out = zebu(dir, ["convert", "-O", "raw", image, "ours.raw"]);
    if out.code != Some(0) {
        return Err(out.to_string());
    }
    let ours = std::fs::read(dir.join("ours.raw")).map_err(|e| e.to_string())?;
    if let Some(text) = difference(0, expected, &ours) {
        return Err(format!("zebu convert: {text}"));
    }
    let out = zebu(dir, ["compare", "-f", format, "-F", "raw", image, "ours.raw"]);
    if out.code != Some(0) {
        return Err(out.to_string());
    }
    let info = zebu(dir, ["info", "--output=json", image]).ok();
    let info: serde_json::Value = serde_json::from_str(&info.stdout).map_err(|e| e.to_string())?;
    if (info["format"].as_str(), info["virtual-size"].as_u64()) != (Some(format), Some(expected.len() as u64))
    {
        return Err(info.to_string());
    }
    let options = OpenOptions::default()
        .format(Format::from_name(format))
        .access(Access::ReadOnly)
        .cache(*random.pick(&[CacheMode::Writeback, CacheMode::None]));
    by_library(&dir.join(image), &options, expected, random)
}

/// The whole disk in order, then some ranges at any offset.
fn by_library(
    path: &Path,
    options: &OpenOptions,
    expected: &[u8],
    random: &mut Random,
) -> Result<(), String> {
    let worker = worker(*random.pick(&[Engine::IoUring, Engine::Threads]));
    worker.block_on(async {
        let image = Image::open(&worker, path, options).await.map_err(|e| e.to_string())?;
        let piece = *random.pick(&[65536, (1 << 20) - 512, 4 << 20]);
        let found = read_all(&worker, &image, piece).await.map_err(|e| e.to_string())?;
        if let Some(text) = difference(0, expected, &found) {
            return Err(text);
        }
        for _ in 0..20 {
            let offset = random.below(expected.len() as u64);
            let len = random.between(1, 200_000).min(expected.len() as u64 - offset);
            let (result, buffers) = image.read(&worker, offset, worker.buffer(len as usize).into()).await;
            result.map_err(|e| e.to_string())?;
            let mut found = vec![0; len as usize];
            buffers.copy_to(0, &mut found);
            let wanted = &expected[offset as usize..(offset + len) as usize];
            if let Some(text) = difference(offset, wanted, &found) {
                return Err(format!("read of {len} bytes at {offset}: {text}"));
            }
        }
        image.close(&worker).await.map_err(|e| e.to_string())
    })
}

#[test]
fn images_of_qemu_read_as_qemu_reads_them() {
    let Some(qemu) = Qemu::find() else { return };
    let mut random = Random::new(28);
    for (way, (format, options)) in WAYS.iter().enumerate() {
        let disks = [(MIB, Fill::Nothing), (2 * MIB, Fill::All), (5 * MIB + 7 * 512, Fill::Some)];
        for (number, (size, fill)) in disks.into_iter().enumerate() {
            if !tenth::has(way * disks.len() + number) {
                continue;
            }
            let scratch = Scratch::new("foreign");
            let dir = scratch.path();
            write_sparse(&scratch.file("source.raw"), &disk(size, fill, &mut random));
            let line = format!("convert -f raw -O {format} {options} source.raw image");
            qemu.img_line(dir, &line).ok();
            let expected = read_by_qemu(&qemu, dir, format, "image");
            check(dir, "image", format, &expected, &mut random)
                .unwrap_or_else(|what| panic!("{format} {options}, {size} bytes, {fill:?}: {what}"));
        }
    }
}

/// Writes a sample, or a damaged one, into a directory.
fn write_sample(dir: &Path, sample: &Sample) {
    for (name, bytes) in &sample.files {
        std::fs::write(dir.join(name), bytes).expect("scratch is writable");
    }
}

/// Images put together from the documents of their formats: QEMU, too, must read them as they were made.
#[test]
fn images_made_by_hand_read_as_made() {
    let Some(qemu) = Qemu::find() else { return };
    let mut random = Random::new(7);
    for (name, sample) in foreign_samples::all() {
        let scratch = Scratch::new("foreign");
        let dir = scratch.path();
        write_sample(dir, sample);
        check(dir, "image", sample.format, &sample.disk, &mut random)
            .unwrap_or_else(|what| panic!("{name}: {what}"));
        let verdict = zebu(dir, ["info", "--verdict", "-f", sample.format, "image"]);
        assert!(!verdict.stdout.contains("looks like"), "{name}: {verdict}");
        if *name == "vhdx-with-log" {
            qemu.img(dir, ["check", "-q", "-f", "vhdx", "-r", "all", "image"]);
        }
        // QEMU reads neither ZERO nor RDONLY extents, and no QED with clusters of 4 KiB.
        if !matches!(*name, "vmdk-flat" | "qed") {
            let theirs = read_by_qemu(&qemu, dir, sample.format, "image");
            assert_eq!(difference(0, &sample.disk, &theirs), None, "{name}");
        }
    }
}

/// Resident memory that a command may have beside 4 times the file's size, KiB.
const MEMORY_KIB: u64 = 48 << 10;

/// Damaged images end in errors, in bounded time and memory.
#[test]
fn damaged_images_are_refused_by_every_command() {
    let scratch = Scratch::new("foreign");
    let dir = scratch.path();
    let measured = Path::new(env!("CARGO_BIN_EXE_measured"));
    for (name, make, damage, message) in foreign_samples::cases::CASES {
        let mut sample = make();
        damage(sample.header());
        write_sample(dir, &sample);
        let allowed_kib = MEMORY_KIB + 4 * sample.image().len() as u64 / 1024;
        for line in ["info --verdict -f FORMAT image", "convert -f FORMAT -O raw image out"] {
            let line = line.replace("FORMAT", sample.format);
            let words: Vec<&str> = line.split(' ').collect();
            let (out, peak_kib) = run_measured(measured, Duration::from_secs(20), dir, &words);
            assert!(peak_kib <= allowed_kib, "{name}: {peak_kib} KiB: {out}");
            assert!(!out.stderr.contains("panicked"), "{name}: {out}");
            if words[0] == "convert" {
                let names_it = out.stderr.contains(message) || out.stderr.contains("--allow-refs");
                assert!(out.code == Some(1) && names_it, "{name}: {out}");
                assert!(!scratch.file("out").exists(), "{name}");
            } else {
                assert!(matches!(out.code, Some(0..=2)), "{name}: {out}");
            }
        }
    }
}

/// Two grains of one compressed stream, which is as short as the second, the last one of the disk. What a reader's buffers held
/// before, such as data of another disk, must not show in the first.
#[test]
fn a_stream_that_is_too_short_for_one_of_its_units_shows_nothing() {
    let scratch = Scratch::new("foreign");
    let dir = scratch.path();
    let mut image = vec![0; 512];
    image[..4].copy_from_slice(b"KDMV");
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(4, &3u32.to_le_bytes());
    put(8, &(1u32 | 1 << 16).to_le_bytes());
    for (at, value) in [(12, 129u64), (20, 128), (48, 0), (56, 1), (64, 16)] {
        put(at, &value.to_le_bytes());
    }
    put(44, &512u32.to_le_bytes());
    put(77, &1u16.to_le_bytes());
    let block = |words: &[u32], len: usize| {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(len, 0);
        bytes
    };
    image.extend(block(&[2], 512));
    image.extend(block(&[6, 6], 2048));
    // A zlib stream of one stored block: 512 times the letter B.
    let data = [b'B'; 512];
    image.extend([0x78, 0x01, 0x01, 0x00, 0x02, 0xff, 0xfd]);
    image.extend(data);
    let (a, b) = data.iter().fold((1u32, 0u32), |(a, b), byte| {
        ((a + u32::from(*byte)) % 65521, (a + b + u32::from(*byte)) % 65521)
    });
    image.extend((b << 16 | a).to_be_bytes());
    image.resize(image.len() + 300_000, 0);
    std::fs::write(dir.join("short-s001.vmdk"), image).unwrap();
    let text =
        foreign_samples::vmware::descriptor("twoGbMaxExtentSparse", "", "RW 129 SPARSE \"short-s001.vmdk\"");
    std::fs::write(dir.join("short.vmdk"), text).unwrap();
    std::fs::write(dir.join("secret.raw"), b"SECRET--".repeat(1 << 17)).unwrap();
    // The last grain is read first, then the one for which the stream is too short.
    let commands = ["read -P 0x42 65536 512", "read -v 0 65536"];
    let words = commands.iter().flat_map(|command| ["-c", command]);
    let out = zebu(dir, ["io", "-r", "-f", "vmdk", "short.vmdk"].into_iter().chain(words));
    assert!(
        out.stdout.contains("read 512/512") && !out.stdout.contains("Pattern verification failed"),
        "{out}"
    );
    assert!(!out.stdout.contains("read 65536/65536"), "{out}");
    assert!(
        format!("{out}").contains("holds too few bytes") || format!("{out}").contains("Input/output error"),
        "{out}"
    );
    let out = zebu(dir, ["convert", "-O", "raw", "secret.raw", "short.vmdk", "out.raw"]);
    assert!(out.code == Some(1) && out.stderr.contains("too few bytes"), "{out}");
}

/// Images that are valid in their format and begin as one that a tool that guesses would take them for.
#[test]
fn an_image_that_others_take_for_another_is_unsafe() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("foreign");
    let dir = scratch.path();
    qemu.img(dir, ["create", "-q", "-f", "qcow2", "inner", "1M"]).ok();
    let mut disk = std::fs::read(dir.join("inner")).unwrap();
    disk.resize(1 << 20, 0);
    std::fs::write(dir.join("disk.raw"), disk).unwrap();
    for (format, options) in [
        ("vpc", "subformat=fixed,force_size=on"),
        ("vmdk", "subformat=monolithicSparse"),
        ("vdi", "static=on"),
    ] {
        qemu.img(dir, ["convert", "-f", "raw", "-O", format, "-o", options, "disk.raw", "image"]).ok();
        let out = zebu(dir, ["info", "--verdict", "-f", format, "image"]);
        assert!(out.code != Some(0) && out.stdout.contains("looks like qcow2"), "{format}: {out}");
    }
    // No tool takes an image, or a disk, for a packed file.
    let mut disk = b"BZh91AY&SY".to_vec();
    disk.resize(1 << 20, 0);
    std::fs::write(dir.join("disk.raw"), disk).unwrap();
    let options = "subformat=fixed,force_size=on";
    qemu.img(dir, ["convert", "-f", "raw", "-O", "vpc", "-o", options, "disk.raw", "image"]).ok();
    let out = zebu(dir, ["info", "--verdict", "-f", "vpc", "image"]);
    assert!(!out.stdout.contains("looks like"), "{out}");
}

/// A disk of several files of 2 GiB each, with data about the ends of them.
#[test]
fn a_vmdk_of_several_extents_reads_as_qemu_reads_it() {
    let Some(qemu) = Qemu::find() else { return };
    for subformat in ["twoGbMaxExtentSparse", "twoGbMaxExtentFlat"] {
        let scratch = Scratch::new("foreign");
        let dir = scratch.path();
        qemu.create(dir, "image.vmdk", "vmdk", &format!("subformat={subformat}"), (4 << 30) + 4096);
        let writes = ["write -P 1 2046M 4M", "write -P 2 0 64k", "write -P 3 4095M 1M", "write -P 4 4G 4k"];
        qemu.io(dir, "-f vmdk", "image.vmdk", &writes).ok();
        qemu.img_line(dir, "convert -f vmdk -O qcow2 image.vmdk theirs.qcow2").ok();
        zebu(dir, ["compare", "image.vmdk", "theirs.qcow2"]).ok();
        zebu(dir, ["convert", "-O", "qcow2", "image.vmdk", "ours.qcow2"]).ok();
        qemu.img_line(dir, "compare ours.qcow2 image.vmdk").ok();
        // Nothing but what is in the directory of the image may be opened.
        let refused =
            zebu(dir, ["convert", "-O", "raw", "--allow-refs", "none", "image.vmdk", "out"]).exits(1);
        assert!(refused.stderr.contains("--allow-refs"), "{refused}");
    }
}

#[test]
fn images_with_parents_read_as_qemu_reads_them() {
    let Some(qemu) = Qemu::find() else { return };
    let mut random = Random::new(3);
    for (format, base_format) in [
        ("vmdk", "vmdk"),
        ("qed", "raw"),
        ("qed", "qcow2"),
        ("qcow", "qcow2"),
        ("qcow2", "vmdk"),
        ("qcow2", "vdi"),
    ] {
        let scratch = Scratch::new("foreign");
        let dir = scratch.path();
        write_sparse(&scratch.file("source.raw"), &disk(4 * MIB, Fill::Some, &mut random));
        qemu.img_line(dir, &format!("convert -f raw -O {base_format} source.raw base")).ok();
        qemu.img_line(dir, &format!("create -q -f {format} -b base -F {base_format} image")).ok();
        let writes = ["write -P 7 100k 200k", "write -P 8 3M 4k", "write -z 1M 128k"];
        qemu.io(dir, &format!("-f {format}"), "image", &writes).ok();
        let expected = read_by_qemu(&qemu, dir, format, "image");
        check(dir, "image", format, &expected, &mut random)
            .unwrap_or_else(|what| panic!("{format} on {base_format}: {what}"));
    }
}

#[test]
fn a_parent_that_was_changed_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("foreign");
    let dir = scratch.path();
    qemu.create(dir, "base.vmdk", "vmdk", "", 4 << 20);
    qemu.img_line(dir, "create -q -f vmdk -b base.vmdk -F vmdk image.vmdk").ok();
    zebu(dir, ["convert", "-O", "raw", "image.vmdk", "out"]).ok();
    // Another content has another number.
    qemu.create(dir, "base.vmdk", "vmdk", "", 4 << 20);
    let out = zebu(dir, ["convert", "-O", "raw", "image.vmdk", "out"]).exits(1);
    assert!(out.stderr.contains("parent"), "{out}");
}

#[test]
fn what_would_write_is_refused_by_name() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("foreign");
    let dir = scratch.path();
    for format in ["vmdk", "vdi", "vhdx", "vpc", "qed", "parallels", "qcow"] {
        qemu.create(dir, "image", format, "", 4 << 20);
        let before = std::fs::read(scratch.file("image")).expect("just made");
        let io = zebu(dir, ["io", "-f", format, "image", "-c", "write 0 64k"]);
        assert!(io.code != Some(0) && io.stderr.contains("convert"), "{io}");
        let resize = zebu(dir, ["resize", "-f", format, "image", "8M"]).exits(1);
        assert!(resize.stderr.contains("convert"), "{resize}");
        zebu(dir, ["check", "-f", format, "image"]).exits(63);
        zebu(dir, ["check", "image"]).exits(63);
        let commit = zebu(dir, ["snapshot", "-c", "a", "-f", format, "image"]).exits(1);
        assert!(commit.stderr.contains(format), "{commit}");
        assert!(std::fs::read(scratch.file("image")).expect("still there") == before);
        std::fs::remove_file(scratch.file("image")).expect("ours");
    }
}

/// Descriptors by which clouds gave files of their hosts away (CVE-2022-47951, CVE-2024-44082).
#[test]
fn extents_that_name_other_places_are_refused() {
    let scratch = Scratch::new("foreign");
    let dir = scratch.path();
    std::fs::create_dir(scratch.file("images")).expect("scratch is writable");
    std::fs::write(scratch.file("secret"), [7; 4096]).expect("scratch is writable");
    std::os::unix::fs::symlink("../secret", scratch.file("images/link")).expect("scratch is writable");
    let absolute = scratch.file("secret");
    for name in [
        "../secret",
        "link",
        "./../secret",
        &absolute.to_string_lossy(),
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
        "http://127.0.0.1:1/secret",
        "nbd://127.0.0.1:1/secret",
        "nbd+unix:///secret?socket=/secret",
        "json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}",
        "file:/etc/passwd",
    ] {
        for (create, line) in
            [("monolithicFlat", "RW 8 FLAT"), ("vmfs", "RW 8 VMFS"), ("twoGbMaxExtentSparse", "RW 8 SPARSE")]
        {
            let end = if line.ends_with("FLAT") { " 0" } else { "" };
            let text = format!(
                "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"{create}\"\n{line} \"{name}\"{end}\n"
            );
            std::fs::write(scratch.file("images/image.vmdk"), text).expect("scratch is writable");
            for words in
                [vec!["convert", "-O", "raw", "images/image.vmdk", "out"], vec!["map", "images/image.vmdk"]]
            {
                let out = zebu(dir, words).exits(1);
                assert!(!out.stderr.contains("panicked") && !scratch.file("out").exists(), "{name}: {out}");
            }
            let verdict = zebu(dir, ["info", "--verdict", "images/image.vmdk"]);
            assert!(matches!(verdict.code, Some(1 | 2)), "{name}: {verdict}");
        }
    }
}

/// Old versions of Virtual PC wrote footers of 511 bytes.
#[test]
fn a_vhd_whose_footer_lacks_a_byte_reads_as_qemu_reads_it() {
    let Some(qemu) = Qemu::find() else { return };
    let mut random = Random::new(511);
    for subformat in ["fixed", "dynamic"] {
        let scratch = Scratch::new("foreign");
        let dir = scratch.path();
        write_sparse(&scratch.file("source.raw"), &disk(2 * MIB, Fill::Some, &mut random));
        qemu.img_line(dir, &format!("convert -f raw -O vpc -o subformat={subformat} source.raw image")).ok();
        let file = std::fs::File::options().write(true).open(scratch.file("image")).expect("just made");
        file.set_len(file.metadata().expect("ours").len() - 1).expect("ours");
        let expected = read_by_qemu(&qemu, dir, "vpc", "image");
        check(dir, "image", "vpc", &expected, &mut random)
            .unwrap_or_else(|what| panic!("{subformat}: {what}"));
    }
}
