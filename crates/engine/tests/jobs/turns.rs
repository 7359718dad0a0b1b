//! Pieces of a conversion that wait for their turn, when one before them never has its own.

use crate::support::{Images, on_worker};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use zebu_engine::jobs::{
    ConvertOptions, ConvertReport, ConvertTarget, CopyMode, NewTarget, ReadErrors, TargetClusters, convert,
};
use zebu_engine::storage::{Completer, File, OpenFlags, Storage, StorageAbilities, StorageDone, StorageOp};
use zebu_engine::{CreateOptions, ErrorKind, Format, Image, OpenOptions, OpenedFile, Result};

const LEN: u64 = 24 << 20;
/// Where the disk can't be read.
const BAD: u64 = (5 << 20) + 65536;

/// The end of a read.
#[derive(Debug, Clone, Copy)]
enum Reads {
    Fail,
    Panic,
}

/// A disk that reads as ones but for one place.
struct Bad(Reads);

impl Storage for Bad {
    fn len(&self) -> u64 {
        LEN
    }
    fn identity(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }
    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::empty()
    }
    fn submit(&self, op: StorageOp, mut done: Completer) {
        let StorageOp::Read { offset, len } = op else {
            return done.finish(Err(rustix::io::Errno::OPNOTSUPP.raw_os_error()));
        };
        if (offset..offset + len).contains(&BAD) {
            match self.0 {
                Reads::Fail => return done.finish(Err(rustix::io::Errno::IO.raw_os_error())),
                Reads::Panic => panic!("as intended"),
            }
        }
        done.bufs_mut().fill(0, len as usize, 1);
        done.finish(Ok(StorageDone::Moved(len)));
    }
}

fn converted(
    reads: Reads,
    target: &Path,
    create: CreateOptions,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    on_worker(async |worker| {
        let file = File::from_storage(Arc::new(Bad(reads)), "bad", &OpenFlags::default()).unwrap();
        let file = vec![OpenedFile::new(file, Format::Raw)];
        let source = Image::open_files(worker, file, &OpenOptions::default()).await.unwrap();
        let target = ConvertTarget::New(Box::new(NewTarget::new(target).create(create)));
        convert(worker, &[source], target, options).await
    })
}

fn all_ways(mut each: impl FnMut(CreateOptions, ConvertOptions)) {
    for workers in [1, 3] {
        for requests in [1, 2, 16] {
            for clusters in [TargetClusters::Plain, TargetClusters::Compressed] {
                let options = ConvertOptions::default()
                    .workers(workers)
                    .requests(requests)
                    .buffer_memory(4 << 20)
                    .copy(CopyMode::Buffers)
                    .clusters(clusters);
                each(CreateOptions::default().format(Format::Qcow2), options.clone());
                if clusters == TargetClusters::Plain {
                    each(CreateOptions::default().format(Format::from_name("vdi").unwrap()), options);
                }
            }
        }
    }
}

#[test]
fn a_source_that_can_not_be_read_ends_the_job() {
    let images = Images::new();
    all_ways(|create, options| {
        let error = converted(Reads::Fail, &images.path("new"), create, &options).unwrap_err();
        assert_eq!((error.kind(), error.image()), (ErrorKind::Io, Some(Path::new("bad"))), "{options:?}");
        assert_eq!(images.names(), Vec::<String>::new(), "{options:?}");
    });
}

#[test]
fn what_can_not_be_read_is_left_out_in_its_turn() {
    let images = Images::new();
    all_ways(|create, options| {
        let options = options.read_errors(ReadErrors::Zero);
        let report = converted(Reads::Fail, &images.path("new"), create, &options).unwrap();
        assert_eq!((report.total, report.unreadable), (LEN, 512), "{options:?}");
        std::fs::remove_file(images.path("new")).unwrap();
    });
}

#[test]
fn a_panic_ends_the_job() {
    let images = Images::new();
    all_ways(|create, options| {
        let work = || converted(Reads::Panic, &images.path("new"), create, &options);
        // On the calling thread it goes on as a panic.
        if let Ok(done) = catch_unwind(AssertUnwindSafe(work)) {
            assert_eq!(done.unwrap_err().kind(), ErrorKind::Panicked, "{options:?}");
        }
        assert_eq!(images.names(), Vec::<String>::new(), "{options:?}");
    });
}
