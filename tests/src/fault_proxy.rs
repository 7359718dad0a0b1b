//! A proxy between a client and a server on Unix sockets that does to a connection what networks and broken servers do.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// A mishap of one connection. Counts are bytes from the server.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Nothing.
    None,
    /// It ends after so many.
    CutAfter(u64),
    /// After so many, nothing comes any more, and the connection stays.
    SilentAfter(u64),
    /// The byte at this place has all its bits turned over.
    FlipAt(u64),
    /// Everything comes so much later.
    Late(Duration),
    /// No more than so many bytes come in a second.
    Slow(u64),
}

/// A running proxy; it ends with the process.
#[derive(Debug)]
pub struct FaultProxy {
    path: PathBuf,
    connections: Arc<AtomicUsize>,
}

impl FaultProxy {
    /// A proxy at `path` in front of the server at `server`. Connection number n has the n-th fault, later ones have none.
    ///
    /// # Panics
    /// If it can't listen.
    pub fn start(path: &Path, server: &Path, faults: Vec<Fault>) -> Self {
        let listener = UnixListener::bind(path).expect("the proxy listens");
        let connections = Arc::new(AtomicUsize::new(0));
        let (count, server) = (Arc::clone(&connections), server.to_owned());
        thread::spawn(move || {
            for client in listener.incoming() {
                let number = count.fetch_add(1, Ordering::SeqCst);
                let fault = faults.get(number).copied().unwrap_or(Fault::None);
                let (Ok(client), Ok(server)) = (client, UnixStream::connect(&server)) else { continue };
                let (from_client, to_server) = (client.try_clone(), server.try_clone());
                if let (Ok(from_client), Ok(to_server)) = (from_client, to_server) {
                    thread::spawn(move || pass(from_client, to_server, Fault::None));
                    thread::spawn(move || pass(server, client, fault));
                }
            }
        });
        Self { path: path.to_owned(), connections }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

/// Passes bytes on until the end of either side, or of the fault's patience.
fn pass(mut from: UnixStream, mut to: UnixStream, fault: Fault) {
    let mut buf = [0; 16 << 10];
    let mut passed = 0u64;
    while let Ok(read @ 1..) = from.read(&mut buf) {
        let mut bytes = &mut buf[..read];
        match fault {
            Fault::None => {}
            Fault::Late(time) => thread::sleep(time),
            Fault::Slow(rate) => thread::sleep(Duration::from_micros(read as u64 * 1_000_000 / rate)),
            Fault::FlipAt(at) => {
                if let Some(byte) = at.checked_sub(passed).and_then(|at| bytes.get_mut(at as usize)) {
                    *byte = !*byte;
                }
            }
            Fault::CutAfter(most) | Fault::SilentAfter(most) => {
                let left = most.saturating_sub(passed).min(read as u64) as usize;
                if left < read {
                    bytes = &mut bytes[..left];
                    let _ = to.write_all(bytes);
                    if matches!(fault, Fault::SilentAfter(_)) {
                        // Both ends stay open; what the server says is lost.
                        while let Ok(1..) = from.read(&mut buf) {}
                    }
                    break;
                }
            }
        }
        passed += bytes.len() as u64;
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
