//! The process that removes what a server has in the file system: the files of its sockets, and what it has mounted. In its
//! sandbox the server may not, and after a crash it is gone. It is this program again, outside of the sandbox. It knows what
//! to remove from its start; the server sends it the moment, and nothing else.

use super::address::SocketFile;
use clap::Args;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use zebu_export::fuse::{FuseMount, MountedOver, mounted_over, unmount_unless_used};

/// The name of the command that it runs.
const COMMAND: &str = "clean-up-in-the-end";
/// Its messages: when it waits, when the sockets are gone, and last.
const WAITING: &str = "waiting";
const REMOVED: &str = "removed";
const DONE: &str = "done";
/// The byte by which it removes the sockets. (The end of the pipe has it unmount.)
const REMOVE: u8 = b'R';

/// The files.
#[derive(Debug, Args)]
pub(crate) struct CleanUpArgs {
    /// Sockets
    #[arg(long, value_name = "PATH")]
    socket: Vec<PathBuf>,
    /// Mounted over; these were there before, and stay
    #[arg(long, value_name = "PATH")]
    over: Vec<PathBuf>,
    /// Mounted over; these were made for it, and go
    #[arg(long, value_name = "PATH")]
    made: Vec<PathBuf>,
}

/// The process, as its server has it.
pub(crate) struct Cleaner {
    /// Closed to have it unmount.
    told: ChildStdin,
    said: BufReader<ChildStdout>,
    /// Nobody waits for it: in the sandbox that is not to be had.
    _child: Child,
}

impl Cleaner {
    /// Starts it, to remove these; from now on only the end of this process ends it.
    pub(crate) fn start(sockets: &[SocketFile], mounts: &[FuseMount]) -> io::Result<Self> {
        let mut command = Command::new(own_program());
        command.arg0("zebu").arg(COMMAND);
        let mut named = |option: &str, path: &Path| {
            let mut argument = OsString::from(option);
            argument.push(path);
            command.arg(argument);
        };
        for socket in sockets {
            named("--socket=", socket.path());
        }
        for mount in mounts {
            named(if mount.made_its_file() { "--made=" } else { "--over=" }, mount.path());
        }
        // What a terminal sends to the server's group is not for it.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let told = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let said = BufReader::new(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
        let mut started = Self { told, said, _child: child };
        if !started.has_said(WAITING) {
            return Err(io::Error::other("it ended at once"));
        }
        Ok(started)
    }

    fn has_said(&mut self, word: &str) -> bool {
        let mut line = String::new();
        self.said.read_line(&mut line).is_ok() && line.trim_end() == word
    }

    /// Has it remove the sockets, and waits for that. What there is to warn of.
    pub(crate) fn remove_sockets(&mut self) -> Option<String> {
        let is_done = self.told.write_all(&[REMOVE]).is_ok() && self.has_said(REMOVED);
        (!is_done).then(|| "the process that removes the sockets has ended: they stay".to_owned())
    }

    /// Has it unmount everything, and waits for that. What there is to warn of.
    pub(crate) fn unmount(self) -> Vec<String> {
        let Self { told, mut said, _child } = self;
        drop(told);
        let mut text = String::new();
        // It ends when the process does.
        let _ = said.read_to_string(&mut text);
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        if lines.pop_if(|last| last == DONE).is_none() {
            lines.push(
                "the process that unmounts has ended: look for mounted files (umount, fusermount3 -u)".into(),
            );
        }
        lines
    }
}

/// This program: without /proc, as it was called.
fn own_program() -> PathBuf {
    let running = Path::new("/proc/self/exe");
    match std::env::args_os().next() {
        Some(called) if !running.exists() => called.into(),
        _ => running.to_owned(),
    }
}

/// Waits for the end of the server, and removes what it has left.
pub(crate) fn run(args: &CleanUpArgs) -> u8 {
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // A service manager sends them to all processes at once; the server's end is what counts.
        let _ = signal_hook::flag::register(signal, Arc::clone(&ignored));
    }
    let sockets: Vec<SocketFile> = args.socket.iter().filter_map(|path| SocketFile::at(path).ok()).collect();
    let mounts: Vec<(&PathBuf, Option<MountedOver>)> =
        args.over.iter().chain(&args.made).map(|path| (path, mounted_over(path))).collect();
    say(format_args!("{WAITING}"));
    let mut word = [0];
    if io::stdin().read_exact(&mut word).is_ok() && word == [REMOVE] {
        drop(sockets);
        say(format_args!("{REMOVED}"));
    } else {
        // It was killed, and another may have made the same sockets again.
        std::mem::forget(sockets);
    }
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    for (path, mount) in mounts {
        // Another server may have mounted its own since.
        let now = mounted_over(path);
        if now.is_some() && now != mount {
            continue;
        }
        if now.is_some() {
            unmount_one(path);
        }
        if args.made.contains(path) {
            // It is empty; if it stays, nothing is lost.
            let _ = fs::remove_file(path);
        }
    }
    say(format_args!("{DONE}"));
    0
}

fn unmount_one(path: &Path) {
    let file = path.display();
    let taken = match unmount_unless_used(path) {
        Err(Errno::BUSY) => {
            say(format_args!("'{file}' is in use: unmounted all the same"));
            // Its users get errors when the device is closed.
            unmount(path, UnmountFlags::DETACH)
        }
        other => other,
    };
    match taken {
        // Invalid: it is not mounted any more.
        Ok(()) | Err(Errno::INVAL) => {}
        // Those who are not root have it done.
        Err(Errno::PERM) if is_done_by_fusermount(path) => {}
        Err(error) => say(format_args!("could not unmount '{file}': {error}")),
    }
}

fn is_done_by_fusermount(path: &Path) -> bool {
    let done = |program: &&str| {
        let mut command = Command::new(program);
        command.args(["-u", "-q", "-z", "--"]).arg(path).stdin(Stdio::null()).stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    ["fusermount3", "fusermount"].iter().any(done)
}

fn say(message: std::fmt::Arguments<'_>) {
    // Nobody may be left to hear it.
    let _ = crate::output::stdout::print(&format!("{message}\n"));
}
