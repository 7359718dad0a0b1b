//! Mistakes of other writers of qcow2: one test for each case, named after it. QEMU is the judge.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zebu_tests::model::difference;
use zebu_tests::patch::{COPIED, CORRUPT, OFFSET_MASK, Patch, header};
use zebu_tests::program::{Finished, find, finish, replacing, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;

const IMAGE: &str = "disk.qcow2";
const MIB: u64 = 1 << 20;

/// Autoclear bits.
const BITMAPS: u64 = 1;
const RAW_DATA_FILE: u64 = 1 << 1;
/// Incompatible bit 0.
const DIRTY: u64 = 1;

/// An image of 8 MiB with the given options of `create`, filled from 1 MiB to 3 MiB with 0x11.
fn image(qemu: &Qemu, options: &str) -> Scratch {
    let scratch = Scratch::new("peers");
    qemu.create(scratch.path(), IMAGE, "qcow2", options, 8 * MIB);
    qemu.io(scratch.path(), "-f qcow2", IMAGE, &["write -P 0x11 1M 2M"]).ok();
    scratch
}

/// Runs commands of `zebu io` on the image, for writing.
fn io(dir: &Path, commands: &[&str]) -> Finished {
    let words = ["io", "-f", "qcow2", IMAGE].into_iter();
    zebu(dir, words.chain(commands.iter().flat_map(|command| ["-c", command])))
}

fn patch(scratch: &Scratch) -> Patch {
    Patch::open(&scratch.file(IMAGE))
}

fn content(scratch: &Scratch) -> Vec<u8> {
    std::fs::read(scratch.file(IMAGE)).expect("readable")
}

/// The commands fail, in one line that holds `word`, and no byte of the file changes.
#[track_caller]
fn refused(scratch: &Scratch, words: &[&str], word: &str) {
    let before = content(scratch);
    let out = zebu(scratch.path(), words).exits(1);
    assert!(out.stderr.to_lowercase().contains(&word.to_lowercase()), "{word:?} not named: {out}");
    assert_eq!(out.stderr.lines().count(), 1, "more or less than one line: {out}");
    assert!(content(scratch) == before, "the file changed: {out}");
}

// Two libraries and a VMM destroy snapshots: they write in place what a snapshot still needs.
#[test]
fn a_snapshot_survives_writes() {
    let Some(qemu) = Qemu::find() else { return };
    for options in ["compat=1.1", "compat=0.10", "cluster_size=512", "extended_l2=on", "refcount_bits=2"] {
        let scratch = image(&qemu, options);
        qemu.img(scratch.path(), ["snapshot", "-c", "kept", IMAGE]).ok();
        let before = qemu.read_all(scratch.path(), IMAGE, Some("kept"));
        io(
            scratch.path(),
            &["write -P 0x22 1M 4k", "write -z 2M 64k", "discard 2560k 128k", "write -P 0x23 6M 1M"],
        )
        .ok();
        qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{options}: {e}"));
        let after = qemu.read_all(scratch.path(), IMAGE, Some("kept"));
        assert_eq!(difference(0, &before, &after), None, "{options}");
        qemu.io(
            scratch.path(),
            "-f qcow2",
            IMAGE,
            &["read -P 0x22 1M 4k", "read -P 0x11 1028k 4k", "read -P 0 2M 64k", "read -P 0x23 6M 1M"],
        )
        .ok();
        // The refcounts that were left must also be right for whoever deletes the snapshot.
        qemu.img(scratch.path(), ["snapshot", "-d", "kept", IMAGE]).ok();
        qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{options}, deleted: {e}"));
    }
}

// Three libraries open LUKS images, hand out ciphertext and write plaintext into them.
#[test]
fn luks_needs_its_key() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("peers");
    let line = format!(
        "create -q --object secret,id=key,data=abcdef -f qcow2 \
         -o encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10 {IMAGE} 8M"
    );
    qemu.img_line(scratch.path(), &line).ok();
    refused(&scratch, &["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"], "key-secret");
    refused(&scratch, &["io", "-r", "-f", "qcow2", IMAGE, "-c", "read 0 4k"], "key-secret");
    refused(&scratch, &["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"], "key-secret");
    assert!(!scratch.file("out.raw").exists());
    // Looking is no harm.
    zebu(scratch.path(), ["info", "-f", "qcow2", IMAGE]).ok();
}

