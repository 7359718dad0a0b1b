//! Images that were made on other machines: with parents whose names lead nowhere here, with names in other encodings, in hundreds
//! of files, and with extents that VirtualBox has rounded.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use zebu_tests::filled_disk::{Fill, disk};
use zebu_tests::hostile::foreign_samples::vmware::descriptor;
use zebu_tests::hostile::foreign_samples::{self, hyper_v, put};
use zebu_tests::model::difference;
use zebu_tests::program::{finish, zebu, zebu_program};
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

fn write(dir: &Path, name: impl AsRef<OsStr>, bytes: impl AsRef<[u8]>) {
    std::fs::write(dir.join(name.as_ref()), bytes).expect("scratch is writable");
}

/// Converts an image, which must hold the disk.
#[track_caller]
fn reads_as(dir: &Path, words: &[&str], expected: &[u8]) {
    let line = ["convert", "-O", "raw"].iter().chain(words).chain(&["out"]);
    let out = zebu(dir, line.copied()).ok();
    let found = std::fs::read(dir.join("out")).expect("just made");
    if let Some(text) = difference(0, expected, &found) {
        panic!("{out}: {text}");
    }
    std::fs::remove_file(dir.join("out")).expect("just made");
}

#[track_caller]
fn is_refused(dir: &Path, words: &[&str], word: &str) {
    let line = ["convert", "-O", "raw"].iter().chain(words).chain(&["out"]);
    let out = zebu(dir, line.copied()).exits(1);
    assert!(out.stderr.contains(word) && !dir.join("out").exists(), "{word}: {out}");
}

