//! Watching a job from outside: progress on request, and signals that stop it.

use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::{Handle, Signals};
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zebu::jobs::{Cancel, JobControl, Phase};

/// How often progress is shown.
const TICK: Duration = Duration::from_millis(200);

/// `-p`, `--progress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ProgressMode {
    /// A bar on a terminal; else the percentage, as qemu-img prints it.
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
    /// Show progress: a bar on a terminal, percentages on standard output otherwise, or as WHEN says
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
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    fn load(&self) -> Snapshot {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Copying => "copying",
        Phase::Comparing => "comparing",
        Phase::Measuring => "measuring",
        Phase::Verifying => "verifying",
        Phase::Reserving => "reserving",
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

/// Watches one job. While it lives, SIGINT and SIGTERM throw the job's switch, and SIGUSR1 prints how far it is.
pub(crate) struct Watch {
    cancel: Cancel,
    shared: Arc<Shared>,
    signals: Handle,
    signal_thread: Option<JoinHandle<()>>,
    display: Option<Display>,
}

struct Display {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Begins to watch. A second SIGINT or SIGTERM ends the process at once.
    pub(crate) fn start(mode: ProgressMode) -> Result<Self, Failure> {
        let cancel = Cancel::new();
        let shared = Arc::new(Shared::default());
        let started = Instant::now();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1])
            .map_err(|error| Failure::new(format!("could not watch for signals: {error}")))?;
        let handle = signals.handle();
        let signal_thread = {
            let cancel = cancel.clone();
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                for signal in &mut signals {
                    if signal == SIGUSR1 {
                        let _ = writeln!(std::io::stderr(), "    ({:.2}/100%)", shared.load().percent());
                    } else if cancel.is_cancelled() {
                        std::process::exit(i32::from(crate::failure::EXIT_INTERRUPTED));
                    } else {
                        cancel.cancel();
                    }
                }
            })
        };
        let display = style(mode).map(|style| {
            let (stop, stopped) = channel();
            let shared = Arc::clone(&shared);
            let thread = std::thread::spawn(move || {
                let mut painter = Painter::new(style, started);
                while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                    painter.show(shared.load());
                }
                painter.finish(shared.load());
            });
            Display { stop, thread }
        });
        Ok(Self { cancel, shared, signals: handle, signal_thread: Some(signal_thread), display })
    }

    /// The switch that signals throw.
    pub(crate) fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// For the job.
    pub(crate) fn control(&self) -> JobControl {
        let shared = Arc::clone(&self.shared);
        JobControl {
            cancel: self.cancel.clone(),
            progress: Some(Arc::new(move |progress| {
                shared.store(Snapshot {
                    phase: phase_name(progress.phase),
                    done: progress.done,
                    total: progress.total,
                });
            })),
            rate_limit: None,
        }
    }

    /// Notes how far work is that has no [`JobControl`].
    pub(crate) fn note(&self, phase: &'static str, done: u64, total: u64) {
        self.shared.store(Snapshot { phase, done, total });
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
        ProgressMode::Auto if std::io::stderr().is_terminal() => Some(Style::Bar),
        ProgressMode::Auto => Some(Style::Percent),
    }
}

/// Shows one state after the other.
struct Painter {
    style: Style,
    started: Instant,
    bar: Option<ProgressBar>,
    /// What was printed last, so that a job that stands still prints nothing new.
    last: Option<(u64, &'static str)>,
}

impl Painter {
    fn new(style: Style, started: Instant) -> Self {
        let bar = (style == Style::Bar).then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
            let template = "{msg:>10} {bar:30} {percent:>3}% {decimal_bytes_per_sec:>12} {eta:>5} left";
            if let Ok(parsed) = ProgressStyle::with_template(template) {
                bar.set_style(parsed);
            }
            bar
        });
        Self { style, started, bar, last: None }
    }

    fn show(&mut self, now: Snapshot) {
        if now.total == 0 {
            return;
        }
        match self.style {
            Style::Bar => {
                if let Some(bar) = &self.bar {
                    bar.set_length(now.total);
                    bar.set_position(now.done);
                    bar.set_message(now.phase);
                }
            }
            Style::Json => {
                if self.is_news(now) {
                    let line = self.json_line(now);
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
            }
            Style::Percent => {
                if self.is_news(now) {
                    let mut out = std::io::stdout().lock();
                    let _ = write!(out, "    ({:.2}/100%)\r", now.percent());
                    let _ = out.flush();
                }
            }
        }
    }

    fn finish(&mut self, now: Snapshot) {
        self.show(now);
        match (self.style, &self.bar) {
            (Style::Bar, Some(bar)) => bar.finish(),
            (Style::Percent, _) => {
                let _ = writeln!(std::io::stdout());
            }
            _ => {}
        }
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
