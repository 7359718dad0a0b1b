//! The whole engine on a disk in memory that a program brought.

use super::ENGINES;
use super::event_loops::worker;
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use zebu_engine::storage::{
    Completer, File, IoBuf, OpenFlags, Storage, StorageAbilities, StorageDone, StorageOp, Worker,
};
use zebu_engine::{
    Access, CreateOptions, Durability, ErrorKind, Format, Image, NewSnapshot, OpenOptions, OpenedFile,
    ZeroMode,
};

type Bytes = Arc<Mutex<Vec<u8>>>;

/// A disk in memory, which a thread of its own serves.
struct Memory {
    bytes: Bytes,
    requests: mpsc::Sender<Completer>,
}

impl Memory {
    /// From write number `fails_at` on, nothing is answered.
    fn file(bytes: &Bytes, fails_at: usize) -> File {
        let (requests, theirs) = mpsc::channel::<Completer>();
        let disk = Arc::clone(bytes);
        std::thread::spawn(move || {
            let mut writes = 0;
            for mut done in theirs {
                writes += usize::from(matches!(done.op(), StorageOp::Write { .. }));
                if writes > fails_at {
                    continue;
                }
                let result = perform(&mut disk.lock().unwrap(), &mut done);
                done.finish(result);
            }
        });
        let flags = OpenFlags::default().access(zebu_engine::storage::Access::ReadWrite);
        let storage = Self { bytes: Arc::clone(bytes), requests };
        File::from_storage(Arc::new(storage), "memory", &flags).unwrap()
    }
}

/// Does an operation on the bytes of a disk; the errno if it can't.
pub(crate) fn perform(disk: &mut Vec<u8>, done: &mut Completer) -> Result<StorageDone, i32> {
    let range = |offset: u64, len: u64| offset as usize..(offset + len) as usize;
    match done.op() {
        StorageOp::Read { offset, len } => {
            done.bufs_mut().copy_from(0, &disk[range(offset, len)]);
            Ok(StorageDone::Moved(len))
        }
        StorageOp::Write { offset, len } => {
            let range = range(offset, len);
            disk.resize(disk.len().max(range.end), 0);
            done.bufs().copy_to(0, &mut disk[range]);
            Ok(StorageDone::Moved(len))
        }
        StorageOp::Punch { offset, len } => {
            disk[range(offset, len)].fill(0);
            Ok(StorageDone::Done)
        }
        StorageOp::SetLen { len } => {
            disk.resize(len as usize, 0);
            Ok(StorageDone::Done)
        }
        StorageOp::Flush => Ok(StorageDone::Done),
        _ => Err(rustix::io::Errno::OPNOTSUPP.raw_os_error()),
    }
}

impl Storage for Memory {
    fn len(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }
    fn identity(&self) -> u64 {
        Arc::as_ptr(&self.bytes) as u64
    }
    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::WRITE | StorageAbilities::PUNCH | StorageAbilities::SET_LEN
    }
    fn submit(&self, _: StorageOp, done: Completer) {
        self.requests.send(done).unwrap();
    }
}

fn opened(bytes: &Bytes, fails_at: usize) -> Vec<OpenedFile> {
    vec![OpenedFile::new(Memory::file(bytes, fails_at), Format::Qcow2)]
}

/// A sequence that every run has the same.
fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % below
}

async fn change(worker: &Worker, image: &Image, model: &mut [u8], seed: &mut u64) {
    let len = 512 * (1 + random(seed, 300)) as usize;
    let at = 512 * random(seed, (model.len() - len) as u64 / 512) as usize;
    match random(seed, 8) {
        0 => {
            image.write_zeroes(worker, at as u64, len as u64, ZeroMode::Unmap).await.unwrap();
            model[at..at + len].fill(0);
        }
        1 => image.flush(worker).await.unwrap(),
        _ => {
            let byte = random(seed, 255) as u8;
            let data = IoBuf::copy_of(&vec![byte; len]);
            image.write(worker, at as u64, data.into(), Durability::Volatile).await.0.unwrap();
            model[at..at + len].fill(byte);
        }
    }
}

