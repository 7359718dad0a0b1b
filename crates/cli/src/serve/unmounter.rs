//! The process that unmounts what a server has mounted: in its sandbox the server may not, and after a crash it is gone.
//! It is this program again, outside of the sandbox. It waits until the server closes a pipe, or ends, and takes nothing
//! else from it.

use clap::Args;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use zebu_export::fuse::FuseMount;

/// The name of the command that it runs.
const COMMAND: &str = "unmount-in-the-end";
/// Its messages: when it waits, and last.
const WAITING: &str = "waiting";
const DONE: &str = "done";

/// Which files, all of them mounted over.
#[derive(Debug, Args)]
pub(crate) struct UnmountArgs {
    /// These were there before, and stay
    #[arg(long, value_name = "PATH")]
    over: Vec<PathBuf>,
    /// These were made for it, and go
    #[arg(long, value_name = "PATH")]
    made: Vec<PathBuf>,
}

/// The process, as its server has it.
pub(crate) struct Unmounter {
    /// Closed to have it begin.
    told: ChildStdin,
    said: BufReader<ChildStdout>,
    /// Nobody waits for it: in the sandbox that is not to be had.
    _child: Child,
}

impl Unmounter {
    /// Starts it, to unmount these; from now on only the end of this process ends it.
    pub(crate) fn start(mounts: &[FuseMount]) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(COMMAND);
        for mount in mounts {
            command.arg(if mount.made_its_file() { "--made" } else { "--over" }).arg(mount.path());
        }
        // What a terminal sends to the server's group is not for it.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let told = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut said = BufReader::new(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        if line.trim_end() != WAITING {
            return Err(io::Error::other("it ended at once"));
        }
        Ok(Self { told, said, _child: child })
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
                "what unmounts in the end is gone: look for mounted files (umount, fusermount3 -u)".into(),
            );
        }
        lines
    }
}

/// Waits for the end of the server, and unmounts its files.
pub(crate) fn run(args: &UnmountArgs) -> u8 {
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // A service manager sends them to all processes at once; the server's end is what counts.
        let _ = signal_hook::flag::register(signal, Arc::clone(&ignored));
    }
    let files: Vec<(&PathBuf, Option<String>)> =
        args.over.iter().chain(&args.made).map(|path| (path, device_over(path))).collect();
    say(format_args!("{WAITING}"));
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    for (path, device) in files {
        // Another server may have mounted its own since.
        if device.is_some() && device_over(path) == device {
            unmount_one(path);
        }
    }
    for path in &args.made {
        // It is empty; if it stays, nothing is lost.
        let _ = fs::remove_file(path);
    }
    say(format_args!("{DONE}"));
    0
}

/// The number of the file system that is mounted last over a path (proc_pid_mountinfo(5), fields 3 and 5).
fn device_over(path: &Path) -> Option<String> {
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    let fields = mounts.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let device = fields.nth(2)?;
        Some((device, unescaped(fields.nth(1)?)))
    });
    let mut over = fields.filter(|(_, mounted)| mounted.as_bytes() == path.as_os_str().as_bytes());
    over.next_back().map(|(device, _)| String::from_utf8_lossy(device).into_owned())
}

/// Without the octal escapes of blanks and backslashes.
fn unescaped(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, behind @ ..] = rest {
        let escaped = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { rest.get(4..).unwrap_or_default() } else { behind };
    }
    OsString::from_vec(bytes)
}

fn unmount_one(path: &Path) {
    let file = path.display();
    let taken = match unmount(path, UnmountFlags::empty()) {
        Err(Errno::BUSY) => {
            say(format_args!("'{file}' is in use: taken away nevertheless"));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_as_they_are() {
        assert_eq!(unescaped(b"/a\\040b\\134040/\\011\\08"), "/a b\\040/\t\\08");
        assert!(device_over("/proc".as_ref()).is_some());
        assert_eq!(device_over("/no such/place".as_ref()), None);
    }
}
