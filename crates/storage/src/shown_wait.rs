//! A wait that is reported when it takes long.

use crate::file::File;
use crate::long_waits::LONG_WAIT;
use crate::worker::Worker;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

impl Worker {
    /// The result of `waits`, which is about `file`. If it takes long, it is told, and shows in [`File::long_waits`] until its
    /// end.
    pub async fn shown<T>(&self, file: &File, what: &'static str, waits: impl Future<Output = T>) -> T {
        let (mut waits, mut is_long) = (pin!(waits), pin!(self.sleep(LONG_WAIT)));
        let mut shown = None;
        poll_fn(|cx| {
            let result = waits.as_mut().poll(cx);
            if result.is_pending() && shown.is_none() && is_long.as_mut().poll(cx) == Poll::Ready(()) {
                shown = Some(file.waits().show(file.path(), what, self.id()));
            }
            result
        })
        .await
    }
}
