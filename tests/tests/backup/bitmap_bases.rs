//! A bitmap knows the backup that it goes on from: an increment on another one is refused, whoever makes it, and whatever was done
//! to the image or to the backup meanwhile.

use serde_json::Value;
use std::path::Path;
use zebu_tests::patience::wait_for;
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const DISK: &str = "disk.qcow2";
const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

/// The maker of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maker {
    Live,
    Offline,
}

const BOTH: [Maker; 2] = [Maker::Live, Maker::Offline];

fn make(dir: &Path, options: &str) {
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", options, DISK, &SIZE.to_string()]).ok();
}

/// Makes a backup with bitmap `b`.
fn back_up(dir: &Path, maker: Maker, target: &str, previous: Option<&str>) -> Finished {
    let mut words = vec!["--bitmap", "b"];
    words.extend(previous.iter().flat_map(|previous| ["--previous", previous]));
    match maker {
        Maker::Offline => zebu(dir, [&["backup"], &words[..], &[DISK, target]].concat()),
        Maker::Live => {
            let server = Server::start(dir, &format!("--control ctl.sock -f qcow2 {DISK}"));
            let out =
                zebu(dir, [&["ctl", "ctl.sock", "backup-start", "-w"], &words[..], &["", target]].concat());
            server.stop();
            out
        }
    }
}

fn refused(dir: &Path, maker: Maker, target: &str, previous: &str, why: &[&str]) {
    let out = back_up(dir, maker, target, Some(previous)).exits(1);
    assert!(why.iter().all(|why| out.stderr.contains(why)), "{maker:?}, {why:?}: {out}");
    assert!(!dir.join(target).exists(), "{maker:?}: {out}");
}

fn write(dir: &Path, byte: u8, offset: &str) {
    zebu(dir, ["io", "-f", "qcow2", "-c", &format!("write -P {byte} {offset} 64k"), DISK]).ok();
}

/// Writes to an image that is not the disk.
fn write_to(dir: &Path, image: &str) {
    zebu(dir, ["io", "-f", "qcow2", "-c", "write -P 9 8M 64k", image]).ok();
}

fn make_named(dir: &Path, image: &str) {
    zebu(dir, ["create", "-q", "-f", "qcow2", image, &SIZE.to_string()]).ok();
}

fn same(qemu: &Qemu, dir: &Path, backup: &str) {
    qemu.img(dir, ["compare", "-f", "qcow2", "-F", "qcow2", DISK, backup]).ok();
    qemu.check_clean(dir, backup).unwrap();
    qemu.check_clean(dir, DISK).unwrap();
}

fn specific(dir: &Path, image: &str) -> Value {
    let out = zebu(dir, ["info", "--output", "json", image]).ok().stdout;
    let info: Value = serde_json::from_str(&out).unwrap();
    info["format-specific"]["data"].clone()
}

/// The id of a backup.
fn id(dir: &Path, backup: &str) -> String {
    specific(dir, backup)["backup-id"].as_str().unwrap_or_else(|| panic!("{backup} has no id")).to_owned()
}

/// The id of the backup that the bitmap goes on from.
fn base(dir: &Path) -> Option<String> {
    specific(dir, DISK)["bitmaps"][0]["base"].as_str().map(str::to_owned)
}

/// A full backup, `full.qcow2`, and an increment on it, `mon.qcow2`; something was written after each.
fn begun(dir: &Path, maker: Maker, options: &str) {
    make(dir, options);
    write(dir, 1, "0");
    back_up(dir, maker, "full.qcow2", None).ok();
    write(dir, 2, "1M");
    back_up(dir, maker, "mon.qcow2", Some("full.qcow2")).ok();
    write(dir, 3, "2M");
}

