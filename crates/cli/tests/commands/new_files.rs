//! Manners of `zebu` where it makes files.

use crate::common::Scratch;

fn format(scratch: &Scratch, name: &str) -> String {
    let info = scratch.zebu(&["info", "--output", "json", name]).ok().json();
    info["format"].as_str().unwrap().to_owned()
}

#[test]
fn the_format_of_a_new_file_follows_its_suffix() {
    let scratch = Scratch::new();
    for (suffix, expected) in [
        ("qcow2", "qcow2"),
        ("raw", "raw"),
        ("img", "raw"),
        ("vmdk", "vmdk"),
        ("vhdx", "vhdx"),
        ("vhd", "vpc"),
        ("vdi", "vdi"),
    ] {
        let (made, converted) = (format!("made.{suffix}"), format!("converted.{suffix}"));
        scratch.zebu_as_typed(&format!("create -q {made} 4M")).ok();
        assert_eq!(format(&scratch, &made), expected);
        scratch.zebu_as_typed(&format!("convert {made} {converted}")).ok();
        assert_eq!(format(&scratch, &converted), expected);
    }
    scratch.zebu_as_typed("dd if=made.raw of=copied.qcow2 bs=1M").ok();
    assert_eq!(format(&scratch, "copied.qcow2"), "qcow2");
}

#[test]
fn a_name_without_a_format_is_asked_about() {
    let scratch = Scratch::new();
    scratch.zebu_as_typed("create -q a.raw 1M").ok();
    for (line, first, second) in [
        ("create disk 1M", "`zebu create -f qcow2 disk 1M`", "`zebu create -f raw disk 1M`"),
        ("convert a.raw b.bin", "`zebu convert -O qcow2 a.raw b.bin`", "`zebu convert -O raw a.raw b.bin`"),
        ("dd if=a.raw of=c", "`zebu dd -O qcow2 if=a.raw of=c`", "`zebu dd -O raw if=a.raw of=c`"),
    ] {
        scratch.zebu_as_typed(line).fails_naming(1, &[first, second]);
    }
    assert!(!scratch.file("disk").exists() && !scratch.file("b.bin").exists() && !scratch.file("c").exists());
    scratch.zebu_as_typed("create -q -f raw disk 1M").ok();
}

#[test]
fn a_file_that_holds_something_is_replaced_only_by_force() {
    let scratch = Scratch::new();
    scratch.write("text.img", b"something");
    scratch.write("empty.img", b"");
    scratch.zebu_as_typed("create -q source.qcow2 1M").ok();
    for line in [
        "create -q text.img 1M",
        "convert source.qcow2 text.img",
        "dd if=source.qcow2 of=text.img",
        "create -q -o data_file=text.img,data_file_raw=on new.qcow2 1M",
    ] {
        scratch.zebu_as_typed(line).fails_naming(1, &["text.img", "--force"]);
        assert_eq!(scratch.read("text.img"), b"something", "{line}");
    }
    assert!(!scratch.file("new.qcow2").exists());
    scratch.zebu_as_typed("create -q empty.img 1M").ok();
    scratch.zebu_as_typed("convert -n source.qcow2 empty.img").ok();
    for line in ["create -q --force text.img 1M", "convert --force source.qcow2 text.img"] {
        scratch.zebu_as_typed(line).ok();
        assert_eq!(scratch.read("text.img").len(), 1 << 20, "{line}");
    }
    // A file of the image's own chain is never emptied.
    scratch.zebu_as_typed("create -q -b source.qcow2 -F qcow2 top.qcow2").ok();
    scratch
        .zebu_as_typed("convert --force -O qcow2 top.qcow2 source.qcow2")
        .fails_naming(1, &["source.qcow2"]);
}

#[test]
fn bytes_are_not_written_over_an_image_by_an_oversight() {
    let scratch = Scratch::new();
    scratch.write("source.raw", &vec![7; 1 << 20]);
    scratch.zebu_as_typed("create -q there.qcow2 1M").ok();
    scratch.zebu_as_typed("create -q there.vdi 1M").ok();
    let (image, other) = (scratch.read("there.qcow2"), scratch.read("there.vdi"));
    let line = "convert -n -f raw source.raw";
    scratch.zebu_as_typed(&format!("{line} there.qcow2")).fails_naming(
        1,
        &[
            "`zebu convert -O qcow2 -n -f raw source.raw there.qcow2`",
            "`zebu convert -O raw -n -f raw source.raw there.qcow2`",
        ],
    );
    scratch.zebu_as_typed(&format!("{line} there.vdi")).fails_naming(1, &["there.vdi", "-O raw"]);
    assert!(scratch.read("there.qcow2") == image && scratch.read("there.vdi") == other);
    // Each of the lines does what it says.
    scratch.zebu_as_typed(&format!("{line} -O qcow2 there.qcow2")).ok();
    scratch.zebu_as_typed("compare -f raw source.raw -F qcow2 there.qcow2").ok();
    scratch.zebu_as_typed(&format!("{line} -O raw there.qcow2")).ok();
    assert_eq!(scratch.read("there.qcow2")[..1 << 20], scratch.read("source.raw")[..]);
    // A disk without a format is written as it is, and QEMU's names do as QEMU does.
    scratch.write("plain.img", &vec![0; 1 << 20]);
    scratch.zebu_as_typed(&format!("{line} plain.img")).ok();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zebu"), scratch.file("qemu-img")).unwrap();
    scratch.zebu_as_typed("create -q -o preallocation=full other.qcow2 1M").ok();
    scratch.run("./qemu-img", &["convert", "-n", "-f", "raw", "source.raw", "other.qcow2"]).ok();
    assert_eq!(scratch.read("other.qcow2")[..1 << 20], scratch.read("source.raw")[..]);
}
