//! Power failures and kills while an image's properties are changed: at every moment the file holds an image without errors
//! that shows the same disk, with the old properties or the new ones.

use std::path::Path;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::recorder::{Recorder, can_record};
use zebu_tests::scratch::Scratch;

const IMAGE: &str = "disk.qcow2";
const STATE: &str = "state.qcow2";
const SIZE: u64 = 3 << 20;
/// Moments of each change that are looked at, at most.
const MOMENTS: usize = 24;

/// How an image is made, and what is changed then.
const CHANGES: [(&str, &str); 8] = [
    ("compat=0.10", "compat=1.1"),
    ("compat=1.1", "compat=0.10"),
    ("compat=1.1,cluster_size=4k", "compat=0.10"),
    ("cluster_size=4k", "refcount_bits=64"),
    ("cluster_size=4k,refcount_bits=64", "refcount_bits=2"),
    ("cluster_size=512", "refcount_bits=32"),
    ("compat=0.10,cluster_size=4k", "compat=1.1,refcount_bits=8,lazy_refcounts=on"),
    ("cluster_size=4k", "size=64M"),
];

/// The changed properties of an image: version, width of refcounts, size.
fn properties(qemu: &Qemu, dir: &Path, image: &str) -> (String, u64, u64) {
    let info = qemu.info(dir, image);
    let data = &info["format-specific"]["data"];
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    (data["compat"].to_string(), number(&data["refcount-bits"]), number(&info["virtual-size"]))
}

/// Judges what a crash left.
fn judge(qemu: &Qemu, dir: &Path, state: &[u8], disk: &[u8]) -> Result<(), String> {
    std::fs::write(dir.join(STATE), state).map_err(|e| e.to_string())?;
    let out = qemu.img(dir, ["check", "-f", "qcow2", STATE]);
    if !matches!(out.code, Some(0 | 3)) {
        return Err(out.to_string());
    }
    let shown = qemu.read_all(dir, STATE, None);
    let (same, grown) = shown.split_at_checked(disk.len()).ok_or("the disk has become smaller")?;
    if same != disk || grown.iter().any(|byte| *byte != 0) {
        let at = same.iter().zip(disk).position(|(a, b)| a != b);
        return Err(format!("the disk differs at {at:?}"));
    }
    Ok(())
}

#[test]
fn an_amended_image_shows_the_same_disk_at_every_moment() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_record() {
        return;
    }
    let (mut random, mut states) = (Random::new(7), 0);
    for (made, change) in CHANGES {
        let scratch = Scratch::new("amend-crash");
        let dir = scratch.path();
        qemu.create(dir, IMAGE, "qcow2", made, SIZE);
        let zeroes = if made.contains("0.10") { "write -q -P 4 1M 64k" } else { "write -q -z 1M 64k" };
        let fill = ["write -q -P 1 0 200k", "write -q -P 2 512k 700k", zeroes, "write -q -P 3 2500k 100k"];
        qemu.io(dir, "-f qcow2", IMAGE, &fill).ok();
        let (disk, before) = (qemu.read_all(dir, IMAGE, None), properties(&qemu, dir, IMAGE));
        let recorder = Recorder::over(&dir.join(IMAGE), 512);
        zebu(dir, ["amend", "-f", "qcow2", "-o", change, IMAGE]).ok();
        let recording = recorder.recording();
        drop(recorder);
        let events = recording.len();
        assert!(events >= 2, "{change}: {events} events");
        let (mut seen_old, mut seen_new) = (false, false);
        let positions: Vec<usize> = if events <= MOMENTS {
            (0..=events).collect()
        } else {
            (0..MOMENTS).map(|_| random.below(events as u64 + 1) as usize).chain([0, events]).collect()
        };
        for position in positions {
            let torn = recording.power_failed(position, |_, _| random.below(2) == 0);
            for (name, state) in [
                ("killed", recording.killed(position)),
                ("nothing unsynced", recording.power_failed(position, |_, _| false)),
                ("torn", torn),
            ] {
                states += 1;
                judge(&qemu, dir, &state, &disk).unwrap_or_else(|e| {
                    panic!("{made}, then {change}: event {position} of {events}, {name}: {e}")
                });
                let is_old = properties(&qemu, dir, STATE) == before;
                seen_old |= is_old;
                seen_new |= !is_old;
            }
        }
        assert!(seen_old && seen_new, "{made}, then {change}: old {seen_old}, new {seen_new}");
    }
    eprintln!("{states} states");
}
