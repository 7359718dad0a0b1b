//! Free space that is looked at from two sides.

use super::stage::{Expected, Stage, content, must, read, shared, worker, write};
use crate::qemu::Qemu;
use crate::thread_stress::recorder::fail;
use std::collections::BTreeMap;
use zebu_engine::storage::Worker;
use zebu_engine::{ExtentKind, Image, NewSnapshot};

const CLUSTER: u64 = 512;
const SIZE: u64 = 64 << 20;
/// Clusters that a refcount block counts.
const COUNTED: u64 = CLUSTER * 8 / 16;

/// The guest cluster at each host cluster.
async fn by_host(image: &Image, worker: &Worker) -> BTreeMap<u64, u64> {
    let mut found = BTreeMap::new();
    let mut extents = image.extents(0..SIZE);
    while let Some(extent) = must("extent", extents.next(worker).await) {
        if let ExtentKind::Data { host } = extent.kind {
            for skip in (0..extent.len).step_by(CLUSTER as usize) {
                found.insert((host + skip) / CLUSTER, (extent.offset + skip) / CLUSTER);
            }
        }
    }
    found
}

/// Runs that are too short for the copy of the L1 table (32 clusters), at the border of two refcount blocks, are set aside while a longer one is looked
/// for. A search of the refcounts meets them again: they must not be given out twice.
pub(super) fn runs_set_aside(stage: &mut Stage) {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create(&stage.dir, super::stage::IMAGE, "qcow2", "cluster_size=512,preallocation=falloc", SIZE);
    let worker = worker();
    let expected = Expected::new(stage, SIZE);
    let image = stage.open(&worker, &shared(None));
    worker.block_on(async {
        for at in (0..SIZE).step_by(1 << 20) {
            stage.step();
            write(&worker, &image, at, 1 << 20, at + 1).await;
            expected.put(at, &content(at + 1, at, 1 << 20));
        }
        must("flush", image.flush(&worker).await);
    });
    let hosts = worker.block_on(by_host(&image, &worker));
    // A border with nothing but data around it.
    let all_data = |border: &u64| (border - 60..border + 40).all(|host| hosts.contains_key(&host));
    let borders: Vec<u64> = (1..SIZE / CLUSTER / COUNTED).map(|n| n * COUNTED).filter(all_data).collect();
    if borders.is_empty() {
        fail("no border of two refcount blocks lies within data");
    }
    // A low one: refcounts are searched from the start of the file.
    let near = borders.iter().filter(|border| **border >= 12 * COUNTED).take(2).copied().collect::<Vec<_>>();
    let border = *stage.random.pick(if near.is_empty() { &borders } else { &near });
    let discard = async |image: &Image, host: u64| {
        let offset = hosts[&host] * CLUSTER;
        must("discard", image.discard(&worker, offset, CLUSTER).await);
        expected.put(offset, &[0; CLUSTER as usize]);
    };
    worker.block_on(async {
        // Freed before the next opening, which knows nothing of it.
        for host in border - 60..border - 10 {
            discard(&image, host).await;
        }
        must("close", image.close(&worker).await);
    });
    drop(image);
    let image = stage.open(&worker, &shared(None));
    worker.block_on(async {
        for host in border - 10..border + 30 {
            discard(&image, host).await;
        }
        must("flush", image.flush(&worker).await);
        worker.sleep(std::time::Duration::from_millis(300)).await;
        stage.step();
        must("snapshot", image.create_snapshot(&worker, NewSnapshot::named("s")).await);
        let mut written = Vec::new();
        for host in border - 60..border - 40 {
            written.push(hosts[&host] * CLUSTER);
        }
        // Each in a table of its own, which is copied.
        let table = CLUSTER / 8 * CLUSTER;
        written.extend((0..200).map(|index| table * (index + 300)));
        for offset in &written {
            let value = 7 << 32 | (offset + 1);
            write(&worker, &image, *offset, CLUSTER, value).await;
            expected.put(*offset, &content(value, *offset, CLUSTER));
        }
        must("flush", image.flush(&worker).await);
        let mut wrong = 0;
        for offset in &written {
            let found = read(&worker, &image, *offset, CLUSTER).await;
            wrong += u64::from(found != content(7 << 32 | (offset + 1), *offset, CLUSTER));
        }
        if wrong > 0 {
            fail(&format!("border {border}: {wrong} of {} written clusters are wrong", written.len()));
        }
        must("close", image.close(&worker).await);
    });
}
