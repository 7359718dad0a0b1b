//! Watching a job from outside: progress on request, and signals that stop it.

use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::output::summary::summary;
use crate::progress_bar::{Pace, Shown, line};
use crate::stop_signals::{Answer, Asked, stop_signals, take_over_signals};
use crate::values::OutputFormat;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGUSR1};
use signal_hook::flag::register_conditional_shutdown;
use signal_hook::iterator::{Handle, Signals};
use signal_hook::{SigId, low_level};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zebu_engine::jobs::{Cancel, JobControl, Phase, remove_unfinished_files};
use zebu_storage::sync::Mutex;

/// How often progress is shown.
const TICK: Duration = Duration::from_millis(200);

/// `-p`, `--progress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ProgressMode {
    /// A bar on a terminal; the percentage, as qemu-img prints it, where standard output is a pipe or standard error is no
    /// terminal.
    Auto,
    /// A bar with rate and time left, on standard error.
    Bar,
    /// A JSON object per line, on standard error.
    Json,
    /// Nothing.
    None,
}

/// The option, for the commands that have it.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct ProgressArg {
    /// Show progress: a bar on a terminal, percentages on standard output if it is a pipe, or as WHEN says
    #[arg(
        short,
        long,
        value_name = "WHEN",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "auto"
    )]
    progress: Option<ProgressMode>,
}

impl ProgressArg {
    /// The same beside a report in `output`: standard output has room for JSON alone.
    pub(crate) fn beside(self, output: OutputFormat) -> Self {
        match (self.progress, output) {
            (Some(ProgressMode::Auto), OutputFormat::Json) if std::io::stderr().is_terminal() => {
                Self { progress: Some(ProgressMode::Bar) }
            }
            (Some(ProgressMode::Auto), OutputFormat::Json) => Self { progress: Some(ProgressMode::Json) },
            _ => self,
        }
    }

    /// How progress is shown; not at all for a quiet command.
    pub(crate) fn mode(self, quiet: bool) -> ProgressMode {
        if quiet { ProgressMode::None } else { self.progress.unwrap_or(ProgressMode::None) }
    }
}

/// How progress is shown, once it is known where standard error and output lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Bar,
    Json,
    /// `    (12.34/100%)` and a carriage return, on standard output.
    Percent,
}

/// The state of the job, written by its threads and read by the one that shows it.
#[derive(Default)]
struct Shared(Mutex<Snapshot>);

impl Shared {
    fn store(&self, now: Snapshot) {
        *self.0.lock() = now;
    }

    fn load(&self) -> Snapshot {
        *self.0.lock()
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Copying => "copying",
        Phase::Comparing | Phase::ComparingRefcounts => "comparing",
        Phase::Measuring => "measuring",
        Phase::Verifying => "verifying",
        Phase::Reserving => "reserving",
        Phase::CountingReferences => "counting",
        Phase::CheckingFlags => "flags",
        Phase::RebuildingRefcounts => "rebuilding",
        Phase::Finishing => "finishing",
        _ => "working",
    }
}

/// How far the job was at one moment.
#[derive(Debug, Clone, Copy, Default)]
struct Snapshot {
    phase: &'static str,
    done: u64,
    total: u64,
}

impl Snapshot {
    fn percent(self) -> f64 {
        if self.total == 0 { 0.0 } else { self.done.min(self.total) as f64 * 100.0 / self.total as f64 }
    }
}

/// A line of `--progress=json`.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct JsonLine {
    phase: &'static str,
    done: u64,
    total: u64,
    percent: f64,
    elapsed_seconds: f64,
    bytes_per_second: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_left: Option<u64>,
}

/// Watches one job. While it lives, SIGHUP, SIGINT and SIGTERM throw the job's switch, unless they were ignored when the
/// program was started, and SIGUSR1 prints how far it is.
pub(crate) struct Watch {
    cancel: Cancel,
    /// Handlers that end the process immediately if removing its files does not end.
    last_resort: Vec<SigId>,
    shared: Arc<Shared>,
    signals: Handle,
    signal_thread: Option<JoinHandle<()>>,
    display: Option<Display>,
    /// Whether a bar shows progress.
    has_bar: bool,
    started: Instant,
}