#[test]
fn aes_needs_its_key() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    patch(&scratch).set_u32(header::CRYPT_METHOD, 1);
    refused(&scratch, &["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"], "key-secret");
    refused(&scratch, &["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"], "key-secret");
    patch(&scratch).set_u32(header::CRYPT_METHOD, 3);
    refused(&scratch, &["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"], "encryption");
}

// A bitmap whose autoclear bit is left set without tracking makes the next incremental backup miss a write.
#[test]
fn a_bitmap_tracks_or_its_autoclear_bit_is_cleared() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    qemu.img(scratch.path(), ["bitmap", "--add", IMAGE, "backup"]).ok();
    assert_eq!(patch(&scratch).u64(header::AUTOCLEAR) & BITMAPS, BITMAPS);
    let before = content(&scratch);
    zebu(scratch.path(), ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read 0 4k"]).ok();
    assert!(content(&scratch) == before, "reading changed the image");
    io(scratch.path(), &["write -P 0x44 5M 4k"]).ok();
    if patch(&scratch).u64(header::AUTOCLEAR) & BITMAPS == BITMAPS {
        let map = qemu.img(
            scratch.path(),
            [
                "map",
                "--output=json",
                "--image-opts",
                &format!("driver=qcow2,file.driver=file,file.filename={IMAGE}"),
            ],
        );
        map.ok();
        let listed = &qemu.info(scratch.path(), IMAGE)["format-specific"]["data"]["bitmaps"][0];
        assert_eq!(
            listed["flags"],
            serde_json::json!(["auto"]),
            "neither cleared nor closed cleanly: {listed}"
        );
    }
    let code = qemu.img(scratch.path(), ["check", "-q", IMAGE]).code;
    assert!(matches!(code, Some(0 | 3)), "errors besides the space of unusable bitmaps: {code:?}");
    qemu.io(scratch.path(), "-f qcow2", IMAGE, &["read -P 0x44 5M 4k", "read -P 0x11 1M 2M"]).ok();
}

// A VMM rebuilds the refcounts of a dirty image without counting what snapshots refer to.
#[test]
fn a_dirty_image_with_a_snapshot_is_rebuilt_with_the_snapshot() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "lazy_refcounts=on");
    qemu.img(scratch.path(), ["snapshot", "-c", "kept", IMAGE]).ok();
    let snapshot = qemu.read_all(scratch.path(), IMAGE, Some("kept"));
    qemu.io(
        scratch.path(),
        "-f qcow2 -t writeback",
        IMAGE,
        &["write -P 0x55 1M 256k", "write -P 0x56 5M 256k", "flush", "sigraise 9"],
    );
    assert_eq!(
        patch(&scratch).u64(header::INCOMPATIBLE) & DIRTY,
        DIRTY,
        "the killed process left no dirty bit"
    );
    // Read only: neither repaired nor refused.
    let before = content(&scratch);
    zebu(scratch.path(), ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read -P 0x56 5M 256k"]).ok();
    assert!(content(&scratch) == before, "reading changed the image");
    io(scratch.path(), &["write -P 0x57 1536k 64k", "write -P 0x58 7M 64k"]).ok();
    assert_eq!(patch(&scratch).u64(header::INCOMPATIBLE) & DIRTY, 0, "still dirty after a clean close");
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
    let after = qemu.read_all(scratch.path(), IMAGE, Some("kept"));
    assert_eq!(difference(0, &snapshot, &after), None);
    qemu.io(
        scratch.path(),
        "-f qcow2",
        IMAGE,
        &["read -P 0x55 1M 256k", "read -P 0x57 1536k 64k", "read -P 0x56 5M 256k", "read -P 0x58 7M 64k"],
    )
    .ok();
}

