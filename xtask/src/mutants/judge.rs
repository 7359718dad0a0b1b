//! Running the tests with one change active.

use super::tree::TestProgram;
use super::verdict::{Finding, Verdict};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use zebu_bench::Outcome;
use zebu_bench::workspace::root;

/// A changed program may take so many times as long as the unchanged one, for each that runs beside it, and this.
const PATIENCE: u32 = 4;
const PATIENCE_MORE: Duration = Duration::from_secs(5);
/// Address space of a program, KiB: a change that takes memory without end takes it from nobody else.
const MEMORY_KIB: u64 = 8 << 20;
/// Bytes on the file system that a program may take, and that are left to others: one that writes without end is ended.
const SPACE_TAKEN: u64 = 16 << 30;
const SPACE_LEFT: u64 = 8 << 30;
/// How long what was removed may take to be free again.
const SPACE_COMES: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A test program, and what it does without a change.
struct Program {
    name: String,
    path: PathBuf,
    filter: &'static str,
    takes: Duration,
    reaches: BTreeSet<u32>,
    done: Mutex<Done>,
}

/// Progress of a program so far.
#[derive(Default)]
struct Done {
    noticed: u32,
    took: Duration,
}

impl Program {
    /// How many changes it has noticed in a second of its time; before the first, as if it were about to.
    fn rate(&self) -> f64 {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        f64::from(done.noticed + 1) / (done.took + self.takes).as_secs_f64()
    }
}

/// All test programs.
pub(super) struct Suite {
    programs: Vec<Program>,
    lanes: u32,
    /// Where the programs have their files.
    place: PathBuf,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    Stuck,
}

impl Suite {
    /// Runs each program without a change; all tests have to pass. Later as many run at a time as there are `lanes`.
    pub(super) fn measure(place: &Path, programs: &[TestProgram], lanes: usize) -> Outcome<Self> {
        let mut measured = Vec::new();
        for TestProgram { name, path, filter } in programs {
            let reached = place.join(format!("reached-{name}"));
            let _ = std::fs::remove_file(&reached);
            let start = Instant::now();
            let variable = ("ZEBU_CHANGES_REACHED", reached.as_os_str());
            let end = run(path, filter, variable, place, Duration::from_secs(1800))?;
            if end != End::Passed {
                return Err(format!("{name} fails without a change: {}", path.display()));
            }
            let reaches: BTreeSet<u32> = std::fs::read_to_string(&reached)
                .unwrap_or_default()
                .lines()
                .filter_map(|line| line.parse().ok())
                .collect();
            let takes = start.elapsed();
            println!("{name}: {:.1} s, reaches {}", takes.as_secs_f64(), reaches.len());
            let done = Mutex::default();
            measured.push(Program { name: name.clone(), path: path.clone(), filter, takes, reaches, done });
        }
        let lanes = u32::try_from(lanes).map_err(|e| e.to_string())?;
        Ok(Self { programs: measured, lanes, place: place.to_owned() })
    }

    /// The verdict of the programs on a change.
    pub(super) fn judge(&self, number: u32) -> Outcome<Finding> {
        let start = Instant::now();
        let mut verdict = Verdict::NotReached;
        let mut by = None;
        // Those first that have noticed the most.
        let mut programs: Vec<_> =
            self.programs.iter().filter(|program| program.reaches.contains(&number)).collect();
        programs.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
        for program in programs {
            let begun = Instant::now();
            let limit = program.takes * PATIENCE * self.lanes + PATIENCE_MORE;
            let variable = number.to_string();
            verdict = match run(
                &program.path,
                program.filter,
                ("ZEBU_CHANGE", variable.as_ref()),
                &self.place,
                limit,
            )? {
                End::Passed => Verdict::Survived,
                End::Failed => Verdict::Caught,
                End::Stuck => Verdict::Stuck,
            };
            let mut done = program.done.lock().unwrap_or_else(PoisonError::into_inner);
            done.took += begun.elapsed();
            if verdict != Verdict::Survived {
                done.noticed += 1;
                by = Some(program.name.clone());
                break;
            }
        }
        Ok(Finding { verdict, by, seconds: start.elapsed().as_secs_f64() })
    }
}

/// Runs a test program until a test fails, all have passed, the time is over, or its files take too much.
/// Of these, none is left in `place`, however it ends.
fn run(
    program: &Path,
    filter: &str,
    variable: (&str, &std::ffi::OsStr),
    place: &Path,
    limit: Duration,
) -> Outcome<End> {
    let said = |e: std::io::Error| format!("cannot run {}: {e}", program.display());
    let space = space_for(place)?;
    let scratch = tempfile::tempdir_in(place).map_err(said)?;
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("ulimit -c 0; ulimit -v {MEMORY_KIB}; exec \"$0\" \"$1\" 2>/dev/null")])
        .arg(program)
        .arg(filter);
    command.current_dir(root().join("crates/engine")).env(variable.0, variable.1).process_group(0);
    command.env("TMPDIR", scratch.path());
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(said)?;
    let lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let deadline = Instant::now() + limit;
    loop {
        match receiver.recv_timeout(LOOK_EVERY) {
            Ok(line) if line.ends_with(" ... FAILED") => {
                kill(&mut child);
                return Ok(End::Failed);
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.wait().map_err(said)?;
                return Ok(if status.success() { End::Passed } else { End::Failed });
            }
            Ok(_) | Err(RecvTimeoutError::Timeout) => {}
        }
        if Instant::now() > deadline || space_left(place)? < space.saturating_sub(SPACE_TAKEN).max(SPACE_LEFT)
        {
            kill(&mut child);
            return Ok(End::Stuck);
        }
    }
}

/// Bytes that the file system of `place` can take, once there are some to take.
fn space_for(place: &Path) -> Outcome<u64> {
    let deadline = Instant::now() + SPACE_COMES;
    loop {
        let left = space_left(place)?;
        if left >= SPACE_LEFT + SPACE_TAKEN {
            return Ok(left);
        }
        if Instant::now() > deadline {
            return Err(format!("{}: {} GiB are left, too few", place.display(), left >> 30));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Bytes that the file system of `place` can still take.
fn space_left(place: &Path) -> Outcome<u64> {
    let found = rustix::fs::statvfs(place).map_err(|e| format!("{}: {e}", place.display()))?;
    Ok(found.f_bavail * found.f_frsize)
}

/// Ends a program, and what it has started.
fn kill(child: &mut Child) {
    // SAFETY: a process group of ours, whose leader has not been waited for; no memory is touched.
    unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
    let _ = child.wait();
}
