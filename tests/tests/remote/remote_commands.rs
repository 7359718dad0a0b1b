//! Every command that names a disk, with one on an NBD server or a web server in each place: what works does what QEMU's
//! program does, and the rest is refused by the disk's name.

use Export::{Blank, Qcow2, Raw};
use std::path::{Path, PathBuf};
use zebu_tests::foreign_server::ForeignServer;
use zebu_tests::program::{Finished, required, run_in, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::web_server::WebServer;

/// Bytes of the disk.
const LEN: usize = 4 << 20;
/// Bytes of an export that an image is made in.
const ROOM: u64 = 32 << 20;

/// The names that a line of a table has in braces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Export {
    /// The disk itself.
    Raw,
    /// A qcow2 image of it, with a snapshot and a bitmap.
    Qcow2,
    /// Zeroes.
    Blank,
}

impl Export {
    const ALL: [Self; 3] = [Self::Raw, Self::Qcow2, Self::Blank];

    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Blank => "blank",
        }
    }

    fn file(self, dir: &Path) -> PathBuf {
        dir.join(self.name()).join("disk")
    }
}

/// Files and servers of one case.
struct Case {
    dir: PathBuf,
    servers: Vec<(Export, ForeignServer)>,
    web: Option<WebServer>,
}

fn qemu_img(dir: &Path, line: &str) -> Finished {
    run_in(dir, &required("qemu-img"), line.split_whitespace())
}

/// A disk `base.raw`, another `other.raw`, and both as qcow2, one with a snapshot and a bitmap; `top.qcow2` stands on
/// `base.raw` and differs as `other.raw` does.
struct Files(PathBuf);

impl Files {
    fn new(scratch: &Scratch) -> Self {
        let dir = scratch.path().join("files");
        std::fs::create_dir(&dir).unwrap();
        let mut content = vec![0; LEN];
        for (index, byte) in content[..LEN / 2].iter_mut().enumerate() {
            *byte = (index / 512 * 31 + index) as u8;
        }
        std::fs::write(dir.join("base.raw"), &content).unwrap();
        content[65_536..131_072].fill(0x51);
        std::fs::write(dir.join("other.raw"), &content).unwrap();
        for name in ["base", "other"] {
            qemu_img(&dir, &format!("convert -f raw -O qcow2 {name}.raw {name}.qcow2")).ok();
        }
        qemu_img(&dir, "bitmap --add base.qcow2 bitmap").ok();
        qemu_img(&dir, "snapshot -c snap base.qcow2").ok();
        qemu_img(&dir, "create -q -f qcow2 -b base.raw -F raw top.qcow2").ok();
        let write = ["-f", "qcow2", "-c", "write -P 0x51 64k 64k", "top.qcow2"];
        run_in(&dir, &required("qemu-io"), write).ok();
        Self(dir)
    }

    /// A directory with copies, and the servers that `line` names; all of them if it names none.
    fn case(&self, name: &str, line: &str) -> Case {
        let dir = self.0.with_file_name(name);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("www")).unwrap();
        for name in ["base.raw", "other.raw", "base.qcow2", "other.qcow2", "top.qcow2"] {
            std::fs::copy(self.0.join(name), dir.join(name)).unwrap();
        }
        for name in ["base.raw", "base.qcow2", "other.raw"] {
            std::fs::copy(self.0.join(name), dir.join("www").join(name)).unwrap();
        }
        for export in Export::ALL {
            let file = export.file(&dir);
            std::fs::create_dir(file.parent().unwrap()).unwrap();
            match export {
                Export::Raw => drop(std::fs::copy(self.0.join("base.raw"), &file).unwrap()),
                Export::Qcow2 => drop(std::fs::copy(self.0.join("base.qcow2"), &file).unwrap()),
                Export::Blank => std::fs::write(&file, []).unwrap(),
            }
            if export != Export::Raw {
                std::fs::File::options().write(true).open(&file).unwrap().set_len(ROOM).unwrap();
            }
        }
        let mut case = Case { dir, servers: Vec::new(), web: None };
        let is_named = |export: &Export| {
            let overlays =
                ["top-raw", "two"].iter().any(|name| line.contains(name)) && *export == Export::Raw;
            let name = export.name();
            line.is_empty()
                || overlays
                || line.contains(&format!("{{{name}}}"))
                || line.contains(&format!("top-{name}"))
        };
        case.serve(Export::ALL.into_iter().filter(is_named));
        case.overlays();
        if line.is_empty() || line.contains("{web") {
            case.web = Some(WebServer::start(&case.dir));
        }
        case
    }
}