#[test]
fn the_engine_works_on_a_disk_in_memory_whose_answers_come_from_another_thread() {
    for engine in ENGINES {
        let (bytes, worker) = (Bytes::default(), worker(engine));
        let mut model = vec![0; 8 << 20];
        let mut seed = 7;
        worker.block_on(async {
            let create = CreateOptions::default().size(Some(model.len() as u64));
            Image::create_in(&worker, &Memory::file(&bytes, usize::MAX), &create).await.unwrap();
            let options = OpenOptions::default().access(Access::ReadWrite);
            for _ in 0..3 {
                let image = Image::open_files(&worker, opened(&bytes, usize::MAX), &options).await.unwrap();
                for _ in 0..60 {
                    change(&worker, &image, &mut model, &mut seed).await;
                }
                image.create_snapshot(&worker, NewSnapshot::named("before")).await.unwrap();
                image.close(&worker).await.unwrap();
            }
            let image = Image::open_files(&worker, opened(&bytes, usize::MAX), &OpenOptions::default())
                .await
                .unwrap();
            let (result, bufs) = image.read(&worker, 0, IoBuf::zeroed(model.len()).into()).await;
            result.unwrap();
            let mut read = vec![0; model.len()];
            bufs.copy_to(0, &mut read);
            assert!(read == model, "{engine:?}");
        });
        // QEMU has the same bytes in a file.
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x.qcow2"), &*bytes.lock().unwrap()).unwrap();
        std::fs::write(dir.path().join("x.raw"), &model).unwrap();
        if std::env::var_os("ZEBU_SKIP_QEMU").is_none() {
            for words in [&["check", "x.qcow2"][..], &["compare", "-F", "raw", "x.qcow2", "x.raw"]] {
                let run = Command::new("qemu-img").args(words).current_dir(dir.path()).output().unwrap();
                assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
            }
        }
    }
}

#[test]
fn an_answer_that_never_comes_is_an_error_and_the_image_takes_no_harm() {
    for engine in ENGINES {
        let (bytes, worker) = (Bytes::default(), worker(engine));
        worker.block_on(async {
            let create = CreateOptions::default().size(Some(8 << 20));
            Image::create_in(&worker, &Memory::file(&bytes, usize::MAX), &create).await.unwrap();
            let options = OpenOptions::default().access(Access::ReadWrite);
            let image = Image::open_files(&worker, opened(&bytes, 12), &options).await.unwrap();
            let mut failed = 0;
            for cluster in 0..40 {
                let data = IoBuf::copy_of(&vec![(cluster + 1) as u8; 65536]).into();
                let at = cluster * 65536;
                match image.write(&worker, at, data, Durability::Volatile).await.0 {
                    Ok(()) => assert_eq!(failed, 0),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Io);
                        failed += 1;
                    }
                }
            }
            assert!(failed > 0);
            assert!(image.flush(&worker).await.is_err());
            let closed = image.close(&worker);
            let mut closed = std::pin::pin!(closed);
            let mut over = std::pin::pin!(worker.sleep(Duration::from_secs(600)));
            let is_over = std::future::poll_fn(|cx| {
                if closed.as_mut().poll(cx).is_ready() {
                    return std::task::Poll::Ready(true);
                }
                over.as_mut().poll(cx).map(|()| false)
            })
            .await;
            assert!(is_over);
            // Nothing of it was flushed: the disk is as it was made.
            let image = Image::open_files(&worker, opened(&bytes, usize::MAX), &OpenOptions::default())
                .await
                .unwrap();
            let (result, _) = image.read(&worker, 0, IoBuf::zeroed(8 << 20).into()).await;
            result.unwrap();
        });
    }
}
