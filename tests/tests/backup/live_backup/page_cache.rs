//! Pages that a backup leaves in the page cache: none, in every way but the one that is asked to.

use super::{IMAGE, MIB, TARGET, ctl, make, query, serve, wait};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use zebu_tests::lanes::{change_until, content, lanes};
use zebu_tests::mount::Mounted;
use zebu_tests::patience::{Patience, wait_until};
use zebu_tests::program::{find, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

/// Pages of a file in the page cache.
fn pages(file: &Path) -> u64 {
    let fincore = find("fincore").expect("util-linux is installed");
    let out = Command::new(fincore).args(["-n", "-o", "PAGES"]).arg(file).output().unwrap();
    String::from_utf8_lossy(&out.stdout).trim().parse().unwrap_or(0)
}

/// Drops what is in the page cache of a file.
fn drop_pages(file: &Path) {
    let file = std::fs::File::open(file).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Writes 20 MiB of noise through a server.
fn fill(dir: &Path) {
    let server = serve(dir, "");
    let mut noise = vec![0; 20 * MIB];
    Random::new(1).fill(&mut noise);
    lanes(&server, super::SIZE, 1).remove(0).client.write(0, 0, &noise).unwrap();
    server.stop();
}

#[test]
fn nothing_of_a_backup_stays_in_the_page_cache() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    fill(dir);
    for cache in ["none", "writeback"] {
        for (round, words) in [
            &[][..],
            &["-t", "none"],
            &["-t", "dontcache"],
            &["-t", "dontcache", "--compression-type", "zstd"],
            &["--compression-type", "zlib"],
            &["-t", "writeback"],
        ]
        .into_iter()
        .enumerate()
        {
            if cache == "writeback" && round % 3 != 0 {
                continue;
            }
            // A disk that is busy with others keeps all waiting, and so does a processor that uses some pages just then.
            let patience = Patience::begin();
            let mut attempt = 0;
            while let Some(what) = what_stays(&qemu, dir, cache, words, &format!("{cache}-{round}-{attempt}"))
            {
                attempt += 1;
                patience.pause(format_args!("serve -t {cache}, {words:?}: {what}"));
            }
        }
    }
}

/// Makes a backup. Tells what stays in the page cache, or was there all at once, in ways that are to leave nothing.
fn what_stays(qemu: &Qemu, dir: &Path, cache: &str, words: &[&str], name: &str) -> Option<String> {
    /// Pages of all data of the disk.
    const ALL: u64 = 20 * 256;
    let what = format!("serve -t {cache}, {words:?}");
    let source = dir.join(IMAGE);
    drop_pages(&source);
    let found = pages(&source);
    let server = serve(dir, &format!("-t {cache}"));
    let name = format!("{name}-{TARGET}");
    let target = dir.join(&name);
    ctl(dir, &[&["backup-start", "", &name, "-r", "40M"], words].concat()).ok();
    let begun = query(dir);
    let mut most = 0;
    while query(dir)["status"] == "running" {
        most = most.max(pages(&target));
    }
    let ended = query(dir);
    assert_eq!(ended["status"], "completed", "{what}: {ended}");
    assert_eq!(ended["target-cache"], begun["target-cache"], "{what}");
    let mut is_behind = false;
    match ended["target-cache"].as_str().unwrap() {
        "none" => assert_eq!(most, 0, "{what}: while it ran"),
        "dontcache" | "drop-behind" => is_behind = true,
        "writeback" => assert!(pages(&target) > 4 * 256, "{what}: {ended}"),
        other => panic!("{what}: {other}"),
    }
    if words.contains(&"writeback") {
        assert_eq!(ended["target-cache"], "writeback");
    } else {
        // The kernel drops some of them when they have been written.
        wait_until(format_args!("{what}: no pages: {ended}"), || pages(&target) == 0);
    }
    if let ["-t", asked @ ("none" | "dontcache"), ..] = words {
        let is_as_asked = ended["target-cache"] == *asked || ended["target-cache"] == "drop-behind";
        assert!(is_as_asked, "{what}: {ended}");
    }
    assert_eq!(ended["source-cache"] == "none", cache == "none", "{what}: {ended}");
    // The server itself reads the tables of an image that is not open with O_DIRECT, and the kernel reads ahead.
    let allowed = if cache == "none" { found } else { found + 1024 };
    let left = pages(&source);
    server.stop();
    qemu.check_clean(dir, &name).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(qemu.read_all(dir, &name, None) == qemu.read_all(dir, IMAGE, None), "{what}");
    std::fs::remove_file(&target).unwrap();
    if is_behind && most >= ALL {
        // What is under way to the disk is less.
        return Some(format!("{most} pages of the target while it ran"));
    }
    (left > allowed).then(|| format!("{left} pages of the source, {allowed} allowed"))
}

#[test]
fn a_file_system_in_memory_is_told_of_and_works() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(tmpfs) = Mounted::tmpfs(128 << 20) else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    fill(dir);
    let server = serve(dir, "");
    let target = tmpfs.path().join(TARGET);
    let name = target.to_str().unwrap();
    for asked in ["none", "dontcache"] {
        let refused = ctl(dir, &["backup-start", "", name, "-t", asked]).exits(1);
        assert!(refused.stderr.contains("writeback") && !target.exists(), "{refused}");
    }
    let told = ctl(dir, &["backup-start", "-w", "", name]).ok();
    assert!(told.stderr.contains("in memory"), "{told}");
    assert_eq!(query(dir)["target-cache"], "memory");
    server.stop();
    qemu.check_clean(dir, name).unwrap();
    assert!(qemu.read_all(dir, name, None) == qemu.read_all(dir, IMAGE, None));
}