#[test]
fn an_increment_on_another_backup_than_the_last_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    for (maker, options) in [
        (Maker::Live, "cluster_size=64k"),
        (Maker::Offline, "cluster_size=64k"),
        (Maker::Live, "cluster_size=512"),
        (Maker::Offline, "cluster_size=512"),
        (Maker::Offline, "extended_l2=on"),
    ] {
        let scratch = Scratch::new("bases");
        let dir = scratch.path();
        begun(dir, maker, options);
        let (full, mon) = (id(dir, "full.qcow2"), id(dir, "mon.qcow2"));
        assert_eq!(base(dir), Some(mon.clone()));
        refused(dir, maker, "tue.qcow2", "full.qcow2", &["'b'", "full.qcow2", &full, &mon]);
        assert_eq!(base(dir), Some(mon.clone()), "a refusal changes nothing");
        // The right one goes on, with all that was written since.
        back_up(dir, maker, "tue.qcow2", Some("mon.qcow2")).ok();
        same(&qemu, dir, "tue.qcow2");
        // The script runs twice: the same target is there, and under another name the previous one is not the last.
        let again = back_up(dir, maker, "tue.qcow2", Some("mon.qcow2")).exits(1);
        assert!(again.stderr.contains("tue.qcow2"), "{again}");
        refused(dir, maker, "tue-again.qcow2", "mon.qcow2", &[&mon, &id(dir, "tue.qcow2")]);
        write(dir, 4, "3M");
        // The two ways go on from each other.
        for (maker, name, previous) in
            [(Maker::Live, "wed.qcow2", "tue.qcow2"), (Maker::Offline, "thu.qcow2", "wed.qcow2")]
        {
            back_up(dir, maker, name, Some(previous)).ok();
            same(&qemu, dir, name);
            write(dir, 5, "4M");
        }
    }
}

#[test]
fn an_image_that_is_no_backup_of_the_disk_is_refused() {
    for maker in BOTH {
        let scratch = Scratch::new("bases");
        let dir = scratch.path();
        begun(dir, maker, "");
        let mon = id(dir, "mon.qcow2");
        zebu(dir, ["create", "-q", "-f", "qcow2", "empty.qcow2", &SIZE.to_string()]).ok();
        zebu(dir, ["convert", "-O", "qcow2", "mon.qcow2", "copy.qcow2"]).ok();
        for other in ["empty.qcow2", "copy.qcow2"] {
            refused(dir, maker, "tue.qcow2", other, &[other, &mon, "not marked as a backup"]);
        }
        // A backup of another disk.
        let other = scratch.path().join("other");
        std::fs::create_dir(&other).unwrap();
        begun(&other, maker, "");
        refused(
            dir,
            maker,
            "tue.qcow2",
            "other/mon.qcow2",
            &["other/mon.qcow2", &mon, &id(&other, "mon.qcow2")],
        );
        // What was written since is not what it was; a copy of the file is.
        std::fs::copy(dir.join("mon.qcow2"), dir.join("kept.qcow2")).unwrap();
        zebu(dir, ["io", "-f", "qcow2", "-c", "write -P 9 8M 64k", "mon.qcow2"]).ok();
        refused(dir, maker, "tue.qcow2", "mon.qcow2", &["mon.qcow2", &mon, "was written since"]);
        back_up(dir, maker, "tue.qcow2", Some("kept.qcow2")).ok();
        zebu(dir, ["compare", DISK, "tue.qcow2"]).ok();
    }
}

/// An image above something that was written since is not what it was, however far below that is, and whoever wrote it.
#[test]
fn a_backup_above_one_that_was_written_is_no_backup() {
    let Some(qemu) = Qemu::find() else { return };
    for maker in BOTH {
        type Change<'a> = (&'a str, &'a dyn Fn(&Path));
        let changes: [Change<'_>; 4] = [
            ("a write", &|dir| write_to(dir, "full.qcow2")),
            ("another file of its name", &|dir| {
                std::fs::remove_file(dir.join("full.qcow2")).unwrap();
                make_named(dir, "full.qcow2");
            }),
            ("another backing file, by QEMU", &|dir| {
                make_named(dir, "other.qcow2");
                drop(qemu.img(dir, ["rebase", "-u", "-F", "qcow2", "-b", "other.qcow2", "mon.qcow2"]).ok());
            }),
            ("no backing file, by QEMU", &|dir| {
                drop(qemu.img(dir, ["rebase", "-u", "-b", "", "mon.qcow2"]).ok());
            }),
        ];
        for (what, change) in changes {
            let scratch = Scratch::new("bases");
            let dir = scratch.path();
            begun(dir, maker, "");
            back_up(dir, maker, "tue.qcow2", Some("mon.qcow2")).ok();
            assert_eq!(specific(dir, "tue.qcow2")["backup-stands-on"], id(dir, "mon.qcow2").as_str());
            let tue = id(dir, "tue.qcow2");
            change(dir);
            let why = ["tue.qcow2", &tue, "an image that it stands on was", "make a full one"];
            refused(dir, maker, "wed.qcow2", "tue.qcow2", &why);
            assert_eq!(base(dir), Some(tue), "{maker:?}, {what}: a refusal changes nothing");
        }
    }
}

