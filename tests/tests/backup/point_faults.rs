//! Stores of points where something is wrong: what is damaged harms nothing else, and each message names the way out.

use crate::point_scene::{DISK, MIB, STORE, Scene};
use serde_json::Value;
use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_tests::program::{Finished, finish, zebu, zebu_program};

/// Changes a bit.
fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// The image and the hashes of the top layer of a point, by its index.
fn top(scene: &Scene, index: usize) -> [PathBuf; 2] {
    let bytes = std::fs::read(&scene.objects("points")[index]).unwrap();
    let manifest: Value = serde_json::from_slice(&bytes).unwrap();
    let name = |key: &str| manifest["layers"][0][key].as_str().unwrap().to_owned();
    let store = scene.dir().join("backups/vm1");
    [
        store.join(format!("layers/{}.qcow2", name("sha256"))),
        store.join(format!("hashes/{}.hashes", name("hashes"))),
    ]
}

fn json_of(finished: &Finished) -> Value {
    serde_json::from_str(&finished.stdout).unwrap()
}

#[test]
fn a_changed_manifest_is_seen() {
    let Some(mut scene) = Scene::new("points-digest", 4 * MIB, 31) else { return };
    for _ in 0..2 {
        scene.write();
        scene.take(&[]);
    }
    let manifest = scene.objects("points")[1].clone();
    let text = std::fs::read_to_string(&manifest).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    let layer = |index: usize, key: &str| value["layers"][index][key].as_str().unwrap().to_owned();
    let swap = |text: &str, key: &str| {
        let (a, b) = (layer(0, key), layer(1, key));
        text.replace(&a, "x").replace(&b, &a).replace("\"x\"", &format!("\"{b}\""))
    };
    let time = value["time"].to_string();
    let later = (value["time"].as_u64().unwrap() + 86_400).to_string();
    for wrong in [text.replace(&time, &later), swap(&swap(&text, "sha256"), "hashes")] {
        assert_ne!(wrong, text);
        std::fs::write(&manifest, &wrong).unwrap();
        for words in [["verify", STORE], ["points", STORE]] {
            let found = scene.zebu(&words).exits(2);
            assert!(
                found.stderr.contains("points/00000002.json: its text is not what its digest"),
                "{found}"
            );
        }
        let refused = scene.zebu(&["restore", "-q", STORE, "new.raw"]).exits(1);
        assert!(refused.stderr.contains("digest"), "{refused}");
    }
    std::fs::write(&manifest, text).unwrap();
    scene.zebu(&["verify", STORE]).ok();
    scene.check_all();
}

#[test]
fn a_disabled_bitmap_is_left_alone_and_said() {
    let Some(mut scene) = Scene::new("points-disabled", 4 * MIB, 32) else { return };
    let bitmap = ["--bitmap", "b"];
    scene.write();
    zebu(scene.dir(), ["bitmap", "--add", "--disable", DISK, "b"]).ok();
    let made = scene.zebu(&["backup", "--output", "json", "--bitmap", "b", DISK, STORE]).ok();
    assert!(made.stderr.contains("zebu bitmap --enable"), "{made}");
    assert_eq!(json_of(&made)["way"], "full");
    let copy = scene.copy();
    scene.copies.insert(json_of(&made)["point"].as_str().unwrap().to_owned(), copy);
    scene.write();
    let report = scene.take(&bitmap);
    assert!(report["way"] == "scan" && report["reason"].as_str().unwrap().contains("disabled"), "{report}");
    // What it held is still there, and it records nothing yet.
    let info = scene.json(&["info", DISK]);
    let flags = &info["format-specific"]["data"]["bitmaps"][0]["flags"];
    assert!(!flags.to_string().contains("auto"), "{info}");
    zebu(scene.dir(), ["bitmap", "--enable", DISK, "b"]).ok();
    let report = scene.take(&bitmap);
    assert!(report["reason"].as_str().unwrap().contains("does not go on"), "{report}");
    scene.write();
    assert_eq!(scene.take(&bitmap)["way"], "bitmap");
    scene.check_all();
}

