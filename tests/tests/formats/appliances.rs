//! Tar files as others pack their disks: with holes, in chunks, in directories, in other encodings, and with manifests.

use sha2::{Digest, Sha256};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use zebu_tests::filled_disk::{Fill, disk, write_sparse};
use zebu_tests::model::difference;
use zebu_tests::program::zebu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::usage::run_measured;

const MIB: usize = 1 << 20;

const OVF: &str = "<Envelope><References><File ovf:id=\"f\" ovf:href=\"HREF\"/></References>
    <DiskSection><Disk ovf:diskId=\"d\" ovf:fileRef=\"f\"/></DiskSection></Envelope>";

fn write(dir: &Path, name: impl AsRef<OsStr>, bytes: impl AsRef<[u8]>) {
    std::fs::write(dir.join(name.as_ref()), bytes).expect("scratch is writable");
}

/// Runs `tar`; the words are split at spaces.
fn tar(dir: &Path, options: &str, members: &[impl AsRef<OsStr>]) {
    let mut command = Command::new("tar");
    command.args(options.split(' ')).args(members).current_dir(dir).stdin(Stdio::null());
    assert!(command.status().expect("tar is there").success(), "{options}");
}

#[track_caller]
fn reads_as(dir: &Path, words: &[&str], expected: &[u8]) {
    for format in ["raw", "qcow2"] {
        let options = ["convert", "-O", format];
        let line = options.iter().chain(words).chain(&["out"]);
        let out = zebu(dir, line.copied()).ok();
        zebu(dir, ["convert", "-f", format, "-O", "raw", "out", "found"]).ok();
        let found = std::fs::read(dir.join("found")).expect("just made");
        if let Some(text) = difference(0, expected, &found) {
            panic!("{out}: {text}");
        }
        std::fs::remove_file(dir.join("out")).expect("just made");
    }
}

#[track_caller]
fn is_refused(dir: &Path, words: &[&str], word: &str) {
    let line = ["convert", "-O", "raw"].iter().chain(words).chain(&["new"]);
    let out = zebu(dir, line.copied()).exits(1);
    assert!(out.stderr.contains(word) && !dir.join("new").exists(), "{word}: {out}");
}

/// Images of Google's cloud, and boxes of Vagrant.
#[test]
fn sparse_members_are_read_in_place() {
    let scratch = Scratch::new("appliances");
    let dir = scratch.path();
    let expected = disk(40 * MIB, Fill::Some, &mut Random::new(91));
    write_sparse(&dir.join("disk.raw"), &expected);
    write_sparse(&dir.join("box.img"), &expected);
    write(dir, "metadata.json", "{}");
    for (options, source) in [
        ("--format=oldgnu -Sczf gce.tar.gz", "gce.tar.gz"),
        ("--format=gnu -Scf gnu.tar", "gnu.tar"),
        ("--format=posix -Scf pax.tar", "pax.tar"),
        ("--format=posix --sparse-version=0.1 -ScJf pax.tar.xz", "pax.tar.xz"),
    ] {
        tar(dir, options, &["disk.raw"]);
        reads_as(dir, &[source], &expected);
    }
    tar(dir, "-cSzf my.box", &["metadata.json", "box.img"]);
    reads_as(dir, &["my.box"], &expected);
    tar(dir, "-cSf two.tar", &["disk.raw", "box.img"]);
    is_refused(dir, &["two.tar"], "--member");
    reads_as(dir, &["--member", "box.img", "two.tar"], &expected);
    // An image of a format in a sparse member.
    zebu(dir, ["convert", "-O", "vdi", "disk.raw", "disk.vdi"]).ok();
    tar(dir, "-cSf vdi.tar", &["disk.vdi"]);
    reads_as(dir, &["vdi.tar"], &expected);
}

