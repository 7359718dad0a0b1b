//! Threads and workers that end, or idle, while others wait for what they began.
//!
//! Each must come to its end. Whether a flush that was left alone succeeds is not judged; that what a successful one
//! covers is there is.

use super::stage::{Expected, Stage, content, must, shared, worker, write};
use crate::thread_stress::recorder::fail;
use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{CreateOptions, Disk, Durability, Image};

const SIZE: u64 = 1 << 30;

/// Runs a future on a worker for a while; what it brought, if it ended.
fn for_a_while<T: 'static>(
    worker: &Worker,
    time: Duration,
    future: impl Future<Output = T> + 'static,
) -> Option<T> {
    let result = Rc::new(RefCell::new(None));
    let into = result.clone();
    drop(worker.spawn(async move {
        let value = future.await;
        *into.borrow_mut() = Some(value);
    }));
    let start = Instant::now();
    while start.elapsed() < time && result.borrow().is_none() {
        worker.wait(Some(Duration::from_millis(10)));
    }
    result.borrow_mut().take()
}

/// An image of which the first cluster is written and flushed.
fn begin(stage: &Stage, worker: &Worker, size: u64) -> Image {
    stage.create(worker, &CreateOptions::default().size(Some(size)));
    let image = stage.open(worker, &shared(None));
    worker.block_on(async {
        write(worker, &image, 0, 4096, 11).await;
        must("flush", image.flush(worker).await);
    });
    image
}

/// Flushes and closes on a worker that nothing happened to. What a flush that succeeded covers is there.
fn end(stage: &Stage, worker: &Worker, image: Image, written: &[(u64, u64, u64)], size: u64) {
    stage.step();
    let flushed = worker.block_on(image.flush(worker));
    stage.step();
    let closed = worker.block_on(image.close(worker));
    drop(image);
    if flushed.is_err() || closed.is_err() {
        stage.may_leak();
    }
    if flushed.is_ok() {
        let expected = Expected::new(stage, size);
        for (offset, len, value) in written {
            expected.put(*offset, &content(*value, *offset, *len));
        }
    }
}

pub(super) fn dropped_flush(stage: &mut Stage) {
    let (first, second) = (worker(), worker());
    let image = begin(stage, &second, SIZE);
    // The image's own worker may be done with a flush before the first poll returns.
    let written = (12..412).find(|value| {
        second.block_on(write(&second, &image, 1 << 20, 1 << 20, *value));
        let mut flush = Box::pin(image.flush(&first));
        let is_under_way = flush.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
        if is_under_way {
            for _ in 0..stage.random.below(3) {
                first.poll();
            }
        }
        is_under_way
    });
    drop(first);
    let Some(value) = written else { fail("each flush that has something to do ends at once") };
    end(stage, &second, image, &[(0, 4096, 11), (1 << 20, 1 << 20, value)], SIZE);
}

/// Has the second worker stand still in the middle of an allocating write until the first one's flush waits for it.
/// Returns the first one, unless they never met.
fn held_up(
    stage: &mut Stage,
    image: &Image,
    second: &Worker,
    size: u64,
    written: &mut Vec<(u64, u64, u64)>,
) -> Option<Worker> {
    let mut first = worker();
    for round in 0..400 {
        let offset = stage.random.below(size / 65536) * 65536;
        written.retain(|(at, _, _)| *at != offset);
        written.push((offset, 4096, 13 + round));
        let (on, of) = (second.clone(), image.clone());
        drop(second.spawn(async move { write(&on, &of, offset, 4096, 13 + round).await }));
        for _ in 0..stage.random.between(1, 4) {
            second.poll();
        }
        let (on, of) = (first.clone(), image.clone());
        let flushed = for_a_while(&first, Duration::from_millis(200), async move { of.flush(&on).await });
        stage.step();
        if flushed.is_none() {
            return Some(first);
        }
        first.drain(Duration::from_millis(500));
        second.drain(Duration::from_millis(500));
        first = worker();
    }
    None
}