// A library clears every autoclear bit it does not know the use of, and with it the promise about the data file.
#[test]
fn a_raw_data_file_stays_one() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "data_file=data.bin,data_file_raw=on");
    io(
        scratch.path(),
        &["write -P 0x66 2M 4k", "write -z 1M 64k", "discard 1536k 64k", "write -P 0x67 7M 1M"],
    )
    .ok();
    assert_eq!(patch(&scratch).u64(header::AUTOCLEAR) & RAW_DATA_FILE, RAW_DATA_FILE);
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
    let through_image = qemu.read_all(scratch.path(), IMAGE, None);
    let by_itself = std::fs::read(scratch.file("data.bin")).expect("readable");
    assert_eq!(difference(0, &through_image, &by_itself), None);
}

// Unknown autoclear bits are to be cleared by a writer, and kept by a reader.
#[test]
fn an_unknown_autoclear_bit_is_cleared_by_writing_alone() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    patch(&scratch).set_u64(header::AUTOCLEAR, 1 << 17);
    zebu(scratch.path(), ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read -P 0x11 1M 2M"]).ok();
    assert_eq!(patch(&scratch).u64(header::AUTOCLEAR), 1 << 17);
    io(scratch.path(), &["write 0 4k"]).ok();
    assert_eq!(patch(&scratch).u64(header::AUTOCLEAR), 0);
}

#[test]
fn an_unknown_incompatible_bit_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    patch(&scratch).set_u64(header::INCOMPATIBLE, 1 << 40);
    refused(&scratch, &["io", "-r", "-f", "qcow2", IMAGE, "-c", "read 0 4k"], "feature");
}

// A library punches a hole into space that was set aside on purpose; two others leak it.
#[test]
fn a_preallocated_zero_cluster_is_written_in_place() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    // Zeroed without unmap: the cluster keeps its host space.
    qemu.io(scratch.path(), "-f qcow2", IMAGE, &["write -z 1M 2M"]).ok();
    let first = 16;
    let entry = patch(&scratch).u64(patch(&scratch).l2_entry(first));
    assert!(entry & OFFSET_MASK != 0 && entry & 1 == 1, "not a preallocated zero cluster: {entry:#x}");
    let blocks = std::fs::metadata(scratch.file(IMAGE)).expect("there").blocks();
    io(scratch.path(), &["write -P 0x77 1052672 4096"]).ok();
    let after = patch(&scratch).u64(patch(&scratch).l2_entry(first));
    assert_eq!(after, (entry & OFFSET_MASK) | COPIED, "not the same host cluster, plain and owned");
    assert!(
        std::fs::metadata(scratch.file(IMAGE)).expect("there").blocks() >= blocks,
        "space was given back"
    );
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
    qemu.io(
        scratch.path(),
        "-f qcow2",
        IMAGE,
        &["read -P 0 1M 4k", "read -P 0x77 1052672 4096", "read -P 0 1056768 2040k"],
    )
    .ok();
}

// A VMM's header rewrite sets the compression type back to deflate: every compressed cluster is lost.
#[test]
fn the_compression_type_survives_header_rewrites() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("peers");
    qemu.create(scratch.path(), "source.raw", "raw", "", 8 * MIB);
    qemu.io(scratch.path(), "-f raw", "source.raw", &["write -P 0x12 0 8M"]).ok();
    qemu.img_line(
        scratch.path(),
        &format!("convert -c -O qcow2 -o compression_type=zstd source.raw {IMAGE}"),
    )
    .ok();
    io(scratch.path(), &["write -P 0x13 100k 4k"]).ok();
    zebu(scratch.path(), ["resize", "-f", "qcow2", IMAGE, "16M"]).ok();
    assert_eq!(patch(&scratch).bytes(header::COMPRESSION_TYPE, 1), [1]);
    assert_eq!(patch(&scratch).u64(header::INCOMPATIBLE), 1 << 3);
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
    qemu.io(
        scratch.path(),
        "-f qcow2",
        IMAGE,
        &["read -P 0x12 0 100k", "read -P 0x13 100k 4k", "read -P 0x12 104k 8088k", "read -P 0 8M 8M"],
    )
    .ok();
}

