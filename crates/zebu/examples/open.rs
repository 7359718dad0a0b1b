//! Opens the images that are named, wherever they are: `nbd+unix:///e?socket=s`, `http://host/disk`, `json:{...}`, `disk.zst`.

use zebu::OpenOptions;
use zebu::disks::Context;
use zebu::storage::{Worker, WorkerConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (context, worker) = (Context::default(), Worker::new(&WorkerConfig::default())?);
    for name in std::env::args_os().skip(1) {
        let image = context.open(&worker, &name, OpenOptions::default())?;
        println!("{}: {} bytes", name.display(), image.virtual_size());
        worker.block_on(image.close(&worker))?;
    }
    Ok(context.disks.close()?)
}
