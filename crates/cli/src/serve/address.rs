//! Addresses that a server listens on.

use crate::failure::Failure;
use listenfd::ListenFd;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// `unix:PATH`, `HOST:PORT` or `systemd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP socket; the host `*` stands for all addresses.
    Tcp(String),
    /// The sockets that whoever started the process passed on (sd_listen_fds(3)).
    Passed,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "systemd" {
            return Ok(Self::Passed);
        }
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() {
                Err("the path is missing".to_owned())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        let Some((host, port)) = text.rsplit_once(':') else {
            return Err("expected unix:PATH, HOST:PORT or systemd".to_owned());
        };
        port.parse::<u16>().map_err(|_| format!("'{port}' is no port number"))?;
        let host = if matches!(host, "*" | "") { "[::]" } else { host };
        Ok(Self::Tcp(format!("{host}:{port}")))
    }
}

/// A bound socket of either kind.
pub(crate) enum Bound {
    Unix(UnixListener, Option<SocketFile>),
    Tcp(TcpListener),
}

impl Address {
    /// The path, if it is a Unix socket.
    pub(crate) fn unix_path(&self) -> Option<&Path> {
        match self {
            Address::Unix(path) => Some(path),
            Address::Tcp(_) | Address::Passed => None,
        }
    }

    /// Begins to listen. A socket that a dead server left behind is replaced.
    pub(crate) fn bind(&self) -> Result<Vec<Bound>, Failure> {
        let bound = match self {
            Address::Passed => return passed(),
            Address::Unix(path) => bind_unix(path).map(|(listener, file)| Bound::Unix(listener, Some(file))),
            Address::Tcp(address) => TcpListener::bind(address)
                .map(Bound::Tcp)
                .map_err(|error| Failure::new(format!("could not listen on {address}: {error}"))),
        };
        bound.map(|bound| vec![bound])
    }
}

/// The sockets that were passed on, which are nobody's to remove.
fn passed() -> Result<Vec<Bound>, Failure> {
    let mut descriptors = ListenFd::from_env();
    let mut all = Vec::new();
    for index in 0..descriptors.len() {
        let found = match descriptors.take_tcp_listener(index) {
            Ok(listener) => listener.map(Bound::Tcp),
            Err(_) => descriptors
                .take_unix_listener(index)
                .map_err(|error| Failure::new(format!("descriptor {index} that was passed on: {error}")))?
                .map(|listener| Bound::Unix(listener, None)),
        };
        all.extend(found);
    }
    if all.is_empty() {
        return Err(Failure::new(
            "no sockets were passed on (LISTEN_FDS): start it through a systemd socket unit",
        ));
    }
    Ok(all)
}

/// Binds a Unix socket.
pub(crate) fn bind_unix(path: &Path) -> Result<(UnixListener, SocketFile), Failure> {
    let fail = |error: io::Error| Failure::new(format!("could not listen on '{}': {error}", path.display()));
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(path) => {
            fs::remove_file(path).map_err(fail)?;
            UnixListener::bind(path)
        }
        result => result,
    };
    listener.map(|listener| (listener, SocketFile(path.to_owned()))).map_err(fail)
}

/// Whether it is a socket where nobody listens any more. (A file that is no socket refuses connections, too.)
fn is_left_behind(path: &Path) -> bool {
    if !fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        return false;
    }
    UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// The file of a Unix socket, removed on drop.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it before; there is nothing else to do about it.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_paths_or_hosts() {
        let tcp = |text: &str| Ok(Address::Tcp(text.to_owned()));
        assert_eq!("unix:/run/x.sock".parse(), Ok(Address::Unix("/run/x.sock".into())));
        assert_eq!("localhost:10809".parse(), tcp("localhost:10809"));
        assert_eq!("[::1]:1".parse(), tcp("[::1]:1"));
        assert_eq!("*:1".parse(), tcp("[::]:1"));
        assert_eq!(":1".parse(), tcp("[::]:1"));
        assert_eq!("systemd".parse(), Ok(Address::Passed));
        for wrong in ["unix:", "localhost", "localhost:", "localhost:65536", "localhost:-1", "/run/x.sock"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_socket_that_was_left_behind_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        let (live, file) = bind_unix(&path).unwrap();
        let failure = bind_unix(&path).unwrap_err();
        assert!(failure.message.unwrap().contains("in use"));
        drop((live, file));
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert!(bind_unix(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
    }
}