struct Display {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Begins to watch. Another SIGINT or SIGTERM, a second later, ends the process at once, without what it has not
    /// finished.
    pub(crate) fn start(mode: ProgressMode) -> Result<Self, Failure> {
        let cancel = Cancel::new();
        let shared = Arc::new(Shared::default());
        let started = Instant::now();
        let fail = |error: std::io::Error| Failure::new(format!("could not watch for signals: {error}"));
        take_over_signals();
        let stop = stop_signals();
        let mut signals = Signals::new(stop.iter().chain(&[SIGUSR1])).map_err(fail)?;
        let handle = signals.handle();
        let ending = Arc::new(AtomicBool::new(false));
        let mut last_resort = Vec::new();
        for signal in stop.into_iter().filter(|signal| *signal != SIGHUP) {
            let exit = i32::from(EXIT_INTERRUPTED);
            last_resort.push(register_conditional_shutdown(signal, exit, Arc::clone(&ending)).map_err(fail)?);
        }
        let signal_thread = {
            let cancel = cancel.clone();
            let shared = Arc::clone(&shared);
            let watch = move || {
                let mut asked = Asked::default();
                for signal in &mut signals {
                    if signal == SIGUSR1 {
                        let _ = writeln!(std::io::stderr(), "    ({:.2}/100%)", shared.load().percent());
                        continue;
                    }
                    match asked.answer(signal, Instant::now()) {
                        Answer::Begin => cancel.cancel(),
                        Answer::Wait => {}
                        Answer::EndAtOnce => {
                            ending.store(true, Ordering::SeqCst);
                            remove_unfinished_files();
                            std::process::exit(i32::from(EXIT_INTERRUPTED));
                        }
                    }
                }
            };
            std::thread::Builder::new().spawn(watch).map_err(fail)?
        };
        let display = style(mode).and_then(|style| {
            let (stop, stopped) = channel();
            let shared = Arc::clone(&shared);
            let paint = move || {
                let mut painter = Painter::new(style, started);
                while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                    painter.show(shared.load());
                }
                painter.finish(shared.load());
            };
            // Where the system has no thread to give, progress is not shown.
            let thread = std::thread::Builder::new().spawn(paint).ok()?;
            Some(Display { stop, thread })
        });
        Ok(Self {
            cancel,
            last_resort,
            shared,
            signals: handle,
            signal_thread: Some(signal_thread),
            display,
            has_bar: style(mode) == Some(Style::Bar),
            started,
        })
    }

    /// The switch that signals throw.
    pub(crate) fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// For the job.
    pub(crate) fn control(&self) -> JobControl {
        let shared = Arc::clone(&self.shared);
        JobControl::default()
            .cancel(self.cancel.clone())
            .progress(move |progress| {
                shared.store(Snapshot {
                    phase: phase_name(progress.phase),
                    done: progress.done,
                    total: progress.total,
                });
            })
            .rate_limit(None)
    }

    /// For a job of several: `before` bytes were done by others before it, and all have `all`.
    pub(crate) fn control_within(&self, before: u64, all: u64) -> JobControl {
        let shared = Arc::clone(&self.shared);
        self.control().progress(move |progress| {
            shared.store(Snapshot {
                phase: phase_name(progress.phase),
                done: before + progress.done,
                total: all,
            });
        })
    }

    /// Notes how far work is that has no [`JobControl`].
    pub(crate) fn note(&self, phase: &'static str, done: u64, total: u64) {
        self.shared.store(Snapshot { phase, done, total });
    }

    /// The time since it began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Ends the display, and says below a bar what was done: bytes of the disk, and of the file that was made.
    pub(crate) fn finish_with(&mut self, disk: u64, file: Option<u64>) {
        let line = summary(disk, file, self.elapsed());
        self.finish();
        if self.has_bar && width().is_none_or(|width| line.len() < width) {
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }

    /// Ends the display, so that what is printed next is not mixed with it. Done by drop, too.
    pub(crate) fn finish(&mut self) {
        if let Some(display) = self.display.take() {
            drop(display.stop);
            let _ = display.thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.finish();
        self.signals.close();
        for id in self.last_resort.drain(..) {
            low_level::unregister(id);
        }
        if let Some(thread) = self.signal_thread.take() {
            let _ = thread.join();
        }
    }
}

fn style(mode: ProgressMode) -> Option<Style> {
    match mode {
        ProgressMode::None => None,
        ProgressMode::Bar => Some(Style::Bar),
        ProgressMode::Json => Some(Style::Json),
        ProgressMode::Auto if std::io::stderr().is_terminal() && !is_pipe() => Some(Style::Bar),
        ProgressMode::Auto => Some(Style::Percent),
    }
}

/// Whether a program reads what is printed: it waits for the percentages that qemu-img prints.
fn is_pipe() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;
    let opened = std::io::stdout().as_fd().try_clone_to_owned().map(std::fs::File::from);
    opened.and_then(|file| file.metadata()).is_ok_and(|found| {
        let kind = found.file_type();
        kind.is_fifo() || kind.is_socket()
    })
}