/// An image that names its parent as another machine did, the parent, and the disk.
struct Family {
    format: &'static str,
    child: Vec<(&'static str, Vec<u8>)>,
    parent: (&'static str, Vec<u8>),
    disk: Vec<u8>,
    base: Vec<u8>,
}

/// A child over its parent: sectors that the child has not are the parent's.
fn over(child: &[u8], parent: &[u8]) -> Vec<u8> {
    let mut disk = child.to_vec();
    for (sector, below) in disk.chunks_mut(512).zip(parent.chunks(512)) {
        if sector.iter().all(|byte| *byte == 0) {
            sector[..below.len()].copy_from_slice(below);
        }
    }
    disk
}

fn made(dir: &Path, base: &[u8], options: &[&str]) -> Vec<u8> {
    write(dir, "source", base);
    let words = ["convert", "-f", "raw"].iter().chain(options).chain(&["source", "made"]);
    zebu(dir, words.copied()).ok();
    std::fs::read(dir.join("made")).expect("just made")
}

fn vhd(dir: &Path) -> Family {
    let base = disk(3 * 4096, Fill::All, &mut Random::new(81));
    let mut parent = made(dir, &base, &["-O", "vpc", "-o", "force_size=on"]);
    let end = parent.len() - 512;
    for at in [0, end] {
        parent[at + 68..at + 84].fill(0xcd);
        hyper_v::set_vhd_sum(&mut parent[at..at + 512], 64);
    }
    let mut child = foreign_samples::vhd_differencing();
    let name: Vec<u8> = "C:\\vm\\parent.vhd".encode_utf16().flat_map(u16::to_le_bytes).collect();
    put(child.image(), 20480, &name);
    let disk = over(&child.disk, &base);
    let child = vec![("child.vhd", child.files.remove(0).1)];
    Family { format: "vpc", child, parent: ("parent.vhd", parent), disk, base }
}

fn vhdx(dir: &Path) -> Family {
    let base = disk(3 << 20, Fill::All, &mut Random::new(82));
    let mut parent = made(dir, &base, &["-O", "vhdx", "-o", "block_size=1M"]);
    for at in [64 << 10, 128 << 10] {
        put(&mut parent, at + 32, &[4, 3, 2, 1, 6, 5, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16]);
        hyper_v::set_vhdx_sum(&mut parent, at, 4096);
    }
    let mut child = foreign_samples::vhdx_differencing();
    // Its third block is zero, whatever the parent has there.
    let mut disk = over(&child.disk, &base);
    disk[2 << 20..].fill(0);
    let child = vec![("child.avhdx", child.files.remove(0).1)];
    Family { format: "vhdx", child, parent: ("base.vhdx", parent), disk, base }
}

/// A snapshot of ESX over a disk of ESX.
fn vmdk(dir: &Path) -> Family {
    let base = disk(20 * 512, Fill::All, &mut Random::new(83));
    write(dir, "vm-flat.vmdk", &base);
    let parent = descriptor("vmfs", "", "RW 20 VMFS \"vm-flat.vmdk\"");
    let mut child = foreign_samples::cowd();
    let hint = "parentFileNameHint=\"/vmfs/volumes/5f0c-1/vm/vm.vmdk\"";
    let text = descriptor("vmfsSparse", hint, "RW 20 VMFSSPARSE \"vm-000001-delta.vmdk\"");
    let text = String::from_utf8(text).unwrap().replace("parentCID=ffffffff", "parentCID=12345678");
    let disk = over(&child.disk, &base);
    let child =
        vec![("vm-000001.vmdk", text.into_bytes()), ("vm-000001-delta.vmdk", child.files.remove(1).1)];
    Family { format: "vmdk", child, parent: ("vm.vmdk", parent), disk, base }
}

#[test]
fn a_parent_is_found_beside_the_image_or_named() {
    for family in [vhd, vhdx, vmdk] {
        let scratch = Scratch::new("elsewhere");
        let dir = scratch.path();
        let Family { format, child, parent, disk, base } = family(dir);
        for (name, bytes) in &child {
            write(dir, name, bytes);
        }
        let (image, name) = (child[0].0, parent.0);
        let named = |driver: &str, file: &str| {
            format!(
                "driver={format},file.filename={image},backing.driver={driver},backing.file.filename={file}"
            )
        };
        is_refused(dir, &[image], "may not be opened");
        is_refused(dir, &[image], "no file of that name beside the image");
        write(dir, name, &parent.1);
        reads_as(dir, &[image], &disk);
        reads_as(dir, &["--image-opts", &named(format, name)], &disk);
        let info = zebu(dir, ["info", "--backing-chain", image]).ok();
        assert!(info.stdout.contains(&format!("image: ./{name}")), "{info}");
        assert!(info.stdout.contains(&format!("(actual path: ./{name})")), "{info}");
        // Under the same rule as every file that an image names.
        is_refused(dir, &["--allow-refs", "none", image], "may not be opened");
        let overlay = zebu(dir, ["create", "-f", "qcow2", "-b", image, "-F", format, "top"]).ok();
        assert!(overlay.stderr.is_empty(), "{overlay}");
        reads_as(dir, &["top"], &disk);
        // In other hands it has another name.
        std::fs::rename(dir.join(name), dir.join("other")).unwrap();
        is_refused(dir, &[image], "no file of that name beside the image");
        reads_as(dir, &["--image-opts", &named(format, "other")], &disk);
        write(dir, "raw", &base);
        reads_as(dir, &["--image-opts", &named("raw", "raw")], &disk);
        // Another image of the same name is not the parent.
        let made_so = made(dir, &base, &["-O", format]);
        write(dir, name, made_so);
        let not_it = "is not the image that this one was made for";
        is_refused(dir, &[image], not_it);
        is_refused(dir, &["--image-opts", &named(format, name)], not_it);
        // One that has no parent takes none.
        let alone =
            format!("driver={format},file.filename=other,backing.driver=raw,backing.file.filename=raw");
        is_refused(dir, &["--image-opts", &alone], "it takes no backing file");
    }
}

/// Opens what is beside the image under the rule of every name, and ends a loop of parents.
#[test]
fn parents_beside_the_image_reach_nothing_that_names_may_not() {
    let scratch = Scratch::new("elsewhere");
    let dir = scratch.path();
    let lines = |name: &str, id: &str, parent: &str, hint: &str| {
        let hint = format!("parentFileNameHint=\"{hint}\"");
        write(dir, format!("{name}-delta"), foreign_samples::cowd().files.remove(1).1);
        let text = descriptor("vmfsSparse", &hint, &format!("RW 20 VMFSSPARSE \"{name}-delta\""));
        let text =
            String::from_utf8(text).unwrap().replace("parentCID=ffffffff", &format!("parentCID={parent}"));
        assert!(text.contains("\nCID=12345678\n"));
        write(dir, name, text.replace("\nCID=12345678\n", &format!("\nCID={id}\n")));
    };
    for (a, b, a_to, b_to) in [
        ("00000001", "00000002", "/vmfs/volumes/x/b.vmdk", "C:\\x\\a.vmdk"),
        ("00000001", "00000002", "b.vmdk", "/vmfs/volumes/x/a.vmdk"),
    ] {
        lines("a.vmdk", a, b, a_to);
        lines("b.vmdk", b, a, b_to);
        is_refused(dir, &["a.vmdk"], "infinite loop");
    }
    lines("self.vmdk", "00000001", "00000001", "/vmfs/volumes/x/self.vmdk");
    is_refused(dir, &["self.vmdk"], "infinite loop");
    // The name beside the image is a link that leads out.
    let inner = dir.join("inner");
    std::fs::create_dir(&inner).expect("scratch is writable");
    let base = disk(20 * 512, Fill::All, &mut Random::new(87));
    write(&inner, "parent-flat.vmdk", &base);
    write(&inner, "parent.vmdk", descriptor("vmfs", "", "RW 20 VMFS \"parent-flat.vmdk\""));
    lines("child.vmdk", "00000001", "12345678", "/vmfs/volumes/x/parent.vmdk");
    for name in ["child.vmdk", "child.vmdk-delta"] {
        std::fs::rename(dir.join(name), inner.join(name)).expect("just made");
    }
    let expected = over(&foreign_samples::cowd().disk, &base);
    reads_as(dir, &["inner/child.vmdk"], &expected);
    std::fs::rename(inner.join("parent.vmdk"), dir.join("parent.vmdk")).expect("just made");
    std::os::unix::fs::symlink("../parent.vmdk", inner.join("parent.vmdk")).expect("scratch is writable");
    is_refused(dir, &["inner/child.vmdk"], "may not be opened");
    for hint in ["/vmfs/..", "/vmfs/.", "C:\\", "/"] {
        lines("odd.vmdk", "00000001", "12345678", hint);
        is_refused(dir, &["odd.vmdk"], "odd.vmdk");
    }
}

/// A VDI tells of its parent what it is, not where.
#[test]
fn the_parent_of_a_vdi_is_named_by_the_user() {
    let scratch = Scratch::new("elsewhere");
    let dir = scratch.path();
    let mut sample = foreign_samples::vdi();
    let base = disk(sample.disk.len(), Fill::All, &mut Random::new(86));
    let parent = made(dir, &base, &["-O", "vdi"]);
    write(dir, "parent.vdi", &parent);
    let child = sample.image();
    put(child, 0x4c, &4u32.to_le_bytes());
    put(child, 0x1a8, &parent[0x188..0x1a8]);
    write(dir, "child.vdi", &child);
    // Two blocks are its own, one was discarded.
    let mut expected = base.clone();
    expected[..3 << 20].copy_from_slice(&sample.disk[..3 << 20]);
    let named = |file: &str| {
        format!("driver=vdi,file.filename=child.vdi,backing.driver=vdi,backing.file.filename={file}")
    };
    is_refused(dir, &["child.vdi"], "does not name its parent: name it yourself (--image-opts)");
    reads_as(dir, &["--image-opts", &named("parent.vdi")], &expected);
    let other = made(dir, &base, &["-O", "vdi"]);
    write(dir, "other.vdi", other);
    is_refused(dir, &["--image-opts", &named("other.vdi")], "is not the image that this one was made for");
    zebu(dir, ["info", "child.vdi"]).ok();
    let info = zebu(dir, ["info", "--backing-chain", "--image-opts", &named("parent.vdi")]).ok();
    assert!(info.stdout.contains("image: parent.vdi"), "{info}");
}

/// Parallels calls a directory a disk.
#[test]
fn a_parallels_directory_is_the_disk_in_it() {
    let scratch = Scratch::new("elsewhere");
    let dir = scratch.path();
    let mut sample = foreign_samples::parallels();
    std::fs::create_dir(dir.join("vm.hdd")).expect("scratch is writable");
    write(dir, "vm.hdd/vm.hdd", "");
    write(dir, "vm.hdd/disk.hds", sample.image());
    write(dir, "vm.hdd/plain.hds", &sample.disk);
    write(dir, "secret", &sample.disk);
    let image = |kind: &str, file: &str| {
        format!("<Image><GUID>{{5fbaabe3}}</GUID><Type>{kind}</Type><File>{file}</File></Image>")
    };
    let describe = |images: String| {
        let text = format!(
            "<?xml version='1.0'?>\n<Parallels_disk_image Version=\"1.0\"><StorageData><Storage>{images}</Storage>\
             </StorageData></Parallels_disk_image>"
        );
        write(dir, "vm.hdd/DiskDescriptor.xml", text);
    };
    for (kind, file, format) in [("Compressed", "disk.hds", "parallels"), ("Plain", "plain.hds", "raw")] {
        describe(image(kind, file));
        for name in ["vm.hdd", "vm.hdd/"] {
            reads_as(dir, &[name], &sample.disk);
            let info = zebu(dir, ["info", "--output", "json", name]).ok();
            assert!(info.stdout.contains(&format!("\"format\": \"{format}\"")), "{info}");
        }
    }
    let out = zebu(dir, ["convert", "-O", "raw", "vm.hdd", "vm.hdd/plain.hds"]).exits(1);
    assert!(std::fs::read(dir.join("vm.hdd/plain.hds")).expect("ours") == sample.disk, "{out}");
    for outside in [dir.join("secret").to_str().expect("text"), "nbd://localhost/x", "json:{}", ""] {
        describe(image("Plain", outside));
        is_refused(dir, &["vm.hdd"], "vm.hdd");
    }
    describe(image("Plain", "../secret"));
    is_refused(dir, &["vm.hdd"], "may not be opened");
    describe(image("Compressed", "disk.hds").repeat(2));
    is_refused(dir, &["vm.hdd"], "has snapshots");
    // One of its images is a part, unless the user says what it is.
    is_refused(dir, &["vm.hdd/disk.hds"], "with snapshots");
    reads_as(dir, &["-f", "parallels", "vm.hdd/disk.hds"], &sample.disk);
    reads_as(dir, &["-f", "raw", "vm.hdd/plain.hds"], &sample.disk);
    for (kind, file) in [("Compressed", "disk.hds"), ("Plain", "plain.hds")] {
        for (sectors, is_wrong) in [(0, false), (1, true), (u64::MAX >> 9, true)] {
            let sectors = if is_wrong { sectors } else { sample.disk.len() as u64 / 512 };
            let told = format!("<Disk_Parameters><Disk_size>{sectors}</Disk_size></Disk_Parameters>");
            describe(image(kind, file) + &told);
            if is_wrong {
                is_refused(dir, &["vm.hdd"], "a part may be missing");
            } else {
                reads_as(dir, &["vm.hdd"], &sample.disk);
            }
        }
    }
    describe(image("Compressed", "disk.hds") + &" ".repeat(1 << 20));
    is_refused(dir, &["vm.hdd"], "more than 1048576 bytes");
    describe(String::new());
    is_refused(dir, &["vm.hdd"], "names no file");
    std::fs::remove_file(dir.join("vm.hdd/DiskDescriptor.xml")).expect("just made");
    is_refused(dir, &["vm.hdd"], "vm.hdd");
}

/// VMware on Windows writes names in the code page of the system.
#[test]
fn names_in_other_encodings_are_read() {
    let scratch = Scratch::new("elsewhere");
    let dir = scratch.path();
    let expected = disk(64 << 10, Fill::All, &mut Random::new(84));
    let whole = made(dir, &expected, &["-O", "vmdk"]);
    for (encoding, bytes, name) in [
        ("GBK", &b"\xd0\xe9\xc4\xe2\xbb\xfa"[..], "虚拟机"),
        ("Shift_JIS", b"\x89\xbc\x91\x7a", "仮想"),
        ("Big5", b"\xb5\xea\xc0\xc0", "虛擬"),
        ("windows-1251", b"\xc4\xe8\xf1\xea", "Диск"),
        ("windows-1252", b"M\xfcller", "Müller"),
        ("UTF-8", "Müller".as_bytes(), "Müller"),
    ] {
        write(dir, name, &expected);
        let extent = [b"RW 128 FLAT \"", bytes, b"\" 0"].concat();
        let text = descriptor("monolithicFlat", &format!("encoding=\"{encoding}\""), "EXTENT");
        let at = text.windows(6).position(|word| word == b"EXTENT").unwrap();
        write(dir, "image.vmdk", [&text[..at], &extent, &text[at + 6..]].concat());
        reads_as(dir, &["image.vmdk"], &expected);
        let info = zebu(dir, ["info", "--output", "json", "image.vmdk"]).ok();
        assert!(info.stdout.contains(name), "{info}");
        std::fs::remove_file(dir.join(name)).unwrap();
    }
    // Of an image in one file the name does not count, whatever it is.
    for encoding in ["GBK", "klingon"] {
        let mut image = whole.clone();
        let text = [
            b"# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicSparse\"\nencoding=\"",
            encoding.as_bytes(),
            b"\"\nRW 128 SPARSE \"\xd0\xe9\xc4\xff.vmdk\"\n\0",
        ]
        .concat();
        put(&mut image, 512, &text);
        write(dir, "mono.vmdk", image);
        reads_as(dir, &["mono.vmdk"], &expected);
    }
    let text = descriptor("monolithicFlat", "encoding=\"klingon\"", "RW 128 FLAT \"M?ller\" 0");
    let text: Vec<u8> = text.into_iter().map(|byte| if byte == b'?' { 0xfc } else { byte }).collect();
    write(dir, "image.vmdk", text);
    write(dir, OsStr::from_bytes(b"M\xfcller"), &expected);
    is_refused(dir, &["image.vmdk"], "encoded in 'klingon'");
}

/// Each of them takes two descriptors.
#[test]
fn an_image_may_have_more_files_than_the_soft_limit_of_descriptors() {
    let scratch = Scratch::new("elsewhere");
    let dir = scratch.path();
    let mut lines = String::new();
    let mut expected = Vec::new();
    for number in 0..60 {
        let part = disk(4096, Fill::All, &mut Random::new(number));
        write(dir, format!("f{number:03}"), &part);
        expected.extend(part);
        lines += &format!("RW 8 FLAT \"f{number:03}\" 0\n");
    }
    write(dir, "image.vmdk", descriptor("twoGbMaxExtentFlat", "", &lines));
    let mut command = Command::new("prlimit");
    command.args(["--nofile=64:4096", "--"]).arg(zebu_program()).current_dir(dir);
    command.args(["convert", "-O", "raw", "image.vmdk", "out"]);
    finish(command).ok();
    assert!(std::fs::read(dir.join("out")).expect("just made") == expected);
}

/// The header of a sparse extent counts whole grains, the descriptor sectors. What lies behind it begins where the latter says.
#[test]
fn the_length_of_an_extent_is_that_of_the_descriptor() {
    let scratch = Scratch::new("elsewhere");
    let dir = scratch.path();
    let mut sample = foreign_samples::sparse();
    let second = disk(4096, Fill::All, &mut Random::new(85));
    write(dir, "second", &second);
    let lines = "RW 33 SPARSE \"first\"\nRW 8 FLAT \"second\" 0";
    write(dir, "image.vmdk", descriptor("twoGbMaxExtentSparse", "", lines));
    let expected = [&sample.disk[..], &second].concat();
    for (sectors, fits) in [(33u64, true), (40, true), (32, false), (34, false), (41, false), (48, false)] {
        put(sample.image(), 12, &sectors.to_le_bytes());
        write(dir, "first", sample.image());
        if fits {
            reads_as(dir, &["image.vmdk"], &expected);
        } else {
            is_refused(dir, &["image.vmdk"], "by its own header");
        }
    }
}