/// Maps and names that would cost more than the file has, and packings that can't be taken away in place.
#[test]
fn sparse_members_that_lie_are_refused() {
    let scratch = Scratch::new("appliances");
    let dir = scratch.path();
    let raw = std::fs::File::create(dir.join("disk.raw")).expect("scratch is writable");
    raw.set_len(40 << 20).expect("sparse files are allowed");
    raw.write_all_at(b"data", 20 << 20).expect("scratch is writable");
    tar(dir, "--format=posix -cSf good.tar", &["disk.raw"]);
    let good = std::fs::read(dir.join("good.tar")).expect("just made");
    let with = |old: &str, new: &str| {
        assert_eq!(old.len(), new.len());
        let mut bytes = good.clone();
        let at = bytes.windows(old.len()).position(|found| found == old.as_bytes()).expect("it is there");
        bytes[at..at + old.len()].copy_from_slice(new.as_bytes());
        write(dir, "bad.tar", bytes);
    };
    for (old, new, word) in [
        ("realsize=41943040", "realsize=00000512", "map of the sparse member"),
        ("realsize=41943040", "realsize=4194304x", "attributes of a sparse member"),
        ("\n20971520\n", "\n99999999\n", "map of the sparse member"),
        ("sparse.major=1", "sparse.major=0", "map of the sparse member"),
        ("sparse.minor=0", "sparse.minor=1", "unknown version"),
    ] {
        with(old, new);
        is_refused(dir, &["bad.tar"], word);
    }
    let long = "n".repeat(5000);
    let record = format!("5010 path={}\n", &long[..4999]);
    assert_eq!(record.len(), 5010);
    std::fs::write(dir.join("a"), "a disk").expect("scratch is writable");
    write(dir, "long.tar", pax_member(record.as_bytes(), &[7; 512]));
    is_refused(dir, &["long.tar"], "the name of the member");
    // A packed member with holes.
    let out = Command::new("gzip").args(["-c", "a"]).current_dir(dir).output().expect("gzip is there");
    let packed = std::fs::File::create(dir.join("a.gz")).expect("scratch is writable");
    packed.write_all_at(&out.stdout, 0).expect("scratch is writable");
    packed.set_len(4 << 20).expect("sparse files are allowed");
    tar(dir, "-cSf packed.tar", &["a.gz"]);
    is_refused(dir, &["packed.tar"], "within a sparse member");
}

