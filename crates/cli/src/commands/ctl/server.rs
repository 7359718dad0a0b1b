//! The server that `zebu ctl` talks to.

use crate::failure::Failure;
use crate::serve::accept::MOST_DESCRIPTORS;
use crate::serve::control_request::{Command, Request};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use zebu_disks::{Context, errno_text};

/// A connection to a server.
pub(super) struct Server {
    pub(super) context: Context,
    stream: BufReader<UnixStream>,
    socket: PathBuf,
    name: String,
    /// Whether the last request was answered with an error.
    was_refused: bool,
}

impl Server {
    pub(super) fn connect(socket: &Path, context: &Context) -> Result<Self, Failure> {
        let name = socket.display().to_string();
        match UnixStream::connect(socket) {
            Ok(stream) => {
                let stream = BufReader::new(stream);
                let (context, socket) = (context.clone(), socket.to_owned());
                Ok(Self { context, stream, socket, name, was_refused: false })
            }
            Err(error) => {
                let why = error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
                Err(Failure::new(format!(
                    "could not connect to '{name}': {why} (a server has the socket by --control)"
                )))
            }
        }
    }

    /// Another connection: the server closes one that is silent for a minute.
    pub(super) fn again(&self) -> Result<Self, Failure> {
        Self::connect(&self.socket, &self.context)
    }

    /// The export that is meant: the only one, where none was named.
    pub(super) fn export(&mut self, named: Option<String>) -> Result<String, Failure> {
        if let Some(name) = named {
            return Ok(name);
        }
        let stats = self.ask(Command::Stats { export: None })?;
        let exports = stats["exports"].as_array().map(Vec::as_slice).unwrap_or_default();
        let names: Vec<&str> = exports.iter().filter_map(|export| export["name"].as_str()).collect();
        match names[..] {
            [name] => Ok(name.to_owned()),
            _ => Err(Failure::usage(format!("which export? {}", exports_told(&names)))),
        }
    }

    /// Whether the server has said that it did not do what it was asked for last.
    pub(super) fn has_refused(&self) -> bool {
        self.was_refused
    }

    pub(super) fn ask(&mut self, command: Command) -> Result<Value, Failure> {
        self.ask_with(command, &[])
    }

    /// Asks, with descriptors that come with the request.
    pub(super) fn ask_with(
        &mut self,
        command: Command,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Value, Failure> {
        self.was_refused = false;
        let name = &self.name;
        if descriptors.len() > MOST_DESCRIPTORS {
            self.was_refused = true;
            return Err(Failure::usage(format!("at most {MOST_DESCRIPTORS} disks at one moment")));
        }
        let fail = |error: std::io::Error| Failure::new(format!("'{name}': {error}"));
        let mut line = serde_json::to_string(&Request { id: None, command })
            .map_err(|error| Failure::new(error.to_string()))?;
        line.push('\n');
        let mut rest = line.as_bytes();
        if !descriptors.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
            let stream = self.stream.get_ref();
            let sent = sendmsg(stream, &[IoSlice::new(rest)], &mut ancillary, SendFlags::NOSIGNAL)
                .map_err(|error| fail(error.into()))?;
            rest = &rest[sent..];
        }
        self.stream.get_mut().write_all(rest).map_err(fail)?;
        let mut answer = String::new();
        self.stream.read_line(&mut answer).map_err(fail)?;
        if answer.is_empty() {
            let unknown = "the server has ended without an answer; whether it did this is not known";
            return Err(Failure::new(format!("'{name}': {unknown}")));
        }
        let mut answer: Value = serde_json::from_str(&answer)
            .map_err(|error| Failure::new(format!("'{name}' does not answer as a zebu server: {error}")))?;
        if let Some(message) = answer["error"]["message"].as_str() {
            self.was_refused = true;
            return Err(Failure::new(message));
        }
        Ok(answer["result"].take())
    }
}

/// Exports that are told of where one has to be named.
const MOST_NAMES: usize = 8;

/// The names of a server's exports, in a message.
fn exports_told(names: &[&str]) -> String {
    let told: Vec<String> = names.iter().take(MOST_NAMES).map(|name| format!("'{name}'")).collect();
    match names.len() {
        0 => "the server has none".to_owned(),
        count => {
            let more = if count > MOST_NAMES { ", and more" } else { "" };
            format!("There are {}{more}", told.join(", "))
        }
    }
}
