//! Lending the front of a buffer to a request, and waiting for two requests at once.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use zebu_storage::{IoBuf, IoBufs};

/// Puts a buffer together again whose front was split off and lent to a request.
pub(super) fn rejoin(head: IoBufs, tail: IoBuf) -> IoBuf {
    let mut parts = head;
    parts.push(tail);
    match parts.pop_part() {
        Some(whole) if parts.parts().is_empty() => whole,
        // Requests give back the memory that they were lent, so the parts are neighbours; were they not, a copy keeps
        // the bytes in order.
        last => {
            if let Some(last) = last {
                parts.push_part(last);
            }
            let mut whole = IoBuf::zeroed(parts.len());
            parts.copy_to(0, whole.as_mut_slice());
            whole
        }
    }
}

/// Runs two futures at once until both are done.
pub(super) async fn join<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut done_a, mut done_b) = (None, None);
    poll_fn(move |context| {
        if done_a.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(context)
        {
            done_a = Some(value);
        }
        if done_b.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(context)
        {
            done_b = Some(value);
        }
        match (done_a.take(), done_b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (done_a, done_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}
