//! Running programs, and the command `zebu` among them.

use crate::patience::LONGEST;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};

/// The output and exit code of a finished program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// The command line, for messages.
    pub line: String,
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Finished {
    /// Itself, if the exit code is 0.
    ///
    /// # Panics
    /// If it is not.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.exits(0)
    }

    /// Itself, if the exit code is `code`.
    ///
    /// # Panics
    /// If it is not.
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert!(self.code == Some(code), "exit code {code} expected\n{self}");
        self
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, code, stdout, stderr } = self;
        let [stdout, stderr] = [stdout, stderr].map(|text| shortened(text));
        write!(f, "$ {line}\n{stdout}{stderr}exit code {code:?}")
    }
}

/// A damaged image has a line for each of its clusters: the first ones will do.
fn shortened(text: &str) -> String {
    const LINES: usize = 20;
    let mut short: String = text.split_inclusive('\n').take(LINES).collect();
    let more = text.lines().count().saturating_sub(LINES);
    if more > 0 {
        short += &format!("... {more} more lines\n");
    }
    short
}

/// Runs a command to its end in `dir`.
///
/// # Panics
/// If it can't be started.
pub fn run_in<S: AsRef<OsStr>>(dir: &Path, program: &Path, args: impl IntoIterator<Item = S>) -> Finished {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir);
    finish(command)
}

/// Runs a prepared command to its end.
///
/// # Panics
/// If it can't be started.
pub fn finish(command: Command) -> Finished {
    finish_with(command, Stdio::null())
}

/// As [`finish`], with something on standard input.
///
/// # Panics
/// If it can't be started.
pub fn finish_with(mut command: Command, stdin: Stdio) -> Finished {
    let line = line_of(&command);
    let pipes = command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = pipes.spawn().unwrap_or_else(|e| panic!("cannot run {line}: {e}"));
    let (over, is_over) = channel::<()>();
    let pid = Pid::from_child(&child);
    // A guard against one that hangs. What a guest boots takes long where there is no other way than emulation.
    std::thread::spawn(move || {
        if is_over.recv_timeout(4 * LONGEST) == Err(RecvTimeoutError::Timeout) {
            let _ = kill_process(pid, Signal::KILL);
        }
    });
    let out = child.wait_with_output().unwrap_or_else(|e| panic!("{line}: {e}"));
    drop(over);
    Finished {
        line,
        code: out.status.code(),
        stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
    }
}

fn line_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// The program `name` on the PATH.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// The program `name` on the PATH.
///
/// # Panics
/// If it is missing.
pub fn required(name: &str) -> PathBuf {
    find(name).unwrap_or_else(|| panic!("{name} is missing: `cargo xtask setup` installs it"))
}

/// Runs the command `zebu` in `dir`.
///
/// # Panics
/// If it has not been built.
pub fn zebu<S: AsRef<OsStr>>(dir: &Path, args: impl IntoIterator<Item = S>) -> Finished {
    run_in(dir, zebu_program(), replacing(args))
}

/// Words of a command line of `zebu` that replaces files: tests make the same names again.
pub fn replacing<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Vec<OsString> {
    const MAKE_FILES: [&str; 3] = ["create", "convert", "dd"];
    let mut words: Vec<OsString> = args.into_iter().map(|word| word.as_ref().to_owned()).collect();
    if words.first().is_some_and(|command| MAKE_FILES.iter().any(|name| command == name)) {
        words.insert(1, "--force".into());
    }
    words
}

/// As [`fn@zebu`], interrupted (SIGINT) as soon as its progress says that `bytes` are done, or at its end.
///
/// # Panics
/// If it has not been built.
pub fn zebu_interrupted(dir: &Path, args: &[&str], bytes: u64) -> Finished {
    let mut command = Command::new(zebu_program());
    command.args(replacing(args)).arg("--progress=json").current_dir(dir).stdin(Stdio::null());
    let line = line_of(&command);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("zebu");
    let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let mut lines = lines.map(|line| line.expect("text"));
    let done = |line: &str| serde_json::from_str::<Value>(line).ok()?["done"].as_u64();
    let mut stderr = String::new();
    for line in lines.by_ref() {
        stderr += &format!("{line}\n");
        if done(&line).is_some_and(|done| done >= bytes) {
            break;
        }
    }
    // One that has ended is still there until it is waited for.
    kill_process(Pid::from_child(&child), Signal::INT).expect("a process");
    lines.for_each(|line| stderr += &format!("{line}\n"));
    let code = child.wait().expect("a process").code();
    Finished { line, code, stdout: String::new(), stderr }
}

/// As [`fn@zebu`], with 256 MiB of private memory and 20 seconds of the processor: a hostile image gets no more. What goes
/// past them, or hangs, has no exit code.
///
/// # Panics
/// If it has not been built.
pub fn zebu_limited<S: AsRef<OsStr>>(dir: &Path, args: impl IntoIterator<Item = S>) -> Finished {
    let mut command = Command::new("timeout");
    let limits = "ulimit -d 262144; ulimit -c 0; ulimit -t 20; exec \"$0\" \"$@\"";
    command
        .args(["-s", "KILL", &LONGEST.as_secs().to_string(), "sh", "-c", limits])
        .arg(zebu_program())
        .args(replacing(args))
        .current_dir(dir);
    let mut finished = finish(command);
    // timeout's own, and those of SIGKILL and SIGXCPU.
    if matches!(finished.code, Some(124 | 137 | 152)) {
        finished.code = None;
    }
    finished
}

/// Runs a program in `dir` under strace with these options, to its end. Its calls, a line each behind the time at which it
/// began: those of all threads in that order, none cut by another thread's.
///
/// # Panics
/// If it does not succeed, or strace is missing.
pub fn traced<S: AsRef<OsStr>>(
    dir: &Path,
    options: &[&str],
    program: &Path,
    args: impl IntoIterator<Item = S>,
) -> String {
    let mut command = Command::new(required("strace"));
    command.args(["-ff", "-ttt", "-qq", "-o", "trace"]).args(options);
    command.arg(program).args(args).current_dir(dir);
    finish(command).ok();
    let mut text = String::new();
    for entry in std::fs::read_dir(dir).expect("readable") {
        let path = entry.expect("readable").path();
        // `trace.PID`
        if path.file_stem().is_some_and(|name| name == "trace") {
            text += &std::fs::read_to_string(&path).expect("strace wrote it");
            std::fs::remove_file(&path).expect("it is ours");
        }
    }
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_by_key(|line| line.split(' ').next());
    lines.join("\n")
}

/// The command `zebu`: `ZEBU_BIN`, or the one built beside this program.
///
/// # Panics
/// If there is none.
pub fn zebu_program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(program) = std::env::var_os("ZEBU_BIN") {
            return program.into();
        }
        let own = std::env::current_exe().unwrap_or_default();
        let beside = own.ancestors().skip(1).take(2).map(|dir| dir.join("zebu")).find(|p| p.is_file());
        beside.unwrap_or_else(|| {
            panic!("the command zebu is not built: run `cargo build -p zebu-cli` (with the same --profile), or set ZEBU_BIN")
        })
    })
}

/// Whether this process is root.
pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}