pub(super) fn dropped_commit(stage: &mut Stage) {
    let second = worker();
    let image = begin(stage, &second, 8 << 30);
    let mut written = vec![(0, 4096, 11)];
    // The write of one round may be over another's: only the places count.
    let first = held_up(stage, &image, &second, 8 << 30, &mut written);
    drop(first);
    second.drain(Duration::from_millis(500));
    end(stage, &second, image, &written, 8 << 30);
}

pub(super) fn dropped_release(stage: &mut Stage) {
    let (first, second) = (worker(), worker());
    let image = begin(stage, &second, SIZE);
    second.block_on(async {
        write(&second, &image, 0, 1 << 20, 12).await;
        must("flush", image.flush(&second).await);
    });
    // A read that stands still keeps the space from being given back.
    let (on, of) = (second.clone(), image.clone());
    drop(second.spawn(async move {
        must("read", of.read(&on, 0, IoBuf::zeroed(65536).into()).await.0);
    }));
    for _ in 0..stage.random.between(1, 2) {
        second.poll();
    }
    stage.step();
    first.block_on(async {
        must("discard", image.discard(&first, 0, 1 << 20).await);
        must("flush", image.flush(&first).await);
    });
    drop(first);
    second.drain(Duration::from_millis(500));
    end(stage, &second, image, &[], SIZE);
}

pub(super) fn ended_thread(stage: &mut Stage) {
    let second = worker();
    let size = 8 << 30;
    let image = begin(stage, &second, size);
    let mut written = vec![(0, 4096, 11)];
    for round in 0..40 {
        // An allocating write stands still at one of its first moments.
        let offset = (round + 1) * (64 << 20);
        written.push((offset, 4096, 12 + round));
        let (on, of) = (second.clone(), image.clone());
        drop(second.spawn(async move { write(&on, &of, offset, 4096, 12 + round).await }));
        for _ in 0..stage.random.between(1, 4) {
            second.poll();
        }
        let of = image.clone();
        let thread = std::thread::spawn(move || {
            let first = worker();
            let on = first.clone();
            for_a_while(&first, Duration::from_millis(300), async move { of.flush(&on).await.is_ok() })
        });
        // Its end waits some seconds for what it began.
        let Ok(flushed) = thread.join() else { fail("the thread that ended panicked") };
        stage.step();
        second.drain(Duration::from_millis(500));
        if flushed.is_none() {
            break;
        }
    }
    end(stage, &second, image, &written, size);
}

pub(super) fn idle_blocking_flush(stage: &mut Stage) {
    let size = 1 << 40;
    let path = stage.image();
    must("create", Disk::create(&path, &CreateOptions::default().size(Some(size))));
    let disk = must("open", Disk::open(&path, &shared(Some(2_000_000))));
    // So many tables that some of them have to be written meanwhile.
    let count = 100 + stage.random.below(100);
    for index in 0..count {
        must("write", disk.write(index * (32 << 20), &content(12, index * (32 << 20), 512)));
    }
    stage.step();
    let image = disk.image().clone();
    let thread = std::thread::spawn(move || {
        let worker = worker();
        must("flush", worker.block_on(image.flush(&worker)));
    });
    if thread.join().is_err() {
        fail("the thread that flushed panicked");
    }
    stage.step();
    must("close", disk.close());
}

pub(super) fn idle_blocking_close(stage: &mut Stage) {
    let path = stage.image();
    must("create", Disk::create(&path, &CreateOptions::default().size(Some(SIZE))));
    let disk = must("open", Disk::open(&path, &shared(Some(2_000_000))));
    must("write", disk.write(0, &vec![1; 4 << 20]));
    must("flush", disk.flush());
    must("discard", disk.discard(0, 4 << 20));
    must("flush", disk.flush());
    stage.step();
    let image = disk.image().clone();
    let thread = std::thread::spawn(move || {
        let worker = worker();
        let bufs = IoBuf::copy_of(&content(12, 8 << 20, 4096)).into();
        must("write", worker.block_on(image.write(&worker, 8 << 20, bufs, Durability::Volatile)).0);
        must("close", worker.block_on(image.close(&worker)));
    });
    if thread.join().is_err() {
        fail("the thread that closed panicked");
    }
    stage.step();
    drop(disk);
    let expected = Expected::new(stage, SIZE);
    expected.put(8 << 20, &content(12, 8 << 20, 4096));
}
