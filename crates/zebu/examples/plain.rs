//! A disk that waits: create, write, snapshot, read back, check.
//!
//! ```sh
//! cargo run --example plain -- disk.qcow2
//! ```

use std::path::{Path, PathBuf};
use zebu::check::CheckOptions;
use zebu::{Access, CreateOptions, Disk, NewSnapshot, OpenOptions};

fn main() -> zebu::Result<()> {
    run(&PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "disk.qcow2".into())))
}

/// The program, on a new disk at `path`.
pub(crate) fn run(path: &Path) -> zebu::Result<()> {
    Disk::create(path, &CreateOptions::default().size(1 << 30))?;
    let disk = Disk::builder()
        .on_drop_error(|error| eprintln!("not closed as it should be: {error}"))
        .open(path, &OpenOptions::default().access(Access::ReadWrite))?;

    disk.write(4096, b"hello")?;
    disk.create_snapshot(NewSnapshot::named("greeting"))?;
    // Any number of threads may use it.
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let disk = &disk;
            scope.spawn(move || disk.write((thread + 1) << 20, &[thread as u8; 512]));
        }
    });
    disk.flush()?;

    let mut back = [0; 5];
    disk.read(4096, &mut back)?;
    println!("{}", String::from_utf8_lossy(&back));
    for extent in disk.extents(0..disk.virtual_size()) {
        let extent = extent?;
        println!("{:>10} {:>10} {:?}", extent.offset, extent.len, extent.kind);
    }
    disk.close()?;
    let report = Disk::check(path, &CheckOptions::default())?;
    println!("clean: {}", report.is_clean());
    Ok(())
}
