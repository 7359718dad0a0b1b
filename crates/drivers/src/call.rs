//! A storage's operation as a future.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use zebu_storage::sync::Mutex;
use zebu_storage::{Completer, IoBufs, Storage, StorageDone, StorageOp};

type Answer = (IoBufs, Result<StorageDone, i32>);

#[derive(Default)]
struct State {
    answer: Option<Answer>,
    waker: Option<Waker>,
}

/// The answer to an operation, once it is there.
struct Waiting(Arc<Mutex<State>>);

impl Future for Waiting {
    type Output = Answer;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
        let mut state = self.0.lock();
        if let Some(answer) = state.answer.take() {
            return Poll::Ready(answer);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

/// Has `storage` do `op` with `bufs`.
pub(crate) fn call(
    storage: &dyn Storage,
    op: StorageOp,
    bufs: IoBufs,
) -> impl Future<Output = Answer> + use<> {
    let state = Arc::new(Mutex::new(State::default()));
    let waiting = Waiting(Arc::clone(&state));
    storage.submit(
        op,
        Completer::new(op, bufs, move |bufs, result| {
            let mut state = state.lock();
            state.answer = Some((bufs, result));
            if let Some(waker) = state.waker.take() {
                drop(state);
                waker.wake();
            }
        }),
    );
    waiting
}

/// The memory of an operation, taken out of its completer.
pub(crate) fn take_bufs(done: &mut Completer) -> IoBufs {
    std::mem::take(done.bufs_mut())
}

/// Gives the memory back and answers.
pub(crate) fn answer(mut done: Completer, bufs: IoBufs, result: Result<StorageDone, i32>) {
    *done.bufs_mut() = bufs;
    done.finish(result);
}

/// The same operation elsewhere.
pub(crate) fn moved(op: StorageOp, to: u64) -> StorageOp {
    match op {
        StorageOp::Read { len, .. } => StorageOp::Read { offset: to, len },
        StorageOp::Write { len, .. } => StorageOp::Write { offset: to, len },
        StorageOp::Punch { len, .. } => StorageOp::Punch { offset: to, len },
        StorageOp::ZeroRange { len, .. } => StorageOp::ZeroRange { offset: to, len },
        StorageOp::Allocate { len, .. } => StorageOp::Allocate { offset: to, len },
        StorageOp::ExtentAt { .. } => StorageOp::ExtentAt { offset: to },
        other => other,
    }
}

/// The range that an operation is about.
pub(crate) fn range(op: StorageOp) -> Option<(u64, u64)> {
    match op {
        StorageOp::Read { offset, len }
        | StorageOp::Write { offset, len }
        | StorageOp::Punch { offset, len }
        | StorageOp::ZeroRange { offset, len }
        | StorageOp::Allocate { offset, len } => Some((offset, len)),
        _ => None,
    }
}
