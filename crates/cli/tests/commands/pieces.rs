//! Files that are no disks by themselves: parts of images, and what is often found where a disk is looked for.

use crate::common::{Scratch, words};
use std::os::unix::fs::symlink;

fn named(scratch: &Scratch) -> String {
    let link = scratch.file("qemu-img");
    if !link.exists() {
        symlink(env!("CARGO_BIN_EXE_zebu"), &link).unwrap();
    }
    link.to_str().unwrap().to_owned()
}

/// Every way of reading refuses it under both names, and no verdict calls it safe.
#[track_caller]
fn is_refused(scratch: &Scratch, file: &str, word: &str) {
    let as_qemu = named(scratch);
    for line in
        ["info FILE", "convert -O raw FILE out", "convert -O qcow2 FILE out", "map FILE", "compare FILE FILE"]
    {
        let line = line.replace("FILE", file);
        for program in [env!("CARGO_BIN_EXE_zebu"), &as_qemu] {
            let ran = scratch.run(program, &words(&line));
            assert!(
                ran.code.is_some_and(|code| code == 1 || line.starts_with("compare") && code == 2),
                "{line}: {ran:#?}"
            );
            assert!(ran.stderr.contains(word), "{line}: no {word}: {ran:#?}");
            assert!(!scratch.file("out").exists(), "{line}");
        }
    }
    let backup = scratch.zebu(&["backup", file, "out"]);
    backup.fails_naming(1, &[word]);
    let verdict = scratch.zebu(&["info", "--verdict", "--output", "json", file]);
    assert_eq!(verdict.code, Some(2), "{verdict:#?}");
    assert_eq!(verdict.json()["safe"], false, "{verdict:#?}");
    assert!(verdict.stdout.contains(word), "{verdict:#?}");
}

/// A monolithic sparse VMDK of a disk with data.
fn vmdk(scratch: &Scratch) -> Vec<u8> {
    scratch.write("disk", &vec![9; 256 << 10]);
    scratch.zebu(&words("convert -f raw -O vmdk disk whole.vmdk")).ok();
    scratch.read("whole.vmdk")
}

#[test]
fn parts_of_a_vmdk_are_no_disks() {
    let scratch = Scratch::new();
    let whole = vmdk(&scratch);
    let mut part = whole.clone();
    part[28..44].fill(0);
    scratch.write("disk-s002.vmdk", &part);
    is_refused(&scratch, "disk-s002.vmdk", "a part of a VMDK");

    let mut several = whole;
    let line = b"RW 512 SPARSE \"a-s001.vmdk\"\nRW 512 SPARSE \"a-s002.vmdk\"\n";
    let text =
        b"# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"twoGbMaxExtentSparse\"\n";
    let text = [&text[..], line, &[0; 512]].concat();
    several[512..512 + text.len()].copy_from_slice(&text);
    scratch.write("several.vmdk", &several);
    is_refused(&scratch, "several.vmdk", "a part of a VMDK");

    scratch.write("vm-000001-delta.vmdk", &[&b"COWD\x01\0\0\0\x03\0\0\0"[..], &[0; 4096]].concat());
    is_refused(&scratch, "vm-000001-delta.vmdk", "a part of a VMDK");
    let magic = b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02\0\0\0";
    scratch.write("vm-000001-sesparse.vmdk", &[&magic[..], &[0; 4096]].concat());
    is_refused(&scratch, "vm-000001-sesparse.vmdk", "a part of a VMDK");
    scratch.write("disk-f001.vmdk", &[7; 4096]);
    is_refused(&scratch, "disk-f001.vmdk", "a part of a split VMDK");
    // The data of a whole disk has no mark; with the format given, every file is a disk.
    scratch.write("disk-flat.vmdk", &[7; 4096]);
    for line in ["convert -O raw disk-flat.vmdk o1", "convert -f raw -O raw disk-f001.vmdk o2"] {
        scratch.zebu(&words(line)).ok();
    }
}

