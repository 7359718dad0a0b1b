//! Stores of points in a folder: every point shows what the disk was, whatever was forgotten, pruned, merged, killed or damaged.
//!
//! `ZEBU_KILL_ROUNDS` sets the number of kills.

use crate::point_scene::{DISK, MIB, STORE, Scene};
use serde_json::Value;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::server::kill_until_free;

#[test]
fn every_point_shows_what_the_disk_was() {
    for (seed, size, bitmap) in [(1, 24 * MIB + 3 * 512, true), (2, 16 * MIB, false)] {
        let Some(mut scene) = Scene::new("points", size, seed) else { return };
        let options: &[&str] = if bitmap { &["--bitmap", "nightly"] } else { &[] };
        for round in 0..8 {
            scene.write();
            let report = scene.take(options);
            let way = match round {
                0 => "full",
                _ if bitmap => "bitmap",
                _ => "scan",
            };
            assert_eq!(report["way"], way, "{report}");
            if round == 3 {
                scene.zebu(&["forget", "--keep-last", "2", STORE]).ok();
                scene.zebu(&["compact", "--depth", "1", STORE]).ok();
                scene.check_all();
                scene.zebu(&["forget", "--prune", STORE]).ok();
            }
            scene.check_all();
        }
        assert_eq!(scene.points().len(), 6);
        scene.zebu(&["verify", STORE]).ok();
        let list = scene.json(&["points", STORE]);
        let points = list["points"].as_array().unwrap();
        assert!(points.iter().all(|point| point["verified"].is_string()), "{list}");
        assert!(
            points.windows(2).all(|two| two[0]["sequence"].as_u64() < two[1]["sequence"].as_u64()),
            "{list}"
        );

        // The two oldest stand on two layers of which the first was merged; all others go.
        let before = scene.objects("layers").len();
        let report = scene.json(&["forget", "--prune", "--keep-last", "1", STORE]);
        assert_eq!(report["removed"].as_array().unwrap().len(), 5);
        let merged = scene.json(&["compact", "--depth", "1", STORE]);
        assert_eq!((&merged["made"], &merged["points"]), (&Value::from(1), &Value::from(1)), "{merged}");
        scene.check_all();
        scene.zebu(&["forget", "--prune", STORE]).ok();
        assert!(before > 1);
        assert_eq!((scene.objects("layers").len(), scene.objects("hashes").len()), (1, 1));
        scene.check_all();
        let layer = scene.objects("layers")[0].display().to_string();
        scene.qemu.check_clean(scene.dir(), &layer).unwrap();
        // What was merged is still what the bitmap goes on from.
        scene.write();
        let report = scene.take(options);
        assert_eq!(report["way"], if bitmap { "bitmap" } else { "scan" }, "{report}");
        scene.check_all();
        for part in ["claims", "marks", "tmp"] {
            assert!(scene.objects(part).is_empty(), "{part}");
        }
    }
}

#[test]
fn layers_that_were_not_merged_are_a_chain_for_qemu() {
    let Some(mut scene) = Scene::new("points-qemu", 8 * MIB, 3) else { return };
    let mut report = Value::Null;
    for _ in 0..3 {
        scene.write();
        report = scene.take(&[]);
    }
    let manifest = std::fs::read(&scene.objects("points")[2]).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let top = format!("backups/vm1/layers/{}.qcow2", manifest["layers"][0]["sha256"].as_str().unwrap());
    let copy = scene.copies[report["point"].as_str().unwrap()].display().to_string();
    scene.qemu.img(scene.dir(), ["compare", "-f", "raw", "-F", "qcow2", &copy, &top]).ok();
}

#[test]
fn ranges_that_changed_are_listed() {
    let Some(mut scene) = Scene::new("points-delta", 8 * MIB, 4) else { return };
    let first = scene.take(&[]);
    zebu(scene.dir(), ["io", "-c", "write -P 7 1M 64k", "-c", "write -P 8 3145728 100", DISK]).ok();
    let second = scene.take(&[]);
    let name = |report: &Value| format!("{STORE}@{}", report["point"].as_str().unwrap());
    let expected = serde_json::json!([
        {"offset": MIB, "length": 65536}, {"offset": 3 * MIB, "length": 65536}
    ]);
    let delta = scene.json(&["delta", &name(&first), &name(&second)]);
    assert_eq!((&delta["ranges"], &delta["changed"]), (&expected, &Value::from(131_072)));
    scene.zebu(&["restore", "-q", &name(&first), "first.qcow2"]).ok();
    let delta = scene.json(&["delta", "first.qcow2", &name(&second)]);
    assert_eq!(delta["ranges"], expected);
    assert_eq!(scene.json(&["delta", "first.qcow2", &name(&first)])["changed"], 0);
}