#[test]
fn a_bitmap_that_does_not_tell_the_truth_gives_a_compared_point() {
    let Some(mut scene) = Scene::new("points-untrue", 4 * MIB, 33) else { return };
    let bitmap = ["--bitmap", "b"];
    zebu(scene.dir(), ["io", "-c", "write -P 3 0 4M", DISK]).ok();
    scene.take(&bitmap);
    // A program that knows nothing of bitmaps writes where the data is.
    let map = scene.json(&["map", DISK]);
    let image = scene.scratch.file(DISK);
    let file = OpenOptions::new().write(true).open(image).unwrap();
    let offset = map[0]["offset"].as_u64().unwrap();
    file.write_all_at(&vec![9; MIB as usize], offset).unwrap();
    let report = scene.take(&bitmap);
    assert!(
        report["way"] == "scan" && report["reason"].as_str().unwrap().contains("does not belong"),
        "{report}"
    );
    scene.write();
    assert_eq!(scene.take(&bitmap)["way"], "bitmap");
    scene.check_all();
}

#[test]
fn nothing_stands_on_a_damaged_layer() {
    let Some(mut scene) = Scene::new("points-base", 8 * MIB, 34) else { return };
    for number in [0, 1] {
        // Of the layer, and of its hashes: the next point is a full one by itself.
        scene.write();
        scene.take(&[]);
        let damaged = top(&scene, scene.points().len() - 1)[number].clone();
        let whole = std::fs::read(&damaged).unwrap();
        for at in 0..whole.len() as u64 / 512 {
            flip(&damaged, at * 512 + 300);
        }
        scene.write();
        let report = scene.take(&[]);
        let reason = report["reason"].as_str().unwrap().to_owned();
        assert!(report["way"] == "full" && reason.contains("can't stand on"), "{report}");
        scene.check(report["point"].as_str().unwrap());
        scene.write();
        assert_eq!(scene.take(&[])["way"], "scan");
        std::fs::write(&damaged, whole).unwrap();
    }
    scene.zebu(&["verify", STORE]).ok();

    // A change that only a verification sees is noted.
    let [damaged, _] = top(&scene, scene.points().len() - 1);
    let whole = std::fs::read(&damaged).unwrap();

    flip(&damaged, 8 + 80);
    scene.zebu(&["verify", STORE]).exits(2);
    let listed = scene.zebu(&["points", "--output", "json", STORE]).exits(2);
    let points = json_of(&listed)["points"].as_array().unwrap().clone();
    let last = points.last().unwrap();
    assert!(
        last["damaged"].as_str().unwrap().starts_with("layers/") && last["verified"].is_null(),
        "{listed}"
    );
    assert!(points[0]["damaged"].is_null() && points[0]["verified"].is_string(), "{listed}");
    let merged = scene.zebu(&["compact", STORE, "--depth", "1"]);
    assert!(merged.code == Some(0) || merged.stderr.contains("found it damaged"), "{merged}");
    let report = scene.take(&[]);
    assert!(
        report["way"] == "full" && report["reason"].as_str().unwrap().contains("'zebu verify' found"),
        "{report}"
    );
    std::fs::write(&damaged, whole).unwrap();
    scene.zebu(&["verify", STORE]).ok();
    scene.zebu(&["points", STORE]).ok();

    // Nobody needs damage for it.
    scene.write();
    assert_eq!(scene.take(&[])["way"], "scan");
    let report = scene.take(&["--full"]);
    assert!(report["way"] == "full" && report["parent"].is_null(), "{report}");
    scene.check_all();
}

#[test]
fn a_damaged_manifest_blocks_nothing_else() {
    let Some(mut scene) = Scene::new("points-blocked", 4 * MIB, 35) else { return };
    for _ in 0..4 {
        scene.write();
        scene.take(&[]);
    }
    let names = scene.points();
    std::fs::write(&scene.objects("points")[1], "{").unwrap();
    // The point is published, which the exit code and the report tell apart from a failure.
    scene.write();
    let copy = scene.copy();
    let made = scene.zebu(&["backup", "--output", "json", "--keep-last", "2", DISK, STORE]).exits(3);
    let report = json_of(&made);
    let newest = report["point"].as_str().unwrap().to_owned();
    scene.copies.insert(newest.clone(), copy);
    assert!(report["failed"].as_str().unwrap().contains("points/00000002.json"), "{report}");
    assert!(report["damaged"][0].as_str().unwrap().contains("forget store:backups/vm1@00000002"), "{report}");
    assert!(made.stderr.contains(&format!("point {newest} is published")), "{made}");
    assert_eq!(report["forgotten"], serde_json::json!([names[0], names[2]]));
    // Without rules nothing failed.
    let report = scene.take(&[]);
    assert!(report["failed"].is_null() && report["damaged"].is_array(), "{report}");
    scene.zebu(&["forget", &format!("{STORE}@{}", report["point"].as_str().unwrap())]).exits(2);
    // The objects stay that it may need.
    let layers = scene.objects("layers");
    let pruned = scene.zebu(&["forget", "--prune", "--output", "json", STORE]).exits(2);
    assert_eq!(json_of(&pruned)["pruned"]["objects"], 0, "{pruned}");
    assert!(json_of(&pruned)["pruned"]["spared-objects"].as_u64().unwrap() > 0, "{pruned}");
    assert!(pruned.stderr.contains("may name them"), "{pruned}");
    assert_eq!(scene.objects("layers"), layers);
    // It goes by its number, or by its name.
    scene.zebu(&["forget", &format!("{STORE}@00000009")]).exits(1);
    scene.zebu(&["forget", &format!("{STORE}@{}", names[1])]).ok();
    assert_eq!(scene.points().len(), 2);
    let pruned = scene.json(&["forget", "--prune", STORE]);
    assert!(pruned["pruned"]["spared-objects"] == 0 && pruned["pruned"]["objects"] != 0, "{pruned}");
    scene.check_all();
    scene.zebu(&["verify", STORE]).ok();
}

