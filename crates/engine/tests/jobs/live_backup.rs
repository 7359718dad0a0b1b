//! Backups of a disk in use whose target fails, or is not finished. (The rest is tested over NBD, in `tests/`.)

use crate::support::{Images, on_worker};
use std::path::Path;
use std::sync::{Arc, Mutex};
use zebu_engine::jobs::{Cancel, JobControl, LiveBackup, LiveBackupOptions, OnCopyError, UnfinishedImage};
use zebu_engine::storage::{
    Access as FileAccess, Completer, Create, File, IoBuf, LockMode, OpenFlags, Storage, StorageAbilities,
    StorageDone, StorageOp, Worker,
};
use zebu_engine::{
    Access, CreateOptions, Durability, ErrorKind, Format, Image, OpenOptions, OpenedFile, Shrink,
};

const SIZE: u64 = 1 << 20;

fn options(access: Access) -> OpenOptions {
    OpenOptions::default().format(Some(Format::Qcow2)).access(access)
}

async fn make(worker: &Worker, path: &Path, access: Access) -> Image {
    let create = CreateOptions::default().size(Some(SIZE));
    Image::create(worker, path, &create).await.unwrap();
    Image::open(worker, path, &options(access)).await.unwrap()
}

async fn write(worker: &Worker, image: &Image, offset: u64, byte: u8) -> zebu_engine::Result<()> {
    let bytes = vec![byte; 65536];
    image.write(worker, offset, IoBuf::copy_of(&bytes).into(), Durability::Volatile).await.0
}

async fn first_byte(worker: &Worker, image: &Image, offset: u64) -> u8 {
    let (read, bufs) = image.read(worker, offset, IoBuf::zeroed(512).into()).await;
    read.unwrap();
    let mut bytes = [0; 512];
    bufs.copy_to(0, &mut bytes);
    bytes[0]
}

/// A target that takes no write.
async fn failing(worker: &Worker, images: &Images, on_copy_error: OnCopyError) -> (Image, LiveBackup) {
    let source = make(worker, &images.path("disk"), Access::ReadWrite).await;
    write(worker, &source, 0, 1).await.unwrap();
    let target = make(worker, &images.path("target"), Access::ReadOnly).await;
    let options = LiveBackupOptions::default().on_copy_error(on_copy_error);
    let backup = LiveBackup::start(worker, &source, &target, options).await.unwrap();
    (source, backup)
}

#[test]
fn a_failing_target_ends_the_backup_and_not_the_guest() {
    let images = Images::new();
    on_worker(async |worker| {
        let (source, backup) = failing(worker, &images, OnCopyError::FailBackup).await;
        write(worker, &source, 0, 2).await.unwrap();
        assert_eq!(first_byte(worker, &source, 0).await, 2);
        assert_eq!(backup.run(worker).await.unwrap_err().kind(), ErrorKind::ReadOnly);
        source.close(worker).await.unwrap();
    });
}

#[test]
fn a_failing_target_fails_the_guest_where_that_is_wanted() {
    let images = Images::new();
    on_worker(async |worker| {
        let (source, backup) = failing(worker, &images, OnCopyError::FailRequest).await;
        let error = write(worker, &source, 0, 2).await.unwrap_err();
        assert!(error.to_string().contains("the backup to"), "{error}");
        assert_eq!(first_byte(worker, &source, 0).await, 1);
        // What is zero needs no copy.
        write(worker, &source, 1 << 19, 3).await.unwrap();
        assert!(
            source.resize(worker, SIZE / 2, Shrink::Allow, zebu_engine::Preallocation::Off).await.is_err()
        );
        drop(backup);
        write(worker, &source, 0, 2).await.unwrap();
        source.resize(worker, SIZE / 2, Shrink::Allow, zebu_engine::Preallocation::Off).await.unwrap();
        source.close(worker).await.unwrap();
    });
}

/// A disk that answers no write before it is released.
struct Standing(Mutex<Option<Vec<Completer>>>);

impl Standing {
    fn held(&self) -> usize {
        self.0.lock().unwrap().as_ref().map_or(0, Vec::len)
    }

    fn release(&self) {
        for done in self.0.lock().unwrap().take().into_iter().flatten() {
            let StorageOp::Write { len, .. } = done.op() else { unreachable!() };
            done.finish(Ok(StorageDone::Moved(len)));
        }
    }
}

