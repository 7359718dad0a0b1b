//! The load of `zebu bench` and `qemu-img bench`, by way of the library: `load disk|queue -c 75000 -d 64 IMAGE`.
//!
//! `disk` has a thread for each request in flight; `queue` has one thread and one queue. `raw` has the threads of `disk`, which
//! do the same to a raw file by pread64(2) and pwrite64(2): what any interface whose calls wait costs at least. It prints the
//! line that `bench` prints.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use zebu::storage::{IoBuf, IoBufs};
use zebu::{Access, CacheMode, Disk, Durability, Format, OpenOptions, Request, Result};

struct Load {
    count: u64,
    depth: u64,
    block: usize,
    step: u64,
    write: bool,
    next: AtomicU64,
}

impl Load {
    /// The offset of the next request; none if all are given out. A request that would reach over the end begins at 0.
    fn next(&self, size: u64) -> Option<u64> {
        let index = self.next.fetch_add(1, Relaxed);
        let last = size.checked_sub(self.block as u64)?;
        let offset = (u128::from(index) * u128::from(self.step) % u128::from(size)) as u64;
        (index < self.count).then_some(if offset > last { 0 } else { offset })
    }
}

/// Has as many threads as requests are in flight do one request after the other.
fn by_threads<E: Send>(
    load: &Load,
    size: u64,
    request: impl Fn(u64, &mut [u8]) -> std::result::Result<(), E> + Sync,
) -> std::result::Result<(), E> {
    let requests = || {
        let mut bytes = IoBuf::zeroed(load.block);
        while let Some(offset) = load.next(size) {
            request(offset, bytes.as_mut_slice())?;
        }
        Ok(())
    };
    if load.depth == 1 {
        return requests();
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..load.depth).map(|_| scope.spawn(requests)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no request panics"))
    })
}

fn by_disk(disk: &Disk, load: &Load) -> Result<()> {
    by_threads(load, disk.virtual_size(), |offset, bytes| {
        if load.write { disk.write(offset, bytes) } else { disk.read(offset, bytes) }
    })
}

/// The time of the load on a raw file.
fn by_system_calls(path: &Path, load: &Load) -> std::io::Result<Duration> {
    let access = if load.write { OFlags::RDWR } else { OFlags::RDONLY };
    let file = File::from(rustix::fs::open(path, access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?);
    let size = file.metadata()?.len();
    let start = Instant::now();
    by_threads(load, size, |offset, bytes| {
        if load.write { file.write_all_at(bytes, offset) } else { file.read_exact_at(bytes, offset) }
    })?;
    Ok(start.elapsed())
}

fn by_queue(disk: &Disk, load: &Load) -> Result<()> {
    let size = disk.virtual_size();
    let queue = disk.queue().promise_to_drive().build()?;
    let submit = |bufs: IoBufs| {
        let Some(offset) = load.next(size) else { return };
        let request = if load.write {
            Request::Write { offset, bufs, durability: Durability::Volatile }
        } else {
            Request::Read { offset, bufs }
        };
        queue.submit(request, 0);
    };
    (0..load.depth).for_each(|_| submit(IoBuf::zeroed(load.block).into()));
    let mut done = Vec::new();
    while queue.pending() > 0 {
        queue.wait(&mut done, None);
        for completion in done.drain(..) {
            completion.result?;
            submit(completion.bufs);
        }
    }
    Ok(())
}

fn run(words: &[String]) -> std::result::Result<Duration, String> {
    let number = |name: &str, or: u64| {
        let at = words.iter().position(|word| word == name);
        at.map_or(Some(or), |at| words.get(at + 1)?.parse().ok()).ok_or(format!("{name}: a number"))
    };
    let load = Load {
        count: number("-c", 75_000)?,
        depth: number("-d", 64)?,
        block: number("-s", 4096)? as usize,
        step: number("-S", 4096)?,
        write: words.iter().any(|word| word == "-w"),
        next: AtomicU64::new(0),
    };
    let path = PathBuf::from(words.last().ok_or("no image")?);
    let serve: fn(&Disk, &Load) -> Result<()> = match words.first().map(String::as_str) {
        Some("disk") => by_disk,
        Some("queue") => by_queue,
        Some("raw") => {
            return by_system_calls(&path, &load).map_err(|e| format!("{}: {e}", path.display()));
        }
        _ => return Err("load disk|queue|raw [-c COUNT] [-d DEPTH] [-s BYTES] [-S STEP] [-w] IMAGE".into()),
    };
    let access = if load.write { Access::ReadWrite } else { Access::ReadOnly };
    let options = OpenOptions::default().access(access).cache(CacheMode::None).format(Format::Qcow2);
    let disk = Disk::open(&path, &options).map_err(|e| e.to_string())?;
    let start = Instant::now();
    let served = serve(&disk, &load);
    let took = start.elapsed();
    served.and_then(|()| disk.close()).map_err(|e| e.to_string())?;
    Ok(took)
}

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(took) => {
            println!("Run completed in {:.3} seconds.", took.as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("load: {error}");
            ExitCode::FAILURE
        }
    }
}