// QEMU counts a COPIED flag that is not exactly "refcount 1" as corruption, and writes in place where it is set.
#[test]
fn copied_is_exactly_refcount_one() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    qemu.img(scratch.path(), ["snapshot", "-c", "kept", IMAGE]).ok();
    io(scratch.path(), &["write -P 0x22 1M 64k", "write -P 0x23 1152k 4k", "write -P 0x24 6M 64k"]).ok();
    let image = patch(&scratch);
    let mut owned = 0;
    for cluster in 0..8 * MIB / 65536 {
        let entry = image.u64(image.l2_entry(cluster));
        if entry & OFFSET_MASK != 0 {
            let refcount = image.refcount((entry & OFFSET_MASK) / 65536);
            assert_eq!(
                entry & COPIED != 0,
                refcount == 1,
                "cluster {cluster}: {entry:#x}, refcount {refcount}"
            );
            owned += u32::from(refcount == 1);
        }
    }
    assert_eq!(owned, 3, "clusters of its own");
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn unknown_extensions_and_fields_survive_header_rewrites() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    let image = patch(&scratch);
    // Extensions are (type, length, data padded to 8); the list ends with type 0.
    let mut at = u64::from(image.u32(header::HEADER_LENGTH));
    while image.u32(at) != 0 {
        at += 8 + u64::from(image.u32(at + 4)).next_multiple_of(8);
    }
    let unknown = [0x5a45_4255_u32.to_be_bytes(), 13_u32.to_be_bytes()].concat();
    image.set(at, &unknown).set(at + 8, b"keep me, pls!\0\0\0").set(at + 24, &[0; 8]);
    drop(image);
    io(scratch.path(), &["write 0 4k"]).ok();
    zebu(scratch.path(), ["resize", "-f", "qcow2", IMAGE, "40M"]).ok();
    let head = patch(&scratch).bytes(0, 65536);
    let found = head.windows(8).position(|w| w == unknown).expect("the unknown extension is gone");
    assert_eq!(&head[found + 8..found + 24], b"keep me, pls!\0\0\0");
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));

    // Fields past the ones known: a header of 128 bytes.
    let scratch = self::image(&qemu, "cluster_size=4k");
    let image = patch(&scratch);
    let extensions = image.bytes(112, 3000);
    image.set(112, b"unknown header f").set(128, &extensions).set_u32(header::HEADER_LENGTH, 128);
    drop(image);
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("as patched: {e}"));
    io(scratch.path(), &["write 0 4k"]).ok();
    zebu(scratch.path(), ["resize", "-f", "qcow2", IMAGE, "40M"]).ok();
    assert_eq!(patch(&scratch).u32(header::HEADER_LENGTH), 128);
    assert_eq!(patch(&scratch).bytes(112, 16), b"unknown header f");
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
}

// Peers refuse zstd, or misread extended L2 entries.
#[test]
fn a_part_of_a_compressed_cluster_is_overwritten() {
    let Some(qemu) = Qemu::find() else { return };
    for kind in ["zlib", "zstd"] {
        for more in ["", ",extended_l2=on", ",cluster_size=2M", ",cluster_size=512"] {
            let scratch = Scratch::new("peers");
            qemu.create(scratch.path(), "source.raw", "raw", "", 8 * MIB);
            qemu.io(scratch.path(), "-f raw", "source.raw", &["write -P 0x12 0 8M"]).ok();
            let line = format!("convert -c -O qcow2 -o compression_type={kind}{more} source.raw {IMAGE}");
            qemu.img_line(scratch.path(), &line).ok();
            io(scratch.path(), &["write -P 0x13 1000k 1k", "write -z 3M 512", "discard 4M 1M"]).ok();
            qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{kind}{more}: {e}"));
            qemu.io(
                scratch.path(),
                "-f qcow2",
                IMAGE,
                &[
                    "read -P 0x12 0 1000k",
                    "read -P 0x13 1000k 1k",
                    "read -P 0x12 1001k 2071k",
                    "read -P 0 3M 512",
                    "read -P 0x12 3146240 500k",
                    "read -P 0x12 5M 3M",
                ],
            )
            .ok();
        }
    }
}

