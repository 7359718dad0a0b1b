//! Waiting for the futures of `object_store`, which want a runtime of `tokio` with timers and threads that may block.
//! Nothing else of zebu knows of it.

use std::future::Future;
use std::io;
use tokio::runtime::Builder;

/// Waits for a future on the thread that calls.
///
/// # Errors
/// The system gives no runtime.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> io::Result<T> {
    let runtime = Builder::new_current_thread().enable_time().build()?;
    let value = runtime.block_on(future);
    // A request that the future has given up may go on for long.
    runtime.shutdown_background();
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn a_request_that_is_given_up_is_not_waited_for() {
        let (end, ended) = channel::<()>();
        let request = move || {
            let _ = ended.recv();
        };
        let given_up = wait(async {
            tokio::time::timeout(Duration::from_millis(10), tokio::task::spawn_blocking(request)).await
        });
        assert!(given_up.unwrap().is_err());
        drop(end);
    }
}
