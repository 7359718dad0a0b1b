//! Commands that make files, over every file of the chain that they read or stand on.

use crate::common::{Scratch, words};
use std::os::unix::fs::symlink;

/// The files of the chains: `top` stands on `mid`, whose data is in `mid.data`, and `mid` on `base`; `parts` is a VMDK
/// with an extent.
const FILES: [&str; 6] = ["top", "mid", "mid.data", "base", "parts", "parts-extent"];

/// Commands that make FILE. A chain stands in each of them.
const LINES: &[&str] = &[
    "create -q -f qcow2 -b top -F qcow2 FILE 1M",
    "create -q -f qcow2 -u -b top -F qcow2 FILE 1M",
    "create -q -f qcow2 -o backing_file=top,backing_fmt=qcow2,data_file=FILE new 1M",
    "create -q -f qcow2 -b parts -F vmdk FILE 1M",
    "create -q -f qcow2 -b json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"top\"}} -F qcow2 FILE 1M",
    "convert -O qcow2 top FILE",
    "convert -O raw top FILE",
    "convert -O vhdx top FILE",
    "convert -U -O raw top FILE",
    "convert -n -O raw top FILE",
    "convert -U -n --target-image-opts top driver=raw,offset=0,size=64k,file.driver=file,file.filename=FILE",
    "convert -U -n --target-image-opts top driver=raw,file.driver=blkdebug,file.image.filename=FILE",
    "convert -O qcow2 -o data_file=FILE top new",
    "convert -O qcow2 -B top -F qcow2 empty FILE",
    "convert -O raw parts FILE",
    "dd -O raw if=top of=FILE",
    "dd -U -O qcow2 if=top of=FILE",
    "dd -O raw if=parts of=FILE",
];

/// Lines of zebu's own commands.
const OWN_LINES: &[&str] =
    &["backup top FILE", "clone top FILE", "convert --image-opts -O raw driver=qcow2,file.filename=top FILE"];

struct Place {
    scratch: Scratch,
    contents: Vec<Vec<u8>>,
}

impl Place {
    fn new() -> Self {
        let scratch = Scratch::new();
        for line in [
            "create -q -f raw base 1M",
            "create -q -f qcow2 -o data_file=mid.data -b base -F raw mid 1M",
            "create -q -f qcow2 -b mid -F qcow2 top 1M",
            "create -q -f qcow2 empty 1M",
        ] {
            scratch.zebu(&words(line)).ok();
        }
        for (name, byte) in [("top", 3), ("mid", 2)] {
            let command = format!("write -P {byte} {}k 64k", byte * 64);
            scratch.zebu(&["io", "-f", "qcow2", "-c", &command, name]).ok();
        }
        let text = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
                    RW 2048 FLAT \"parts-extent\" 0\n";
        scratch.write("parts", text.as_bytes());
        scratch.write("parts-extent", &vec![7; 1 << 20]);
        let contents = FILES.iter().map(|name| scratch.read(name)).collect();
        Self { scratch, contents }
    }

    /// Files that are not as they were made. All are afterwards, and there are no others.
    fn restore(&self) -> Vec<&'static str> {
        let mut changed = Vec::new();
        for (name, before) in FILES.iter().zip(&self.contents) {
            if self.scratch.read(name) != *before {
                changed.push(*name);
                self.scratch.write(name, before);
            }
        }
        for entry in std::fs::read_dir(self.scratch.path()).unwrap() {
            let name = entry.unwrap().file_name();
            if name != "empty" && !FILES.contains(&name.to_str().unwrap()) {
                std::fs::remove_file(self.scratch.path().join(name)).unwrap();
            }
        }
        changed
    }
}

