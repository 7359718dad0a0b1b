//! The service manager that has started the server (systemd's `Type=notify`): it is told when clients can connect, now and then that
//! all threads take turns, and that the end has begun.
//!
//! A process outside of the sandbox has the socket, since a socket for datagrams reaches any address: a unit needs
//! `NotifyAccess=all`. (sd_notify(3) has the messages and the variables.)

use crate::failure::Failure;
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::future::pending;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use zebu_engine::storage::Worker;

/// The name of the command that it runs.
const COMMAND: &str = "tell-a-service-manager";
/// The shortest time between two messages that the server is alive.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
/// The variables of a service manager.
const SOCKET: &str = "NOTIFY_SOCKET";
const WATCHDOG_TIME: &str = "WATCHDOG_USEC";
const WATCHDOG_PROCESS: &str = "WATCHDOG_PID";

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message {
    /// Clients can connect.
    Ready,
    /// All threads have taken a turn.
    Alive,
    /// The server ends.
    Ending,
}

impl Message {
    const ALL: [Self; 3] = [Self::Ready, Self::Alive, Self::Ending];

    /// The byte by which the process knows it.
    fn byte(self) -> u8 {
        match self {
            Self::Ready => b'R',
            Self::Alive => b'A',
            Self::Ending => b'E',
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Ready => "READY=1",
            Self::Alive => "WATCHDOG=1",
            Self::Ending => "STOPPING=1",
        }
    }
}

/// The service manager, as its server has it.
pub(crate) struct ServiceManager {
    told: Option<ChildStdin>,
    /// The time within which it wants to hear that the server is alive.
    patience: Option<Duration>,
}

impl ServiceManager {
    /// The one that the environment names, if there is one.
    ///
    /// # Errors
    /// The process that is to tell it things can't be started.
    pub(crate) fn of_environment() -> Result<Self, Failure> {
        let Some(socket) = socket(env::var_os(SOCKET)) else {
            return Ok(Self { told: None, patience: None });
        };
        let fail = |error: io::Error| {
            Failure::new(format!("could not start the process that notifies the service manager: {error}"))
        };
        let mut command = Command::new("/proc/self/exe");
        command.arg0("zebu").arg(COMMAND).arg(socket);
        // What a terminal sends to the server's group is not for it. It ends when the server does.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let told = command.spawn().map_err(fail)?.stdin.take();
        let text = |name| env::var(name).ok();
        let patience = patience(text(WATCHDOG_TIME).as_deref(), text(WATCHDOG_PROCESS).as_deref());
        Ok(Self { told, patience })
    }

    /// The time within which it wants to hear that the server is alive.
    pub(crate) fn patience(&self) -> Option<Duration> {
        self.patience
    }

    /// Tells it again and again that the server is alive, each time after the threads took a `turn`.
    pub(crate) async fn stay_alive(&self, worker: &Worker, turn: impl AsyncFn()) -> Infallible {
        let Some(patience) = self.patience else { return pending().await };
        loop {
            worker.sleep(pause(patience)).await;
            turn().await;
            self.tell(Message::Alive);
        }
    }

    /// Tells it.
    pub(crate) fn tell(&self, message: Message) {
        if let Some(mut told) = self.told.as_ref() {
            // One that is gone waits for nothing.
            let _ = told.write_all(&[message.byte()]);
        }
    }
}

/// The socket of a service manager. An empty name is none, as in `sd_notify(3)`.
fn socket(named: Option<OsString>) -> Option<OsString> {
    named.filter(|name| !name.is_empty())
}

/// The time between two messages to a watchdog of this patience.
fn pause(patience: Duration) -> Duration {
    (patience / 2).max(SHORTEST_PAUSE)
}

/// The time of a watchdog that is meant for this process.
fn patience(time: Option<&str>, process: Option<&str>) -> Option<Duration> {
    let is_other = process.is_some_and(|process| process.parse() != Ok(std::process::id()));
    let time = time?.parse().ok().filter(|time| *time > 0).map(Duration::from_micros);
    if is_other { None } else { time }
}

/// Keeps the variables from a process that is no server of the service manager's.
pub(crate) fn hide_from(command: &mut Command) {
    for name in [SOCKET, WATCHDOG_TIME, WATCHDOG_PROCESS] {
        command.env_remove(name);
    }
}

/// The service manager's socket.
#[derive(Debug, Args)]
pub(crate) struct TellArgs {
    /// A path, or `@` and an abstract name
    #[arg(value_name = "SOCKET")]
    socket: OsString,
}

/// Tells the service manager what the server says, until that is gone.
pub(crate) fn run(args: &TellArgs) -> Result<u8, Failure> {
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // A service manager sends them to all processes at once; the server's end is what counts.
        let _ = signal_hook::flag::register(signal, Arc::clone(&ignored));
    }
    let fail = |error: io::Error| {
        Failure::new(format!(
            "{SOCKET} '{}': could not notify the service manager: {error}",
            args.socket.display()
        ))
    };
    let socket = UnixDatagram::unbound().map_err(fail)?;
    socket.connect_addr(&address(&args.socket).map_err(fail)?).map_err(fail)?;
    let mut byte = [0];
    loop {
        match io::stdin().read(&mut byte) {
            Ok(0) => return Ok(0),
            Ok(_) => {
                for message in Message::ALL.iter().filter(|message| message.byte() == byte[0]) {
                    socket.send(message.text().as_bytes()).map_err(fail)?;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(fail(error)),
        }
    }
}

fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes().split_first() {
        Some((b'@', rest)) => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_is_for_the_process_that_it_names() {
        let own = std::process::id().to_string();
        let second = Some(Duration::from_secs(1));
        assert_eq!(patience(Some("1000000"), None), second);
        assert_eq!(patience(Some("1000000"), Some(&own)), second);
        for (time, process) in [("1000000", "1"), ("1000000", "x"), ("0", &own), ("-1", &own), ("", &own)] {
            assert_eq!(patience(Some(time), Some(process)), None, "{time} {process}");
        }
        assert_eq!(patience(None, Some(&own)), None);
    }

    #[test]
    fn an_impatient_watchdog_is_not_flooded() {
        assert_eq!(pause(Duration::from_micros(1)), Duration::from_millis(50));
        assert_eq!(pause(Duration::from_secs(10)), Duration::from_secs(5));
    }

    #[test]
    fn an_empty_name_is_no_socket() {
        assert_eq!(socket(Some(OsString::new())), None);
        assert_eq!(socket(None), None);
        assert_eq!(socket(Some("@abc".into())), Some("@abc".into()));
    }

    #[test]
    fn an_address_is_a_path_or_a_name() {
        let socket = address(OsStr::new("@abc")).unwrap();
        assert_eq!(socket.as_abstract_name(), Some(&b"abc"[..]));
        let path = address(OsStr::new("/run/systemd/notify")).unwrap();
        assert_eq!(path.as_pathname().unwrap().to_str(), Some("/run/systemd/notify"));
    }
}
