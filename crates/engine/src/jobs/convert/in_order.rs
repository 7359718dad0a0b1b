//! Targets that are written in the order of the disk: pieces are read and packed several at a time, and appended one after
//! the other.

use super::copy;
use super::job::Job;
use super::piece::Piece;
use super::sink::Sink;
use crate::image_stream::{ClusterBytes, Packer};
use crate::jobs::pipeline::InOrder;
use crate::jobs::queue::Queue;
use crate::jobs::zeros::is_zero;
use crate::new_foreign::WritesUnderWay;
use crate::{Error, ErrorKind, Result};
use futures_util::future::join_all;
use zebu_storage::Worker;

/// Does pieces of work until there are no more, as [`copy::copy_pieces`] does for other targets.
pub(super) async fn pack_pieces(worker: &Worker, job: &Job, queue: &Queue<Piece>) {
    let Sink::Stream { writer: place, packing, .. } = &job.target else { return };
    let Some(mut writer) = place.lock().take() else { return };
    let mut under_way = InOrder::new(job.sizing.tasks);
    let mut writes = WritesUnderWay::default();
    loop {
        while under_way.has_room() {
            let next = if under_way.is_idle() { queue.pop().await } else { queue.try_pop() };
            let Some(piece) = next else { break };
            // Such a target is zero where nothing is written, so nothing else is queued.
            if let Piece::Copy { part, offset, len } = piece
                && !job.is_stopped()
            {
                under_way.begin(pack_piece(worker, job, packing, part, offset, len));
            }
        }
        let Some(packed) = under_way.next().await else { break };
        let done = match packed {
            Ok(_) if job.is_stopped() => continue,
            Ok((blocks, len)) => writer.append(worker, blocks, &mut writes).await.map(|()| len),
            Err(error) => Err(error),
        };
        match done {
            Ok(len) => job.advance(len),
            Err(error) => job.fail(error),
        }
    }
    if let Err(error) = writes.wait(0).await {
        job.fail(error);
    }
    *place.lock() = Some(writer);
}

/// The packed blocks of a piece, and its length.
async fn pack_piece(
    worker: &Worker,
    job: &Job,
    packing: &Packer,
    part: usize,
    offset: u64,
    len: usize,
) -> Result<(Vec<(u64, ClusterBytes)>, u64)> {
    job.tracker.keep_to_rate(worker, len as u64).await?;
    let buffer = worker.buffer(len);
    let (read, mut rest) = copy::read(worker, job, &job.parts[part], offset, len, buffer).await;
    read?;
    let mut blocks = Vec::new();
    let mut at = offset;
    while !rest.is_empty() {
        let within = at % packing.block();
        let block = rest.split_to(rest.len().min((packing.block() - within) as usize));
        let (start, block_len) = (at, block.len() as u64);
        at += block_len;
        let is_whole = within == 0 && (block_len == packing.block() || at == job.end());
        if !is_whole {
            let size = match packing.block() {
                bytes if bytes < 1024 => format!("{bytes} bytes"),
                bytes => format!("{} KiB", bytes >> 10),
            };
            let message = format!(
                "a source ends within a block of {size} of the target, and another follows: convert them to one raw image first"
            );
            return Err(Error::new(ErrorKind::Unsupported, message).on(job.target.path()).at_guest(start));
        }
        if job.sparse_size > 0 && is_zero(block.as_slice()) {
            job.count(|report| report.skipped += block_len);
        } else {
            job.count(|report| report.written += block_len);
            blocks.push((start / packing.block(), block.into()));
        }
    }
    let packed = join_all(blocks.into_iter().map(|(index, block)| packing.pack(worker, index, block))).await;
    Ok((packed.into_iter().collect::<Result<_>>()?, len as u64))
}