/// Columns of the terminal that the bar is on.
fn width() -> Option<usize> {
    rustix::termios::tcgetwinsize(std::io::stderr()).ok().map(|size| usize::from(size.ws_col))
}

/// Shows one state after the other.
struct Painter {
    style: Style,
    started: Instant,
    pace: Pace,
    /// Columns that the last line took.
    drawn: usize,
    /// The last output, so that a job that stands still prints nothing new.
    last: Option<(u64, &'static str)>,
    /// The last line of percentages.
    percent: String,
}

impl Painter {
    fn new(style: Style, started: Instant) -> Self {
        Self { style, started, pace: Pace::default(), drawn: 0, last: None, percent: String::new() }
    }

    fn show(&mut self, now: Snapshot) {
        if now.total == 0 {
            return;
        }
        match self.style {
            Style::Bar => {
                self.pace.note(Instant::now(), now.done);
                let rate = self.pace.rate();
                self.draw(line(Shown { phase: now.phase, done: now.done, total: now.total, rate }, width()));
            }
            Style::Json => {
                if self.is_news(now) {
                    let line = self.json_line(now);
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
            }
            Style::Percent => {
                if self.is_news(now) {
                    // However short the job was.
                    if self.percent.is_empty() {
                        self.say_percent(0.0);
                    }
                    self.say_percent(now.percent());
                }
            }
        }
    }

    fn say_percent(&mut self, percent: f64) {
        let text = format!("    ({percent:.2}/100%)\r");
        if text != self.percent {
            let mut out = std::io::stdout().lock();
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            self.percent = text;
        }
    }

    fn finish(&mut self, now: Snapshot) {
        match self.style {
            Style::Bar => {
                // A job that was too short for a line needs none.
                if now.total > 0 {
                    self.pace = Pace::default();
                    self.show(now);
                }
                if self.drawn > 0 {
                    let _ = writeln!(std::io::stderr());
                }
            }
            Style::Json => self.show(now),
            Style::Percent => {
                self.show(now);
                let _ = writeln!(std::io::stdout());
            }
        }
    }

    /// Puts a line over the last one.
    fn draw(&mut self, line: String) {
        let columns = line.chars().count();
        let rest = " ".repeat(self.drawn.saturating_sub(columns));
        self.drawn = columns;
        let mut out = std::io::stderr().lock();
        let _ = write!(out, "\r{line}{rest}\r{line}");
        let _ = out.flush();
    }

    fn is_news(&mut self, now: Snapshot) -> bool {
        let state = Some((now.done, now.phase));
        std::mem::replace(&mut self.last, state) != state
    }

    fn json_line(&self, now: Snapshot) -> String {
        let elapsed = self.started.elapsed().as_secs_f64();
        let rate = if elapsed > 0.0 { now.done as f64 / elapsed } else { 0.0 };
        let line = JsonLine {
            phase: now.phase,
            done: now.done,
            total: now.total,
            percent: (now.percent() * 100.0).round() / 100.0,
            elapsed_seconds: (elapsed * 1000.0).round() / 1000.0,
            bytes_per_second: rate as u64,
            seconds_left: (rate > 0.0)
                .then(|| (now.total.saturating_sub(now.done) as f64 / rate).ceil() as u64),
        };
        serde_json::to_string(&line).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_bounded() {
        assert!(Snapshot { phase: "copying", done: 0, total: 0 }.percent().abs() < f64::EPSILON);
        assert!((Snapshot { phase: "copying", done: 7, total: 5 }.percent() - 100.0).abs() < f64::EPSILON);
    }

    #[test]
    fn a_line_of_json_tells_the_whole_state() {
        let painter = Painter::new(Style::Json, Instant::now());
        let line = painter.json_line(Snapshot { phase: "copying", done: 512, total: 1024 });
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["phase"], "copying");
        assert_eq!(value["done"], 512);
        assert_eq!(value["total"], 1024);
        assert_eq!(value["percent"], 50.0);
    }

    #[test]
    fn a_job_that_stands_still_is_no_news() {
        let mut painter = Painter::new(Style::Json, Instant::now());
        let state = Snapshot { phase: "copying", done: 1, total: 2 };
        assert!(painter.is_news(state));
        assert!(!painter.is_news(state));
        assert!(painter.is_news(Snapshot { done: 2, ..state }));
    }
}