/// Nobody would notice a change of what has no id, so what stands on it gets none, and each increment is compared.
#[test]
fn an_increment_on_what_has_no_id_is_compared_each_time() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bases");
    let dir = scratch.path();
    make(dir, "");
    write(dir, 1, "0");
    zebu(dir, ["backup", DISK, "full.qcow2"]).ok();
    zebu(dir, ["bitmap", "--add", DISK, "b"]).ok();
    for (name, previous, at) in [("mon.qcow2", "full.qcow2", "1M"), ("tue.qcow2", "mon.qcow2", "2M")] {
        write(dir, 2, at);
        let out = back_up(dir, Maker::Offline, name, Some(previous)).ok();
        assert!(out.stderr.contains(&format!("goes on from '{previous}', so all")), "{out}");
        assert_eq!((base(dir), &specific(dir, name)["backup-id"]), (None, &Value::Null));
        same(&qemu, dir, name);
    }
    write_to(dir, "full.qcow2");
    refused(dir, Maker::Offline, "wed.qcow2", "tue.qcow2", &["does not belong to 'tue.qcow2'"]);
}

/// A chain that is made shorter holds the same backups.
#[test]
fn an_increment_stands_on_what_was_committed_or_rebased() {
    let Some(qemu) = Qemu::find() else { return };
    for maker in BOTH {
        let scratch = Scratch::new("bases");
        let dir = scratch.path();
        begun(dir, maker, "");
        back_up(dir, maker, "tue.qcow2", Some("mon.qcow2")).ok();
        let tue = id(dir, "tue.qcow2");
        zebu(dir, ["rebase", "-F", "qcow2", "-b", "full.qcow2", "tue.qcow2"]).ok();
        assert_eq!(id(dir, "tue.qcow2"), tue);
        write(dir, 4, "3M");
        back_up(dir, maker, "wed.qcow2", Some("tue.qcow2")).ok();
        same(&qemu, dir, "wed.qcow2");
        let wed = id(dir, "wed.qcow2");
        zebu(dir, ["commit", "-q", "wed.qcow2"]).ok();
        assert_eq!(id(dir, "tue.qcow2"), wed);
        write(dir, 5, "4M");
        back_up(dir, maker, "thu.qcow2", Some("tue.qcow2")).ok();
        same(&qemu, dir, "thu.qcow2");
    }
}

/// Another backing file may hold something else where the backup has nothing.
#[test]
fn a_backup_whose_backing_file_was_changed_by_name_is_no_backup() {
    if Qemu::find().is_none() {
        return;
    }
    for (maker, backing) in [(Maker::Live, ""), (Maker::Live, "other.qcow2"), (Maker::Offline, "other.qcow2")]
    {
        let scratch = Scratch::new("bases");
        let dir = scratch.path();
        begun(dir, maker, "");
        zebu(dir, ["create", "-q", "-f", "qcow2", "other.qcow2", &SIZE.to_string()]).ok();
        let format: &[&str] = if backing.is_empty() { &[] } else { &["-F", "qcow2"] };
        zebu(dir, [&["rebase", "-u", "-b", backing], format, &["mon.qcow2"]].concat()).ok();
        assert_eq!(specific(dir, "mon.qcow2")["backup-id"], Value::Null);
        refused(dir, maker, "tue.qcow2", "mon.qcow2", &["'b'", "mon.qcow2"]);
    }
}

