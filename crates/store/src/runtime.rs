//! The thread on which the futures of `object_store` run. Nothing else of zebu knows of it.

use std::future::Future;
use std::io;
use std::sync::mpsc;
use tokio::runtime::{Builder, Handle};
use zebu_storage::sync::Mutex;

/// The most threads. A part that is sent takes two, and no upload sends more than [`MOST_PARTS`] at a time.
const MOST_REQUESTS: usize = 256;
/// The most parts of an upload in memory.
pub(crate) const MOST_PARTS: u64 = 16;

static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);

/// The runtime, which is started when it is needed first.
///
/// # Errors
/// The system gives no thread.
pub(crate) fn handle() -> io::Result<Handle> {
    let mut place = RUNTIME.lock();
    if let Some(handle) = &*place {
        return Ok(handle.clone());
    }
    let (sender, receiver) = mpsc::channel();
    let run = move || {
        let made = Builder::new_current_thread().enable_time().max_blocking_threads(MOST_REQUESTS).build();
        match made {
            Ok(runtime) => {
                let _ = sender.send(Ok(runtime.handle().clone()));
                runtime.block_on(std::future::pending::<()>());
            }
            Err(error) => drop(sender.send(Err(error))),
        }
    };
    std::thread::Builder::new().name("zebu-store".to_owned()).spawn(run)?;
    let handle = receiver.recv().map_err(|_| io::Error::other("the thread ended at once"))??;
    Ok(place.insert(handle).clone())
}

/// Waits for a future on the thread that calls.
///
/// # Errors
/// As of [`handle`].
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> io::Result<T> {
    Ok(handle()?.block_on(future))
}
