//! By which surface of the library a thread makes its requests.

use super::plan::Surface;
use crate::driver;
use std::future::Future;
use std::io::{IoSlice, IoSliceMut};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use zebu_engine::storage::{IoBufs, Worker};
use zebu_engine::{Disk, Durability, Image, Result, ZeroMode};

/// Requests of a thread: futures on a worker of its own, or calls that wait, which do small requests on the thread itself.
#[derive(Clone)]
pub(super) enum Hands {
    /// A worker's.
    Worker(Image, Worker),
    /// A disk's.
    Disk(Disk),
}

impl Hands {
    /// The hands of a thread that has begun. `disk` has the image.
    pub(super) fn new(surface: Surface, disk: &Disk) -> Self {
        match surface {
            Surface::Worker(engine) => Self::Worker(disk.image().clone(), driver::worker(engine)),
            Surface::Disk => Self::Disk(disk.clone()),
        }
    }

    /// Runs streams of requests: beside each other, or one after the other if each request is waited for.
    pub(super) fn run(&self, streams: impl Iterator<Item = impl Future<Output = ()> + 'static>) {
        match self {
            Self::Worker(_, worker) => {
                let running: Vec<_> = streams.map(|stream| worker.spawn(stream)).collect();
                worker.block_on(async {
                    for stream in running {
                        stream.await;
                    }
                });
            }
            Self::Disk(_) => streams.for_each(|stream| {
                let polled = pin!(stream).poll(&mut Context::from_waker(Waker::noop()));
                assert_eq!(polled, Poll::Ready(()), "calls of a disk return when all is done");
            }),
        }
    }

    pub(super) async fn write(&self, offset: u64, bufs: IoBufs, durability: Durability) -> Result<()> {
        match self {
            Self::Worker(image, worker) => image.write(worker, offset, bufs, durability).await.0,
            Self::Disk(disk) => {
                let parts: Vec<_> = bufs.parts().iter().map(|part| IoSlice::new(part.as_slice())).collect();
                disk.write_vectored(offset, &parts, durability)
            }
        }
    }

    pub(super) async fn read(&self, offset: u64, mut bufs: IoBufs) -> (Result<()>, IoBufs) {
        match self {
            Self::Worker(image, worker) => image.read(worker, offset, bufs).await,
            Self::Disk(disk) => {
                let parts = bufs.parts_mut().iter_mut();
                let mut parts: Vec<_> = parts.map(|part| IoSliceMut::new(part.as_mut_slice())).collect();
                let result = disk.read_vectored(offset, &mut parts);
                (result, bufs)
            }
        }
    }

    /// Copies a range from the backing image. A disk has no such call: nothing is copied.
    pub(super) async fn fill_from_backing(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            Self::Worker(image, worker) => image.fill_from_backing(worker, offset, len).await.map(drop),
            Self::Disk(_) => Ok(()),
        }
    }

    pub(super) async fn write_zeroes(&self, offset: u64, len: u64, mode: ZeroMode) -> Result<()> {
        match self {
            Self::Worker(image, worker) => image.write_zeroes(worker, offset, len, mode).await,
            Self::Disk(disk) => disk.write_zeroes(offset, len, mode),
        }
    }

    pub(super) async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        match self {
            Self::Worker(image, worker) => image.discard(worker, offset, len).await,
            Self::Disk(disk) => disk.discard(offset, len),
        }
    }

    pub(super) async fn write_compressed(&self, offset: u64, bufs: IoBufs) -> Result<()> {
        match self {
            Self::Worker(image, worker) => {
                image.write_compressed(worker, offset, bufs, Durability::Volatile).await.0
            }
            Self::Disk(disk) => {
                let mut bytes = vec![0; bufs.len()];
                bufs.copy_to(0, &mut bytes);
                disk.write_compressed(offset, &bytes)
            }
        }
    }

    pub(super) async fn flush(&self) -> Result<()> {
        match self {
            Self::Worker(image, worker) => image.flush(worker).await,
            Self::Disk(disk) => disk.flush(),
        }
    }
}