/// A backup by manifests alone, which the bitmap knows nothing of: it stands on the one that the bitmap goes on from, and is compared.
#[test]
fn an_increment_on_one_that_was_made_without_the_bitmap_is_compared() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bases");
    let dir = scratch.path();
    make(dir, "");
    write(dir, 1, "0");
    zebu(dir, ["backup", "--bitmap", "b", "--manifest", "full.m", DISK, "full.qcow2"]).ok();
    write(dir, 2, "1M");
    zebu(dir, ["backup", "--previous", "full.qcow2", "--previous-manifest", "full.m", DISK, "mon.qcow2"])
        .ok();
    write(dir, 3, "2M");
    refused(dir, Maker::Live, "tue.qcow2", "mon.qcow2", &["mon.qcow2", &id(dir, "full.qcow2")]);
    // One of another disk that stands on it as well.
    std::fs::copy(dir.join(DISK), dir.join("other.qcow2")).unwrap();
    zebu(dir, ["io", "-f", "qcow2", "-c", "write -P 9 7M 64k", "other.qcow2"]).ok();
    zebu(dir, ["backup", "--bitmap", "b", "--previous", "full.qcow2", "other.qcow2", "elsewhere.qcow2"]).ok();
    refused(dir, Maker::Offline, "tue.qcow2", "elsewhere.qcow2", &["does not belong to 'elsewhere.qcow2'"]);
    let out = back_up(dir, Maker::Offline, "tue.qcow2", Some("mon.qcow2")).ok();
    assert!(out.stderr.contains("goes on from 'mon.qcow2', so all"), "{out}");
    same(&qemu, dir, "tue.qcow2");
}

/// Words for a change, the change, and whether the bitmap still knows of everything.
type Change<'a> = (&'a str, &'a dyn Fn(&Path), bool);

/// QEMU has changed the image's bitmap, in each way in which it can: nobody knows any more what it goes on from. A live increment
/// is refused; one that reads the disk compares it, and is right or refused.
#[test]
fn a_bitmap_that_another_program_has_changed_tells_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    let img = |dir: &Path, line: &str| drop(qemu.img(dir, line.split(' ')).ok());
    let io = |dir: &Path, command: &str| drop(qemu.io(dir, "-f qcow2", DISK, &[command]).ok());
    let changes: [Change<'_>; 6] = [
        ("a write that it records", &|dir| io(dir, "write -P 7 5M 64k"), true),
        ("no more than opening", &|dir| io(dir, "read 0 512"), true),
        // The second one may put everything where it was before the first.
        (
            "clearing what it has recorded",
            &|dir| {
                io(dir, "write -P 7 5M 64k");
                img(dir, &format!("bitmap --clear {DISK} b"));
            },
            false,
        ),
        ("clearing", &|dir| img(dir, &format!("bitmap --clear {DISK} b")), false),
        (
            "a new one of the same name",
            &|dir| {
                img(dir, &format!("bitmap --remove {DISK} b"));
                img(dir, &format!("bitmap --add -g 64k {DISK} b"));
            },
            false,
        ),
        (
            "a write that it does not record",
            &|dir| {
                img(dir, &format!("bitmap --disable {DISK} b"));
                io(dir, "write -P 7 5M 64k");
                img(dir, &format!("bitmap --enable {DISK} b"));
            },
            false,
        ),
    ];
    for (what, change, still_fits) in changes {
        let scratch = Scratch::new("bases");
        let dir = scratch.path();
        begun(dir, Maker::Offline, "");
        change(dir);
        assert_eq!(base(dir), None, "{what}");
        refused(
            dir,
            Maker::Live,
            "tue.qcow2",
            "mon.qcow2",
            &["'b'", "mon.qcow2", "does not tell", "full backup"],
        );
        if still_fits {
            let out = back_up(dir, Maker::Offline, "tue.qcow2", Some("mon.qcow2")).ok();
            assert!(out.stderr.contains("goes on from 'mon.qcow2', so all"), "{what}: {out}");
            same(&qemu, dir, "tue.qcow2");
            assert_eq!(base(dir), Some(id(dir, "tue.qcow2")), "{what}");
        } else {
            refused(dir, Maker::Offline, "tue.qcow2", "mon.qcow2", &["does not belong to 'mon.qcow2'"]);
        }
        // A full backup begins anew.
        back_up(dir, Maker::Live, "full-again.qcow2", None).ok();
        write(dir, 6, "6M");
        back_up(dir, Maker::Live, "wed.qcow2", Some("full-again.qcow2")).ok();
        same(&qemu, dir, "wed.qcow2");
    }
}

