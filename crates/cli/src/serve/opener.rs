//! The process that opens the files of a configuration for a server that is in its sandbox. It is this program again, outside of
//! the sandbox. It reads the configuration when the server asks, and opens only files that this names.
//!
//! A question is a byte, and a number of four bytes with [`OPEN`]. An answer is a byte, four bytes of length, and as much text; with
//! [`FILE`] a descriptor comes along.

use super::config_file::{self, ConfigFile};
use crate::failure::Failure;
use clap::Args;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use zebu_disks::errno_text;
use zebu_engine::storage::Worker;
use zebu_storage::sync::Mutex;

/// The name of the command that it runs.
const COMMAND: &str = "open-for-a-server";
/// The questions: the text of the configuration, and the file of an export of it.
const READ: u8 = b'R';
const OPEN: u8 = b'O';
/// The answers.
const TEXT: u8 = b'T';
const FILE: u8 = b'F';
const REFUSED: u8 = b'E';
/// Bytes of the longest answer.
const LONGEST: usize = 8 << 20;

/// Its configuration; questions come over standard input.
#[derive(Debug, Args)]
pub(crate) struct OpenArgs {
    /// The file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// An answer to the wish for a file.
pub(crate) enum Handed {
    File(OwnedFd),
    Refused(String),
}

/// The process, as its server has it.
#[derive(Clone)]
pub(crate) struct Opener {
    stream: Arc<Mutex<UnixStream>>,
    /// The same socket, for who does not wait for answers.
    unlocked: Arc<UnixStream>,
}

impl Opener {
    /// Starts it. It ends when the server does.
    pub(crate) fn start(config: &Path) -> Result<Self, Failure> {
        let fail = |error: io::Error| {
            Failure::new(format!(
                "could not start the process that opens files later: {error} (--no-sandbox needs none)"
            ))
        };
        let (ours, theirs) = UnixStream::pair().map_err(fail)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg(COMMAND).arg("--config").arg(config);
        // What a terminal sends to the server's group is not for it.
        command.process_group(0).stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        let unlocked = Arc::new(ours.try_clone().map_err(fail)?);
        command.spawn().map_err(fail)?;
        Ok(Self { stream: Arc::new(Mutex::new(ours)), unlocked })
    }

    /// Ends questions that are not answered yet, and all later ones.
    pub(crate) fn leave(&self) {
        // One that is gone asks nobody.
        let _ = self.unlocked.shutdown(Shutdown::Both);
    }

    async fn ask(&self, worker: &Worker, question: Vec<u8>) -> Result<(u8, String, Option<OwnedFd>), String> {
        let stream = Arc::clone(&self.stream);
        let asked = worker.run_blocking(move || {
            let mut stream = stream.lock();
            stream.write_all(&question)?;
            receive(&mut stream)
        });
        asked.await.map_err(|error| {
            format!("the process that opens files for the server has ended ({error}): restart the server")
        })
    }

    /// The text of the configuration as it is now.
    pub(crate) async fn read(&self, worker: &Worker) -> Result<String, String> {
        match self.ask(worker, vec![READ]).await? {
            (TEXT, text, _) => Ok(text),
            (_, why, _) => Err(why),
        }
    }

    /// The file of an export, by its number in the configuration that was read last.
    pub(crate) async fn open(&self, worker: &Worker, number: usize) -> Result<Handed, String> {
        let number = u32::try_from(number).map_err(|_| "too many exports".to_owned())?;
        let question = [&[OPEN][..], &number.to_le_bytes()].concat();
        Ok(match self.ask(worker, question).await? {
            (FILE, _, Some(file)) => Handed::File(file),
            (_, why, _) => Handed::Refused(why),
        })
    }
}

fn receive(stream: &mut UnixStream) -> io::Result<(u8, String, Option<OwnedFd>)> {
    let mut kind = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(&*stream, &mut [IoSliceMut::new(&mut kind)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut file = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            file = files.last();
        }
    }
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    Ok((kind[0], String::from_utf8_lossy(&text).into_owned(), file))
}

fn send(stream: &mut UnixStream, kind: u8, text: &str, file: Option<&File>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = file.map(|file| [file.as_fd()]);
    if let Some(files) = &files {
        ancillary.push(SendAncillaryMessage::ScmRights(files));
    }
    sendmsg(&*stream, &[IoSlice::new(&[kind])], &mut ancillary, SendFlags::NOSIGNAL)?;
    stream.write_all(&(text.len() as u32).to_le_bytes())?;
    stream.write_all(text.as_bytes())
}

/// Answers until the server is gone.
pub(crate) fn run(args: &OpenArgs) -> Result<u8, Failure> {
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // A service manager sends them to all processes at once; the server's end is what counts.
        let _ = signal_hook::flag::register(signal, Arc::clone(&ignored));
    }
    let socket = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let mut socket = socket.map_err(|error| Failure::new(error.to_string()))?;
    let mut known = ConfigFile::default();
    let mut question = [0];
    while socket.read_exact(&mut question).is_ok() {
        let answered = match question[0] {
            READ => match config_file::read(&args.config) {
                Ok(text) => {
                    // What is wrong with it, the server finds.
                    known = ConfigFile::parse(&args.config, &text).unwrap_or_default();
                    send(&mut socket, TEXT, &text, None)
                }
                Err(why) => send(&mut socket, REFUSED, &why, None),
            },
            OPEN => {
                let mut number = [0; 4];
                if socket.read_exact(&mut number).is_err() {
                    break;
                }
                match open(&known, u32::from_le_bytes(number) as usize) {
                    Ok(file) => send(&mut socket, FILE, "", Some(&file)),
                    Err(why) => send(&mut socket, REFUSED, &why, None),
                }
            }
            _ => break,
        };
        if answered.is_err() {
            break;
        }
    }
    Ok(0)
}

fn open(known: &ConfigFile, number: usize) -> Result<File, String> {
    let export = known.exports.get(number).ok_or("there is no such export in the file")?;
    let path = export.file.display();
    if !export.file.is_absolute() {
        return Err(format!("'{path}' is no file, and the server is in its sandbox: restart it"));
    }
    let opened = OpenOptions::new().read(true).write(!export.read_only).open(&export.file);
    opened.map_err(|error| {
        format!("could not open '{path}': {}", errno_text(error.raw_os_error().unwrap_or_default()))
    })
}
