//! The program of docs/tutorial/embedder.md, which has it word for word.

use std::error::Error;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use zebu::storage::{Worker, WorkerConfig};
use zebu::{Access, CreateOptions, Disk, Image, NewSnapshot, OpenOptions};
use zebu_export::nbd::{Listener, NbdConfig, NbdServer};
use zebu_export::{Export, Exports, PoolConfig, WorkerPool};

fn main() -> Result<(), Box<dyn Error>> {
    let path = Path::new("disk.qcow2");
    prepare(path)?;
    serve(path)
}

/// Makes a disk, and takes a snapshot of what is on it.
fn prepare(path: &Path) -> zebu::Result<()> {
    Disk::create(path, &CreateOptions::default().size(1 << 30))?;
    let disk = Disk::open(path, &OpenOptions::default().access(Access::ReadWrite))?;
    disk.write(4096, b"hello")?;
    disk.create_snapshot(NewSnapshot::named("first"))?;
    disk.flush()?; // from here on it survives any crash
    disk.close()
}

/// Serves it to clients of NBD, until the end of standard input.
fn serve(path: &Path) -> Result<(), Box<dyn Error>> {
    let worker = Worker::new(&WorkerConfig::default())?;
    let writable = OpenOptions::default().access(Access::ReadWrite);
    let image = worker.block_on(Image::open(&worker, path, &writable))?;

    let pool = WorkerPool::start(&PoolConfig::default())?;
    let exports = Exports::new(vec![Export::new("disk", &image, Access::ReadWrite)])?;
    let listener = Listener::unix(UnixListener::bind("disk.sock")?)?;
    let server = NbdServer::start(&pool, exports, vec![listener], NbdConfig::default())?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;

    // Requests under way are finished, and what was written is made durable.
    server.stop();
    pool.join();
    worker.block_on(image.close(&worker))?;
    Ok(())
}