impl Case {
    /// Starts NBD servers.
    fn serve(&mut self, exports: impl Iterator<Item = Export>) {
        self.servers = exports
            .map(|export| {
                let dir = self.dir.join(export.name());
                (export, ForeignServer::qemu(&dir, "--shared=16 --discard=unmap -f raw disk"))
            })
            .collect();
    }

    /// Makes `top-raw.qcow2` and `top-qcow2.qcow2`, which stand on exports, and `two.qcow2`, which stands on the first of them.
    fn overlays(&self) {
        for (export, server) in &self.servers {
            let name = export.name();
            if *export == Export::Blank {
                continue;
            }
            let to = format!("top-{name}.qcow2");
            std::fs::copy(self.dir.join("top.qcow2"), self.dir.join(&to)).unwrap();
            qemu_img(&self.dir, &format!("rebase -u -f qcow2 -b {} -F {name} {to}", server.uri())).ok();
        }
        qemu_img(&self.dir, "create -q -u -f qcow2 -b top-raw.qcow2 -F qcow2 two.qcow2 4M").ok();
    }

    /// Ends the servers, so that their files can be looked at.
    fn end(&mut self) {
        self.servers.clear();
    }

    /// The words of a line; names in braces are those of disks on servers.
    fn line(&self, line: &str) -> Vec<String> {
        line.split_whitespace()
            .map(|word| {
                let mut word = word.replace("{dir}", &self.dir.display().to_string());
                for (export, server) in &self.servers {
                    word = word.replace(&format!("{{{}}}", export.name()), &server.uri());
                }
                if let Some(web) = &self.web {
                    for name in ["base.raw", "base.qcow2", "other.raw", "new"] {
                        word = word.replace(&format!("{{web/{name}}}"), &web.url(&format!("/{name}")));
                    }
                }
                assert!(!word.contains('{'), "{word}");
                word
            })
            .collect()
    }

    fn zebu(&self, line: &str) -> Finished {
        zebu(&self.dir, self.line(line))
    }

