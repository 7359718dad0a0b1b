//! The pipelines of jobs: one task walks, and several pieces of work that it finds are under way at once. Where their order
//! matters not, they go through a queue to tasks that take them ([`run`]); else their results are taken in order
//! ([`InOrder`]).

use super::queue::{CloseOnDrop, Queue};
use crate::Result;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};
use zebu_storage::Worker;

/// Pieces of work under way at once, at most: each costs a task and a buffer, and no disk has so long a queue.
pub(super) const MOST_AT_ONCE: usize = 1024;

/// Runs `walk` on the calling task, beside `movers` tasks (at most [`MOST_AT_ONCE`]) of the same worker, which empty the queue
/// that it fills. Ends when all of them have. If the future is dropped, the movers end with what is in the queue.
pub(super) async fn run<Piece: 'static, Moving: Future<Output = ()> + 'static>(
    worker: &Worker,
    movers: usize,
    mover: impl Fn(Worker, Queue<Piece>) -> Moving,
    walk: impl AsyncFnOnce(&Queue<Piece>),
) {
    let movers = movers.min(MOST_AT_ONCE);
    let queue = Queue::new(2 * movers);
    let closer = CloseOnDrop(queue.clone());
    let movers: Vec<_> =
        (0..movers).map(|_| worker.spawn(mover(worker.uncounted(), queue.clone()))).collect();
    walk(&queue).await;
    drop(closer);
    for mover in movers {
        mover.await;
    }
}

/// Pieces of work under way at once, whose results come in the order in which they were begun.
pub(super) struct InOrder<'a, T> {
    under_way: FuturesOrdered<LocalBoxFuture<'a, Result<T>>>,
    most: usize,
}

impl<'a, T> InOrder<'a, T> {
    /// None yet, and `most` at once (no more than [`MOST_AT_ONCE`]).
    pub(super) fn new(most: usize) -> Self {
        Self { under_way: FuturesOrdered::new(), most: most.min(MOST_AT_ONCE) }
    }

    /// Whether another piece may begin.
    pub(super) fn has_room(&self) -> bool {
        self.under_way.len() < self.most
    }

    /// Whether no piece is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Begins a piece of work. It goes on while a result is waited for.
    pub(super) fn begin(&mut self, work: impl Future<Output = Result<T>> + 'a) {
        self.under_way.push_back(Box::pin(work));
    }

    /// Waits for the result of the piece that was begun first; `None` if none is under way.
    pub(super) async fn next(&mut self) -> Option<Result<T>> {
        self.under_way.next().await
    }

    /// Waits until no piece is under way, and drops their results.
    pub(super) async fn idle(&mut self) {
        while self.next().await.is_some() {}
    }
}