/// A tar file with a member, and what an extended header says of it.
fn pax_member(said: &[u8], data: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    for (kind, bytes) in [(b'x', said), (b'0', data)] {
        let mut header = [0; 512];
        header[0] = b'm';
        header[124..136].copy_from_slice(format!("{:011o}\0", bytes.len()).as_bytes());
        header[156] = kind;
        header[148..156].fill(b' ');
        header[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        file.extend_from_slice(&header);
        file.extend_from_slice(bytes);
        file.resize(file.len().next_multiple_of(512), 0);
    }
    file.resize(file.len() + 1024, 0);
    file
}

/// A small file of a disk that is all hole has nobody work for long.
#[test]
fn holes_of_a_sparse_member_are_not_read() {
    let scratch = Scratch::new("appliances");
    let dir = scratch.path();
    let raw = std::fs::File::create(dir.join("disk.raw")).expect("scratch is writable");
    raw.set_len(1 << 40).expect("sparse files are allowed");
    raw.write_all_at(b"data", 900 << 30).expect("scratch is writable");
    tar(dir, "-cSf big.tar", &["disk.raw"]);
    assert!(std::fs::metadata(dir.join("big.tar")).expect("just made").len() < 1 << 20);
    let measured = Path::new(env!("CARGO_BIN_EXE_measured"));
    let words = ["convert", "-O", "qcow2", "big.tar", "out"];
    let (out, _) = run_measured(measured, Duration::from_secs(20), dir, &words);
    out.ok();
    let out = zebu(dir, ["io", "-r", "-f", "qcow2", "out", "-c", "read -v 900G 4"]).ok();
    assert!(out.stdout.contains("data"), "{out}");
}

/// Puts an appliance together of an OVF and files.
fn ova(dir: &Path, ovf: &str, members: &[&str]) {
    write(dir, "box.ovf", ovf);
    let members: Vec<&str> = ["box.ovf"].into_iter().chain(members.iter().copied()).collect();
    tar(dir, "--format=ustar -cf box.ova", &members);
}

#[test]
fn a_disk_in_chunks_is_put_together() {
    let scratch = Scratch::new("appliances");
    let dir = scratch.path();
    let expected = disk(3 * MIB + 512, Fill::All, &mut Random::new(92));
    write(dir, "raw", &expected);
    zebu(dir, ["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "raw", "disk.vmdk"]).ok();
    let image = std::fs::read(dir.join("disk.vmdk")).expect("just made");
    let chunk = image.len().div_ceil(3);
    let names: Vec<String> = (0..3).map(|number| format!("disk.vmdk.{number:09}")).collect();
    for (name, bytes) in names.iter().zip(image.chunks(chunk)) {
        write(dir, name, bytes);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let file = format!("HREF\" ovf:size=\"{}\" ovf:chunkSize=\"{chunk}", image.len());
    let ovf = OVF.replace("HREF", &file).replace("HREF", "disk.vmdk");
    ova(dir, &ovf, &names);
    reads_as(dir, &["box.ova"], &expected);
    reads_as(dir, &["--member", "disk.vmdk", "box.ova"], &expected);
    ova(dir, &ovf, &names[..2]);
    is_refused(dir, &["box.ova"], "one is missing or cut off");
    ova(dir, &ovf, &names[1..]);
    is_refused(dir, &["box.ova"], "not in the file");
    // Packed by gzip, and cut afterwards.
    let packed =
        Command::new("gzip").args(["-c", "disk.vmdk"]).current_dir(dir).output().expect("gzip is there");
    for (name, bytes) in names.iter().zip(packed.stdout.chunks(packed.stdout.len().div_ceil(3))) {
        write(dir, name, bytes);
    }
    ova(dir, &OVF.replace("HREF", "disk.vmdk"), &names);
    reads_as(dir, &["box.ova"], &expected);
}

#[test]
fn names_of_an_ovf_are_relative_to_it_and_may_be_encoded() {
    let scratch = Scratch::new("appliances");
    let dir = scratch.path();
    let expected = disk(MIB, Fill::All, &mut Random::new(93));
    std::fs::create_dir(dir.join("box")).expect("scratch is writable");
    write(dir, "box/my disk.raw", &expected);
    write(dir, "box/._box.ovf", "what macOS keeps");
    for href in ["my disk.raw", "my%20disk.raw", "./my disk.raw", "box/my disk.raw"] {
        write(dir, "box/box.ovf", OVF.replace("HREF", href));
        for members in [&["box"][..], &["./box/._box.ovf", "./box/box.ovf", "./box/my disk.raw"]] {
            tar(dir, "--format=ustar -cf box.ova", members);
            reads_as(dir, &["box.ova"], &expected);
        }
    }
    // An OVF in a code page of Windows, whose names are those of the members; and one in UTF-16.
    let name = OsString::from_vec(b"M\xfcller.raw".to_vec());
    write(dir, &name, &expected);
    let text = format!("<?xml version=\"1.0\" encoding=\"windows-1252\"?>{OVF}");
    let (start, end) = text.split_once("HREF").expect("it is there");
    write(dir, "box.ovf", [start.as_bytes(), name.as_bytes(), end.as_bytes()].concat());
    tar(dir, "--format=ustar -cf box.ova", &[OsStr::new("box.ovf"), &name]);
    reads_as(dir, &["box.ova"], &expected);
    write(dir, "Müller.raw", &expected);
    let text = format!("\u{feff}{}", OVF.replace("HREF", "Müller.raw"));
    write(dir, "box.ovf", text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>());
    tar(dir, "--format=ustar -cf box.ova", &["box.ovf", "Müller.raw"]);
    reads_as(dir, &["box.ova"], &expected);
    reads_as(dir, &["--member", "Müller.raw", "box.ova"], &expected);
}

/// An OVF names members of its file and nothing else.
#[test]
fn an_ovf_reaches_nothing_outside() {
    let scratch = Scratch::new("appliances");
    let dir = scratch.path();
    let expected = disk(MIB, Fill::All, &mut Random::new(95));
    std::fs::create_dir(dir.join("box")).expect("scratch is writable");
    write(dir, "secret.raw", &expected);
    write(dir, "box/disk.raw", &expected);
    let absolute = dir.join("secret.raw");
    let absolute = absolute.to_str().expect("text");
    let url = format!("file://{absolute}");
    for href in
        ["../secret.raw", "..%2fsecret.raw", "%2e%2e/secret.raw", absolute, &url, "", "secret.raw\u{1b}[2J"]
    {
        write(dir, "box/box.ovf", OVF.replace("HREF", href));
        tar(dir, "--format=ustar -cf box.ova", &["box/box.ovf", "box/disk.raw"]);
        is_refused(dir, &["box.ova"], "not in the file");
    }
    let out = zebu(dir, ["convert", "-O", "raw", "box.ova", "new"]).exits(1);
    assert!(!out.stderr.contains('\u{1b}'), "{out}");
    is_refused(dir, &["--member", "../secret.raw", "box.ova"], "has no member");
    // Not the file that a link in the tar file leads to.
    std::os::unix::fs::symlink("../secret.raw", dir.join("box/link.raw")).expect("scratch is writable");
    write(dir, "box/box.ovf", OVF.replace("HREF", "link.raw"));
    tar(dir, "--format=ustar -cf box.ova", &["box"]);
    is_refused(dir, &["box.ova"], "not in the file");
    // A member of such a name is one like all others, and read where it lies.
    write(dir, "box/box.ovf", OVF.replace("HREF", "../../other.raw"));
    tar(dir, "-P --transform=s,secret,../../other, -cf box.ova", &["box/box.ovf", "secret.raw"]);
    reads_as(dir, &["box.ova"], &expected);
    assert!(!dir.join("../../other.raw").exists());
}

#[test]
fn what_a_manifest_tells_of_is_checked() {
    let scratch = Scratch::new("appliances");
    let dir = scratch.path();
    let expected = disk(3 * MIB, Fill::All, &mut Random::new(94));
    write(dir, "disk.raw", &expected);
    write(dir, "notes", "a note");
    let ovf = OVF.replace("HREF", "disk.raw");
    let sum = |bytes: &[u8]| {
        let digits = Sha256::digest(bytes).into_iter().flat_map(|byte| [byte >> 4, byte & 15]);
        digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect::<String>()
    };
    let (of_ovf, of_disk, other) = (sum(ovf.as_bytes()), sum(&expected), sum(b"other"));
    let with = |manifest: String| {
        write(dir, "box.mf", manifest);
        ova(dir, &ovf, &["disk.raw", "notes", "box.mf"]);
    };
    // What is not read is not checked.
    with(format!("SHA256(box.ovf)= {of_ovf}\r\nSHA256(disk.raw)= {of_disk}\r\nSHA256(notes)= {other}\r\n"));
    reads_as(dir, &["box.ova"], &expected);
    for (ovf_sum, disk_sum, named) in [(&of_ovf, &other, "'disk.raw'"), (&other, &of_disk, "'box.ovf'")] {
        with(format!("SHA256(box.ovf)= {ovf_sum}\nSHA256(disk.raw)= {disk_sum}\n"));
        is_refused(dir, &["box.ova"], named);
        is_refused(dir, &["--member", "disk.raw", "box.ova"], "manifest");
    }
    let sums = |program: &str| {
        let out = Command::new(program).args(["--tag", "disk.raw"]).current_dir(dir).output();
        String::from_utf8(out.expect("coreutils are there").stdout).expect("text")
    };
    for program in ["sha1sum", "sha256sum", "sha512sum"] {
        with(sums(program));
        reads_as(dir, &["box.ova"], &expected);
    }
    for line in ["MD5(disk.raw)= 00", "no digest", "SHA256(disk.raw)= 00", "SHA1(disk.raw)="] {
        with(line.to_owned());
        is_refused(dir, &["box.ova"], "manifest");
    }
    // Who repeats lines would have the disk read again and again.
    with(format!("SHA256(disk.raw)= {of_disk}\nSHA256(./d%69sk.raw)= {of_disk}\n"));
    is_refused(dir, &["box.ova"], "twice");
    // A disk in chunks: a digest of each, or of all together.
    write(dir, "disk.raw.000000000", &expected[..MIB]);
    write(dir, "disk.raw.000000001", &expected[MIB..]);
    let (first, second) = (sum(&expected[..MIB]), sum(&expected[MIB..]));
    for (manifest, fits) in [
        (format!("SHA256(disk.raw.000000000)= {first}\nSHA256(disk.raw.000000001)= {second}\n"), true),
        (format!("SHA256(disk.raw)= {of_disk}\n"), true),
        (format!("SHA256(disk.raw.000000000)= {first}\nSHA256(disk.raw.000000001)= {first}\n"), false),
        (format!("SHA256(disk.raw)= {first}\n"), false),
    ] {
        write(dir, "box.mf", &manifest);
        ova(dir, &ovf, &["disk.raw.000000000", "disk.raw.000000001", "box.mf"]);
        if fits {
            reads_as(dir, &["box.ova"], &expected);
        } else {
            is_refused(dir, &["box.ova"], "does not match the manifest");
        }
    }
}
