//! Three ways in which QEMU loses data with a clean check afterwards, shown on the QEMU that is installed, and the same
//! done to zebu, which keeps the data:
//!
//! - a freed cluster is used again before it is durable that nobody points to it: a range that was zeroed shows the data
//!   of another range after a kill;
//! - a compressed cluster is linked before its data is written: a write that failed makes the old data unreadable;
//! - a failed read inside a read-modify-write goes unnoticed: the neighbours of a write that "succeeded" are destroyed.
//!
//! QEMU is made to fail by its own blkdebug driver, zebu by a recorded file below it. Should a QEMU not lose the data any
//! more, the test says so and does not fail.

use std::path::Path;
use std::process::Command;
use zebu_tests::program::{Finished, finish, required, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::recorder::{Failing, Recorder, can_record};
use zebu_tests::scratch::Scratch;

const IMAGE: &str = "disk.qcow2";
const STATE: &str = "state.qcow2";
const CLUSTER: usize = 64 << 10;
const MIB: u64 = 1 << 20;

/// Commands of `zebu io`, with the options given.
fn zebu_io(dir: &Path, options: &str, image: &str, commands: &[&str]) -> Finished {
    let mut args = vec!["io"];
    args.extend(options.split_whitespace());
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(image);
    zebu(dir, args)
}

/// QEMU's answer to whether a range holds nothing but a byte.
fn holds(qemu: &Qemu, dir: &Path, image: &str, format: &str, byte: u8, offset: u64, len: u64) -> bool {
    let command = format!("read -P {byte} {offset} {len}");
    let out = qemu.io(dir, &format!("-r -f {format}"), image, &[command]);
    out.code == Some(0)
        && out.stdout.contains(&format!("read {len}/{len}"))
        && !out.stdout.contains("verification failed")
}

/// Whether QEMU lost the data, as it is known to.
fn demonstrated(loss: &str, lost: bool) {
    if lost {
        eprintln!("demonstrated on QEMU: {loss}");
    } else {
        eprintln!("note: this QEMU does not lose data in this way: {loss}");
    }
}

fn check_has_no_errors(qemu: &Qemu, dir: &Path, image: &str) {
    let out = qemu.img(dir, ["check", "-f", "qcow2", image]);
    assert!(matches!(out.code, Some(0 | 3)), "{out}");
}

/// An image whose first cluster holds 1, for good.
fn image_with_ones(qemu: &Qemu, dir: &Path) {
    qemu.create(dir, IMAGE, "qcow2", "", 4 * MIB);
    qemu.io(dir, "-f qcow2", IMAGE, &["write -P 1 0 64k", "flush"]).ok();
}

#[test]
fn a_zeroed_range_does_not_show_another_ranges_data() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("loss-freed");
    let dir = scratch.path();
    image_with_ones(&qemu, dir);
    let below =
        format!("driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={IMAGE}");
    let killed =
        ["write -z -u 0 64k", "break l2_update A", "aio_write -P 8 1M 64k", "wait_break A", "sigraise 9"];
    // A QEMU that does not come to the breakpoint would wait for ever.
    let mut qemu_io = Command::new("timeout");
    qemu_io.arg("600").arg(required("qemu-io")).args(["-t", "writeback", "--image-opts"]);
    qemu_io.args(killed.iter().flat_map(|command| ["-c", command])).arg(&below).current_dir(dir);
    let out = finish(qemu_io);
    assert_eq!(out.code, None, "it was killed: {out}");
    let is_clean = qemu.img(dir, ["check", "-f", "qcow2", IMAGE]).code == Some(0);
    let shows_eights = holds(&qemu, dir, IMAGE, "qcow2", 8, 0, CLUSTER as u64);
    demonstrated("after a kill, a zeroed range shows the data of another", shows_eights && is_clean);

    if !can_record() {
        return;
    }
    let mut random = Random::new(8);
    for options in ["-t none", "-t writeback --aio threads"] {
        std::fs::remove_file(dir.join(IMAGE)).unwrap();
        image_with_ones(&qemu, dir);
        let recording = {
            let recorder = Recorder::over(&dir.join(IMAGE), 1);
            let commands =
                ["write -z -u 0 64k", "write -P 8 1M 64k", "write -P 9 2M 64k", "flush", "write -P 7 3M 64k"];
            zebu_io(dir, options, IMAGE, &commands).ok();
            recorder.recording()
        };
        assert!(recording.len() > 4, "something was recorded");
        for at in 0..=recording.len() {
            let killed = recording.killed(at);
            let torn = recording.power_failed(at, |_, _| random.chance(50));
            for state in [killed, torn] {
                std::fs::write(dir.join(STATE), state).unwrap();
                check_has_no_errors(&qemu, dir, STATE);
                let disk = qemu.read_all(dir, STATE, None);
                let first = &disk[..CLUSTER];
                assert!(
                    first.iter().all(|byte| *byte <= 1),
                    "{options}, before event {at}: what was zeroed holds {:?}",
                    first.iter().find(|byte| **byte > 1)
                );
            }
        }
    }
}