// One library refuses even to read such an image; others write it.
#[test]
fn a_corrupt_image_is_read_and_not_written() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    patch(&scratch).set_u64(header::INCOMPATIBLE, CORRUPT);
    zebu(scratch.path(), ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read -P 0x11 1M 2M"]).ok();
    refused(&scratch, &["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"], "corrupt");
    zebu(scratch.path(), ["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"]).ok();
}

// A VMM has no overlap check: on a crafted image guest writes go to the header.
#[test]
fn a_mapping_into_metadata_is_never_written_through() {
    let Some(qemu) = Qemu::find() else { return };
    for (name, target) in
        [("refcount table", header::REFCOUNT_TABLE_OFFSET), ("L1 table", header::L1_TABLE_OFFSET)]
    {
        let scratch = image(&qemu, "");
        let image = patch(&scratch);
        let place = image.u64(target);
        image.set_u64(image.l2_entry(16), place | COPIED);
        let table = image.bytes(place, 512);
        let out = io(scratch.path(), &["write -P 0x99 1M 4k"]);
        assert_eq!(out.code, Some(1), "{name}: {out}");
        assert!(image.bytes(place, 512) == table, "{name}: overwritten by a guest");
    }
    let scratch = image(&qemu, "");
    let image = patch(&scratch);
    image.set_u64(image.l2_entry(16), image.l2_table(0) | COPIED);
    let place = image.l2_table(0);
    let out = io(scratch.path(), &["write -P 0x99 1M 4k"]);
    assert_eq!(out.code, Some(1), "L2 table: {out}");
    assert!(image.bytes(place, 512) != [0x99; 512], "the L2 table was overwritten by a guest");
}

// CVE-2008-2004 and three later ones: the guest of a raw disk writes a qcow2 header that names a host file.
#[test]
fn a_raw_disk_with_a_qcow2_header_stays_raw() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("peers");
    std::fs::write(scratch.file("secret"), vec![0x5e; 65536]).expect("scratch is writable");
    let line = "create -q -f qcow2 -b secret -F raw disk.raw 64k";
    qemu.img_line(scratch.path(), line).ok();
    let mut bytes = std::fs::read(scratch.file("disk.raw")).expect("readable");
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    std::fs::write(scratch.file("disk.raw"), &bytes).expect("scratch is writable");
    for words in [
        vec!["convert", "-f", "raw", "-O", "raw", "disk.raw", "out.raw"],
        vec!["dd", "-f", "raw", "-O", "raw", "if=disk.raw", "of=out.raw"],
    ] {
        let out = zebu(scratch.path(), &words);
        if out.code == Some(0) {
            assert!(std::fs::read(scratch.file("out.raw")).expect("made") == bytes, "interpreted: {out}");
        } else {
            // A subcommand that is not there yet gives nothing away either.
            assert!(words[0] == "dd", "{out}");
        }
    }
    let info = zebu(scratch.path(), ["info", "-f", "raw", "--output=json", "disk.raw"]).ok();
    assert!(info.stdout.contains("\"raw\"") && !info.stdout.contains("secret"), "{info}");
}