#[test]
fn nothing_is_made_over_a_file_of_the_chain() {
    let program = Scratch::new();
    let as_qemu = program.file("qemu-img");
    symlink(env!("CARGO_BIN_EXE_zebu"), &as_qemu).unwrap();
    let own = env!("CARGO_BIN_EXE_zebu");
    let place = Place::new();
    let mut wrong = Vec::new();
    for (line, names_of_qemu) in
        LINES.iter().map(|line| (line, true)).chain(OWN_LINES.iter().map(|line| (line, false)))
    {
        let chain: &[&str] = if line.contains("parts") { &FILES[4..] } else { &FILES[..4] };
        for file in chain {
            for name in ["", "./", "link-", "hard-"] {
                for program in [own, as_qemu.to_str().unwrap()] {
                    if program != own && !names_of_qemu {
                        continue;
                    }
                    let target = format!("{name}{file}");
                    match name {
                        "link-" => symlink(file, place.scratch.file(&target)).unwrap(),
                        "hard-" => {
                            std::fs::hard_link(place.scratch.file(file), place.scratch.file(&target))
                                .unwrap();
                        }
                        _ => {}
                    }
                    let mut text = line.replace("FILE", &target);
                    if program == own && !line.starts_with("backup") && !line.starts_with("clone") {
                        text = text.replacen(' ', " --force ", 1);
                    }
                    let ran = place.scratch.run(program, &words(&text));
                    let changed = place.restore();
                    let is_named = ran.stderr.contains(&format!("{target}'"))
                        || ran.stderr.contains(&format!("{target}:"));
                    if ran.code != Some(1)
                        || !changed.is_empty()
                        || ran.stderr.lines().count() != 1
                        || !is_named
                    {
                        wrong.push(format!("{program} {text}: changed {changed:?}, {ran:?}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} lines:\n{}", wrong.len(), wrong.join("\n"));
}

/// A name in an image that describes a disk below drivers is looked through.
#[test]
fn nothing_is_made_over_a_file_that_a_description_names() {
    let place = Place::new();
    let base = "json:{\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"base\"}}";
    place.scratch.zebu(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", "empty", "1M"]).ok();
    place
        .scratch
        .zebu(&words("create -q -f qcow2 -b empty -F qcow2 base 1M"))
        .fails_naming(1, &["the chain"]);
    assert!(place.restore().is_empty());
}

/// A name with a protocol, and one that describes a disk, lead to the files below them.
#[test]
fn names_in_images_are_followed_before_anything_is_made() {
    let described = "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"mid\"}}";
    for name in ["file:mid", described] {
        let place = Place::new();
        // One level further down as well: the names that lead there are images of the same kind.
        place
            .scratch
            .zebu(&["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "qcow2", "between", "1M"])
            .ok();
        for above in ["file:between", &described.replace("mid", "between")] {
            place
                .scratch
                .zebu(&["create", "-q", "-f", "qcow2", "-u", "-b", above, "-F", "qcow2", "empty", "1M"])
                .ok();
            for lower in ["mid", "base"] {
                let line = format!("create -q -f qcow2 -u -b empty -F qcow2 {lower} 1M");
                place.scratch.zebu(&words(&line)).fails_naming(1, &["the chain", lower]);
            }
        }
        assert!(place.restore().is_empty(), "{name}");
        place
            .scratch
            .zebu(&["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "qcow2", "empty", "1M"])
            .ok();
        let line = words("create -q -f qcow2 -u -b empty -F qcow2 mid 1M");
        let ran = place.scratch.zebu(&line);
        assert!(ran.code == Some(1) && place.restore().is_empty(), "{name}: {ran:?}");
    }
}

/// Whether a chain that may not be looked at has the target in it can't be told; the option allows the look.
#[test]
fn a_chain_that_leads_elsewhere_may_be_looked_at_where_that_is_allowed() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.file("elsewhere")).unwrap();
    scratch.zebu(&words("create -q -f raw elsewhere/base 1M")).ok();
    let base = scratch.file("elsewhere/base").to_str().unwrap().to_owned();
    scratch.zebu(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", "top", "1M"]).ok();
    std::fs::create_dir(scratch.file("vms")).unwrap();
    std::fs::rename(scratch.file("top"), scratch.file("vms/top")).unwrap();
    scratch.write("old", b"something");
    let line = "create -q -f qcow2 -b vms/top -F qcow2 old";
    scratch.zebu(&words(line)).fails_naming(1, &["--allow-refs"]);
    assert_eq!(scratch.read("old"), b"something");
    scratch.zebu(&words(&format!("{line} --allow-refs all"))).ok();
    let top = scratch.file("vms/top").display().to_string();
    let over = format!("create -q -f qcow2 -b {top} -F qcow2 --allow-refs all {base}");
    scratch.zebu(&words(&over)).fails_naming(1, &["the chain"]);
}

/// A file with the number of a process is overwritten, and no other.
#[test]
fn a_pid_file_is_no_image() {
    let place = Place::new();
    let socket = place.scratch.file("socket").display().to_string();
    for file in FILES {
        let line = format!("serve -f qcow2 --nbd unix:{socket} --pid-file {file} top");
        place.scratch.zebu(&words(&line)).fails_naming(1, &["pid file", file]);
        assert!(place.restore().is_empty(), "{file}");
    }
}

/// Files that are in no chain are overwritten as before.
#[test]
fn other_files_are_made_anew() {
    for line in [
        "create -q -f qcow2 -b top -F qcow2 empty 1M",
        "create -q -f qcow2 -b base -F raw top 1M",
        "create -q -f qcow2 -b base -F raw mid 1M",
        "convert -O qcow2 top empty",
        "dd -O raw if=mid of=empty",
    ] {
        let place = Place::new();
        place.scratch.zebu(&words(line)).ok();
    }
}