#[test]
fn other_peoples_containers_and_error_pages_are_named() {
    let scratch = Scratch::new();
    let disk = [5; 8192];
    let with = |magic: &[u8]| [magic, &disk].concat();
    for (name, bytes, word) in [
        ("evidence.E01", with(b"EVF\x09\x0d\x0a\xff\0\x01\x01\0\0\0"), "forensic"),
        ("vzdump.vma", with(b"VMA\0\0\0\0\x01"), "Proxmox"),
        ("secret.dmg", with(b"encrcdsa\0\0\0\x02"), "encrypted disk image of macOS"),
        ("old.dmg", [&disk[..], b"cdsaencr"].concat(), "encrypted disk image of macOS"),
        ("system.img", with(b"\x3a\xff\x26\xed\x01\0\0\0\x1c\0\x0c\0"), "Android"),
        ("page.qcow2", b"<!DOCTYPE html>\n<html><title>404 Not Found</title></html>\n".to_vec(), "web page"),
        ("denied.img", b"<?xml version=\"1.0\"?>\n<Error><Code>AccessDenied</Code></Error>".to_vec(), "XML"),
        ("denied.raw", b"{\"errors\":[{\"code\":\"UNAUTHORIZED\"}]}\n".to_vec(), "JSON"),
        (
            "DiskDescriptor.xml",
            b"<?xml version='1.0' encoding='UTF-8'?>\n<Parallels_disk_image Version=\"1.0\">\n".to_vec(),
            "Parallels",
        ),
        ("disk.hdd", Vec::new(), "Parallels"),
    ] {
        scratch.write(name, &bytes);
        is_refused(&scratch, name, word);
        scratch.zebu(&["convert", "-f", "raw", "-O", "raw", name, "forced"]).ok();
        std::fs::remove_file(scratch.file("forced")).unwrap();
    }
    // A guest's disk that begins so is taken for nothing else by any tool.
    scratch.zebu(&words("convert -f raw -O qcow2 page.qcow2 disk.qcow2")).ok();
    scratch.zebu(&words("info --verdict -f qcow2 disk.qcow2")).ok();
}

/// The bytes of a sector as a VHDX tells a guest.
fn sector(scratch: &Scratch, name: &str) -> u32 {
    const SECTOR_ID: [u8; 4] = [0x1d, 0xbf, 0x41, 0x81];
    let bytes = scratch.read(name);
    let metadata = bytes.windows(8).position(|part| part == b"metadata").unwrap();
    let entry = bytes[metadata..].windows(4).position(|part| part == SECTOR_ID).unwrap() + metadata;
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    number(metadata + number(entry + 16) as usize)
}

