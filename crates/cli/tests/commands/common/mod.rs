//! Running `zebu` beside QEMU's programs, each in a directory of its own.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsStr;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The output of a program, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// The same, after checking that it ended well.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// Checks that it failed with `code` and one line of error that has all of `words`.
    #[track_caller]
    pub(crate) fn fails_naming(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:#?}");
        let mut lines = self.stderr.lines();
        let first = lines.next().unwrap_or_default();
        assert!(first.starts_with("zebu: "), "{self:#?}");
        for word in words {
            assert!(first.contains(word), "{word} is missing: {self:#?}");
        }
        let rest: Vec<&str> = lines.collect();
        assert!(rest.is_empty() || rest[0].starts_with("Try 'zebu"), "more than one line: {self:#?}");
    }
}

/// Whether tests against QEMU run. They fail where it is missing, unless `ZEBU_SKIP_QEMU=1` says that this is meant.
pub(crate) fn qemu() -> bool {
    if std::env::var_os("ZEBU_SKIP_QEMU").is_some_and(|value| value == "1") {
        eprintln!("skipped: ZEBU_SKIP_QEMU=1");
        return false;
    }
    for program in ["qemu-img", "qemu-io", "qemu-nbd"] {
        let found =
            Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
        assert!(
            found,
            "{program} is needed: install it (Debian: apt install qemu-utils), or set ZEBU_SKIP_QEMU=1 to leave out \
             the comparison with QEMU"
        );
    }
    true
}

/// Commands that replace a file only by `--force`.
const MAKE_FILES: [&str; 3] = ["create", "convert", "dd"];

/// A directory that goes away with its value.
pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(tempfile::Builder::new().prefix("zebu-cli-").tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the `zebu` under test here. It replaces files, because tests make the same names again.
    pub(crate) fn zebu<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Ran {
        let mut words: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        if words.first().is_some_and(|command| MAKE_FILES.iter().any(|name| command == name)) {
            words.insert(1, OsStr::new("--force"));
        }
        self.run(env!("CARGO_BIN_EXE_zebu"), &words)
    }

    /// The same with these words alone.
    pub(crate) fn zebu_as_typed(&self, line: &str) -> Ran {
        self.run(env!("CARGO_BIN_EXE_zebu"), &words(line))
    }

    pub(crate) fn qemu_img<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Ran {
        self.run("qemu-img", arguments)
    }

    pub(crate) fn qemu_io<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Ran {
        self.run("qemu-io", arguments)
    }

    /// Runs a program here, in the time zone and language that its output is compared in.
    pub(crate) fn run<S: AsRef<OsStr>>(&self, program: &str, arguments: &[S]) -> Ran {
        let output = self.command(program, arguments).stdin(Stdio::null()).output().unwrap();
        Ran {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub(crate) fn command<S: AsRef<OsStr>>(&self, program: &str, arguments: &[S]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.path()).env("TZ", "UTC").env("LC_ALL", "C");
        command
    }

    /// Writes `contents` to a file.
    pub(crate) fn write(&self, name: &str, contents: &[u8]) {
        std::fs::write(self.file(name), contents).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.file(name)).unwrap()
    }
}

/// A program in the background that is stopped with its value.
pub(crate) struct Background(Child);

impl Background {
    /// Starts a program. Unless somebody else reads it, its standard output is left out: a caller that reads to the end
    /// would wait for a program that outlives its test.
    #[track_caller]
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    /// Waits for its end: the exit code and standard error.
    #[track_caller]
    pub(crate) fn ended(mut self) -> (Option<i32>, String) {
        let mut stderr = String::new();
        if let Some(mut pipe) = self.0.stderr.take() {
            std::io::Read::read_to_string(&mut pipe, &mut stderr).unwrap();
        }
        (self.0.wait().unwrap().code(), stderr)
    }

    /// Starts a program that takes commands, and waits until it asks for the first one: the image that it was given is
    /// open and locked then. (To try the lock from outside could make the program itself fail.)
    #[track_caller]
    pub(crate) fn with_prompt(mut command: Command, prompt: &str) -> Self {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut background = Self(child);
        let mut text = vec![0; prompt.len()];
        std::io::Read::read_exact(background.0.stdout.as_mut().unwrap(), &mut text).unwrap();
        assert_eq!(text, prompt.as_bytes());
        background
    }
}

impl Deref for Background {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Background {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal to a program that was not waited for yet.
#[track_caller]
pub(crate) fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Waits until `condition` holds; fails after ten minutes, a guard against a test that hangs.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(600);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until nothing that a killed `zebu` has sent to a file is under way: QEMU does not wait for it. The kernel's
/// requests hold a lock of byte 99.
#[track_caller]
pub(crate) fn wait_until_landed(file: &Path) {
    let Ok(found) = std::fs::metadata(file) else { return };
    let inode = format!(":{}", found.ino());
    wait_for("writes of a killed program that land", || {
        // NUMBER: KIND MANDATE ACCESS PROCESS DEVICE:INODE FIRST LAST
        let locks = std::fs::read_to_string("/proc/locks").unwrap();
        let mut lines = locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        !lines.any(|words| words.len() > 6 && words[5].ends_with(&inode) && words[6] == "99")
    });
}

/// Waits until a program listens on `socket`, without a connection, which would be its first client.
#[track_caller]
pub(crate) fn wait_for_listener(socket: &Path) {
    const ACCEPTS_CONNECTIONS: &str = "00010000";
    let name = socket.to_str().unwrap();
    wait_for("a socket that listens", || {
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        let mut lines = sockets.lines().filter(|line| line.ends_with(name));
        lines.any(|line| line.split_whitespace().nth(3) == Some(ACCEPTS_CONNECTIONS))
    });
}

/// Checks that `ours` has every key of `theirs` with the same value, at any depth. Keys in `ignored` may differ, but
/// must be there.
#[track_caller]
pub(crate) fn assert_has_all(ours: &Value, theirs: &Value, ignored: &[&str]) {
    if let Err(difference) = has_all(ours, theirs, ignored, "") {
        panic!("{difference}\nours: {ours:#}\ntheirs: {theirs:#}");
    }
}

fn has_all(ours: &Value, theirs: &Value, ignored: &[&str], path: &str) -> Result<(), String> {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                let path = format!("{path}/{key}");
                let Some(own) = ours.get(key) else { return Err(format!("{path} is missing")) };
                if !ignored.contains(&key.as_str()) {
                    has_all(own, value, ignored, &path)?;
                }
            }
            Ok(())
        }
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => ours
            .iter()
            .zip(theirs)
            .enumerate()
            .try_for_each(|(index, (a, b))| has_all(a, b, ignored, &format!("{path}/{index}"))),
        _ if ours == theirs => Ok(()),
        _ => Err(format!("{path}: {ours} instead of {theirs}")),
    }
}

/// The words of a line of command, for tests that list many.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Bytes that do not repeat, from a seed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