    /// The files of the case, to see which a command makes.
    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(&self.dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

/// A word of a line that only zebu's own name takes: images may name servers.
const ALLOWED: &str = "--allow-refs all";

/// Tells what a command reads as QEMU's program tells it, whatever server it is on.
#[test]
fn what_is_read_of_an_nbd_server_is_what_qemu_says() {
    let scratch = Scratch::new("remote-commands-read");
    let case = Files::new(&scratch).case("case", "");
    for (line, code) in [
        ("info --output=json -f raw {raw}", 0),
        ("info --output=json {qcow2}", 0),
        ("map --output=json -f raw {raw}", 0),
        ("map --output=json {qcow2}", 0),
        ("check -f qcow2 {qcow2}", 0),
        ("check -f raw {raw}", 63),
        ("compare -f raw -F raw {raw} base.raw", 0),
        ("compare -f raw -F qcow2 {raw} {qcow2}", 0),
        ("compare -f raw -F raw other.raw {raw}", 1),
        ("measure -O qcow2 -f raw {raw}", 0),
        ("measure -O qcow2 {qcow2}", 0),
        ("measure -O raw -l snap {qcow2}", 0),
        ("snapshot -l {qcow2}", 0),
    ] {
        let ours = case.zebu(line).exits(code);
        let theirs = run_in(&case.dir, &required("qemu-img"), case.line(line)).exits(code);
        if line.starts_with("info") {
            let sizes = |text: &str| {
                let told: serde_json::Value = serde_json::from_str(text).unwrap();
                [&told["virtual-size"], &told["format"], &told["filename"], &told["format-specific"]]
                    .map(Clone::clone)
            };
            assert_eq!(sizes(&ours.stdout), sizes(&theirs.stdout), "{line}");
        } else {
            assert_eq!(ours.stdout, theirs.stdout, "{line}");
        }
    }
}

/// The disk or image that a line leaves in an export, or in a local file, holds what QEMU's program leaves there.
#[test]
fn what_is_written_to_an_nbd_server_is_what_qemu_writes() {
    let scratch = Scratch::new("remote-commands-write");
    let files = Files::new(&scratch);
    for (line, export, format) in [
        ("create -q -f qcow2 {blank} 16M", Blank, "qcow2"),
        ("create -q -f qcow2 {qcow2} 16M", Qcow2, "qcow2"),
        ("create -q -f qcow2 -o preallocation=metadata {blank} 16M", Blank, "qcow2"),
        ("create -q -f qcow2 -b {dir}/base.raw -F raw {blank}", Blank, "qcow2"),
        ("create -q -f raw {raw} 2M", Raw, "raw"),
        ("convert -f raw -O raw other.raw {raw}", Raw, "raw"),
        ("convert -n -f raw -O raw other.raw {raw}", Raw, "raw"),
        ("convert -n -f raw -O raw other.raw {blank}", Blank, "raw"),
        ("convert -n -f raw -O qcow2 other.raw {qcow2}", Qcow2, "qcow2"),
        ("convert -f raw -O qcow2 other.raw {qcow2}", Qcow2, "qcow2"),
        ("convert -f raw -O qcow2 other.raw {blank}", Blank, "qcow2"),
        ("convert -f raw -O qcow2 -o cluster_size=4k other.raw {blank}", Blank, "qcow2"),
        ("convert -c -f raw -O qcow2 other.raw {blank}", Blank, "qcow2"),
        ("convert -f raw -O qcow2 {raw} {blank}", Blank, "qcow2"),
        ("convert -f raw -O qcow2 -B {dir}/base.raw -F raw other.raw {blank}", Blank, "qcow2"),
        ("dd -f raw -O raw bs=64k if=other.raw of={raw}", Raw, "raw"),
        ("dd -f raw -O raw bs=64k count=4 if=other.raw of={raw}", Raw, "raw"),
        ("dd -f raw -O qcow2 bs=64k if=other.raw of={blank}", Blank, "qcow2"),
        ("commit ALLOWED -q -f qcow2 top-raw.qcow2", Raw, "raw"),
        ("commit ALLOWED -q -d -f qcow2 top-raw.qcow2", Raw, "raw"),
        ("commit ALLOWED -q -f qcow2 -b {raw} two.qcow2", Raw, "raw"),
        ("commit ALLOWED -q -f qcow2 top-qcow2.qcow2", Qcow2, "qcow2"),
        ("rebase -f qcow2 -b {dir}/base.raw -F raw {qcow2}", Qcow2, "qcow2"),
        ("resize -q -f qcow2 {qcow2} +1M", Qcow2, "qcow2"),
        ("resize -q -f qcow2 --shrink {qcow2} 1M", Qcow2, "qcow2"),
        ("snapshot -c second {qcow2}", Qcow2, "qcow2"),
        ("snapshot -d snap {qcow2}", Qcow2, "qcow2"),
        ("amend -f qcow2 -o lazy_refcounts=on {qcow2}", Qcow2, "qcow2"),
        ("bitmap --add -f qcow2 {qcow2} second", Qcow2, "qcow2"),
        ("bitmap --remove -f qcow2 {qcow2} bitmap", Qcow2, "qcow2"),
    ] {
        let [ours, theirs] = ["ours", "theirs"].map(|name| {
            let mut case = files.case(name, line);
            let dir = case.dir.clone();
            let before = case.files();
            if name == "ours" {
                case.zebu(&line.replace("ALLOWED", ALLOWED)).ok();
            } else {
                run_in(&dir, &required("qemu-img"), case.line(&line.replace("ALLOWED", ""))).ok();
            }
            case.end();
            assert_eq!(before, case.files(), "{line}: no file is made");
            case
        });
        let images = [&ours, &theirs].map(|case| export.file(&case.dir).display().to_string());
        let same = format!("compare -f {format} -F {format} {} {}", images[0], images[1]);
        qemu_img(&ours.dir, &same).ok();
        if format == "qcow2" {
            qemu_img(&ours.dir, &format!("check -f qcow2 {}", images[0])).ok();
            let told = images.map(|file| {
                let told = qemu_img(&ours.dir, &format!("info --output=json -f qcow2 {file}")).ok().stdout;
                let told: serde_json::Value = serde_json::from_str(&told).unwrap();
                let snapshots = told["snapshots"].as_array().map_or(0, Vec::len);
                let specific = &told["format-specific"]["data"];
                (
                    told["virtual-size"].clone(),
                    snapshots,
                    specific["bitmaps"].clone(),
                    specific["lazy-refcounts"].clone(),
                )
            });
            assert_eq!(told[0], told[1], "{line}");
        }
        if line.starts_with("commit") {
            let top = line.split(' ').next_back().unwrap();
            let mapped = |case: &Case| {
                qemu_img(&case.dir, &format!("info --output=json {top}"))
                    .ok()
                    .stdout
                    .contains("\"backing-filename\"")
            };
            assert!(mapped(&ours) && mapped(&theirs), "{line}");
        }
    }
}

/// A local overlay shows the same on its new base, whichever kind of disk that is.
#[test]
fn local_images_stand_on_disks_of_servers() {
    let scratch = Scratch::new("remote-commands-local");
    let files = Files::new(&scratch);
    let dir = scratch.path().join("case");
    for (line, image) in [
        ("rebase -f qcow2 -b {raw} -F raw top.qcow2", "top.qcow2"),
        ("rebase -f qcow2 -b {qcow2} -F qcow2 top.qcow2", "top.qcow2"),
        ("rebase -f qcow2 -b {blank} -F raw top.qcow2", "top.qcow2"),
        ("rebase -u -f qcow2 -b {raw} -F raw top.qcow2", "top.qcow2"),
        ("rebase ALLOWED -f qcow2 -b base.raw -F raw top-raw.qcow2", "top-raw.qcow2"),
        ("rebase -f qcow2 -b {web/base.qcow2} -F qcow2 top.qcow2", "top.qcow2"),
        ("rebase -f qcow2 -b {web/other.raw} -F raw top.qcow2", "top.qcow2"),
        ("rebase -u -f qcow2 -b {web/base.raw} -F raw top.qcow2", "top.qcow2"),
        ("convert -f raw -O qcow2 -B {raw} -F raw other.raw new.qcow2", "new.qcow2"),
        ("convert -f raw -O qcow2 -B {web/base.raw} -F raw other.raw new.qcow2", "new.qcow2"),
        ("convert -f raw -O qcow2 {web/other.raw} {blank} new.qcow2", ""),
        ("dd -f raw -O raw bs=64k count=4 if={raw} of=part.raw", ""),
        ("dd -f raw -O raw bs=64k count=4 if={web/base.raw} of=part.raw", ""),
        ("clone {qcow2} new.qcow2", ""),
        ("clone {web/base.qcow2} new.qcow2", ""),
        ("create -q -f qcow2 -b {web/base.raw} -F raw new.qcow2", ""),
    ] {
        let case = files.case("case", line);
        case.zebu(&line.replace("ALLOWED", ALLOWED)).ok();
        if !image.is_empty() {
            case.zebu(&format!("compare {ALLOWED} -f qcow2 -F raw {image} other.raw")).ok();
            // QEMU's own driver for web servers may be missing.
            if !line.contains("web/") {
                qemu_img(&dir, &format!("check -f qcow2 {image}")).ok();
            }
        } else if line.starts_with("dd") {
            let whole = std::fs::read(dir.join("base.raw")).unwrap();
            assert!(std::fs::read(dir.join("part.raw")).unwrap() == whole[..4 << 16], "{line}");
        } else if !line.contains("blank") {
            case.zebu(&format!("compare {ALLOWED} -f qcow2 -F raw new.qcow2 base.raw")).ok();
        } else {
            let told = qemu_img(&dir, "info --output=json new.qcow2").ok().stdout;
            assert!(told.contains(&format!("\"virtual-size\": {}", LEN as u64 + ROOM)), "{told}");
        }
    }
}

/// A backup is one of the disk, whichever side is on a server; a bitmap is read from one as from a file.
#[test]
fn backups_bitmaps_and_measurements_take_disks_of_servers() {
    let scratch = Scratch::new("remote-commands-backup");
    let dir = scratch.path().join("case");
    let mut case = Files::new(&scratch).case("case", "");
    for (line, count) in [("bench -f raw -c 50 -d 8 {raw}", 1), ("bench -f raw -c 50 -d 8 {web/base.raw}", 1)]
    {
        assert_eq!(case.zebu(line).ok().stdout.matches("Run completed").count(), count);
    }
    case.zebu("bitmap --add -f qcow2 other.qcow2 merged").ok();
    for source in ["{qcow2}", "{web/base.qcow2}"] {
        case.zebu(&format!("bitmap --merge bitmap -b {source} -F qcow2 -f qcow2 other.qcow2 merged")).ok();
    }
    for source in ["{raw}", "{web/base.raw}"] {
        case.zebu(&format!("backup -q -f raw {source} backup.qcow2")).ok();
        qemu_img(&dir, "compare -f qcow2 -F raw backup.qcow2 base.raw").ok();
        std::fs::remove_file(dir.join("backup.qcow2")).unwrap();
    }
    case.zebu("backup -q -f qcow2 --bitmap bitmap {qcow2} backup.qcow2").ok();
    case.zebu("backup -q -f raw other.raw --manifest manifest {blank}").ok();
    case.zebu("verify -f qcow2 --manifest manifest {blank}").ok();
    let out = case.zebu("backup -q -f raw other.raw {blank}").exits(1);
    assert!(out.stderr.contains("is not empty"), "{out}");
    // QEMU's program loses the snapshots of an image that it repairs.
    case.zebu("check -q -r leaks -f qcow2 {qcow2}").ok();
    case.zebu("bench -w -f raw -c 50 -d 8 --pattern=7 {raw}").ok();
    case.end();
    let blank = Export::Blank.file(&dir);
    qemu_img(&dir, &format!("compare -f qcow2 -F raw {} other.raw", blank.display())).ok();
    qemu_img(&dir, &format!("check -f qcow2 {}", blank.display())).ok();
    let repaired = Export::Qcow2.file(&dir).display().to_string();
    qemu_img(&dir, &format!("check -f qcow2 {repaired}")).ok();
    assert!(qemu_img(&dir, &format!("snapshot -l {repaired}")).ok().stdout.contains("snap"));
    assert!(std::fs::read(Export::Raw.file(&dir)).unwrap()[..50 * 4096].iter().all(|byte| *byte == 7));
}

/// A backup that the disk has no room for leaves no image on it.
#[test]
fn a_backup_without_room_leaves_no_image() {
    let scratch = Scratch::new("remote-commands-room");
    let dir = scratch.path().join("case");
    let mut case = Files::new(&scratch).case("case", "");
    case.end();
    let blank = Export::Blank.file(&dir);
    std::fs::File::options().write(true).open(&blank).unwrap().set_len(64 << 10).unwrap();
    case.serve([Export::Blank].into_iter());
    let out = case.zebu("backup -q -f raw other.raw {blank}").exits(1);
    assert!(out.stderr.contains("the device holds 65536 bytes"), "{out}");
    case.end();
    assert!(std::fs::read(&blank).unwrap()[..512].iter().all(|byte| *byte == 0));
}

/// One line says what can't be, with the disk's name, and no file is made.
#[test]
fn what_can_t_be_is_refused_by_name() {
    let scratch = Scratch::new("remote-commands-refused");
    let case = Files::new(&scratch).case("case", "");
    qemu_img(&case.dir, "create -q -f qcow2 -b top.qcow2 -F qcow2 -u web.qcow2 4M").ok();
    case.zebu("rebase -u -f qcow2 -b {web/base.raw} -F raw web.qcow2").ok();
    for (line, word) in [
        // Files on web servers are for reading.
        ("create -q -f qcow2 {web/new} 4M", "can be read, not written"),
        ("convert -f raw -O raw base.raw {web/new}", "can be read, not written"),
        ("convert -n -f raw -O raw base.raw {web/base.raw}", "Read-only"),
        ("dd -f raw -O raw if=base.raw of={web/new}", "can be read, not written"),
        ("check -r leaks -f qcow2 {web/base.qcow2}", "Read-only"),
        ("rebase -f qcow2 -b {dir}/base.raw -F raw {web/base.qcow2}", "Read-only"),
        ("resize -f qcow2 {web/base.qcow2} +1M", "Read-only"),
        ("snapshot -c second {web/base.qcow2}", "Read-only"),
        ("snapshot -a snap {web/base.qcow2}", "Read-only"),
        ("snapshot -d snap {web/base.qcow2}", "Read-only"),
        ("amend -f qcow2 -o lazy_refcounts=on {web/base.qcow2}", "Read-only"),
        ("bitmap --add {web/base.qcow2} second", "Read-only"),
        ("bench -w -f raw -c 1 {web/base.raw}", "Read-only"),
        ("io -f raw {web/base.raw} -c help", "Read-only"),
        ("serve --nbd unix:s -f raw {web/base.raw}", "Read-only"),
        ("commit ALLOWED -f qcow2 web.qcow2", "Read-only"),
        ("commit ALLOWED -f qcow2 -b {web/base.raw} web.qcow2", "Read-only"),
        ("backup -f raw base.raw {web/new}", "can be read, not written"),
        ("backup -f qcow2 --bitmap bitmap {web/base.qcow2} out.qcow2", "Read-only"),
        ("clone base.qcow2 {web/new}", "a local file is needed"),
        // A disk on an NBD server is as long as it is.
        ("create -q -f raw {raw} 40M", "the device holds 4194304 bytes"),
        ("create -q -f qcow2 -o preallocation=full {blank} 64M", "full"),
        ("create -q -f qcow2 -o data_file=x {blank} 4M", "data file"),
        ("create -q -f vmdk {blank} 4M", "regular file"),
        ("convert -f raw -O vmdk base.raw {blank}", "regular file"),
        ("convert -f raw -O raw {blank} {raw}", "smaller"),
        ("convert -f raw -O raw {raw} {raw}", "would destroy"),
        ("convert -f raw -O qcow2 {blank} {blank}", "would destroy"),
        ("dd -f raw -O raw if={raw} of={raw}", "would destroy"),
        ("resize -f raw {raw} +1M", "Cannot resize"),
        ("resize -f raw --shrink {raw} 1M", "Cannot resize"),
        ("commit ALLOWED -f qcow2 -b {qcow2} two.qcow2", "backing chain"),
        ("commit -f qcow2 top-raw.qcow2", "--allow-refs"),
        ("commit -f qcow2 {qcow2}", "does not have a backing file"),
        ("backup -f raw base.raw {raw}", "is not empty"),
        ("backup --resume -f raw base.raw {blank}", "can't have --resume"),
        ("backup -f qcow2 base.qcow2 --previous {qcow2} --bitmap bitmap out.qcow2", "a local file is needed"),
        ("clone base.qcow2 {blank}", "a local file is needed"),
        ("serve --nbd unix:s --overlay {blank} -f raw base.raw", "a local file is needed"),
        // What is no image, and names that lead nowhere.
        ("backup -f raw base.raw --manifest nbd:foo out.qcow2", "a local file is needed"),
        ("verify --manifest {web/base.raw} base.qcow2", "a local file is needed"),
        ("create -q -f qcow2 -o data_file={raw} out.qcow2 4M", "a local file is needed"),
        ("create -q -f raw nbd:foo 4M", "nbd:HOST:PORT"),
        ("create -q -f qcow2 nbd://127.0.0.1:1/x 4M", "Connection refused"),
        ("convert -f raw -O raw base.raw nbd://127.0.0.1:1/x", "Connection refused"),
        ("convert -f raw -O qcow2 base.raw nbd://127.0.0.1:1/x", "Connection refused"),
        ("dd -f raw -O raw if=base.raw of=nbd://127.0.0.1:1/x", "Connection refused"),
        ("backup -f raw base.raw nbd://127.0.0.1:1/x", "Connection refused"),
        ("rebase -f qcow2 -b nbd://127.0.0.1:1/x -F raw top.qcow2", "Connection refused"),
        ("commit -f qcow2 -b nbd:foo top.qcow2", "nbd:HOST:PORT"),
    ] {
        let before = case.files();
        let words = case.line(&line.replace("ALLOWED", ALLOWED));
        let out = zebu(&case.dir, &words).exits(1);
        assert!(out.stderr.contains(word) && out.stderr.lines().count() <= 2, "{out}");
        let names: Vec<&str> = words.iter().map(|word| word.rsplit("of=").next().unwrap_or(word)).collect();
        let on_server = |name: &&&str| name.starts_with("nbd") || name.starts_with("http");
        let told = names.iter().filter(on_server).any(|name| out.stderr.contains(*name))
            || line.contains("top-raw")
            || line.contains("data_file={raw}")
            || line.contains("commit ALLOWED -f qcow2 web");
        assert!(told, "it names the disk: {out}");
        assert_eq!(before, case.files(), "{line}: no file is made");
    }
}