#[test]
fn damage_is_found_and_harms_only_what_needs_it() {
    let Some(mut scene) = Scene::new("points-damage", 8 * MIB, 5) else { return };
    for _ in 0..3 {
        scene.write();
        scene.take(&[]);
    }
    let points = scene.points();
    let layers = |scene: &Scene, index: usize| {
        let bytes = std::fs::read(&scene.objects("points")[index]).unwrap();
        let manifest: Value = serde_json::from_slice(&bytes).unwrap();
        let layer = &manifest["layers"][0];
        let name = |key: &str| layer[key].as_str().unwrap().to_owned();
        let store = scene.dir().join("backups/vm1");
        [
            store.join(format!("layers/{}.qcow2", name("sha256"))),
            store.join(format!("hashes/{}.hashes", name("hashes"))),
        ]
    };
    let flip = |path: &Path, at: u64| {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    };
    scene.zebu(&["verify", STORE]).ok();
    for (index, [layer, hashes]) in (0..3).map(|index| (index, layers(&scene, index))) {
        for damaged in [&layer, &hashes] {
            for way in ["flip", "cut", "lose"] {
                let whole = std::fs::read(damaged).unwrap();
                match way {
                    "flip" => flip(damaged, whole.len() as u64 * 2 / 3),
                    "cut" => std::fs::write(damaged, &whole[..whole.len() / 2]).unwrap(),
                    _ => std::fs::remove_file(damaged).unwrap(),
                }
                let what = format!("{way} {}", damaged.display());
                let found = scene.zebu(&["verify", "--output", "json", STORE]).exits(2);
                let report: Value = serde_json::from_str(&found.stdout).unwrap();
                let own = damaged.file_name().unwrap().to_str().unwrap();
                assert!(found.stderr.contains(own) && found.stderr.contains(STORE), "{what}: {found}");
                for (number, (verdict, point)) in
                    report["points"].as_array().unwrap().iter().zip(&points).enumerate()
                {
                    let needs = number >= index;
                    assert_eq!(verdict["status"] == "damaged", needs, "{what}: {report}");
                    if !needs {
                        scene.check(point);
                    }
                }
                std::fs::write(damaged, whole).unwrap();
            }
        }
    }
    scene.zebu(&["verify", STORE]).ok();

    // A read of a wrong layer fails, and nothing wrong comes out.
    let [layer, _] = layers(&scene, 2);
    let whole = std::fs::read(&layer).unwrap();
    std::fs::remove_file(&layer).unwrap();
    let name = format!("{STORE}@{}", points[2]);
    let failed = scene.zebu(&["restore", "-q", &name, "new.raw"]).exits(1);
    assert!(failed.stderr.contains(&points[2]), "{failed}");
    assert!(!scene.scratch.file("new.raw").exists());
    // Nor is anything lost that was to be replaced.
    std::fs::write(scene.scratch.file("old.raw"), "mine").unwrap();
    scene.zebu(&["restore", "-q", "--force", &name, "old.raw"]).exits(1);
    assert_eq!(std::fs::read(scene.scratch.file("old.raw")).unwrap(), b"mine");
    let whole_point = format!("{STORE}@{}", points[0]);
    let own = format!("backups/vm1/layers/{}", layer.file_name().unwrap().to_str().unwrap());
    std::fs::write(&layer, &whole).unwrap();
    let refused = scene.zebu(&["restore", "-q", "--force", "-O", "raw", &whole_point, &own]).exits(1);
    assert!(refused.stderr.contains("part of the store"), "{refused}");
    std::fs::remove_file(&layer).unwrap();
    scene.zebu(&["restore", "-q", "--force", &whole_point, "old.raw"]).ok();
    assert_eq!(std::fs::metadata(scene.scratch.file("old.raw")).unwrap().len(), 8 * MIB);
    // The next point can't stand on it, and says so.
    let report = scene.take(&[]);
    assert_eq!(report["way"], "full", "{report}");
    scene.check(report["point"].as_str().unwrap());
    std::fs::write(&layer, whole).unwrap();

    // A manifest.
    let manifest = scene.objects("points")[1].clone();
    let text = std::fs::read_to_string(&manifest).unwrap();
    for wrong in [
        text[..text.len() / 2].to_owned(),
        text.replacen("\"version\": 2", "\"version\": 9", 1),
        text.replacen("\"time\": 1", "\"time\": 2", 1),
        text.replacen("\"sha256\": \"", "\"sha256\": \"../", 1),
        text.replace(&(8 * MIB).to_string(), "99999999999999999999"),
    ] {
        std::fs::write(&manifest, &wrong).unwrap();
        let listed = scene.zebu(&["points", STORE]).exits(2);
        assert!(
            listed.stderr.contains("points/00000002.json") && listed.stdout.contains(&points[0]),
            "{listed}"
        );
        scene.zebu(&["verify", STORE]).exits(2);
        scene.check(&points[0]);
        scene.check(&points[2]);
        // Which of the others it needs nobody knows, so that all stay.
        let before = scene.objects("layers");
        let spared = scene.zebu(&["forget", "--prune", STORE]).exits(2);
        assert!(spared.stderr.contains("forget store:backups/vm1@00000002"), "{spared}");
        assert_eq!(scene.objects("layers"), before);
        scene.zebu(&["compact", "--depth", "1", STORE]).exits(2);
        scene.take(&[]);
    }
    std::fs::write(&manifest, text).unwrap();
    scene.check_all();
}

