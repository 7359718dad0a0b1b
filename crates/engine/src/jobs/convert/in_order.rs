//! Targets that are written in the order of the disk: pieces are read and packed several at a time, and appended one after
//! the other.

use super::copy;
use super::job::Job;
use super::piece::Piece;
use super::sink::Sink;
use crate::Result;
use crate::image_stream::{ClusterBytes, Packer};
use crate::jobs::pipeline::InOrder;
use crate::jobs::queue::Queue;
use crate::jobs::zeros::is_zero;
use crate::new_foreign::WritesUnderWay;
use futures_util::future::join_all;
use std::future::ready;
use std::sync::Arc;
use zebu_storage::{IoBuf, Worker};

/// A block of the target, or a part of one in which a source ends.
enum Block {
    Whole(u64, ClusterBytes),
    Part { index: u64, within: usize, bytes: IoBuf },
}

/// The block in which one source ends and another begins.
#[derive(Default)]
struct SharedBlock(Option<(u64, IoBuf)>);

/// Does pieces of work until there are no more, as [`copy::copy_pieces`] does for other targets.
pub(super) async fn pack_pieces(worker: &Worker, job: &Arc<Job>, queue: &Queue<Piece>) {
    let Sink::Stream { writer: place, packing, .. } = &job.target else { return };
    let Some(mut writer) = place.lock().take() else { return };
    let mut under_way = InOrder::new(job.sizing.tasks);
    let mut writes = WritesUnderWay::default();
    let mut shared = SharedBlock::default();
    loop {
        while under_way.has_room() {
            let next = if under_way.is_idle() { queue.pop().await } else { queue.try_pop() };
            let Some(piece) = next else { break };
            if job.is_stopped() {
                continue;
            }
            match piece {
                Piece::Copy { part, offset, len } => {
                    // A task goes on while what came before it is written.
                    let (own, job) = (worker.clone(), Arc::clone(job));
                    under_way
                        .begin(worker.spawn(async move { pack_piece(&own, &job, part, offset, len).await }));
                }
                Piece::Zero { offset, len } => {
                    under_way.begin(ready(Ok(zero_piece(job, packing, offset, len))));
                }
                // Only what an image can take is queued.
                Piece::Range { .. } => {}
            }
        }
        let Some(packed) = under_way.next().await else { break };
        let done = match packed {
            Ok(_) if job.is_stopped() => continue,
            Ok((blocks, len)) => match shared.join(worker, packing, blocks).await {
                Ok(blocks) => writer.append(worker, blocks, &mut writes).await.map(|()| len),
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        match done {
            Ok(len) => job.advance(len),
            Err(error) => job.fail(error),
        }
    }
    if !job.is_stopped() {
        let last = match shared.end(worker, packing).await {
            Ok(last) => writer.append(worker, Vec::from_iter(last), &mut writes).await,
            Err(error) => Err(error),
        };
        if let Err(error) = last {
            job.fail(error);
        }
    }
    if let Err(error) = writes.wait(0).await {
        job.fail(error);
    }
    *place.lock() = Some(writer);
}

impl SharedBlock {
    /// Puts blocks together that come in parts.
    async fn join(
        &mut self,
        worker: &Worker,
        packing: &Packer,
        blocks: Vec<Block>,
    ) -> Result<Vec<(u64, ClusterBytes)>> {
        let mut whole = Vec::with_capacity(blocks.len());
        for block in blocks {
            let (Block::Whole(index, _) | Block::Part { index, .. }) = block;
            if self.0.as_ref().is_some_and(|(shared, _)| *shared != index) {
                whole.extend(self.end(worker, packing).await?);
            }
            match block {
                Block::Whole(index, bytes) => whole.push((index, bytes)),
                Block::Part { index, within, bytes } => {
                    let empty = || (index, IoBuf::zeroed(packing.block() as usize));
                    let (_, shared) = self.0.get_or_insert_with(empty);
                    shared.as_mut_slice()[within..within + bytes.len()].copy_from_slice(bytes.as_slice());
                }
            }
        }
        Ok(whole)
    }

    /// The block, if there is one, to which nothing more comes.
    async fn end(&mut self, worker: &Worker, packing: &Packer) -> Result<Option<(u64, ClusterBytes)>> {
        match self.0.take() {
            Some((index, bytes)) => packing.pack(worker, index, bytes.into()).await.map(Some),
            None => Ok(None),
        }
    }
}

/// The packed blocks of a piece, and its length.
async fn pack_piece(
    worker: &Worker,
    job: &Job,
    part: usize,
    offset: u64,
    len: usize,
) -> Result<(Vec<Block>, u64)> {
    let Sink::Stream { packing, .. } = &job.target else { return Ok((Vec::new(), len as u64)) };
    job.tracker.keep_to_rate(worker, len as u64).await?;
    let buffer = worker.buffer(len);
    let (read, mut rest) = copy::read(worker, job, &job.parts[part], offset, len, buffer).await;
    read?;
    let mut blocks = Vec::new();
    let mut at = offset;
    while !rest.is_empty() && at < job.end() {
        let (index, within) = (at / packing.block(), at % packing.block());
        let bytes = rest.split_to(rest.len().min((packing.block() - within) as usize));
        let (start, len) = (at, bytes.len() as u64);
        at += len;
        if job.sparse_size == 0 || !is_zero(bytes.as_slice()) {
            job.count(|report| report.written += len);
            blocks.push(Block::Part { index, within: within as usize, bytes });
        } else if job.is_zero_unless_written(start) {
            job.count(|report| report.skipped += len);
        } else {
            job.count(|report| report.zeroed += len);
            blocks.push(Block::Whole(index, ClusterBytes::Zero));
        }
    }
    let packed = blocks.into_iter().map(|block| pack_block(worker, job, packing, block));
    Ok((join_all(packed).await.into_iter().collect::<Result<_>>()?, len as u64))
}

/// Packs a block, unless a source ends within it.
async fn pack_block(worker: &Worker, job: &Job, packing: &Packer, block: Block) -> Result<Block> {
    match block {
        Block::Part { index, within: 0, bytes }
            if bytes.len() as u64 == packing.block()
                || index * packing.block() + bytes.len() as u64 >= job.end() =>
        {
            let (index, bytes) = packing.pack(worker, index, bytes.into()).await?;
            Ok(Block::Whole(index, bytes))
        }
        other => Ok(other),
    }
}

/// The blocks of a range that hides the backing file.
fn zero_piece(job: &Job, packing: &Packer, offset: u64, len: u64) -> (Vec<Block>, u64) {
    job.count(|report| report.zeroed += len);
    let blocks = offset / packing.block()..(offset + len).div_ceil(packing.block());
    (blocks.map(|index| Block::Whole(index, ClusterBytes::Zero)).collect(), len)
}
