//! The judge of every state that a crash leaves.

use crate::crash::setup::{Files, SNAPSHOT, Setup, TOP, passphrase};
use std::process::Command;
use zebu_engine::check::{CheckOptions, check_file};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Image, Keys, OpenOptions};
use zebu_sim::{GuestModel, SimFileConfig, SimWorld, backing_pattern};

/// Bytes read at once.
const AT_ONCE: u64 = 256 << 10;

/// Leaks that a judge may let pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaks {
    Allowed,
    Forbidden,
}

/// Judges the files that a crash left, in a world of their own. On success, what the disk held.
pub(crate) fn judge(
    setup: &Setup,
    files: &Files,
    model: &GuestModel,
    leaks: Leaks,
) -> Result<Vec<u8>, String> {
    let world = setup.world(files, 0);
    let worker = world.worker();
    world.block_on(judge_in(setup, &world, &worker, model, leaks)).map_err(|stuck| stuck.to_string())?
}

async fn judge_in(
    setup: &Setup,
    world: &SimWorld,
    worker: &Worker,
    model: &GuestModel,
    leaks: Leaks,
) -> Result<Vec<u8>, String> {
    let top = world.open(TOP, SimFileConfig::default()).unwrap();
    let report =
        check_file(worker, &top, &CheckOptions::default()).await.map_err(|e| format!("check: {e}"))?;
    let bad = report.counts.corruptions + report.counts.check_errors;
    if bad > 0 || (leaks == Leaks::Forbidden && report.counts.leaks > 0) {
        let lines: Vec<String> = report.findings.iter().take(6).map(ToString::to_string).collect();
        return Err(format!("check: {:?}\n{}", report.counts, lines.join("\n")));
    }
    let image = Image::open_files(worker, setup.chain(world), &setup.options())
        .await
        .map_err(|e| format!("open: {e}"))?;
    setup.tighten(&image);
    let len = image.virtual_size();
    if !model.may_have_len(len) {
        return Err(format!("the disk has {len} bytes"));
    }
    let bytes = read_all(worker, &image, len).await?;
    model.check(0, &bytes).map_err(|v| v.to_string())?;
    if setup.origin == crate::crash::setup::Origin::Snapshot {
        let options =
            OpenOptions::default().snapshot(Some(SNAPSHOT.to_owned())).keys(Keys::of_top(passphrase()));
        let image = Image::open_files(worker, setup.chain(world), &options)
            .await
            .map_err(|e| format!("open the snapshot: {e}"))?;
        let mut expected = backing_pattern(0, setup.pattern as usize);
        expected.resize(setup.size as usize, 0);
        if read_all(worker, &image, setup.size).await? != expected {
            return Err("the snapshot has changed".to_owned());
        }
    }
    Ok(bytes)
}

/// The whole disk.
pub(crate) async fn read_all(worker: &Worker, image: &Image, len: u64) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; len as usize];
    for at in (0..len).step_by(AT_ONCE as usize) {
        let part = AT_ONCE.min(len - at) as usize;
        let (result, bufs) = image.read(worker, at, IoBuf::zeroed(part).into()).await;
        result.map_err(|e| format!("read at {at:#x}: {e}"))?;
        bufs.copy_to(0, &mut bytes[at as usize..at as usize + part]);
    }
    Ok(bytes)
}

/// The verdict of `qemu-img check`: nothing wrong, or leaks only.
pub(crate) fn judge_by_qemu(files: &Files, leaks: Leaks) -> Result<(), String> {
    if std::env::var_os("ZEBU_SKIP_QEMU").is_some() {
        return Ok(());
    }
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        content.store(&mut std::fs::File::create(dir.path().join(name)).unwrap()).unwrap();
    }
    let out = Command::new("qemu-img")
        .args(["check", "-f", "qcow2", TOP])
        .current_dir(dir.path())
        .output()
        .expect("qemu-img is needed (apt-get install qemu-utils), or set ZEBU_SKIP_QEMU=1");
    match out.status.code() {
        Some(0) => Ok(()),
        Some(3) if leaks == Leaks::Allowed => Ok(()),
        _ => Err(format!(
            "qemu-img check: {}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        )),
    }
}
