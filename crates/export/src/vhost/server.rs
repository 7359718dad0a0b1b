//! Waiting for front ends, one at a time.

use super::back_channel::BackChannel;
use super::config::VhostConfig;
use super::handler::Handler;
use crate::error::ExportError;
use crate::export::{Export, SizeWatcher};
use crate::log::{Level, Seldom};
use crate::pool::{PoolHandle, WorkerPool};
use crate::stop::Stop;
use rustix::net::Shutdown;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vhost::vhost_user::{BackendReqHandler, Error};

/// State that the device's owner and its thread share.
struct Shared {
    listener: UnixListener,
    /// The front end that is connected.
    stream: Mutex<Option<UnixStream>>,
    stop: Stop,
}

/// Lets front ends find nobody, and closes the export, where the device's thread ends by a panic.
struct Closing<'a> {
    shared: &'a Shared,
    export: &'a Export,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.export.close_if_panicking();
        if self.export.is_closed() {
            let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
            self.shared.send_away();
        }
    }
}

/// A vhost-user-blk device. Dropping it stops it.
pub struct VhostUserBlk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl VhostUserBlk {
    /// Makes a device of an export. A front end connects to `listener`; when it leaves, another may come.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        pool: &WorkerPool,
        export: &Arc<Export>,
        listener: UnixListener,
        config: VhostConfig,
    ) -> Result<Self, ExportError> {
        let shared = Arc::new(Shared { listener, stream: Mutex::default(), stop: Stop::default() });
        let (of, export, pool) = (Arc::clone(&shared), Arc::clone(export), pool.handle());
        let (watched, of_closed) = (Arc::clone(&shared), Arc::clone(&export));
        pool.spawn_waiting(0, move |_| async move {
            if watched.stop.or(of_closed.closed().wait()).await.is_some() {
                watched.send_away();
            }
        });
        let thread = std::thread::Builder::new()
            .name("zebu-vhost".to_owned())
            .spawn(move || {
                let _closing = Closing { shared: &of, export: &export };
                of.run(&export, &pool, &config);
            })
            .map_err(|error| ExportError::Thread(error.to_string()))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Sends the front end away and takes no other. Requests in flight are finished when this returns.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.stop.throw();
        // Whoever waits for either finds its end.
        let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
        self.shared.send_away();
        if let Some(thread) = self.thread.take() {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for VhostUserBlk {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn stream(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection to the front end.
    fn send_away(&self) {
        if let Some(stream) = &*self.stream() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn run(&self, export: &Arc<Export>, pool: &PoolHandle, config: &VhostConfig) {
        let log = &config.log;
        let mut failures = Seldom::default();
        while !self.stop.is_thrown() {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(_) if self.stop.is_thrown() => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    if failures.is_due(Instant::now()) {
                        log.write(Level::Warning, format_args!("cannot accept a front end: {error}"));
                    }
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            log.write(Level::Info, format_args!("a front end of '{}' connects", export.name()));
            let clones = (stream.try_clone(), stream.try_clone(), stream.try_clone());
            let (Ok(clone), Ok(watched), Ok(connection)) = clones else { continue };
            *self.stream() = Some(clone);
            if export.is_closed() {
                let name = export.name();
                log.write(Level::Warning, format_args!("a front end of '{name}' is sent away: it is closed"));
                *self.stream() = None;
                continue;
            }
            let handler = Handler::new(export, connection, pool, config);
            let channel = BackChannel::new();
            export.watch_size(Arc::downgrade(&channel) as Weak<dyn SizeWatcher>);
            let tell = |end: &Error| match end {
                Error::Disconnected => {
                    log.write(Level::Info, format_args!("the front end of '{}' leaves", export.name()));
                }
                _ if self.stop.is_thrown() => {}
                error => {
                    log.write(Level::Warning, format_args!("the front end of '{}': {error}", export.name()));
                }
            };
            self.talk(stream, handler, || channel.look_at_next(&watched), tell);
            *self.stream() = None;
        }
    }

    /// Does what the front end asks until it leaves. The rings stand still then. `before_each` is called before a message is
    /// taken, `tell` with the reason of the end, before the connection is closed.
    fn talk(&self, stream: UnixStream, handler: Handler, before_each: impl Fn(), tell: impl Fn(&Error)) {
        let handler = Arc::new(Mutex::new(handler));
        let mut requests = BackendReqHandler::from_stream(stream, Arc::clone(&handler));
        let end = loop {
            // Between the accepting and here, stop may have found no stream to end.
            if self.stop.is_thrown() {
                break Error::Disconnected;
            }
            before_each();
            // After an error, nobody knows what the front end believes.
            if let Err(error) = requests.handle_request() {
                break error;
            }
        };
        handler.lock().unwrap_or_else(PoisonError::into_inner).stop_rings();
        tell(&end);
    }
}