/// Runs the command without the right to write where permissions forbid it, which root has.
fn without_rights(dir: &Path, words: &[&str]) -> Finished {
    let is_root = rustix::process::geteuid().is_root();
    let mut command = Command::new(if is_root { Path::new("setpriv") } else { zebu_program() });
    if is_root {
        command.arg("--bounding-set=-dac_override").arg(zebu_program());
    }
    command.args(words).current_dir(dir);
    finish(command)
}

#[test]
fn a_store_that_can_only_be_read_is_verified() {
    let Some(mut scene) = Scene::new("points-read-only", 4 * MIB, 36) else { return };
    for _ in 0..2 {
        scene.write();
        scene.take(&[]);
    }
    let store = scene.dir().join("backups/vm1");
    let folders: Vec<PathBuf> = std::fs::read_dir(&store)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .chain([store.clone()])
        .collect();
    let allow = |mode: u32| {
        for folder in &folders {
            std::fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
        }
    };
    allow(0o500);
    let verified = without_rights(scene.dir(), &["verify", "--output", "json", STORE]);
    let restored = without_rights(scene.dir(), &["restore", "-q", STORE, "readonly.raw"]);
    let listed = without_rights(scene.dir(), &["points", STORE]);
    let refused = without_rights(scene.dir(), &["backup", DISK, STORE]);
    allow(0o700);
    let report = json_of(&verified.clone().ok());
    assert!(report["points"][0]["status"] == "clean" && report["damaged"] == 0, "{report}");
    assert!(report["not-noted"].as_str().unwrap().contains("verified/"), "{report}");
    assert!(verified.stderr.contains("could not be written to the store"), "{verified}");
    restored.ok();
    listed.ok();
    assert!(refused.exits(1).stderr.contains("ermission denied"));
    scene.zebu(&["verify", STORE]).ok();
    scene.check_all();
}

