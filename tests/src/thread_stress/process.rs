//! The process that runs a case, as the one that judges it sees it: its journals grow, or it hangs; it can be stopped
//! and killed at any moment.

use super::journal::{self, Entry};
use super::recorder::SUFFIX;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A running case. Killed on drop.
#[derive(Debug)]
pub struct Process {
    child: Child,
    dir: PathBuf,
    /// For each journal, how long it was, and since when.
    grown: HashMap<OsString, (u64, Instant)>,
    started: Instant,
    /// Since when a thread seems to hang, and the processor time of all by then.
    suspected: Option<(Instant, ProcessorTime)>,
}

/// After so long, a thread that has not stopped will not.
const LONGEST_STOP: Duration = Duration::from_secs(5);

/// Threads that waited for a processor for more than one part of so many are starved, unless they ran for one of [`SPINNING`].
const STARVED: u32 = 4;
/// Threads that ran for more than one part of so many go round in circles, if nothing comes of it.
const SPINNING: u32 = 20;
/// So many times its patience is waited at most for a process that is starved.
const LONGEST_STARVED: u32 = 10;

/// How long the threads of a process have run, and have waited for a processor; sums.
#[derive(Debug, Clone, Copy, Default)]
struct ProcessorTime {
    ran: Duration,
    waited: Duration,
}

/// Where the process writes what it has to say.
const MESSAGES: &str = "messages";

impl Process {
    /// Starts a program with its messages in a file of `dir`.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(mut command: Command, dir: &Path) -> io::Result<Self> {
        let messages = File::create(dir.join(MESSAGES))?;
        command.stdin(Stdio::null()).stdout(messages.try_clone()?).stderr(messages);
        let child = command.spawn()?;
        let started = Instant::now();
        Ok(Self { child, dir: dir.to_owned(), grown: HashMap::new(), started, suspected: None })
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The process is not ours.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Its messages.
    pub fn messages(&self) -> String {
        std::fs::read_to_string(self.dir.join(MESSAGES)).unwrap_or_default().trim().to_owned()
    }

    /// Bytes of all its journals.
    pub fn progress(&self) -> u64 {
        journals(&self.dir).iter().filter_map(|path| path.metadata().ok()).map(|meta| meta.len()).sum()
    }

    /// A thread that has something left to do, and has done nothing for `patience` and a third more. On a machine whose
    /// processors are busy with other work, ten times as long.
    pub fn stuck(&mut self, patience: Duration) -> Option<String> {
        let Some(who) = self.idle(patience) else {
            self.suspected = None;
            return None;
        };
        let now = self.processor_time();
        let (since, before) = *self.suspected.get_or_insert_with(|| (Instant::now(), now));
        let looked = since.elapsed();
        if looked < patience / 3 {
            return None;
        }
        self.suspected = None;
        let (ran, waited) = (now.ran.saturating_sub(before.ran), now.waited.saturating_sub(before.waited));
        let is_starved = waited > looked / STARVED && ran < looked / SPINNING;
        if is_starved && self.idle(patience * LONGEST_STARVED).is_none() {
            return None;
        }
        Some(format!(
            "{who} (whose process ran for {ran:?} and waited for a processor for {waited:?} of {looked:?})"
        ))
    }

    /// Sums of its threads (the first two numbers of `/proc/PID/schedstat`).
    fn processor_time(&self) -> ProcessorTime {
        let mut sum = ProcessorTime::default();
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        for task in tasks.into_iter().flatten().flatten() {
            let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let mut numbers = text.split(' ').map(|number| Duration::from_nanos(number.parse().unwrap_or(0)));
            sum.ran += numbers.next().unwrap_or_default();
            sum.waited += numbers.next().unwrap_or_default();
        }
        sum
    }

    /// A thread that has something left to do, and has done nothing for `patience`.
    fn idle(&mut self, patience: Duration) -> Option<String> {
        let paths = journals(&self.dir);
        if paths.is_empty() {
            return (self.started.elapsed() > patience).then(|| "nothing was begun".to_owned());
        }
        let mut longest = Duration::ZERO;
        let mut who = None;
        for path in paths {
            let len = path.metadata().map_or(0, |meta| meta.len());
            let name = path.file_name().unwrap_or_default().to_owned();
            let since = self.grown.entry(name.clone()).or_insert((len, Instant::now()));
            if since.0 != len {
                *since = (len, Instant::now());
            }
            if since.1.elapsed() > longest.max(Duration::from_secs(1)) && !journal::is_over(&path) {
                longest = since.1.elapsed();
                who = Some(name.to_string_lossy().into_owned());
            }
        }
        who.filter(|_| longest > patience)
    }

    /// Stops all its threads where they are.
    ///
    /// # Errors
    /// It has ended, or a thread does not stop; then all go on. One that ends waits in the kernel for the threads that io_uring
    /// has made for it, and these are stopped.
    pub fn stop(&mut self) -> io::Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::STOP)?;
        let tasks = format!("/proc/{}/task", self.child.id());
        // The state follows the name, which is in parentheses.
        let is_stopped = |text: String| {
            matches!(
                text.rsplit(')').next().and_then(|rest| rest.trim().chars().next()),
                Some('T' | 't' | 'Z')
            )
        };
        let begun = Instant::now();
        loop {
            if self.child.try_wait()?.is_some() {
                return Err(io::Error::other("it has ended"));
            }
            if begun.elapsed() > LONGEST_STOP {
                self.go_on()?;
                return Err(io::Error::other("a thread does not stop"));
            }
            let mut threads = std::fs::read_dir(&tasks)?;
            if threads.all(|thread| {
                let stat = thread.and_then(|thread| std::fs::read_to_string(thread.path().join("stat")));
                stat.map_or(true, is_stopped)
            }) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets it go on. The time that it stood still is not counted as a hang.
    ///
    /// # Errors
    /// It has ended.
    pub fn go_on(&mut self) -> io::Result<()> {
        self.grown.clear();
        Ok(kill_process(Pid::from_child(&self.child), Signal::CONT)?)
    }

    /// Kills it on the spot.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn journals(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|suffix| suffix == SUFFIX)).collect()
}

/// All journals of a directory, as far as they are written.
///
/// # Errors
/// One can't be read.
pub fn read_journals(dir: &Path) -> io::Result<Vec<Vec<Entry>>> {
    journals(dir).iter().map(|path| journal::read(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patience::LONGEST;

    /// A process that sleeps hangs, and so does one that goes round in circles.
    #[test]
    fn what_sleeps_or_spins_is_stuck() {
        for script in ["exec sleep 100", "while :; do :; done"] {
            let dir = tempfile::tempdir().unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            let mut process = Process::start(command, dir.path()).unwrap();
            let begun = Instant::now();
            while process.stuck(Duration::from_millis(300)).is_none() {
                assert!(begun.elapsed() < LONGEST, "{script}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}