// A raw image that was only guessed to be one must not become something else by a write to its first sector.
#[test]
fn a_guessed_raw_image_is_not_turned_into_another_format() {
    let scratch = Scratch::new("peers");
    std::fs::write(scratch.file("disk.raw"), vec![0; 65536]).expect("scratch is writable");
    let mut magic = vec![0; 512];
    magic[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    std::fs::write(scratch.file("magic"), &magic).expect("scratch is writable");
    let out = zebu(scratch.path(), ["io", "disk.raw", "-c", "write -s magic 0 512"]);
    assert_eq!(out.code, Some(1), "{out}");
    assert_eq!(std::fs::read(scratch.file("disk.raw")).expect("readable"), vec![0; 65536]);
}

// CVE-2015-5163, CVE-2024-32498, CVE-2024-4467 and others: an image names files of the host.
#[test]
fn a_file_outside_the_directory_is_not_opened_for_an_image() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("peers");
    let inner = scratch.file("inner");
    std::fs::create_dir(&inner).expect("scratch is writable");
    std::fs::write(scratch.file("secret"), vec![0x5e; 65536]).expect("scratch is writable");
    std::os::unix::fs::symlink("../secret", inner.join("link")).expect("scratch is writable");
    let absolute = scratch.file("secret");
    let mut images = Vec::new();
    for (number, name) in [
        "../secret",
        absolute.to_str().expect("UTF-8"),
        "link",
        "json:{\"driver\":\"file\",\"filename\":\"../secret\"}",
    ]
    .iter()
    .enumerate()
    {
        let image = format!("backing-{number}.qcow2");
        qemu.img(&inner, ["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", "raw", &image, "64k"]).ok();
        images.push(image);
    }
    qemu.create(&inner, "data.qcow2", "qcow2", "data_file=data.bin", 65536);
    // The same length as data.bin, and outside.
    let image = Patch::open(&inner.join("data.qcow2"));
    let head = image.bytes(0, 4096);
    let at = head.windows(8).position(|w| w == b"data.bin").expect("its name is there");
    std::fs::write(scratch.file("secre"), vec![0x5e; 65536]).expect("scratch is writable");
    image.set(at as u64, b"../secre");
    images.push("data.qcow2".to_owned());
    for image in &images {
        let out = zebu(&inner, ["convert", "-f", "qcow2", "-O", "raw", image, "out.raw"]);
        assert_eq!(out.code, Some(1), "{image}: {out}");
        assert!(out.stderr.contains("--allow-refs"), "{image}: the option is not named: {out}");
        assert!(!inner.join("out.raw").exists(), "{image}: {out}");
        let info = zebu(&inner, ["info", "-f", "qcow2", image]);
        assert_eq!(info.code, Some(0), "{image}: looking is no harm: {info}");
    }
    if find("strace").is_some() {
        for image in &images {
            let trace = opened(&inner, &["info", "-f", "qcow2", image]);
            assert!(!trace.contains("secre"), "info opened what {image} names:\n{trace}");
        }
    }
    let words = ["convert", "--allow-refs", "all", "-f", "qcow2", "-O", "raw", &images[0], "out.raw"];
    zebu(&inner, words).ok();
    assert_eq!(std::fs::read(inner.join("out.raw")).expect("made"), vec![0x5e; 65536]);
}

/// The successful open calls of a zebu command on files that no library or kernel interface accounts for.
fn opened(dir: &Path, words: &[&str]) -> String {
    let mut command = std::process::Command::new("strace");
    command.args(["-f", "-qq", "-e", "trace=open,openat,openat2", "-o", "trace.txt"]);
    command.arg(zebu_program()).args(replacing(words)).args(["--aio", "threads"]).current_dir(dir);
    let mut out = finish(command);
    if out.code != Some(0) {
        // info has no such option, perhaps; what it opens is the point.
        let mut command = std::process::Command::new("strace");
        command.args(["-f", "-qq", "-e", "trace=open,openat,openat2", "-o", "trace.txt"]);
        command.arg(zebu_program()).args(replacing(words)).current_dir(dir);
        out = finish(command);
    }
    assert_eq!(out.code, Some(0), "{out}");
    let trace = std::fs::read_to_string(dir.join("trace.txt")).expect("strace wrote it");
    trace.lines().filter(|l| !l.contains("= -1")).collect::<Vec<_>>().join("\n")
}

