//! Taking clients in, and letting them go.

use super::config::NbdConfig;
use super::gate::Load;
use super::handshake::Handshake;
use super::inbox::Inbox;
use super::listener::Listener;
use super::peers::{Membership, Peers, TimeLimits};
use super::session::Session;
use super::transport::Transport;
use crate::error::ExportError;
use crate::export::Exports;
use crate::log::{Level, Seldom};
use crate::pool::{PoolHandle, Seat, WorkerPool};
use crate::stop::Stop;
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu::storage::Socket;

/// How often the watch looks at the clients.
const LOOK: Duration = Duration::from_secs(1);
/// How long to wait when there is nothing to accept with (descriptors, memory).
const BREATH: Duration = Duration::from_millis(100);

/// What all of a server's tasks share.
struct Shared {
    exports: Exports,
    config: NbdConfig,
    peers: Arc<Peers>,
    pool: PoolHandle,
    stop: Stop,
}

/// A server that takes clients in. Dropping it stops it, too.
pub struct NbdServer(Arc<Shared>);

impl NbdServer {
    /// Starts to serve on the threads of the pool. Clients are spread over them.
    ///
    /// # Errors
    /// None at present.
    pub fn start(
        pool: &WorkerPool,
        exports: Exports,
        listeners: Vec<Listener>,
        config: NbdConfig,
    ) -> Result<Self, ExportError> {
        let shared = Arc::new(Shared {
            exports,
            config,
            peers: Arc::default(),
            pool: pool.handle(),
            stop: Stop::default(),
        });
        for listener in listeners {
            let of = Arc::clone(&shared);
            shared.pool.spawn_on(0, move |seat| async move { accept(of, &listener, &seat).await });
        }
        let of = Arc::clone(&shared);
        shared.pool.spawn_on(0, move |seat| async move { watch(&of, &seat).await });
        Ok(Self(shared))
    }

    /// Clients that are connected.
    pub fn clients(&self) -> usize {
        self.0.peers.len()
    }

    /// Takes no more clients and no more requests; those under way are answered. [`WorkerPool::join`] waits for that.
    pub fn stop(&self) {
        self.0.stop.throw();
        self.0.peers.stop_receiving();
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn accept(shared: Arc<Shared>, listener: &Listener, seat: &Seat) {
    let Shared { config, stop, .. } = &*shared;
    let mut failures = Seldom::default();
    while let Some(ready) = stop.or(seat.worker.readable(listener.socket())).await {
        if let Err(error) = ready {
            config
                .log
                .write(Level::Error, format_args!("{}: cannot wait for clients: {error}", listener.name()));
            return;
        }
        while !stop.is_thrown() {
            match listener.accept() {
                Ok(socket) => welcome(&shared, socket, listener),
                Err(Errno::AGAIN) => break,
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(errno) => {
                    if failures.is_due(Instant::now()) {
                        config.log.write(
                            Level::Warning,
                            format_args!("{}: cannot accept a client: {}", listener.name(), in_words(errno)),
                        );
                    }
                    stop.or(seat.worker.sleep(BREATH)).await;
                    break;
                }
            }
        }
    }
}

fn in_words(errno: Errno) -> String {
    match errno {
        Errno::MFILE => format!("{errno}: raise the limit of open files (LimitNOFILE= of a unit, ulimit -n)"),
        errno => errno.to_string(),
    }
}

fn welcome(shared: &Arc<Shared>, socket: Socket, listener: &Listener) {
    let Shared { config, peers, pool, .. } = &**shared;
    let Some(membership) = peers.admit(&socket, config.max_clients) else {
        let most = config.max_clients;
        config.log.write(Level::Warning, format_args!("{}: more than {most} clients", listener.name()));
        return;
    };
    let of = Arc::clone(shared);
    pool.spawn_on(pool.least_loaded(), move |seat| async move {
        let log = &of.config.log;
        log.write(Level::Debug, format_args!("client {socket:?} connects"));
        match serve(&of, &socket, &membership, &seat).await {
            Ok(()) => log.write(Level::Debug, format_args!("client {socket:?} leaves")),
            Err(error) => log.write(Level::Info, format_args!("client {socket:?} is sent away: {error}")),
        }
    });
}

async fn serve(shared: &Shared, socket: &Socket, membership: &Membership, seat: &Seat) -> io::Result<()> {
    let Shared { exports, config, stop, .. } = shared;
    if stop.is_thrown() {
        return Ok(());
    }
    let peer = membership.peer();
    let plain = Transport::Plain(socket.clone());
    let mut inbox = Inbox::new(&seat.worker, &plain, peer);
    let mut handshake = Handshake::new(&seat.worker, &plain, exports, config);
    let agreement = handshake.run(&mut inbox).await?;
    let Some(agreement) = agreement else { return Ok(()) };
    peer.serves();
    let most = Load { requests: config.max_requests.max(1), bytes: config.max_bytes };
    let export = Arc::clone(&agreement.export);
    export.metrics().client_comes();
    let session = Session::new(seat, agreement, most, peer, stop);
    let result = session.run(&mut inbox, handshake.transport(), peer).await;
    export.metrics().client_goes();
    result
}

/// Sends clients away whose time is over. In the end, waits for all to leave.
async fn watch(shared: &Shared, seat: &Seat) {
    let Shared { config, peers, stop, .. } = shared;
    let limits = TimeLimits { handshake: Some(config.handshake_timeout.max(1)), idle: config.idle_timeout };
    while stop.or(seat.worker.sleep(LOOK)).await.is_some() {
        let over = peers.look(&limits);
        if over > 0 {
            config.log.write(Level::Info, format_args!("sent {over} clients away, whose time was over"));
        }
    }
    // Clients that came in at the last moment.
    peers.stop_receiving();
    let step = Duration::from_millis(10);
    let mut left = Duration::from_secs(config.stop_timeout.into());
    while peers.len() > 0 && !left.is_zero() {
        seat.worker.sleep(step).await;
        left = left.saturating_sub(step);
    }
    peers.hang_up();
}
