//! Tasks of tokio on several threads that share a disk. What waits for the disk runs as a job, whose future any thread may
//! await.
//!
//! ```sh
//! cargo run --example tokio_threads -- disk.qcow2
//! ```

use std::path::{Path, PathBuf};
use zebu::storage::IoBuf;
use zebu::{Access, CreateOptions, Disk, Durability, OpenOptions};

/// Tasks, each with a part of the disk.
const TASKS: u64 = 16;
/// Bytes of a part.
const PART: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    run(&PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "disk.qcow2".into())))
}

/// The program, on a new disk at `path`.
pub(crate) fn run(path: &Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()?;
    Disk::create(path, &CreateOptions::default().size(TASKS * PART))?;
    let disk = Disk::open(path, &OpenOptions::default().access(Access::ReadWrite))?;
    runtime.block_on(async {
        let tasks = (0..TASKS).map(|task| tokio::spawn(fill(disk.clone(), task)));
        for task in tasks.collect::<Vec<_>>() {
            task.await??;
        }
        // Methods that wait belong on threads that may.
        let closing = disk.clone();
        tokio::task::spawn_blocking(move || closing.close()).await??;
        println!("written");
        Ok(())
    })
}

/// Fills a part of the disk, makes it durable, and reads it back.
async fn fill(disk: Disk, task: u64) -> zebu::Result<()> {
    let offset = task * PART;
    let data = vec![task as u8; PART as usize];
    // The requests of a job go to the disk's thread together, and their end wakes this task, on whichever thread it is.
    disk.start(async move |image, worker| {
        image.write(&worker, offset, IoBuf::copy_of(&data).into(), Durability::Durable).await.0
    })?
    .await?;
    let back = disk
        .start(async move |image, worker| {
            let (result, bufs) = image.read(&worker, offset, IoBuf::zeroed(PART as usize).into()).await;
            result.map(|()| bufs)
        })?
        .await?;
    let mut last = [0];
    back.copy_to(PART as usize - 1, &mut last);
    assert_eq!(last, [task as u8]);
    Ok(())
}