impl Storage for Standing {
    fn len(&self) -> u64 {
        SIZE
    }
    fn identity(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }
    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::WRITE
    }
    fn submit(&self, op: StorageOp, done: Completer) {
        let moved = match op {
            StorageOp::Write { len, .. } => {
                if let Some(held) = &mut *self.0.lock().unwrap() {
                    return held.push(done);
                }
                StorageDone::Moved(len)
            }
            StorageOp::Read { len, .. } => StorageDone::Moved(len),
            _ => StorageDone::Done,
        };
        done.finish(Ok(moved));
    }
}

#[test]
fn a_cancelled_backup_lets_guests_go_though_its_target_does_not_answer() {
    let images = Images::new();
    on_worker(async |worker| {
        let source = make(worker, &images.path("disk"), Access::ReadWrite).await;
        for chunk in 0..16 {
            write(worker, &source, chunk * 65536, 1).await.unwrap();
        }
        let disk = Arc::new(Standing(Mutex::new(Some(Vec::new()))));
        let flags = OpenFlags::default().access(FileAccess::ReadWrite);
        let file = File::from_storage(disk.clone(), "standing", &flags).unwrap();
        let file = vec![OpenedFile::new(file, Format::Raw)];
        let target = OpenOptions::default().access(Access::ReadWrite);
        let target = Image::open_files(worker, file, &target).await.unwrap();
        let cancel = Cancel::new();
        let control = JobControl::default().cancel(cancel.clone());
        let options = LiveBackupOptions::default().requests(2).control(control);
        let backup = LiveBackup::start(worker, &source, &target, options).await.unwrap();
        let running = worker.spawn_with(|own| async move { backup.run(&own).await });
        let guests: Vec<_> = [0, 5, 15]
            .into_iter()
            .map(|chunk| {
                let source = source.clone();
                worker.spawn_with(|own| async move { write(&own, &source, chunk * 65536, 2).await })
            })
            .collect();
        while disk.held() < 3 {
            worker.sleep(std::time::Duration::from_millis(1)).await;
        }
        cancel.cancel();
        for guest in guests {
            guest.await.unwrap();
        }
        assert!(disk.held() >= 3);
        disk.release();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Cancelled);
        assert_eq!(first_byte(worker, &source, 15 * 65536).await, 2);
        source.close(worker).await.unwrap();
    });
}

#[test]
fn one_backup_at_a_time_and_of_the_same_size() {
    let images = Images::new();
    on_worker(async |worker| {
        let source = make(worker, &images.path("disk"), Access::ReadWrite).await;
        let target = make(worker, &images.path("target"), Access::ReadWrite).await;
        let start = || LiveBackup::start(worker, &source, &target, LiveBackupOptions::default());
        let first = start().await.unwrap();
        assert_eq!(start().await.unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(first.run(worker).await.unwrap().done, SIZE);
        source.resize(worker, 2 * SIZE, Shrink::Refuse, zebu_engine::Preallocation::Off).await.unwrap();
        assert_eq!(start().await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    });
}

#[test]
fn an_unfinished_image_is_none() {
    let images = Images::new();
    let path = images.path("target");
    on_worker(async |worker| {
        let flags =
            OpenFlags::default().access(FileAccess::ReadWrite).create(Create::Truncate).lock(LockMode::Write);
        let create = CreateOptions::default().size(Some(SIZE));
        let begin = async || {
            let file = File::open(&path, &flags).unwrap();
            UnfinishedImage::create(worker, file, &create, &OpenOptions::default()).await.unwrap()
        };
        let looks_whole = || std::fs::read(&path).unwrap().starts_with(b"QFI\xfb");
        let unfinished = begin().await;
        write(worker, unfinished.image(), 0, 9).await.unwrap();
        unfinished.image().flush(worker).await.unwrap();
        assert!(!looks_whole());
        unfinished.finish(worker).await.unwrap();
        assert!(looks_whole());
        let image = Image::open(worker, &path, &options(Access::ReadOnly)).await.unwrap();
        assert_eq!(first_byte(worker, &image, 0).await, 9);
        drop(image);
        begin().await.discard(worker).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    });
}