// A library computed refcounts of 2 and 4 bits wrongly.
#[test]
fn narrow_refcounts_do_not_alias() {
    let Some(qemu) = Qemu::find() else { return };
    for bits in [1, 2, 4, 8, 32] {
        let scratch = image(&qemu, &format!("refcount_bits={bits},cluster_size=4k"));
        if bits > 1 {
            qemu.img(scratch.path(), ["snapshot", "-c", "kept", IMAGE]).ok();
        }
        io(
            scratch.path(),
            &["write -P 0x22 1M 4k", "write -P 0x23 1064k 12k", "discard 2M 40k", "write -P 0x24 6M 1M"],
        )
        .ok();
        qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{bits} bits: {e}"));
    }
}

// A library's discard never gave space back: it combined flags that the kernel refuses.
#[test]
fn a_discard_gives_space_back() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("peers");
    qemu.create(scratch.path(), IMAGE, "qcow2", "", 64 * MIB);
    qemu.io(scratch.path(), "-f qcow2", IMAGE, &["write -P 0x11 0 48M", "flush"]).ok();
    let bytes = || std::fs::metadata(scratch.file(IMAGE)).expect("there").blocks() * 512;
    let before = bytes();
    io(scratch.path(), &["discard 8M 32M"]).ok();
    assert!(bytes() + 31 * MIB < before, "{before} bytes before, {} after", bytes());
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
    qemu.io(
        scratch.path(),
        "-f qcow2",
        IMAGE,
        &["read -P 0x11 0 8M", "read -P 0 8M 32M", "read -P 0x11 40M 8M"],
    )
    .ok();
}

// A VMM moved its refcount blocks at every flush and left a cluster behind each time: twice the space, a clean check.
#[test]
fn flushing_does_not_grow_the_file() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "cluster_size=4k");
    let commands: Vec<String> = (0..400)
        .flat_map(|i| [format!("write -P {} {}k 4k", i % 250 + 1, 1024 + i % 512 * 4), "flush".into()])
        .collect();
    let before = std::fs::metadata(scratch.file(IMAGE)).expect("there").len();
    io(scratch.path(), &commands.iter().map(String::as_str).collect::<Vec<_>>()).ok();
    let after = std::fs::metadata(scratch.file(IMAGE)).expect("there").len();
    assert!(after <= before + 64 * 1024, "writes in place made {before} bytes into {after}");
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
}

// A VMM's refcount table can't grow: an image ends at a fixed horizon, with ENOSPC.
#[test]
fn the_refcount_table_grows() {
    let Some(qemu) = Qemu::find() else { return };
    // One cluster of the table covers 64 x 64 x 512 bytes = 2 MiB.
    let scratch = Scratch::new("peers");
    qemu.create(scratch.path(), IMAGE, "qcow2", "cluster_size=512,refcount_bits=64", 24 * MIB);
    let clusters = patch(&scratch).u32(header::REFCOUNT_TABLE_CLUSTERS);
    io(scratch.path(), &["write -P 0x31 0 10M", "flush", "write -P 0x32 10M 14M"]).ok();
    assert!(patch(&scratch).u32(header::REFCOUNT_TABLE_CLUSTERS) > clusters, "the table did not grow");
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
    qemu.io(scratch.path(), "-f qcow2", IMAGE, &["read -P 0x31 0 10M", "read -P 0x32 10M 14M"]).ok();
}

// A whole-disk tool of old read what had not reached the disk yet as holes.
#[test]
fn a_source_that_was_just_written_is_copied_whole() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("peers");
    let mut bytes = vec![0; 32 * MIB as usize];
    zebu_tests::random::Random::new(5).fill(&mut bytes[MIB as usize..20 * MIB as usize]);
    std::fs::write(scratch.file("source.raw"), &bytes).expect("scratch is writable");
    zebu(scratch.path(), ["convert", "-f", "raw", "-O", "qcow2", "source.raw", IMAGE]).ok();
    assert_eq!(difference(0, &bytes, &qemu.read_all(scratch.path(), IMAGE, None)), None);
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
}