#[test]
fn links_in_a_store_lead_nowhere() {
    let Some(mut scene) = Scene::new("points-links", 4 * MIB, 37) else { return };
    for _ in 0..2 {
        scene.write();
        scene.take(&[]);
    }
    let store = scene.dir().join("backups/vm1");
    let away = scene.dir().join("away");
    std::fs::create_dir(&away).unwrap();
    // A layer, its hashes, a manifest, and a note.
    let [layer, hashes] = top(&scene, 1);
    let manifest = scene.objects("points")[1].clone();
    for path in [layer, hashes, manifest] {
        let moved = away.join(path.file_name().unwrap());
        std::fs::rename(&path, &moved).unwrap();
        symlink(&moved, &path).unwrap();
        let found = scene.zebu(&["verify", STORE]).exits(2);
        assert!(found.stderr.contains("link"), "{found}");
        let refused = scene.zebu(&["restore", "-q", STORE, "new.raw"]).exits(1);
        assert!(refused.stderr.contains("link"), "{refused}");
        scene.check(scene.copies.keys().next().unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&moved, &path).unwrap();
        scene.zebu(&["verify", STORE]).ok();
    }
    // The lock of replacements, which would be made where it leads.
    let _ = std::fs::remove_file(store.join("lock"));
    symlink(away.join("lock"), store.join("lock")).unwrap();
    scene.zebu(&["forget", &format!("{STORE}@{}", scene.points()[0])]).ok();
    scene.zebu(&["compact", "--depth", "1", STORE]).exits(1);
    assert!(!away.join("lock").exists());
    std::fs::remove_file(store.join("lock")).unwrap();
    // What unfinished work left: a link holds nothing, and what it leads to stays.
    std::fs::write(away.join("mine"), "mine").unwrap();
    symlink(away.join("mine"), store.join("claims/0.json")).unwrap();
    symlink(&away, store.join("tmp/0")).unwrap();
    symlink(away.join("mine"), store.join("tmp/1.part")).unwrap();
    scene.zebu(&["forget", "--prune", STORE]).ok();
    assert!(scene.objects("claims").is_empty() && scene.objects("tmp").is_empty());
    assert!(away.join("mine").exists());
    // A part of the store.
    for part in ["tmp", "layers", "verified"] {
        std::fs::rename(store.join(part), away.join(part)).unwrap();
        symlink(away.join(part), store.join(part)).unwrap();
        let point = format!("{STORE}@{}", scene.copies.keys().next_back().unwrap());
        for words in
            [vec!["points", STORE], vec!["backup", DISK, STORE], vec!["restore", "-q", &point, "n.raw"]]
        {
            let refused = scene.zebu(&words).exits(1);
            assert!(refused.stderr.contains(&format!("'{part}' is a link")), "{refused}");
        }
        std::fs::remove_file(store.join(part)).unwrap();
        std::fs::rename(away.join(part), store.join(part)).unwrap();
    }
    // The store itself may be reached by one.
    symlink("backups", scene.dir().join("elsewhere")).unwrap();
    scene.zebu(&["verify", "store:elsewhere/vm1"]).ok();
    scene.check_all();
}

#[test]
fn a_mistyped_bitmap_makes_no_second_one() {
    let Some(mut scene) = Scene::new("points-mistyped", 4 * MIB, 38) else { return };
    scene.write();
    scene.take(&["--bitmap", "nightly"]);
    scene.write();
    let refused = scene.zebu(&["backup", "--bitmap", "nigthly", DISK, STORE]).exits(1);
    assert!(refused.stderr.contains("'nightly' goes on from the last point"), "{refused}");
    assert!(refused.stderr.contains("--create-bitmap"), "{refused}");
    let info = scene.json(&["info", DISK]);
    assert_eq!(info["format-specific"]["data"]["bitmaps"].as_array().unwrap().len(), 1, "{info}");
    // A point without it comes between; it is still that of this store.
    scene.take(&[]);
    scene.zebu(&["backup", "--bitmap", "nigthly", DISK, STORE]).exits(1);
    // Another store has a bitmap of its own, and so has one that is asked for.
    scene.zebu(&["backup", "-q", "--bitmap", "weekly", DISK, "store:backups/other"]).ok();
    let report = scene.take(&["--bitmap", "second", "--create-bitmap"]);
    assert_eq!(report["way"], "scan", "{report}");
    // A disk that lost its bitmap goes on by itself.
    for name in ["nightly", "second", "weekly"] {
        zebu(scene.dir(), ["bitmap", "--remove", DISK, name]).ok();
    }
    let report = scene.take(&["--bitmap", "nightly"]);
    assert!(report["reason"].as_str().unwrap().contains("begins now"), "{report}");
    scene.check_all();
}

#[test]
fn no_store_is_made_for_a_disk_that_cannot_be_had() {
    let Some(scene) = Scene::new("points-order", 4 * MIB, 39) else { return };
    std::fs::write(scene.scratch.file("plain.raw"), vec![1; 65536]).unwrap();
    let secret = "secret,id=s,data=x";
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    scene.zebu(&["create", "-f", "qcow2", "--object", secret, "-o", options, "secret.qcow2", "1M"]).ok();
    let encrypted = "driver=qcow2,file.filename=secret.qcow2,encrypt.key-secret=s";
    for (words, reason) in [
        (vec!["backup", "missing.qcow2", STORE], "missing.qcow2"),
        (vec!["backup", "-f", "qcow2", "plain.raw", STORE], "plain.raw"),
        (vec!["backup", "-f", "raw", "--bitmap", "b", "plain.raw", STORE], "no bitmaps"),
        (vec!["backup", "--object", secret, "--image-opts", encrypted, STORE], "--decrypt"),
        (vec!["backup", "-l", "none", DISK, STORE], "none"),
    ] {
        let refused = scene.zebu(&words).exits(1);
        assert!(refused.stderr.contains(reason), "{refused}");
        assert!(!scene.dir().join("backups").exists(), "{refused}");
    }
}
