//! Taking clients in, and letting them go.

use super::config::{NbdConfig, WhenFull};
use super::handshake::Handshake;
use super::inbox::Inbox;
use super::listener::{Client, Listener};
use super::origin::Origin;
use super::peers::{LEAVING, Membership, NoPlace, Peers, Places, TimeLimits};
use super::session::Session;
use super::transport::{Transport, is_tls_failure};
use crate::error::ExportError;
use crate::export::Export;
use crate::exports::Exports;
use crate::inflight_limit::{InflightLimit, Load};
use crate::log::{Level, Seldom};
use crate::memory_budget::Due;
use crate::pool::{PoolHandle, Seat, WorkerPool};
use crate::stop::Stop;
use rustix::io::Errno;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use zebu_storage::Socket;
use zebu_storage::sync::Mutex;

/// How often the watch looks at the clients.
const LOOK: Duration = Duration::from_secs(1);
/// How long to wait when there is nothing to accept with (descriptors, memory).
const BREATH: Duration = Duration::from_millis(100);

/// Bytes that a connection takes for what it receives.
const CONNECTION: u64 = 128 << 10;
/// Bytes that TLS takes beside them.
const TLS: u64 = 128 << 10;
/// Bytes that a request takes beside its data: its task, and what its buffer is larger.
const REQUEST: u64 = 8 << 10;

/// State that all of a server's tasks share.
struct Shared {
    exports: Exports,
    config: NbdConfig,
    places: Places,
    peers: Arc<Peers>,
    pool: PoolHandle,
    stop: Stop,
    /// When it was told last that TLS or a lack of memory sent a client away.
    failures: Mutex<Seldom>,
    /// When it was told last that there are too many clients.
    crowds: Mutex<Seldom>,
}

impl Shared {
    /// How important it is that a client was sent away for this. A TLS handshake that fails, and too little memory, are
    /// matters of how the server or the client is set up, and told by themselves, unless strangers do so all the time.
    fn level_of(&self, error: &io::Error) -> Level {
        let is_matter_of_setup = is_tls_failure(error) || error.kind() == io::ErrorKind::OutOfMemory;
        let is_news = is_matter_of_setup && self.failures.lock().is_due(Instant::now());
        if is_news { Level::Warning } else { Level::Info }
    }
}

/// Bytes that a connection takes by being there.
fn fixed(config: &NbdConfig) -> u64 {
    CONNECTION + if config.has_tls() { TLS } else { 0 }
}

/// As many clients as may be, and as connections may have memory.
fn places(config: &NbdConfig) -> Places {
    let in_memory = usize::try_from(config.memory.limit() / 2 / fixed(config)).unwrap_or(usize::MAX);
    let most = config.max_clients.min(in_memory.max(1));
    let of_one = config.max_clients_per_peer.unwrap_or(match config.when_full {
        WhenFull::SendAway => most - most / 16,
        WhenFull::Wait => most,
    });
    Places { most, of_one }
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
            places: places(&config),
            config,
            peers: Arc::default(),
            pool: pool.handle(),
            stop: Stop::default(),
            failures: Mutex::default(),
            crowds: Mutex::default(),
        });
        for listener in listeners {
            let of = Arc::clone(&shared);
            shared.pool.spawn_waiting(0, move |seat| async move { accept(of, &listener, &seat).await });
        }
        let of = Arc::clone(&shared);
        shared.pool.spawn_waiting(0, move |seat| async move { watch(&of, &seat).await });
        Ok(Self(shared))
    }

    /// A way in for clients that are connected already.
    pub(crate) fn entrance(&self) -> Entrance {
        Entrance(Arc::clone(&self.0))
    }

    /// Clients that are connected.
    pub fn clients(&self) -> usize {
        self.0.peers.len()
    }

    /// Waits until a client has been served, and none is connected any more.
    pub async fn all_left(&self) {
        self.0.peers.all_left().await;
    }

    /// Ends the connections to an export, which was removed. Their requests under way are finished.
    pub fn disconnect(&self, export: &Arc<Export>) {
        self.0.peers.leave(export);
    }

    /// Takes no more clients and no more requests; those under way are answered. [`WorkerPool::join`] waits for that.
    pub fn stop(&self) {
        self.0.stop.throw();
        self.0.exports.end_limits();
        self.0.peers.stop_receiving();
    }
}

