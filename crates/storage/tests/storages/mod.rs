//! Storages that a program brings: answers from other threads, late ones, short ones, none.

use super::{AGES, ENGINES, readable, worker};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use zebu_storage::{
    Access, Completer, File, FileKind, IoBuf, IoErrorKind, OpenFlags, Storage, StorageAbilities, StorageDone,
    StorageOp, Worker,
};

/// How a storage answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Before `submit` returns.
    AtOnce,
    /// From another thread, after a while.
    Late(Duration),
    /// With fewer bytes than were asked for.
    Short,
    /// By dropping the completer.
    Dropped,
    /// When it is cancelled only.
    Cancelled,
    /// With a number that is no errno.
    WrongErrno,
    /// With the answer to another kind of operation.
    WrongKind,
}

/// A disk in memory, which answers in a manner of its own.
struct Memory {
    bytes: Arc<Mutex<Vec<u8>>>,
    abilities: StorageAbilities,
    manner: Manner,
    waiting: Mutex<Vec<Completer>>,
    /// Operations as they came.
    seen: Mutex<Vec<StorageOp>>,
}

fn perform(bytes: &Mutex<Vec<u8>>, op: StorageOp, done: &mut Completer) -> Result<StorageDone, i32> {
    let mut disk = bytes.lock().unwrap();
    let range = |offset: u64, len: u64| offset as usize..(offset + len) as usize;
    match op {
        StorageOp::Read { offset, len } => {
            done.bufs_mut().copy_from(0, &disk[range(offset, len)]);
            Ok(StorageDone::Moved(len))
        }
        StorageOp::Write { offset, len } => {
            let end = range(offset, len).end.max(disk.len());
            disk.resize(end, 0);
            done.bufs().copy_to(0, &mut disk[range(offset, len)]);
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
        StorageOp::ExtentAt { offset } => {
            let rest = &disk[offset as usize..];
            let hole = rest[0] == 0;
            let len = rest.iter().take_while(|byte| (**byte == 0) == hole).count();
            Ok(StorageDone::Extent { len: len as u64, hole })
        }
        StorageOp::Flush => Ok(StorageDone::Done),
        _ => Err(libc::EOPNOTSUPP),
    }
}

impl Storage for Memory {
    fn len(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }
    fn identity(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }
    fn abilities(&self) -> StorageAbilities {
        self.abilities
    }
    fn submit(&self, op: StorageOp, mut done: Completer) {
        self.seen.lock().unwrap().push(op);
        match self.manner {
            Manner::AtOnce => {
                let result = perform(&self.bytes, op, &mut done);
                done.finish(result);
            }
            Manner::Late(time) => {
                let bytes = Arc::clone(&self.bytes);
                std::thread::spawn(move || {
                    std::thread::sleep(time);
                    let result = perform(&bytes, op, &mut done);
                    done.finish(result);
                });
            }
            Manner::Short => done.finish(Ok(StorageDone::Moved(1))),
            Manner::Dropped => drop(done),
            Manner::Cancelled => self.waiting.lock().unwrap().push(done),
            Manner::WrongErrno => done.finish(Err(-5)),
            Manner::WrongKind => done.finish(Ok(StorageDone::Extent { len: 0, hole: true })),
        }
    }
    fn cancel(&self) {
        for done in self.waiting.lock().unwrap().drain(..) {
            assert!(done.is_cancelled());
            done.finish(Err(libc::ECANCELED));
        }
    }
}

fn memory(len: usize, abilities: StorageAbilities, manner: Manner) -> (Arc<Memory>, File) {
    let storage = Arc::new(Memory {
        bytes: Arc::new(Mutex::new(vec![7; len])),
        abilities,
        manner,
        waiting: Mutex::default(),
        seen: Mutex::default(),
    });
    let access =
        if abilities.contains(StorageAbilities::WRITE) { Access::ReadWrite } else { Access::ReadOnly };
    let flags = OpenFlags::default().access(access);
    let file = File::from_storage(storage.clone(), "memory", &flags).unwrap();
    (storage, file)
}

fn read(worker: &Worker, file: &File, offset: u64, len: usize) -> Result<Vec<u8>, IoErrorKind> {
    let (result, bufs) = worker.block_on(worker.read(file, offset, IoBuf::zeroed(len).into()));
    let mut bytes = vec![0; len];
    bufs.copy_to(0, &mut bytes);
    result.map(|()| bytes).map_err(|error| error.kind)
}

#[test]
fn a_storage_is_read_and_written_as_a_file_is() {
    for engine in ENGINES {
        for manner in [Manner::AtOnce, Manner::Late(Duration::from_millis(2))] {
            let worker = worker(engine);
            let (storage, file) = memory(1000, StorageAbilities::all(), manner);
            assert_eq!((file.kind(), file.len()), (FileKind::Foreign, 1000));
            worker.block_on(async {
                worker.write(&file, 1500, IoBuf::copy_of(&[9; 10]).into()).await.0.unwrap();
                worker.punch_hole(&file, 10, 20).await.unwrap();
                worker.flush(&file).await.unwrap();
                assert_eq!(file.len(), 1510);
                let extent = worker.extent_at(&file, 10).await.unwrap();
                assert_eq!((extent.len, extent.hole), (20, true));
                worker.set_len(&file, 1505).await.unwrap();
            });
            let mut model = vec![7; 1000];
            model.resize(1500, 0);
            model.extend([9; 5]);
            model[10..30].fill(0);
            assert_eq!(*storage.bytes.lock().unwrap(), model);
            // What lies past the end reads as zero, and the storage is not asked for it.
            model.resize(1600, 0);
            assert_eq!(read(&worker, &file, 0, 1600), Ok(model));
            assert_eq!(read(&worker, &file, 5000, 10), Ok(vec![0; 10]));
            assert!(storage.seen.lock().unwrap().contains(&StorageOp::Read { offset: 0, len: 1505 }));
        }
    }
}

#[test]
fn operations_that_a_storage_has_not_never_reach_it() {
    for engine in ENGINES {
        let worker = worker(engine);
        let (storage, file) = memory(1 << 16, StorageAbilities::WRITE, Manner::AtOnce);
        assert_eq!(file.kind(), FileKind::BlockDevice, "its length is fixed");
        assert!(!file.can_punch() && !file.can_zero_range() && !file.can_allocate());
        worker.block_on(async {
            let past = worker.write(&file, (1 << 16) - 1, IoBuf::copy_of(&[1; 2]).into()).await.0;
            assert_eq!(past.unwrap_err().kind, IoErrorKind::Os(libc::ENOSPC));
            assert_eq!(worker.punch_hole(&file, 0, 4096).await.unwrap_err().kind, IoErrorKind::Unsupported);
            assert_eq!(worker.set_len(&file, 0).await.unwrap_err().kind, IoErrorKind::Unsupported);
            let all = worker.extent_at(&file, 512).await.unwrap();
            assert_eq!((all.len, all.hole), ((1 << 16) - 512, false));
            let copied = worker.copy_range(&file, 0, &file, 8192, 4096).await;
            assert_eq!(copied.unwrap_err().kind, IoErrorKind::Unsupported);
        });
        assert!(storage.seen.lock().unwrap().is_empty());
        let flags = OpenFlags::default().access(Access::ReadWrite);
        let (storage, _) = memory(512, StorageAbilities::empty(), Manner::AtOnce);
        let refused = File::from_storage(storage, "memory", &flags).unwrap_err();
        assert_eq!(refused.kind, IoErrorKind::Os(libc::EROFS));
    }
}

#[test]
fn wrong_answers_and_none_are_errors() {
    for engine in ENGINES {
        for manner in [Manner::Short, Manner::Dropped, Manner::WrongErrno, Manner::WrongKind] {
            let worker = worker(engine);
            let (_, file) = memory(4096, StorageAbilities::all(), manner);
            assert_eq!(
                read(&worker, &file, 0, 100),
                Err(IoErrorKind::Os(libc::EIO)),
                "{engine:?} {manner:?}"
            );
            let extent = worker.block_on(worker.extent_at(&file, 0));
            assert_eq!(extent.unwrap_err().kind, IoErrorKind::Os(libc::EIO));
            let flushed = worker.block_on(worker.flush(&file));
            assert_eq!(flushed.unwrap_err().kind, IoErrorKind::Os(libc::EIO));
            // As with every file: a failed flush is final.
            let again = worker.block_on(worker.flush(&file));
            assert_eq!(again.unwrap_err().kind, IoErrorKind::FlushFailedBefore);
        }
    }
}

#[test]
fn a_worker_ends_although_a_storage_would_wait_for_ever() {
    for engine in ENGINES {
        let (storage, file) = memory(4096, StorageAbilities::all(), Manner::Cancelled);
        let (ended, end) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let worker = worker(engine);
            let task = worker.spawn({
                let (worker, file) = (worker.clone(), file.clone());
                async move { worker.read(&file, 0, IoBuf::zeroed(512).into()).await.0 }
            });
            worker.poll();
            drop(task);
            drop(worker);
            ended.send(()).unwrap();
        });
        end.recv_timeout(AGES).expect("the worker's end waits for ever");
        thread.join().unwrap();
        assert!(storage.waiting.lock().unwrap().is_empty());
    }
}

#[test]
fn an_event_loop_learns_of_answers_from_other_threads() {
    for engine in ENGINES {
        let worker = worker(engine);
        let (_, file) = memory(4096, StorageAbilities::all(), Manner::Late(Duration::from_millis(3)));
        let fd = worker.as_fd();
        for _ in 0..100 {
            let over = Rc::new(Cell::new(false));
            let handle = worker.spawn({
                let (worker, file, over) = (worker.clone(), file.clone(), Rc::clone(&over));
                async move {
                    worker.read(&file, 0, IoBuf::zeroed(512).into()).await.0.unwrap();
                    over.set(true);
                }
            });
            let begin = Instant::now();
            while !over.get() {
                assert!(readable(fd, AGES), "{engine:?}: nobody was woken");
                worker.poll();
                assert!(begin.elapsed() < AGES);
            }
            drop(handle);
        }
    }
}
