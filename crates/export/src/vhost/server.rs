//! Waiting for front ends, one at a time.

use super::back_channel::BackChannel;
use super::config::VhostConfig;
use super::handler::Handler;
use super::ring_control::RunningRings;
use crate::error::ExportError;
use crate::export::{Export, SizeWatcher};
use crate::log::{Level, Log, Seldom};
use crate::pool::{PoolHandle, WorkerPool};
use crate::stop::Stop;
use rustix::net::Shutdown;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vhost::vhost_user::{BackendReqHandler, Error};
use zebu_storage::sync::{Condvar, Mutex};

/// Warnings and errors a minute about front ends, which can cause as many as they like.
const MESSAGES: u32 = 20;

/// How long a front end may hold up its device's end. It can do so for ever: by a descriptor that keeps whoever looks at it or
/// closes it waiting, such as one of a file system of its own (FUSE), or of a TCP socket that lingers.
const GRACE: Duration = Duration::from_secs(10);

/// State that the device's owner and its thread share.
struct Shared {
    listener: UnixListener,
    /// The front end that is connected.
    stream: Mutex<Option<UnixStream>>,
    stop: Stop,
    /// When it was told to stop.
    stopped: OnceLock<Instant>,
    running: Arc<RunningRings>,
    has_ended: Mutex<bool>,
    ended: Condvar,
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
        *self.shared.has_ended.lock() = true;
        self.shared.ended.notify_all();
    }
}

/// A vhost-user-blk device. Dropping it stops it.
pub struct VhostUserBlk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    export: Arc<Export>,
    log: Log,
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
        let log = config.log.clone();
        let config = VhostConfig { log: log.sparing(MESSAGES), ..config };
        let shared = Arc::new(Shared {
            listener,
            stream: Mutex::default(),
            stop: Stop::default(),
            stopped: OnceLock::new(),
            running: Arc::default(),
            has_ended: Mutex::default(),
            ended: Condvar::new(),
        });
        let (of, of_thread, pool) = (Arc::clone(&shared), Arc::clone(export), pool.handle());
        let (watched, of_closed) = (Arc::clone(&shared), Arc::clone(export));
        pool.spawn_waiting(0, move |_| async move {
            if watched.stop.or(of_closed.closed().wait()).await.is_some() {
                watched.send_away();
            }
        });
        let thread = std::thread::Builder::new()
            .name("zebu-vhost".to_owned())
            .spawn(move || {
                let _closing = Closing { shared: &of, export: &of_thread };
                of.run(&of_thread, &pool, &config);
            })
            .map_err(|error| ExportError::Thread(error.to_string()))?;
        Ok(Self { shared, thread: Some(thread), export: Arc::clone(export), log })
    }

    /// Sends the front end away and takes no other. Does not wait.
    pub fn begin_to_stop(&self) {
        let _ = self.shared.stopped.set(Instant::now());
        self.shared.stop.throw();
        // Whoever waits for either finds its end.
        let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
        self.shared.send_away();
    }

    /// As [`VhostUserBlk::begin_to_stop`], and waits. Requests in flight are finished when this returns, unless the front end
    /// holds the device up for ten seconds since then: its thread is left behind, and its requests end with the pool's.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.begin_to_stop();
        if self.shared.ends_in_time() {
            // A panic was reported when it happened.
            let _ = thread.join();
            return;
        }
        self.shared.running.stop();
        let (name, seconds) = (self.export.name(), GRACE.as_secs());
        let what = "what it handed over, or a slow disk, keeps its thread waiting, which is left behind";
        self.log.write(
            Level::Warning,
            format_args!("the front end of '{name}' does not let go for {seconds} s: {what}"),
        );
    }
}

impl Drop for VhostUserBlk {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Ends the connection to the front end.
    fn send_away(&self) {
        if let Some(stream) = &*self.stream.lock() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Whether the thread is over [`GRACE`] after it was told to stop.
    fn ends_in_time(&self) -> bool {
        let deadline = *self.stopped.get_or_init(Instant::now) + GRACE;
        let mut has_ended = self.has_ended.lock();
        while !*has_ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            has_ended = self.ended.wait_timeout(has_ended, left).0;
        }
        true
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
            *self.stream.lock() = Some(clone);
            if export.is_closed() {
                let name = export.name();
                log.write(Level::Warning, format_args!("a front end of '{name}' is sent away: it is closed"));
                *self.stream.lock() = None;
                continue;
            }
            let handler = Handler::new(export, connection, pool, config, &self.running);
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
            *self.stream.lock() = None;
        }
    }

    /// Does what the front end asks until it leaves. The rings stand still then. `before_each` is called before a message is
    /// taken, `tell` with the reason of the end, before the connection is closed.
    fn talk(&self, stream: UnixStream, handler: Handler, before_each: impl Fn(), tell: impl Fn(&Error)) {
        // `vhost` takes requests for the standard library's mutex only.
        let handler = Arc::new(std::sync::Mutex::new(handler));
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
