//! Asking servers, each by a thread of its own: one that does not answer holds up no other.

use super::sample::{Export, Job, Sample, exports, job};
use crate::serve::control_request::{Command, Request};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use zebu_disks::errno_text;

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of an answer that are read: 10,000 exports have some 20 MB.
const MOST_ANSWER: u64 = 64 << 20;

/// A sample of the server of that number.
pub(crate) type Message = (usize, Sample);

/// Threads that ask servers until this is dropped.
pub(crate) struct Askers(Vec<Sender<()>>);

impl Askers {
    /// Begins to ask each of `sockets` every `interval`; samples go to `samples`.
    pub(crate) fn start(sockets: &[PathBuf], interval: Duration, samples: &Sender<Message>) -> Self {
        let begin = |(number, socket): (usize, &PathBuf)| {
            let (stop, stopped) = channel();
            let (socket, samples) = (socket.clone(), samples.clone());
            let ask = move || {
                let mut connection = None;
                loop {
                    let sample = sample(&mut connection, &socket);
                    if samples.send((number, sample)).is_err() {
                        return;
                    }
                    if stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                }
            };
            // Where the system has no thread to give, nothing comes of this server.
            let _ = std::thread::Builder::new().spawn(ask);
            stop
        };
        Self(sockets.iter().enumerate().map(begin).collect())
    }

    /// The number of servers.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}

/// A connection to a control socket.
struct Connection(BufReader<UnixStream>);

/// Asks a server once, over the connection that there is or a new one.
fn sample(connection: &mut Option<Connection>, socket: &Path) -> Sample {
    let found = match connection.take().map_or_else(|| Connection::open(socket), Ok) {
        Ok(mut open) => {
            let found = open.look();
            if found.is_ok() {
                *connection = Some(open);
            }
            found
        }
        Err(error) => Err(error),
    };
    Sample { at: Instant::now(), found }
}

/// The system's words for an error.
fn words(error: &std::io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), errno_text)
}

impl Connection {
    fn open(socket: &Path) -> Result<Self, String> {
        let stream = UnixStream::connect(socket).map_err(|error| words(&error))?;
        let patience = Some(PATIENCE);
        let set = stream.set_read_timeout(patience).and_then(|()| stream.set_write_timeout(patience));
        set.map_err(|error| words(&error))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// The exports, with their jobs.
    fn look(&mut self) -> Result<Vec<Export>, String> {
        let stats = self.ask(Command::Stats { export: None })?;
        let mut exports = exports(&stats?);
        for export in &mut exports {
            export.jobs = self.jobs(&export.name)?;
        }
        Ok(exports)
    }

    /// The jobs of an export. That there was none is an answer as well.
    fn jobs(&mut self, export: &str) -> Result<Vec<Job>, String> {
        let export = || export.to_owned();
        let backup = self.ask(Command::BackupQuery { export: export(), backup: None })?;
        let hydration = self.ask(Command::HydrateQuery { export: export() })?;
        let backup = backup.ok().and_then(|state| job("backup", &state));
        Ok(backup.into_iter().chain(hydration.ok().and_then(|state| job("hydrate", &state))).collect())
    }

    /// The answer, which may be a refusal. The outer error: there is none.
    fn ask(&mut self, command: Command) -> Result<Result<Value, String>, String> {
        let fail = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::WouldBlock => "no answer".to_owned(),
            _ => words(&error),
        };
        let mut line =
            serde_json::to_string(&Request { id: None, command }).map_err(|error| error.to_string())?;
        line.push('\n');
        self.0.get_mut().write_all(line.as_bytes()).map_err(fail)?;
        let mut answer = String::new();
        (&mut self.0).take(MOST_ANSWER).read_line(&mut answer).map_err(fail)?;
        if answer.is_empty() {
            return Err("the server has ended".to_owned());
        }
        let mut answer: Value =
            serde_json::from_str(&answer).map_err(|_| "it does not answer as a zebu server".to_owned())?;
        Ok(match answer["error"]["message"].as_str() {
            Some(message) => Err(message.to_owned()),
            None => Ok(answer["result"].take()),
        })
    }
}