/// A change of a bitmap is noted at once, whether a server makes it or a command.
#[test]
fn a_bitmap_that_was_cleared_or_did_not_record_goes_on_from_nothing() {
    let ctl = |dir: &Path, words: &[&str]| drop(zebu(dir, [&["ctl", "ctl.sock"], words].concat()).ok());
    for steps in [&["--clear"][..], &["--disable", "--enable"], &["--remove", "--add"]] {
        let scratch = Scratch::new("bases");
        let dir = scratch.path();
        begun(dir, Maker::Offline, "");
        for step in steps {
            zebu(dir, ["bitmap", step, DISK, "b"]).ok();
        }
        assert_eq!(base(dir), None, "{steps:?}");
        refused(dir, Maker::Live, "tue.qcow2", "mon.qcow2", &["does not tell"]);
    }
    let scratch = Scratch::new("bases");
    let dir = scratch.path();
    begun(dir, Maker::Offline, "");
    let server = Server::start(dir, &format!("--control ctl.sock -f qcow2 {DISK}"));
    ctl(dir, &["bitmap-clear", "", "b"]);
    let start = [
        "ctl",
        "ctl.sock",
        "backup-start",
        "-w",
        "--bitmap",
        "b",
        "--previous",
        "mon.qcow2",
        "",
        "tue.qcow2",
    ];
    let out = zebu(dir, start).exits(1);
    assert!(out.stderr.contains("does not tell"), "{out}");
    server.stop();
    assert_eq!(base(dir), None);
}

/// A backup that comes to nothing leaves the bitmap with the backup that it went on from.
#[test]
fn a_backup_that_was_cancelled_is_gone_on_from_by_nobody() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bases");
    let dir = scratch.path();
    begun(dir, Maker::Live, "");
    zebu(dir, ["io", "-f", "qcow2", "-c", "write -P 8 4M 8M", DISK]).ok();
    let ctl = |words: &[&str]| zebu(dir, [&["ctl", "ctl.sock"], words].concat());
    let server = Server::start(dir, &format!("--control ctl.sock -f qcow2 {DISK}"));
    let bitmaps = || -> Value { serde_json::from_str(&ctl(&["bitmaps", ""]).ok().stdout).unwrap() };
    let mon = id(dir, "mon.qcow2");
    assert_eq!(bitmaps()["bitmaps"][0]["base"], mon.as_str());
    let start =
        |target: &'static str| ["backup-start", "--bitmap", "b", "--previous", "mon.qcow2", "", target];
    ctl(&[&start("lost.qcow2")[..], &["-r", "16k"]].concat()).ok();
    ctl(&["backup-cancel", ""]).ok();
    let query = || -> Value { serde_json::from_str(&ctl(&["backup-query", ""]).ok().stdout).unwrap() };
    wait_for("the end of the backup", || (query()["status"] != "running").then_some(()));
    assert_eq!(bitmaps()["bitmaps"][0]["base"], mon.as_str());
    ctl(&[&start("tue.qcow2")[..], &["-w"]].concat()).ok();
    server.stop();
    same(&qemu, dir, "tue.qcow2");
    assert_eq!(base(dir), Some(id(dir, "tue.qcow2")));
}

/// A backup that no bitmap goes on from has no id: the same disk gives the same file.
#[test]
fn a_backup_without_a_bitmap_is_not_marked() {
    let scratch = Scratch::new("bases");
    let dir = scratch.path();
    make(dir, "");
    write(dir, 1, "0");
    for target in ["a.qcow2", "b.qcow2"] {
        zebu(dir, ["backup", DISK, target]).ok();
        assert_eq!(specific(dir, target)["backup-id"], Value::Null);
    }
    assert!(std::fs::read(dir.join("a.qcow2")).unwrap() == std::fs::read(dir.join("b.qcow2")).unwrap());
}
