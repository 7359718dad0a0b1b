//! A process for each export (`--isolate`), and the one that starts them: it takes nothing from clients, tells the others of
//! signals, and tells its user when one of them has ended.
//!
//! Signals go on as bytes over a pipe, each the number of one. A terminal or a service manager may signal all processes at
//! once; each of these must take it once, since a second one may end a server at once. They are in process groups of their
//! own, and what comes as a signal insists on nothing (`signals.rs`). The pipe's end, as when this process was killed, ends
//! them in good order.

use crate::failure::{EXIT_FAILURE, Failure};
use crate::output::stdout;
use crate::serve::service_manager::{Message, ServiceManager, hide_from};
use crate::stop_signals::signals_of_servers;
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use zebu_disks::printable;

/// The option that tells a process which image it serves.
pub(crate) const ONLY_IMAGE: &str = "only-image";
/// The message of a server when clients can connect.
const READY: &str = "ready";

/// An event for the process that starts the others.
enum Event {
    /// Clients of this one can connect.
    Ready,
    /// This signal has come.
    Signal(i32),
    /// One has ended.
    Ended(usize, io::Result<ExitStatus>),
}

/// Serves each image by a process of its own, until all have ended. `names` are those of the exports.
pub(crate) fn run(names: &[String]) -> Result<u8, Failure> {
    let (sender, events) = channel();
    watch_signals(&sender).map_err(|error| Failure::new(format!("could not watch for signals: {error}")))?;
    let mut group = Group::new(ServiceManager::of_environment()?);
    let started = names.iter().enumerate().try_for_each(|(number, name)| group.start(number, name, &sender));
    if let Err(failure) = started {
        group.end(SIGTERM);
        group.wait(&events);
        return Err(failure);
    }
    group.wait(&events);
    match group.failure {
        None => Ok(0),
        // Each process has said what became of it.
        Some(failure) => Err(failure),
    }
}

/// Has the signals that end a server come as events.
fn watch_signals(events: &Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new(signals_of_servers())?;
    let events = events.clone();
    let forward = move || {
        for signal in &mut signals {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    Builder::new().name("zebu-signals".to_owned()).spawn(forward).map(drop)
}

/// The processes of all exports.
struct Group {
    manager: ServiceManager,
    members: Vec<Member>,
    /// Members that have not ended.
    left: usize,
    ready: usize,
    /// They were told to end.
    is_ending: bool,
    failure: Option<Failure>,
}

/// A process, as the one that started it has it.
struct Member {
    name: String,
    /// A byte for each signal: its number.
    told: ChildStdin,
}

impl Group {
    fn new(manager: ServiceManager) -> Self {
        Self { manager, members: Vec::new(), left: 0, ready: 0, is_ending: false, failure: None }
    }

    fn start(&mut self, number: usize, name: &str, events: &Sender<Event>) -> Result<(), Failure> {
        let fail =
            |error: io::Error| Failure::new(format!("could not start the process of '{name}': {error}"));
        let mut child = command(number).spawn().map_err(fail)?;
        let (Some(told), Some(said)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(fail(io::ErrorKind::BrokenPipe.into()));
        };
        self.members.push(Member { name: name.to_owned(), told });
        self.left += 1;
        let events = events.clone();
        let watch = move || watch(number, child, &mut BufReader::new(said), &events);
        Builder::new().name("zebu-export".to_owned()).spawn(watch).map(drop).map_err(fail)
    }

    /// Takes what happens until all have ended.
    fn wait(&mut self, events: &Receiver<Event>) {
        while self.left > 0 {
            let event = match self.manager.patience() {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(patience) => events.recv_timeout(patience / 2),
            };
            match event {
                Ok(Event::Ready) => self.is_ready(),
                Ok(Event::Signal(signal)) => self.end(signal),
                Ok(Event::Ended(number, status)) => self.has_ended(number, &status),
                Err(RecvTimeoutError::Timeout) => self.manager.tell(Message::Alive),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn is_ready(&mut self) {
        self.ready += 1;
        if self.ready < self.members.len() || self.is_ending {
            return;
        }
        self.manager.tell(Message::Ready);
        if let Err(failure) = stdout::print(&format!("{READY}\n")) {
            self.failure = Some(failure);
            self.end(SIGTERM);
        }
    }

    /// Tells all of a signal, which they answer as one of their own.
    fn end(&mut self, signal: i32) {
        self.is_ending = true;
        self.manager.tell(Message::Ending);
        for member in &mut self.members {
            // One that has ended takes no more.
            let _ = member.told.write_all(&[signal as u8]);
        }
    }

    fn has_ended(&mut self, number: usize, status: &io::Result<ExitStatus>) {
        self.left -= 1;
        let name = printable(&self.members[number].name);
        let how = match status {
            Ok(status) if status.success() => "in good order".to_owned(),
            Ok(status) => match status.signal() {
                Some(signal) => format!("by signal {signal}: what was not flushed may be lost"),
                None => format!("with exit code {}", status.code().unwrap_or(-1)),
            },
            Err(error) => format!("in an unknown way: {error}"),
        };
        if !status.as_ref().is_ok_and(ExitStatus::success) {
            self.failure.get_or_insert(Failure::silent(EXIT_FAILURE));
        }
        let are_all_ready = self.ready == self.members.len();
        if !self.is_ending || status.as_ref().is_ok_and(|status| status.signal().is_some()) {
            let others = if self.left > 0 && are_all_ready { "; the others go on" } else { "" };
            let message = format!("zebu: error: the process of '{name}' has ended {how}{others}\n");
            // There is nobody left to tell if standard error is gone.
            let _ = io::stderr().write_all(message.as_bytes());
        }
        if !self.is_ending && !are_all_ready {
            // As without --isolate: all images are served, or none.
            self.failure.get_or_insert(Failure::silent(EXIT_FAILURE));
            self.end(SIGTERM);
        }
    }
}

/// This program again, for one image.
fn command(number: usize) -> Command {
    let mut words = std::env::args_os().skip(1);
    let mut command = Command::new("/proc/self/exe");
    command.args(words.next());
    // Before all others: what follows `--` is no option.
    command.arg(OsString::from(format!("--{ONLY_IMAGE}={number}"))).args(words);
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
    hide_from(&mut command);
    command
}

/// Tells of a process when it is ready and when it has ended.
fn watch(number: usize, mut child: Child, said: &mut impl BufRead, events: &Sender<Event>) {
    let mut line = String::new();
    while said.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
        if line.trim_end() == READY {
            let _ = events.send(Event::Ready);
            break;
        }
        // The file of a device.
        let _ = stdout::print(&line);
        line.clear();
    }
    let status = child.wait();
    let _ = events.send(Event::Ended(number, status));
}
