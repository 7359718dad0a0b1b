//! L2 tables that one thread makes while another one uses them.

use super::stage::{Expected, Stage, content, must, read, shared, worker, write};
use crate::random::Random;
use crate::thread_stress::recorder::fail;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zebu_engine::storage::Worker;
use zebu_engine::{CreateOptions, Image, NewSnapshot, ZeroMode};

const CLUSTER: u64 = 4096;
/// Bytes of the disk that a table of such a cluster maps.
const TABLE: u64 = CLUSTER / 8 * CLUSTER;

fn shuffled(count: u64, random: &mut Random) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    for index in (1..order.len()).rev() {
        order.swap(index, random.below(index as u64 + 1) as usize);
    }
    order
}

/// The value that is written into a cluster of a table.
fn value(table: u64, cluster: u64) -> u64 {
    table << 8 | cluster << 1 | 1
}

/// One thread changes a cluster of each table, in an order of chance, while another one flushes.
fn change_beside_flushes(stage: &mut Stage, image: &Image, tables: u64, cluster: u64, pace: u64) {
    let order = shuffled(tables, &mut stage.random);
    let is_over = AtomicBool::new(false);
    let with_zeroes = stage.random.chance(50);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let worker = worker();
            while !is_over.load(Ordering::SeqCst) {
                must("flush", worker.block_on(image.flush(&worker)));
                std::thread::sleep(std::time::Duration::from_micros(pace));
            }
        });
        let worker = worker();
        for tables in order.chunks(8) {
            let changes: Vec<_> = tables
                .iter()
                .map(|table| {
                    let (on, image, table) = (worker.clone(), image.clone(), *table);
                    worker.spawn(async move {
                        if with_zeroes {
                            let offset = table * TABLE + CLUSTER * (cluster + 1);
                            must("zero", image.write_zeroes(&on, offset, CLUSTER, ZeroMode::Unmap).await);
                        }
                        write(&on, &image, table * TABLE + cluster * CLUSTER, CLUSTER, value(table, cluster))
                            .await;
                    })
                })
                .collect();
            worker.block_on(async {
                for change in changes {
                    change.await;
                }
            });
            stage.step();
        }
        is_over.store(true, Ordering::SeqCst);
    });
}

/// Checks that the written data is there, before and after the image is closed.
fn verify(worker: &Worker, image: &Image, tables: u64, clusters: &[u64], when: &str) {
    let mut wrong = Vec::new();
    for table in 0..tables {
        for cluster in clusters {
            let offset = table * TABLE + cluster * CLUSTER;
            let found = worker.block_on(read(worker, image, offset, CLUSTER));
            if found != content(value(table, *cluster), offset, CLUSTER) {
                wrong.push((table, *cluster));
            }
        }
    }
    if !wrong.is_empty() {
        let first = &wrong[..wrong.len().min(5)];
        fail(&format!("{when}: {} clusters that were written are wrong, such as {first:?}", wrong.len()));
    }
}

fn expect(stage: &Stage, size: u64, tables: u64, clusters: &[u64]) {
    let expected = Expected::new(stage, size);
    for table in 0..tables {
        for cluster in clusters {
            let offset = table * TABLE + cluster * CLUSTER;
            expected.put(offset, &content(value(table, *cluster), offset, CLUSTER));
        }
    }
}

pub(super) fn commit_beside_new_tables(stage: &mut Stage) {
    const TABLES: u64 = 2048;
    let worker = worker();
    let size = TABLES * TABLE;
    stage.create(&worker, &CreateOptions::default().size(Some(size)).cluster_size(CLUSTER));
    let image = stage.open(&worker, &shared(Some(128 << 20)));
    worker.block_on(async {
        for table in 0..TABLES {
            write(&worker, &image, table * TABLE, CLUSTER, value(table, 0)).await;
        }
    });
    let clusters = [0, 3, 7, 11];
    for cluster in &clusters[1..] {
        stage.step();
        must("snapshot", worker.block_on(image.create_snapshot(&worker, NewSnapshot::named("s"))));
        let pace = *stage.random.pick(&[0, 100, 5000]);
        change_beside_flushes(stage, &image, TABLES, *cluster, pace);
    }
    expect(stage, size, TABLES, &clusters);
    verify(&worker, &image, TABLES, &clusters, "in the open image");
    must("close", worker.block_on(image.close(&worker)));
}

