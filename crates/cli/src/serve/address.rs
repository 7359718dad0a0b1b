//! Addresses that a server listens on.

use crate::failure::Failure;
use listenfd::ListenFd;
use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::fs::{self, File, Permissions};
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

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

/// The path of the process with this number, from 0 on.
pub(crate) fn numbered_path(path: &Path, number: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", number + 1));
    name.into()
}

/// The address of a listener, as others are told: the path of a Unix socket leads to it from every directory.
pub(crate) fn told_address(name: &str) -> String {
    let path = name.strip_prefix("unix:").and_then(|path| std::path::absolute(path).ok());
    path.map_or_else(|| name.to_owned(), |path| format!("unix:{}", path.display()))
}

/// A bound socket of either kind.
pub(crate) enum Bound {
    Unix(UnixListener, Option<SocketFile>),
    Tcp(TcpListener),
}

impl Address {
    /// The address of the process with this number, from 0 on, of several that are given one address: the path with `.1`,
    /// `.2` and so on behind it, or the ports from this one on.
    pub(crate) fn numbered(&self, number: usize) -> Result<Self, Failure> {
        match self {
            Address::Unix(path) => Ok(Self::Unix(numbered_path(path, number))),
            Address::Tcp(address) => {
                let (host, port) = address.rsplit_once(':').unwrap_or((address, "0"));
                let port =
                    port.parse::<u16>().ok().and_then(|port| port.checked_add(number.try_into().ok()?));
                let port = port.ok_or_else(|| {
                    Failure::usage(format!("there are too few ports from {address} on: each image needs one"))
                })?;
                Ok(Self::Tcp(format!("{host}:{port}")))
            }
            Address::Passed => Ok(Self::Passed),
        }
    }

    /// Begins to listen. A socket that a dead server left behind is replaced.
    pub(crate) fn bind(&self, access: SocketAccess) -> Result<Vec<Bound>, Failure> {
        let bound = match self {
            Address::Passed => return passed(),
            Address::Unix(path) => {
                bind_unix(path, access).map(|(listener, file)| Bound::Unix(listener, Some(file)))
            }
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

/// Access to a Unix socket that the server makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketAccess {
    /// Permission bits of its file, whatever the umask is.
    pub(crate) mode: u32,
    /// Number of its group; the process's own without it.
    pub(crate) group: Option<u32>,
}

impl SocketAccess {
    /// Nobody but the server's own user (and root).
    pub(crate) const OWNER: Self = Self { mode: 0o600, group: None };
}

/// Permission bits in octal digits.
pub(crate) fn mode_argument(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text.strip_prefix("0o").unwrap_or(text), 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("expected permission bits in octal, as 0660".to_owned()),
    }
}

/// The number of a group: itself, or that of a name in `/etc/group`.
pub(crate) fn group_argument(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let groups = fs::read_to_string("/etc/group").map_err(|error| format!("/etc/group: {error}"))?;
    let fields = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let mut found = fields.filter(|fields| fields.first() == Some(&text));
    found
        .find_map(|fields| fields.get(2)?.parse().ok())
        .ok_or_else(|| format!("there is no group '{text}' in /etc/group (or give its number)"))
}

/// Binds a Unix socket. One that a dead server left behind is replaced.
pub(crate) fn bind_unix(path: &Path, access: SocketAccess) -> Result<(UnixListener, SocketFile), Failure> {
    let fail = |error: io::Error| Failure::new(format!("could not listen on '{}': {error}", path.display()));
    // Of two servers that find a socket left behind, one is not to remove what the other has just made.
    let _lock = lock_directory_of(path);
    let listener = match bind(path, access) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(path) => {
            fs::remove_file(path).map_err(fail)?;
            bind(path, access)
        }
        result => result,
    };
    listener.map_err(fail)
}

fn bind(path: &Path, access: SocketAccess) -> io::Result<(UnixListener, SocketFile)> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file gets the socket's mode, so that at no time more may connect than those who shall.
    fchmod(&socket, Mode::from_raw_mode(access.mode & 0o600))?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // From here on it is removed if anything fails.
    let file = SocketFile::at(path)?;
    // First of all, since programs that wait for the file connect when they see it.
    net::listen(&socket, BACKLOG)?;
    if access.group.is_some() {
        chown(path, None, access.group)?;
    }
    fs::set_permissions(path, Permissions::from_mode(access.mode))?;
    Ok((UnixListener::from(socket), file))
}

/// Waits for other servers that bind sockets in the directory, a while.
fn lock_directory_of(path: &Path) -> Option<File> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let directory = File::open(directory).ok()?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        if Instant::now() > deadline {
            // Somebody else's lock, for something else.
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(directory)
}

/// Whether it is a socket where nobody listens any more.
///
/// The kernel gives up the ring of a killed process some milliseconds after its end. Until then the sockets that it
/// waited on take connections, so that one is asked again, for 1.3 s.
fn is_left_behind(path: &Path) -> bool {
    if !fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        return false;
    }
    for probe in 0..=7 {
        match connect(path) {
            // A file that is no socket refuses connections, too.
            Err(Errno::CONNREFUSED) => return true,
            Ok(()) if probe < 7 => std::thread::sleep(Duration::from_millis(10 << probe)),
            // A server that takes no connections at present has a full queue.
            Ok(()) | Err(_) => return false,
        }
    }
    false
}

fn connect(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)
}

/// The file of a Unix socket, removed on drop.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl SocketFile {
    /// The one that is there.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it before, and put another in its place.
        let is_ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if is_ours {
            let _ = fs::remove_file(&self.path);
        }
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
        let (live, file) = bind_unix(&path, SocketAccess::OWNER).unwrap();
        let failure = bind_unix(&path, SocketAccess::OWNER).unwrap_err();
        assert!(failure.message.unwrap().contains("in use"));
        drop((live, file));
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert!(bind_unix(&path, SocketAccess::OWNER).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"a file");
    }

    #[test]
    fn a_live_socket_with_a_full_queue_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        net::listen(&socket, 0).unwrap();
        let _first = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert!(bind_unix(&path, SocketAccess::OWNER).is_err());
        assert!(path.exists());
    }

    #[test]
    fn of_servers_that_start_at_once_one_gets_the_socket_and_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..20 {
            let path = dir.path().join(format!("socket{round}"));
            drop(UnixListener::bind(&path).unwrap());
            let bound: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    (0..4).map(|_| scope.spawn(|| bind_unix(&path, SocketAccess::OWNER).ok())).collect();
                threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(bound.len(), 1);
            drop(std::os::unix::net::UnixStream::connect(&path).unwrap());
        }
    }

    #[test]
    fn a_socket_that_somebody_else_has_put_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let (first, file) = bind_unix(&path, SocketAccess::OWNER).unwrap();
        fs::rename(&path, dir.path().join("other")).unwrap();
        let (_second, _file) = bind_unix(&path, SocketAccess::OWNER).unwrap();
        drop((first, file));
        assert!(path.exists());
    }

    #[test]
    fn modes_and_groups_are_read() {
        assert_eq!(["0660", "600", "0o777"].map(mode_argument), [Ok(0o660), Ok(0o600), Ok(0o777)]);
        assert!(["", "8", "1777", "rw", "-1"].iter().all(|wrong| mode_argument(wrong).is_err()));
        assert_eq!(group_argument("1234"), Ok(1234));
        assert_eq!(group_argument("root"), Ok(0));
        assert!(group_argument("no such group").is_err());
    }
}