/// A way into a server for this machine's kernel.
#[derive(Clone)]
pub(crate) struct Entrance(Arc<Shared>);

impl Entrance {
    /// Takes the kernel in. `over` is dropped when it has left.
    pub(crate) fn take_in(&self, socket: Socket, over: impl Send + 'static) {
        let place = "the kernel";
        let origin = Origin::User(rustix::process::getuid().as_raw());
        let client = Client { socket, name: place.to_owned(), origin };
        welcome_until(&self.0, client, place, over);
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn accept(shared: Arc<Shared>, listener: &Listener, seat: &Seat) {
    let Shared { config, stop, peers, places, .. } = &*shared;
    let mut failures = Seldom::default();
    // A client that is there already makes the socket readable at once: `or` would never look at the switch.
    while !stop.is_thrown()
        && let Some(ready) = stop.or(seat.worker.readable(listener.socket())).await
    {
        if let Err(error) = ready {
            config
                .log
                .write(Level::Error, format_args!("{}: cannot wait for clients: {error}", listener.name()));
            return;
        }
        while !stop.is_thrown() {
            if config.when_full == WhenFull::Wait && stop.or(peers.room(places.most)).await.is_none() {
                return;
            }
            let_displaced_go(&shared, seat).await;
            match listener.accept() {
                Ok(client) => welcome(&shared, client, listener.name()),
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

/// Lets clients go whose places others have got, if many are on their way out. (They may belong to this thread.)
async fn let_displaced_go(shared: &Shared, seat: &Seat) {
    let is_crowded = || shared.peers.len() >= shared.places.most.saturating_add(LEAVING);
    let deadline = Instant::now() + BREATH;
    while is_crowded() && Instant::now() < deadline {
        if shared.stop.or(seat.worker.sleep(Duration::from_millis(1))).await.is_none() {
            return;
        }
    }
}

fn in_words(errno: Errno) -> String {
    match errno {
        Errno::MFILE => format!("{errno}: raise the limit of open files (LimitNOFILE= of a unit, ulimit -n)"),
        errno => errno.to_string(),
    }
}

fn welcome(shared: &Arc<Shared>, client: Client, place: &str) {
    welcome_until(shared, client, place, ());
}

/// As [`welcome`]; `over` is dropped when the client has left.
fn welcome_until(shared: &Arc<Shared>, client: Client, place: &str, over: impl Send + 'static) {
    let Shared { peers, pool, places, .. } = &**shared;
    let Client { socket, name, origin } = client;
    let membership = match peers.admit(&socket, origin, *places) {
        Ok(membership) => membership,
        Err(lack) => return tell_lack(shared, lack, place),
    };
    let of = Arc::clone(shared);
    pool.spawn_on(pool.least_loaded(), move |seat| async move {
        let log = &of.config.log;
        log.write(Level::Debug, format_args!("client {name} connects"));
        match serve(&of, &socket, &membership, &seat).await {
            Ok(()) => log.write(Level::Debug, format_args!("client {name} leaves")),
            Err(error) => {
                let level = of.level_of(&error);
                log.write(level, format_args!("client {name} is sent away: {error}"));
            }
        }
        // Its place is free before anybody hears of that.
        drop(membership);
        drop(over);
    });
}

fn tell_lack(shared: &Shared, lack: NoPlace, name: &str) {
    let Shared { config, places: Places { most, of_one }, .. } = shared;
    let is_news = shared.crowds.lock().is_due(Instant::now());
    let level = if is_news { Level::Warning } else { Level::Info };
    match lack {
        NoPlace::OfOrigin(origin) if of_one < most => {
            config.log.write(level, format_args!("{name}: more than {of_one} clients of {origin}"));
        }
        _ if *most < config.max_clients => {
            let limit = config.memory.limit() >> 20;
            config.log.write(level, format_args!("{name}: connections take half of {limit} MiB"));
        }
        _ => config.log.write(level, format_args!("{name}: more than {most} clients")),
    }
}

async fn serve(shared: &Shared, socket: &Socket, membership: &Membership, seat: &Seat) -> io::Result<()> {
    let Shared { exports, config, stop, peers, places, .. } = shared;
    if stop.is_thrown() {
        return Ok(());
    }
    let peer = membership.peer();
    let due = Due { fixed: fixed(config), reserve: 0 };
    let mut account = config.memory.admit(due, peer.held());
    if account.is_none() && peers.len() > places.most {
        // One whose place this client got is on its way out, and gives its memory back.
        if stop.or(peers.room(places.most + 1)).await.is_none() {
            return Ok(());
        }
        account = config.memory.admit(due, peer.held());
    }
    let account = account.ok_or_else(|| {
        let most = config.memory.limit() >> 20;
        io::Error::new(io::ErrorKind::OutOfMemory, format!("connections take half of {most} MiB"))
    })?;
    let plain = Transport::Plain(socket.clone());
    let mut inbox = Inbox::new(&seat.worker, &plain, peer);
    let mut handshake = Handshake::new(&seat.worker, &plain, exports, config, peer);
    let agreement = handshake.run(&mut inbox).await?;
    let Some(agreement) = agreement else { return Ok(()) };
    peer.serves(&agreement.export);
    let most = Load { requests: config.max_requests.max(1), bytes: config.max_bytes };
    let export = Arc::clone(&agreement.export);
    export.metrics().client_comes();
    let limit = InflightLimit::new(most, account).with_each(REQUEST);
    let session = Session::new(seat, agreement, limit, peer, stop);
    let result = session.run(&mut inbox, handshake.transport(), peer).await;
    export.metrics().client_goes();
    result
}

/// Sends clients away whose time is over. In the end, waits for all to leave.
async fn watch(shared: &Shared, seat: &Seat) {
    let Shared { config, peers, stop, .. } = shared;
    let handshake = Some(config.handshake_timeout.max(1));
    let mut told = Vec::new();
    while stop.or(seat.worker.sleep(LOOK)).await.is_some() {
        for export in shared.exports.all().iter().filter(|export| export.is_closed()) {
            peers.leave_closed();
            if !told.iter().any(|other| Weak::as_ptr(other) == Arc::as_ptr(export)) {
                told.push(Arc::downgrade(export));
                let what = "is closed by a fault of the server's own; others go on";
                config.log.write(Level::Error, format_args!("the export '{}' {what}", export.name()));
            }
        }
        let memory_is_short = config.memory.waiting() > 0;
        let limits = TimeLimits { handshake, idle: config.idle_timeout, memory_is_short };
        let over = peers.look(&limits);
        if over > 0 {
            config.log.write(Level::Info, format_args!("sent {over} clients away, whose time was over"));
        }
    }
    // Clients that came in at the last moment.
    peers.stop_receiving();
    let step = Duration::from_millis(10);
    let deadline = Instant::now() + Duration::from_secs(config.stop_timeout.into());
    while peers.len() > 0 && Instant::now() < deadline {
        seat.worker.sleep(step).await;
    }
    peers.hang_up();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Log;
    use crate::pool::PoolConfig;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use zebu_engine::storage::{Engine, Worker, WorkerConfig};
    use zebu_engine::{Access, Format, Image, OpenOptions};

    const SIZE: usize = 1 << 20;
    const BLOCK: usize = 4096;

    /// A client that has chosen an export, by the oldest way there is.
    fn client(socket: &Path, name: &str) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(600)))?;
        stream.read_exact(&mut [0; 18])?;
        let mut choice = vec![0, 0, 0, 3];
        choice.extend(b"IHAVEOPT");
        choice.extend([0, 0, 0, 1]);
        choice.extend((name.len() as u32).to_be_bytes());
        choice.extend(name.as_bytes());
        stream.write_all(&choice)?;
        stream.read_exact(&mut [0; 10])?;
        Ok(stream)
    }

    fn ask(stream: &mut UnixStream, command: u16, payload: &[u8], answer: usize) -> io::Result<Vec<u8>> {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, 0]);
        request.extend(command.to_be_bytes());
        request.extend([0; 16]);
        let len = if command == 3 { 0 } else { BLOCK as u32 };
        request.extend(len.to_be_bytes());
        request.extend(payload);
        stream.write_all(&request)?;
        let mut reply = vec![0; 16 + answer];
        stream.read_exact(&mut reply)?;
        assert_eq!(reply[4..8], [0; 4]);
        Ok(reply.split_off(16))
    }

    fn read(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
        ask(stream, 0, &[], BLOCK)
    }

    // Workers without a ring find the listening socket readable without waiting.
    #[test]
    fn a_client_that_comes_while_a_server_stops_does_not_hold_it_up() {
        for engine in [Engine::Auto, Engine::Threads] {
            let dir = tempfile::tempdir().unwrap();
            let worker = WorkerConfig::default().engine(engine);
            let of_image = Worker::new(&worker).unwrap();
            let path = dir.path().join("a");
            std::fs::write(&path, vec![7; SIZE]).unwrap();
            let options = OpenOptions::default().format(Some(Format::Raw));
            let image = of_image.block_on(Image::open(&of_image, &path, &options)).unwrap();
            let exports = Exports::new(vec![Export::new("a", &image, Access::ReadOnly)]).unwrap();
            let socket = dir.path().join("socket");
            let listener = Listener::unix(UnixListener::bind(&socket).unwrap()).unwrap();
            let pool = WorkerPool::start(&PoolConfig { worker, ..PoolConfig::default() }).unwrap();
            let server = NbdServer::start(&pool, exports, vec![listener], NbdConfig::default()).unwrap();
            // The thread is busy until a client waits and the server is told to stop.
            let (busy, is_busy) = std::sync::mpsc::channel();
            let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
            pool.handle().spawn_waiting(0, move |_| async move {
                busy.send(()).unwrap();
                let _ = may_go_on.recv();
            });
            is_busy.recv().unwrap();
            let client = UnixStream::connect(&socket).unwrap();
            server.stop();
            drop(go_on);
            let (ended, has_ended) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                pool.join();
                ended.send(()).unwrap();
            });
            let found = has_ended.recv_timeout(Duration::from_secs(600));
            assert!(found.is_ok(), "{engine:?}: the server does not end");
            drop(client);
        }
    }

    /// In the task that takes requests (1), and in that of a request (2).
    #[test]
    fn a_panic_closes_its_export_and_others_go_on() {
        for place in [1, 2] {
            let dir = tempfile::tempdir().unwrap();
            let worker = Worker::new(&WorkerConfig::default()).unwrap();
            let images = ["a", "b"].map(|name| {
                let path = dir.path().join(name);
                std::fs::write(&path, vec![7; SIZE]).unwrap();
                let options = OpenOptions::default().access(Access::ReadWrite).format(Some(Format::Raw));
                worker.block_on(Image::open(&worker, &path, &options)).unwrap()
            });
            let exports = [("a", &images[0]), ("b", &images[1])];
            let exports = exports.map(|(name, image)| Export::new(name, image, Access::ReadWrite));
            let exports = Exports::new(exports.into()).unwrap();
            let socket = dir.path().join("socket");
            let listener = Listener::unix(UnixListener::bind(&socket).unwrap()).unwrap();
            let (sender, messages) = std::sync::mpsc::channel();
            let log = Log::new(Level::Error, move |_, message| sender.send(message.to_string()).unwrap());
            let config = NbdConfig { log, ..NbdConfig::default() };
            let pool = WorkerPool::start(&PoolConfig::default()).unwrap();
            let server = NbdServer::start(&pool, exports.clone(), vec![listener], config).unwrap();
            let [mut first, mut second, mut other] =
                ["a", "a", "b"].map(|name| client(&socket, name).unwrap());
            for stream in [&mut first, &mut second, &mut other] {
                assert_eq!(read(stream).unwrap(), [7; BLOCK]);
            }
            ask(&mut other, 1, &[8; BLOCK], 0).unwrap();
            let export = exports.find("a").unwrap();
            export.panic_at(place);
            assert!(read(&mut first).is_err(), "{place}: a request that panicked is answered");
            assert_eq!(second.read(&mut [0; 1]).unwrap_or(0), 0, "{place}: who else uses the export stays");
            assert!(client(&socket, "a").is_err() && export.is_closed() && exports.find("a").is_none());
            assert_eq!(read(&mut other).unwrap(), [8; BLOCK]);
            ask(&mut other, 3, &[], 0).unwrap();
            assert_eq!(read(&mut client(&socket, "b").unwrap()).unwrap(), [8; BLOCK]);
            server.stop();
            drop((first, second, other));
            pool.join();
            assert_eq!(messages.try_iter().count(), 1, "{place}: it is told once");
            assert_eq!(server.clients(), 0);
            assert_eq!(export.metrics().in_flight(), 0, "{place}");
            for image in &images {
                worker.block_on(image.close(&worker)).unwrap();
            }
        }
    }
}