#[test]
fn the_sectors_of_a_vhdx_are_kept_and_told() {
    let scratch = Scratch::new();
    let as_qemu = named(&scratch);
    scratch.write("disk", &vec![8; 2 << 20]);
    scratch.zebu(&words("create -q -f vhdx -o logical_sector_size=4096,block_size=1M empty.vhdx 2M")).ok();
    assert_eq!(sector(&scratch, "empty.vhdx"), 4096);
    scratch.zebu(&words("convert -f raw -O vhdx -o logical_sector_size=4096,block_size=1M disk a.vhdx")).ok();
    for (line, expected) in [
        ("convert -O vhdx a.vhdx b.vhdx", 4096),
        ("convert -O vhdx -o subformat=fixed a.vhdx b.vhdx", 4096),
        ("dd -O vhdx if=a.vhdx of=b.vhdx", 4096),
        ("convert -O vhdx -o logical_sector_size=512 a.vhdx b.vhdx", 512),
        ("convert -f raw -O vhdx disk b.vhdx", 512),
    ] {
        for program in [env!("CARGO_BIN_EXE_zebu"), &as_qemu] {
            let ran = scratch.run(program, &words(line)).ok();
            assert_eq!(sector(&scratch, "b.vhdx"), expected, "{line}");
            let is_lost = line.contains("logical_sector_size=512");
            assert_eq!(ran.stderr.contains("logical sectors of 4096 bytes"), is_lost, "{ran:#?}");
            let same = scratch.zebu(&words("compare -f vhdx -F raw b.vhdx disk"));
            assert_eq!(same.code, Some(0), "{line}: {same:#?}");
            std::fs::remove_file(scratch.file("b.vhdx")).unwrap();
        }
    }
    for line in [
        "convert -O raw a.vhdx out",
        "convert -O qcow2 a.vhdx out",
        "convert -O vmdk a.vhdx out",
        "convert -O vdi a.vhdx out",
        "dd -O raw if=a.vhdx of=out",
        "backup a.vhdx out",
    ] {
        let ran = scratch.zebu(&words(line)).ok();
        assert!(
            ran.stderr.contains("logical sectors of 4096 bytes") && ran.stderr.contains("'out'"),
            "{ran:#?}"
        );
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
    // An overlay shows those of what it stands on, until it stands on something else.
    scratch.zebu(&words("create -q -f qcow2 -b a.vhdx -F vhdx top")).ok();
    scratch.zebu(&words("create -q -f qcow2 base 2M")).ok();
    for line in ["rebase -b a.vhdx -F vhdx top", "rebase -b base -F qcow2 top", "rebase -b base -F qcow2 top"]
    {
        let is_lost = scratch.zebu(&words("info --backing-chain top")).stdout.contains("4096")
            && line.contains("-b base");
        let ran = scratch.zebu(&words(line)).ok();
        assert_eq!(ran.stderr.contains("logical sectors of 4096 bytes"), is_lost, "{line}: {ran:#?}");
    }
    let info = scratch.zebu(&words("info a.vhdx")).ok();
    assert!(info.stdout.contains("logical sector size: 4096"), "{info:#?}");
    let info = scratch.zebu(&words("info --output json a.vhdx")).ok();
    assert_eq!(info.json()["logical-sector-size"], 4096);
    let info = scratch.zebu(&words("info --output json -f raw disk")).ok();
    assert!(info.json().get("logical-sector-size").is_none());
    for (line, word) in [
        ("create -f vhdx -o logical_sector_size=1024 x.vhdx 1M", "logical sector size 1024"),
        ("create -f vhdx -o logical_sector_size=4096 x.vhdx 1537k", "give a multiple"),
        ("create -f vhdx -o block_size=256M x.vhdx 0", "smaller block_size"),
    ] {
        scratch.zebu(&words(line)).fails_naming(1, &[word]);
        assert!(!scratch.file("x.vhdx").exists(), "{line}");
    }
    scratch.zebu(&words("create -q -f vhdx -o block_size=128M x.vhdx 0")).ok();
}

/// QEMU looks at the beginning of a file alone, so the owner of a raw disk can't choose its format.
#[test]
fn the_end_of_a_file_tells_nothing_under_the_names_of_qemu() {
    let scratch = Scratch::new();
    let as_qemu = named(&scratch);
    scratch.write("disk", &vec![6; 1 << 20]);
    scratch.zebu(&words("convert -f raw -O vpc -o subformat=fixed,force_size=on disk f.vhd")).ok();
    let length = scratch.read("f.vhd").len();
    scratch.run(&as_qemu, &words("convert -O raw f.vhd out")).ok();
    assert_eq!(scratch.read("out").len(), length);
    assert_eq!(scratch.run(&as_qemu, &words("info --output json f.vhd")).ok().json()["format"], "raw");
    scratch.run(&as_qemu, &words("convert -f vpc -O raw f.vhd out")).ok();
    assert_eq!(scratch.read("out").len(), length - 512);
    assert_eq!(scratch.zebu(&words("info --output json f.vhd")).ok().json()["format"], "vpc");
}

/// As unpacking leaves it.
#[test]
fn of_two_members_with_one_name_the_last_counts() {
    let scratch = Scratch::new();
    let ovf = "<Envelope><References><File id=\"f\" href=\"disk\"/></References>\
               <DiskSection><Disk fileRef=\"f\"/></DiskSection></Envelope>";
    scratch.write("box.ovf", ovf.as_bytes());
    for (how, names, byte) in [("-cf", &["box.ovf", "disk"][..], 1), ("-rf", &["./disk"][..], 2)] {
        scratch.write("disk", &[byte; 4096]);
        scratch.run("tar", &[&["--format=ustar", how, "box.ova"][..], names].concat()).ok();
    }
    for line in ["convert -O raw box.ova out", "convert --member disk -O raw box.ova out"] {
        scratch.zebu(&words(line)).ok();
        assert_eq!(scratch.read("out"), [2; 4096], "{line}");
    }
}

/// Places of an encrypted disk that were never written decrypt to noise.
#[test]
fn zeroes_are_written_to_encrypted_disks() {
    let scratch = Scratch::new();
    scratch.write("key", b"secret");
    let mut disk = vec![3; 4 << 20];
    disk[1 << 20..3 << 20].fill(0);
    scratch.write("disk", &disk);
    let secret = ["--object", "secret,id=s,file=key"];
    let make = |line: &str| scratch.zebu(&[&words(line)[..1], &secret, &words(line)[1..]].concat()).ok();
    make("create -q -f luks -o key-secret=s,iter-time=10 t.luks 4M");
    make(
        "create -q -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,preallocation=metadata t.qcow2 4M",
    );
    for (description, made) in [
        ("driver=luks,file.filename=t.luks,key-secret=s", false),
        ("driver=qcow2,file.filename=t.qcow2,encrypt.key-secret=s", false),
        ("driver=qcow2,file.filename=new.qcow2,encrypt.key-secret=s", true),
    ] {
        if made {
            make(
                "convert -f raw -O qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,preallocation=metadata disk new.qcow2",
            );
        } else {
            make(&format!("convert -n --target-is-zero -f raw --target-image-opts disk {description}"));
        }
        make(&format!("convert -O raw --image-opts {description} out"));
        assert!(scratch.read("out") == disk, "{description}");
    }
}