#[test]
fn wrong_command_lines_are_refused_by_name() {
    let Some(mut scene) = Scene::new("points-usage", 4 * MIB, 6) else { return };
    let refuse = |scene: &Scene, words: &[&str], word: &str| {
        let refused = scene.zebu(words);
        assert!(refused.code != Some(0) && refused.stderr.contains(word), "{refused}");
    };
    refuse(&scene, &["points", STORE], "there is no store of points");
    refuse(&scene, &["points", "backups/vm1"], "store:");
    refuse(&scene, &["verify", "store:x/.."], "missing");
    scene.take(&[]);
    let point = scene.points()[0].clone();
    let name = format!("{STORE}@{point}");
    refuse(&scene, &["backup", DISK, &name], "leave '@' out");
    refuse(&scene, &["backup", DISK, STORE, "--manifest", "m"], "--manifest");
    refuse(&scene, &["backup", DISK, "plain.qcow2", "--keep-last", "1"], "--keep-last");
    refuse(&scene, &["forget", STORE], "nothing to do");
    refuse(&scene, &["restore", &name, "restored"], "-O raw");
    refuse(&scene, &["restore", &format!("{STORE}@none"), "r.raw"], "no point 'none'");
    std::fs::write(scene.scratch.file("old.raw"), "old").unwrap();
    refuse(&scene, &["restore", &name, "old.raw"], "--force");
    refuse(&scene, &["convert", "-O", "raw", DISK, STORE], "by backup only");
    refuse(&scene, &["create", STORE, "1M"], "backup only");
    refuse(&scene, &["serve", "--nbd", "unix:s", "--overlay", "o.qcow2", STORE], "store:...@POINT");
    std::fs::create_dir(scene.scratch.file("other")).unwrap();
    std::fs::write(scene.scratch.file("other/file"), "").unwrap();
    refuse(&scene, &["backup", DISK, "store:other"], "something else");
    // Other commands read points.
    let info = scene.json(&["info", &name]);
    assert_eq!((&info["format"], &info["virtual-size"]), (&Value::from("raw"), &Value::from(4 * MIB)));
    scene.zebu(&["compare", DISK, &name]).ok();
    scene.zebu(&["forget", &name]).ok();
    assert!(scene.points().is_empty());
}