/// Three at once share the memory of the server, and a fourth that would have too little is refused by name.
#[test]
fn backups_share_one_budget_of_memory() {
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    fill(dir);
    let names = ["disk.qcow2", "b.qcow2", "c.qcow2", "d.qcow2"];
    for name in &names[1..] {
        std::fs::copy(dir.join(IMAGE), dir.join(name)).unwrap();
    }
    let options = format!("--control ctl.sock --max-memory 64M -f qcow2 {}", names.join(" "));
    let options = format!("{options} --export-name disk --export-name b --export-name c --export-name d");
    let server = zebu_tests::server::Server::start(dir, &options);
    let mut sum = 0;
    for name in &names[..3] {
        let export = name.trim_end_matches(".qcow2");
        let state = |export: &str| -> Value {
            serde_json::from_str(&ctl(dir, &["backup-query", export]).ok().stdout).unwrap()
        };
        ctl(dir, &["backup-start", export, &format!("{export}-{TARGET}"), "-r", "64k"]).ok();
        sum += state(export)["memory"].as_u64().unwrap();
    }
    assert!(sum <= 32 << 20, "{sum}");
    let refused = ctl(dir, &["backup-start", "d", "fourth.qcow2"]).exits(1);
    assert!(refused.stderr.contains("--max-memory") && !dir.join("fourth.qcow2").exists(), "{refused}");
    ctl(dir, &["backup-cancel", "disk"]).ok();
    ctl(dir, &["backup-start", "d", "fourth.qcow2", "-w"]).ok();
    zebu(dir, ["check", "-q", "fourth.qcow2"]).ok();
    server.stop();
}

/// In every way, the target holds the disk as it was at the start while clients write.
#[test]
fn every_way_holds_the_disk_as_it_was() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    let server = serve(dir, "");
    let mut lanes = lanes(&server, super::SIZE, 9);
    for (round, cache) in ["none", "dontcache", "writeback"].into_iter().enumerate() {
        for lane in &mut lanes {
            (0..12).for_each(|_| lane.change());
        }
        let before = content(&lanes);
        let name = format!("{round}-{TARGET}");
        let packed = ["--compression-type", "zlib"];
        let words = [&["backup-start", "", &name, "-r", "20M", "-t", cache][..], &packed[..2 * (round % 2)]];
        let started = zebu(dir, [&["ctl", "ctl.sock"][..], &words.concat()].concat());
        if started.stderr.contains("O_DIRECT") {
            eprintln!("skipped: no O_DIRECT here");
            continue;
        }
        started.ok();
        let mut ended = Value::Null;
        change_until(&mut lanes, &false.into(), || ended = wait(dir));
        assert_eq!(ended["status"], "completed", "{cache}: {ended}");
        qemu.check_clean(dir, &name).unwrap_or_else(|e| panic!("{cache}: {e}"));
        assert!(qemu.read_all(dir, &name, None) == before, "{cache}");
    }
    server.stop();
}
