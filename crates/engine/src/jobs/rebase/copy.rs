//! Compares what both chains hold, and writes what the image would lose.

use super::job::Job;
use super::walk::{Piece, Sides};
use crate::jobs::buffers::{join, rejoin};
use crate::jobs::queue::Queue;
use crate::jobs::zeros::is_zero;
use crate::{Durability, Image, Result, ZeroMode};
use zebu_storage::{IoBuf, IoBufs, Worker};

/// The treatment of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Both chains show the same.
    Leave,
    /// The old chain shows zeroes.
    Zero,
    Write,
}

impl Job {
    /// Does pieces of work until there are no more. After the job was stopped, pieces are taken and left.
    pub(super) async fn copy_pieces(&self, worker: &Worker, queue: &Queue<Piece>) {
        let mut buffers = [worker.buffer(self.chunk), worker.buffer(self.chunk)];
        while let Some(piece) = queue.pop().await {
            if self.is_stopped() {
                continue;
            }
            let (done, len);
            match piece {
                Piece::Zero { offset, len: bytes } => {
                    (done, len) = (self.zero(worker, offset, bytes).await, bytes);
                }
                Piece::Compare { offset, len: bytes, sides } => {
                    (done, buffers) = self.compare(worker, offset, bytes, sides, buffers).await;
                    len = bytes as u64;
                }
            }
            match done {
                Ok(()) => self.tracker.advance(len),
                Err(error) => self.fail(error),
            }
        }
    }

    async fn compare(
        &self,
        worker: &Worker,
        offset: u64,
        len: usize,
        sides: Sides,
        [mut old, mut new]: [IoBuf; 2],
    ) -> (Result<()>, [IoBuf; 2]) {
        if let Err(error) = self.tracker.keep_to_rate(worker, len as u64).await {
            return (Err(error), [old, new]);
        }
        // Past the end of the new chain there is nothing.
        let reach = self.new_size.saturating_sub(offset).min(len as u64) as usize;
        let want_old = if sides == Sides::New { 0 } else { len };
        let want_new = if sides == Sides::Old { 0 } else { reach };
        let (old_head, new_head) = (old.split_to(want_old), new.split_to(want_new));
        let read = async |image: Option<&Image>, bufs: IoBufs| match image {
            Some(image) if !bufs.is_empty() => image.read_source(worker, offset, bufs).await,
            _ => (Ok(()), bufs),
        };
        let ((old_read, old_head), (new_read, new_head)) =
            join(read(Some(&self.image), old_head.into()), read(self.new.as_ref(), new_head.into())).await;
        (old, new) = (rejoin(old_head, old), rejoin(new_head, new));
        if let Err(error) = old_read.and(new_read) {
            return (Err(error), [old, new]);
        }
        old.as_mut_slice()[want_old..len].fill(0);
        new.as_mut_slice()[want_new..len].fill(0);
        self.count(|report| report.compared += len as u64);

        let runs = fates(&old.as_slice()[..len], &new.as_slice()[..len], self.unit as usize);
        let mut rest = IoBufs::from(old.split_to(len));
        let mut done = IoBufs::new();
        let mut result = Ok(());
        let mut at = offset;
        for (fate, bytes) in runs {
            let mut part = rest.split_to(bytes);
            match fate {
                Fate::Leave => {}
                Fate::Zero if self.has_zero_clusters => {
                    result = self.zero(worker, at, bytes as u64).await;
                }
                Fate::Zero | Fate::Write => {
                    let written = self.image.write_as(worker, self.clusters, at, part, Durability::Volatile);
                    (result, part) = written.await;
                    self.count(|report| report.written += bytes as u64);
                }
            }
            at += bytes as u64;
            done.append(part);
            if result.is_err() {
                break;
            }
        }
        done.append(rest);
        (result, [rejoin(done, old), new])
    }

    async fn zero(&self, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        self.image.write_zeroes(worker, offset, len, ZeroMode::Unmap).await?;
        self.count(|report| report.zeroed += len);
        Ok(())
    }
}

/// Runs of units with one fate, and their bytes; the last unit may be cut short.
fn fates(old: &[u8], new: &[u8], unit: usize) -> Vec<(Fate, usize)> {
    let mut runs: Vec<(Fate, usize)> = Vec::new();
    for (old, new) in old.chunks(unit).zip(new.chunks(unit)) {
        let fate = if old == new {
            Fate::Leave
        } else if is_zero(old) {
            Fate::Zero
        } else {
            Fate::Write
        };
        match runs.last_mut() {
            Some((last, len)) if *last == fate => *len += old.len(),
            _ => runs.push((fate, old.len())),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_left_zeroed_or_written_as_a_whole() {
        let old = [[0; 4], [0; 4], [1; 4], [2; 4], [3; 4]].concat();
        let new = [[0; 4], [9; 4], [1; 4], [9; 4], [0; 4]].concat();
        let runs = fates(&old[..18], &new[..18], 4);
        assert_eq!(runs, [(Fate::Leave, 4), (Fate::Zero, 4), (Fate::Leave, 4), (Fate::Write, 6)]);
    }
}
