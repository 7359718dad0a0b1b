//! The process that connects to servers of images again, when connections break: in its sandbox a server may not. It is this
//! program again, outside of the sandbox, and connects only to addresses that were known when it was started. It signs the URLs of objects in stores, too, and reads the
//! credentials for that.

use crate::failure::Failure;
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use zebu_disks::{Context, RemoteDisks};
use zebu_oci::{is_token_name, token_for_broker};
use zebu_remote::{Broker, Peer};
use zebu_store::sign_for_broker;

/// The name of the command that it runs.
const COMMAND: &str = "connect-for-a-server";

/// The addresses; questions come over standard input.
#[derive(Debug, Args)]
pub(crate) struct ConnectArgs {
    /// An address and port
    #[arg(long, value_name = "ADDRESS")]
    tcp: Vec<SocketAddr>,
    /// The path of a Unix socket
    #[arg(long, value_name = "PATH")]
    unix: Vec<PathBuf>,
    /// The name of an object, whose URLs it signs
    #[arg(long, value_name = "NAME")]
    object: Vec<String>,
    /// Certificates of the authorities
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
}

/// Starts it, if images are on servers.
pub(crate) fn start(remote: &RemoteDisks) -> Result<(), Failure> {
    let peers = remote.network().peers();
    if peers.is_empty() {
        return Ok(());
    }
    let fail = |error: io::Error| {
        Failure::new(format!(
            "could not start the process that connects to servers again: {error} (--no-sandbox needs none)"
        ))
    };
    let (ours, theirs) = UnixStream::pair().map_err(fail)?;
    // In the order in which the process has them.
    let (tcp, others): (Vec<Peer>, Vec<Peer>) =
        peers.into_iter().partition(|peer| matches!(peer, Peer::Tcp(_)));
    let (unix, objects): (Vec<Peer>, Vec<Peer>) =
        others.into_iter().partition(|peer| matches!(peer, Peer::Unix(_)));
    let peers = [tcp, unix, objects].concat();
    let mut command = Command::new("/proc/self/exe");
    command.arg(COMMAND);
    for peer in &peers {
        match peer {
            Peer::Tcp(address) => command.arg("--tcp").arg(address.to_string()),
            Peer::Unix(path) => command.arg("--unix").arg(path),
            Peer::Object(name) => command.arg("--object").arg(name),
        };
    }
    if let Some(authorities) = remote.http_options().authorities {
        command.arg("--tls-ca").arg(authorities);
    }
    // What a terminal sends to the server's group is not for it. Nobody waits for it: it ends when the server does.
    command.process_group(0).stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().map_err(fail)?;
    remote.network().use_broker(Broker::new(ours, peers));
    Ok(())
}

/// Connects until the server is gone.
pub(crate) fn run(args: &ConnectArgs, context: &Context) -> Result<u8, Failure> {
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // A service manager sends them to all processes at once; the server's end is what counts.
        let _ = signal_hook::flag::register(signal, Arc::clone(&ignored));
    }
    let tcp = args.tcp.iter().copied().map(Peer::Tcp);
    let unix = args.unix.iter().cloned().map(Peer::Unix);
    let objects = args.object.iter().cloned().map(Peer::Object);
    let peers: Vec<Peer> = tcp.chain(unix).chain(objects).collect();
    let options = context.disks.remote.http_options().authorities(args.tls_ca.clone());
    let socket = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let sign = move |name: &str| {
        if is_token_name(name) { token_for_broker(name, &options) } else { sign_for_broker(name, &options) }
    };
    let served = socket.and_then(|socket| Broker::serve(&socket, &peers, sign));
    served.map_err(|error| Failure::new(format!("could not connect for a server: {error}")))?;
    Ok(0)
}
