//! The futures of an image beside other tasks of tokio, on one thread.
//!
//! ```sh
//! cargo run --example tokio -- disk.qcow2
//! ```

use std::path::{Path, PathBuf};
use tokio::io::unix::AsyncFd;
use tokio::task::LocalSet;
use zebu::storage::{IoBuf, Worker, WorkerConfig};
use zebu::{Access, CreateOptions, Durability, Image, OpenOptions};

/// Polls the worker whenever its descriptor, which is registered once, or its timer says so.
async fn drive(worker: Worker) {
    // Newer versions of tokio prefer `register`, which is unsafe.
    #[allow(deprecated)]
    let readable = AsyncFd::new(worker.as_fd().try_clone_to_owned().unwrap()).unwrap();
    loop {
        let ready = match worker.next_timer() {
            None => Some(readable.readable().await),
            Some(left) => tokio::time::timeout(left, readable.readable()).await.ok(),
        };
        if let Some(ready) = ready {
            // Before the poll: what comes during it shows again.
            ready.unwrap().clear_ready();
        }
        worker.poll();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "disk.qcow2".into())))
}

/// The program, on a new disk at `path`.
pub(crate) fn run(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let worker = Worker::new(&WorkerConfig::default())?;
    let tasks = LocalSet::new();
    tasks.spawn_local(drive(worker.clone()));
    tasks.block_on(&runtime, async {
        Image::create(&worker, path, &CreateOptions::default().size(1 << 30)).await?;
        let options = OpenOptions::default().access(Access::ReadWrite);
        let image = Image::open(&worker, path, &options).await?;
        let writes = (0..16u64).map(|i| {
            let (image, worker) = (image.clone(), worker.clone());
            tokio::task::spawn_local(async move {
                let data = IoBuf::copy_of(&[i as u8; 4096]).into();
                image.write(&worker, i * 65536, data, Durability::Volatile).await.0
            })
        });
        for write in writes.collect::<Vec<_>>() {
            write.await??;
        }
        image.flush(&worker).await?;
        image.close(&worker).await?;
        println!("written");
        Ok(())
    })
}