pub(super) fn commit_beside_recycled_tables(stage: &mut Stage) {
    const TABLES: u64 = 2048;
    let worker = worker();
    let size = TABLES * TABLE;
    stage.create(&worker, &CreateOptions::default().size(Some(size)).cluster_size(CLUSTER));
    let least = 3_000_000;
    let image = stage.open(&worker, &shared(Some(least)));
    // Space full of old data, for tables that are new.
    worker.block_on(async {
        for at in (0..TABLES * CLUSTER * 2).step_by(1 << 20) {
            write(&worker, &image, at, 1 << 20, 0x5555).await;
        }
        must("flush", image.flush(&worker).await);
        must("discard", image.discard(&worker, 0, TABLES * CLUSTER * 2).await);
        must("flush", image.flush(&worker).await);
    });
    let pace = *stage.random.pick(&[0, 100, 5000]);
    change_beside_flushes(stage, &image, TABLES, 3, pace);
    change_beside_flushes(stage, &image, TABLES, 200, pace);
    expect(stage, size, TABLES, &[3, 200]);
    verify(&worker, &image, TABLES, &[3, 200], "in the open image");
    must("close", worker.block_on(image.close(&worker)));
}

pub(super) fn load_beside_copied_table(stage: &mut Stage) {
    // A table has one slice.
    const CLUSTER: u64 = 512;
    const TABLE: u64 = CLUSTER / 8 * CLUSTER;
    const TABLES: u64 = 16384;
    const READERS: u64 = 1;
    let worker = worker();
    let size = TABLES * TABLE;
    stage.create(&worker, &CreateOptions::default().size(Some(size)).cluster_size(CLUSTER));
    let image = stage.open(&worker, &shared(Some(64 << 20)));
    worker.block_on(async {
        for table in 0..TABLES {
            write(&worker, &image, table * TABLE, CLUSTER, value(table, 0)).await;
        }
        must("close", image.close(&worker).await);
    });
    drop(image);
    for pass in 1..=8 {
        let image = stage.open(&worker, &shared(Some(64 << 20)));
        worker.block_on(async {
            must("snapshot", image.create_snapshot(&worker, NewSnapshot::named("s")).await);
            must("close", image.close(&worker).await);
        });
        drop(image);
        // Nothing is cached.
        let image = stage.open(&worker, &shared(Some(64 << 20)));
        stage.step();
        let turn = AtomicU64::new(0);
        let arrived = AtomicU64::new(0);
        let wait = |until: &dyn Fn() -> bool| {
            let mut spins = 0u32;
            while !until() {
                spins += 1;
                if spins.is_multiple_of(256) {
                    std::thread::yield_now();
                }
                std::hint::spin_loop();
            }
        };
        let delays: Vec<u64> = (0..TABLES).map(|_| stage.random.below(400)).collect();
        std::thread::scope(|scope| {
            for _ in 0..READERS {
                scope.spawn(|| {
                    let worker = super::stage::worker();
                    for table in 0..TABLES {
                        arrived.fetch_add(1, Ordering::SeqCst);
                        wait(&|| turn.load(Ordering::SeqCst) > table);
                        let offset = table * TABLE;
                        let found = worker.block_on(read(&worker, &image, offset, CLUSTER));
                        if found != content(value(table, 0), offset, CLUSTER) {
                            let what =
                                if found.iter().all(|byte| *byte == 0) { "zeroes" } else { "other data" };
                            fail(&format!("pass {pass}, table {table}: {what} read where data was durable"));
                        }
                    }
                });
            }
            for table in 0..TABLES {
                if table.is_multiple_of(256) {
                    stage.step();
                }
                wait(&|| arrived.load(Ordering::SeqCst) >= (table + 1) * READERS);
                turn.store(table + 1, Ordering::SeqCst);
                for _ in 0..delays[table as usize] {
                    std::hint::spin_loop();
                }
                let offset = table * TABLE + CLUSTER * pass;
                worker.block_on(write(&worker, &image, offset, CLUSTER, value(table, pass)));
            }
        });
        must("close", worker.block_on(image.close(&worker)));
    }
    let expected = Expected::new(stage, size);
    for table in 0..TABLES {
        for cluster in 0..=8 {
            let offset = table * TABLE + cluster * CLUSTER;
            expected.put(offset, &content(value(table, cluster), offset, CLUSTER));
        }
    }
}
