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
