//! A link for measurements: passes connections on to a server, with a delay and a rate that all of them share.
//!
//! `slow_link SERVER DELAY_MS MEGABITS`, where SERVER is `HOST:PORT` or the path of a Unix socket. It listens on a port of
//! 127.0.0.1 that it prints. Each direction has half of the delay, and the whole rate for itself. (The kernel of many test
//! machines has no netem.)

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that are passed on at once.
const PIECE: usize = 64 << 10;
/// Pieces of one connection that are under way at most: more than the link holds.
const PIECES: usize = 256;

/// A direction of the link, which passes one byte after the other.
struct Lane {
    bytes_a_second: f64,
    free_at: Mutex<Instant>,
}

impl Lane {
    fn new(megabits: f64) -> Self {
        Self { bytes_a_second: megabits * 125_000.0, free_at: Mutex::new(Instant::now()) }
    }

    /// Takes the link for so many bytes; when the last of them has passed.
    fn pass(&self, bytes: usize) -> Instant {
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let start = (*free_at).max(Instant::now());
        *free_at = start + Duration::from_secs_f64(bytes as f64 / self.bytes_a_second);
        *free_at
    }
}

/// Passes bytes on in their time, and the end.
fn run(mut from: File, mut to: File, lane: Arc<Lane>, delay: Duration) {
    let (sender, receiver) = sync_channel::<(Instant, Vec<u8>)>(PIECES);
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = rustix::net::shutdown(&to, rustix::net::Shutdown::Write);
    });
    thread::spawn(move || {
        let mut buf = vec![0; PIECE];
        while let Ok(read @ 1..) = from.read(&mut buf) {
            let due = lane.pass(read) + delay;
            if sender.send((due, buf[..read].to_vec())).is_err() {
                break;
            }
        }
    });
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [server, delay, megabits] = words.as_slice() else {
        eprintln!("usage: slow_link SERVER DELAY_MS MEGABITS");
        std::process::exit(2);
    };
    let (delay, megabits) = (delay.parse::<f64>(), megabits.parse::<f64>());
    let (Ok(delay), Ok(megabits)) = (delay, megabits) else {
        eprintln!("slow_link: the delay and the rate are numbers");
        std::process::exit(2);
    };
    let delay = Duration::from_secs_f64(delay / 2000.0);
    let lanes = [Arc::new(Lane::new(megabits)), Arc::new(Lane::new(megabits))];
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    println!("{}", listener.local_addr().expect("an address").port());
    for client in listener.incoming().flatten() {
        let _ = client.set_nodelay(true);
        let connected = if server.starts_with('/') {
            UnixStream::connect(server).map(OwnedFd::from)
        } else {
            TcpStream::connect(server).map(|socket| {
                let _ = socket.set_nodelay(true);
                OwnedFd::from(socket)
            })
        };
        // Sockets are read and written as files are.
        let ends = connected.and_then(|server| {
            let (client, server) = (File::from(OwnedFd::from(client)), File::from(server));
            Ok([client.try_clone()?, server.try_clone()?, server, client])
        });
        let Ok([client, server, from_server, to_client]) = ends else { continue };
        let [up, down] = lanes.each_ref().map(Arc::clone);
        run(client, server, up, delay);
        run(from_server, to_client, down, delay);
    }
}
