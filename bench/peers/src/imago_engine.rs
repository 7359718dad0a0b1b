//! imago in its synchronous mode.

use crate::load::Load;
use imago::file::File;
use imago::io_buffers::IoBuffer;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate, StorageOpenOptions};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

const ALIGNMENT: usize = 4096;

pub(crate) fn run(image: &Path, load: Load) -> Result<Duration, String> {
    measure(image, &load).map_err(|e| e.to_string())
}

fn measure(image: &Path, load: &Load) -> io::Result<Duration> {
    let driver = Qcow2::<File>::builder_path(image)
        .storage_open_options(StorageOpenOptions::new().direct(true))
        .write(load.write)
        .open(PermissiveImplicitOpenGate::default())?;
    let disk = FormatAccess::new(driver);
    let size = disk.size();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..load.depth).map(|_| scope.spawn(|| requests(&disk, size, load))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("it panicked"))))
    })?;
    disk.flush()?;
    Ok(start.elapsed())
}

fn requests(disk: &FormatAccess<File>, size: u64, load: &Load) -> io::Result<()> {
    let mut buffer = IoBuffer::new(load.block, ALIGNMENT)?;
    buffer.as_mut().into_slice().fill(0x5a);
    while let Some(offset) = load.next(size) {
        if load.write {
            disk.write(&buffer, offset)?;
        } else {
            disk.read(&mut buffer, offset)?;
        }
    }
    Ok(())
}