#[test]
fn a_disk_that_grew_and_a_crashed_bitmap_give_points_that_say_so() {
    let Some(mut scene) = Scene::new("points-ways", 4 * MIB, 7) else { return };
    let bitmap = ["--bitmap", "b"];
    scene.write();
    assert_eq!(scene.take(&[])["way"], "full");
    // It begins with the point, which reads all.
    let report = scene.take(&bitmap);
    assert!(report["way"] == "scan" && report["reason"].as_str().unwrap().contains("begins now"), "{report}");
    scene.write();
    let report = scene.take(&bitmap);
    assert!(report["way"] == "bitmap" && report["reason"].is_null(), "{report}");
    // A point without it comes between.
    scene.write();
    scene.take(&[]);
    scene.write();
    let report = scene.take(&bitmap);
    assert!(
        report["way"] == "scan" && report["reason"].as_str().unwrap().contains("does not go on"),
        "{report}"
    );
    scene.write();
    assert_eq!(scene.take(&bitmap)["way"], "bitmap");
    // A crash: QEMU has it open for writing, and is killed.
    let crash = ["write -P 9 0 64k", "flush", "sigraise 9"];
    assert_eq!(scene.qemu.io(scene.dir(), "-f qcow2", DISK, &crash).code, None);
    let report = scene.take(&bitmap);
    assert!(
        report["way"] == "scan" && report["reason"].as_str().unwrap().contains("inconsistent"),
        "{report}"
    );
    scene.write();
    assert_eq!(scene.take(&bitmap)["way"], "bitmap");
    scene.zebu(&["resize", DISK, "5M"]).ok();
    scene.size = 5 * MIB;
    let report = scene.take(&bitmap);
    assert!(report["way"] == "full" && report["reason"].as_str().unwrap().contains("bytes"), "{report}");
    scene.check_all();
    scene.zebu(&["verify", STORE]).ok();
}

#[test]
fn two_backups_at_once_are_two_points() {
    let Some(mut scene) = Scene::new("points-race", 16 * MIB, 8) else { return };
    scene.write();
    scene.take(&[]);
    for _ in 0..4 {
        scene.write();
        let copy = scene.copy();
        let begin = || {
            let mut command = Command::new(zebu_program());
            command.args(["backup", "-U", "--output", "json", DISK, STORE]).current_dir(scene.scratch.path());
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let running = [begin(), begin(), begin()];
        // A prune beside them harms none.
        scene.zebu(&["forget", "--prune", STORE]).ok();
        for child in running {
            let done = child.wait_with_output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let report: Value = serde_json::from_slice(&done.stdout).unwrap();
            scene.copies.insert(report["point"].as_str().unwrap().to_owned(), copy.clone());
        }
    }
    assert_eq!(scene.points().len(), 13);
    scene.zebu(&["forget", "--prune", STORE]).ok();
    scene.check_all();
    scene.zebu(&["verify", STORE]).ok();
}

#[test]
fn what_is_killed_harms_no_point() {
    let rounds = std::env::var("ZEBU_KILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(40u64);
    let Some(mut scene) = Scene::new("points-kills", 12 * MIB, 9) else { return };
    for _ in 0..2 {
        scene.write();
        scene.take(&["--bitmap", "b"]);
    }
    let (mut killed, mut round) = (0, 0);
    // Where commands are over sooner than they are killed, there are more rounds.
    while round < rounds || killed <= rounds / 8 && round < 10 * rounds {
        scene.write();
        let copy = scene.copy();
        let point = format!("{STORE}@{}", scene.points()[0]);
        let commands: [&[&str]; 5] = [
            &["backup", "-q", "--bitmap", "b", DISK, STORE],
            &["backup", "-q", DISK, STORE],
            &["forget", "-q", "--prune", "--keep-last", "3", STORE],
            &["compact", "-q", "--depth", "1", STORE],
            &["restore", "-q", "--force", &point, "killed.raw"],
        ];
        let words = *scene.random.pick(&commands);
        let before = scene.points();
        let mut command = Command::new(zebu_program());
        command.args(words).current_dir(scene.scratch.path()).stdin(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(Duration::from_micros(scene.random.below(120_000)));
        kill_until_free(&mut child);
        killed += u64::from(child.wait().unwrap().code().is_none());
        let after = scene.points();
        for point in after.iter().filter(|point| !before.contains(point)) {
            scene.copies.insert(point.clone(), copy.clone());
        }
        if words[0] != "forget" {
            assert!(before.iter().all(|point| after.contains(point)), "round {round}: {words:?}");
        }
        let point = scene.random.pick(&after).clone();
        scene.check(&point);
        if round % 8 == 7 {
            // The next run cleans up.
            scene.zebu(&["forget", "--prune", STORE]).ok();
            for part in ["claims", "marks", "tmp"] {
                assert!(scene.objects(part).is_empty(), "round {round}: {part}");
            }
            scene.check_all();
            scene.zebu(&["verify", STORE]).ok();
            scene.write();
            scene.take(&["--bitmap", "b"]);
            scene.check_all();
        }
        round += 1;
    }
    assert!(killed > rounds / 8, "{killed} of {round}");
}
