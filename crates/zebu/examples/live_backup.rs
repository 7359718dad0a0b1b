//! A backup of a disk that another thread writes meanwhile. It holds the disk as it was when the backup began.
//!
//! ```sh
//! cargo run --example live_backup -- disk.qcow2
//! ```

use std::path::{Path, PathBuf};
use zebu::jobs::{BackupEnd, LiveBackup, LiveBackupOptions, LiveBackupReport, UnfinishedImage};
use zebu::storage::{Access as FileAccess, Create, File, LockMode, OpenFlags};
use zebu::{Access, CreateOptions, Disk, OpenOptions};

fn main() -> zebu::Result<()> {
    run(&PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "disk.qcow2".into())))
}

/// The program, on a new disk at `path`; the backup is beside it.
pub(crate) fn run(path: &Path) -> zebu::Result<()> {
    Disk::create(path, &CreateOptions::default().size(64 << 20))?;
    let disk = Disk::open(path, &OpenOptions::default().access(Access::ReadWrite))?;
    disk.write(0, b"before the backup")?;
    let report = std::thread::scope(|scope| {
        scope.spawn(|| (1..64u64).try_for_each(|number| disk.write(number << 20, b"a guest at work")));
        back_up(&disk, &path.with_extension("backup.qcow2"))
    })?;
    println!("{} bytes, {} of them before a guest changed them", report.total, report.copied_for_guests);
    disk.close()
}

/// Copies the disk as it is now into a new image. Nobody takes the file for an image before all is in it.
fn back_up(disk: &Disk, target: &Path) -> zebu::Result<LiveBackupReport> {
    let flags = OpenFlags::default().access(FileAccess::ReadWrite).create(Create::New).lock(LockMode::Write);
    let file = File::open(target, &flags)?;
    let create = CreateOptions::default().size(disk.virtual_size());
    disk.run(async move |image, worker| {
        let target = UnfinishedImage::create(&worker, file, &create, &OpenOptions::default()).await?;
        let backup = LiveBackup::start(&worker, &image, target.image(), LiveBackupOptions::default()).await?;
        let report = backup.run(&worker).await?;
        target.finish(&worker).await?;
        backup.end(BackupEnd::Complete).await;
        Ok(report)
    })
}