#[test]
fn a_failed_compressed_write_leaves_what_was_there() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("loss-compressed");
    let dir = scratch.path();
    let make = || {
        qemu.create(dir, "base.raw", "raw", "", 4 * MIB);
        qemu.io(dir, "-f raw", "base.raw", &["write -P 5 0 4M"]).ok();
        let _ = std::fs::remove_file(dir.join(IMAGE));
        qemu.create(dir, IMAGE, "qcow2", "backing_file=base.raw,backing_fmt=raw", 4 * MIB);
    };
    make();
    let below = format!(
        "driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={IMAGE},\
         file.inject-error.0.event=write_compressed,file.inject-error.0.errno=5,file.inject-error.0.once=on"
    );
    let out = qemu.io(dir, "--image-opts", &below, &["write -c -P 7 0 64k"]);
    assert!(out.to_string().contains("write failed"), "{out}");
    let is_clean = qemu.img(dir, ["check", "-f", "qcow2", IMAGE]).code == Some(0);
    let kept = holds(&qemu, dir, IMAGE, "qcow2", 5, 0, CLUSTER as u64);
    demonstrated("a failed compressed write destroys what was there", !kept && is_clean);

    if !can_record() {
        return;
    }
    // Where it writes; then each of these places fails in turn.
    make();
    let commands = ["write -c -P 7 0 64k", "flush"];
    let places = {
        let recorder = Recorder::over(&dir.join(IMAGE), 1);
        zebu_io(dir, "-t writeback", IMAGE, &commands).ok();
        recorder.recording().written()
    };
    assert!(holds(&qemu, dir, IMAGE, "qcow2", 5, CLUSTER as u64, CLUSTER as u64));
    assert!(places.len() >= 3, "data, a table and an entry at least: {places:?}");
    let mut felt = 0;
    for place in places {
        make();
        let (out, content) = {
            let recorder = Recorder::over(&dir.join(IMAGE), 1);
            recorder.fail(Some(Failing::WritesAt(place)));
            let out = zebu_io(dir, "-t writeback", IMAGE, &commands);
            felt += recorder.failed();
            recorder.fail(None);
            let recording = recorder.recording();
            (out, recording.killed(recording.len()))
        };
        std::fs::write(dir.join(STATE), content).unwrap();
        check_has_no_errors(&qemu, dir, STATE);
        let old = holds(&qemu, dir, STATE, "qcow2", 5, 0, CLUSTER as u64);
        let new = holds(&qemu, dir, STATE, "qcow2", 7, 0, CLUSTER as u64);
        assert!(old || new, "a write at {place:#x} failed, and neither is there\n{out}");
        assert!(out.code != Some(0) || new, "it succeeded, and the new content is not there\n{out}");
    }
    assert!(felt > 0, "nothing failed: the test shows nothing");
}

#[test]
fn a_failed_read_within_a_write_is_not_ignored() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("loss-rmw");
    let dir = scratch.path();
    let make = || {
        qemu.create(dir, "disk.raw", "raw", "", MIB);
        qemu.io(dir, "-f raw", "disk.raw", &["write -P 0x11 0 1M"]).ok();
    };
    make();
    let below = "driver=raw,file.driver=blkdebug,file.align=4096,file.image.driver=file,\
                 file.image.filename=disk.raw,file.inject-error.0.event=pwritev_rmw_head,\
                 file.inject-error.0.errno=5,file.inject-error.0.iotype=read,file.inject-error.0.once=on";
    let out = qemu.io(dir, "-t none --image-opts", below, &["write -P 0x22 512 512"]);
    let kept = holds(&qemu, dir, "disk.raw", "raw", 0x11, 0, 512);
    demonstrated(
        "a failed read destroys the neighbours of a write that is said to have succeeded",
        out.stdout.contains("wrote 512/512") && !kept,
    );

    if !can_record() {
        return;
    }
    make();
    qemu.create(dir, IMAGE, "qcow2", "", MIB);
    qemu.io(dir, "-f qcow2", IMAGE, &["write -P 0x11 0 1M"]).ok();
    for (name, format) in [("disk.raw", "raw"), (IMAGE, "qcow2")] {
        // The block of the file that holds the disk's third block of 4096 bytes.
        let before = std::fs::read(dir.join(name)).unwrap();
        let data = before.windows(4096).position(|window| window.iter().all(|b| *b == 0x11)).unwrap();
        let block = (data + 2 * 4096) as u64;
        let recorder = Recorder::over(&dir.join(name), 4096);
        recorder.fail(Some(Failing::ReadsAt(block)));
        let out = zebu_io(dir, &format!("-t none -f {format}"), name, &["write -P 0x22 8704 512"]);
        assert!(recorder.failed() > 0, "no block was read: the test shows nothing\n{out}");
        assert!(out.to_string().contains("write failed"), "{out}");
        recorder.fail(None);
        let recording = recorder.recording();
        let after = recording.killed(recording.len());
        assert_eq!(after[block as usize..][..4096], before[block as usize..][..4096], "{format}: {out}");
    }
}
