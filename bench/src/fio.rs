//! fio: what it is asked, and what it finds.

use crate::Outcome;
use crate::lab::remove;
use crate::metric::{Metric, Sample};
use crate::process::{find, measure_ok_within, shown};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How much longer than it was asked to fio may take: a server that stands still holds it up.
const STANDING_STILL: Duration = Duration::from_secs(60);

/// How long it may take to ask for everything once.
const ONCE: Duration = Duration::from_secs(300);

/// A load of fio.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask {
    /// fio's word.
    pub(crate) rw: &'static str,
    /// Bytes of a request.
    pub(crate) block: u64,
    /// Offsets are multiples of so many bytes.
    pub(crate) align: u64,
    pub(crate) depth: u32,
    /// Connections, each with `depth` requests in flight.
    pub(crate) connections: u32,
    /// Bytes between the places where connections begin; 0: all ask everywhere.
    pub(crate) apart: u64,
}

impl Ask {
    /// 4 KiB at random, over one connection.
    pub(crate) const fn random(rw: &'static str, depth: u32) -> Self {
        Self { rw, block: 4096, align: 4096, depth, connections: 1, apart: 0 }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub(crate) requests: f64,
    pub(crate) iops: f64,
    pub(crate) p99_nanoseconds: f64,
}

impl Found {
    pub(crate) fn sample(self) -> Sample {
        vec![
            (Metric::RequestsPerSecond, self.iops),
            (Metric::LatencyP99Micros, self.p99_nanoseconds / 1000.0),
        ]
    }
}

/// Has fio ask `target` (arguments that say what and how) for `seconds`, all over the first `size` bytes.
pub(crate) fn fio(ask: Ask, size: u64, seconds: u32, target: &[&str]) -> Outcome<Found> {
    let limit = Duration::from_secs(u64::from(seconds)) + STANDING_STILL;
    let runtime = format!("--runtime={seconds}");
    let words = [&["--time_based", runtime.as_str()], target].concat();
    asked(ask, size, limit, &words)
}

/// Has fio ask `target` for each block of the first `size` bytes once.
pub(crate) fn fio_once(ask: Ask, size: u64, target: &[&str]) -> Outcome<Found> {
    asked(ask, size, ONCE, target)
}

fn asked(ask: Ask, size: u64, limit: Duration, words: &[&str]) -> Outcome<Found> {
    let usage = measure_ok_within(
        Command::new("fio").arg("--name=load").args(words).args([
            &format!("--rw={}", ask.rw),
            &format!("--bs={}", ask.block),
            &format!("--blockalign={}", ask.align),
            &format!("--iodepth={}", ask.depth),
            &format!("--numjobs={}", ask.connections),
            &format!("--size={size}"),
            &format!("--offset_increment={}", ask.apart),
            "--randrepeat=0",
            // Else it keeps a map of all blocks of the disk.
            "--norandommap",
            "--group_reporting",
            "--output-format=json",
        ]),
        limit,
    )?;
    let job = &report(&usage.stdout)?["jobs"][0];
    let figures = &job[if ask.rw.ends_with("read") { "read" } else { "write" }];
    Ok(Found {
        requests: figure(&figures["total_ios"])?,
        iops: figure(&figures["iops"])?,
        p99_nanoseconds: figure(&figures["clat_ns"]["percentile"]["99.000000"])?,
    })
}

/// A load that goes on until it is ended.
pub(crate) struct Steady {
    fio: Child,
    report: PathBuf,
}

impl Steady {
    /// Starts fio with `words`; it reports to the file `report`.
    pub(crate) fn start(words: &[&str], report: &Path) -> Outcome<Self> {
        remove(report)?;
        let mut command = Command::new(find("fio").ok_or("fio is missing")?);
        command.args([
            "--name=load",
            "--time_based",
            "--runtime=600",
            "--norandommap",
            "--output-format=json",
        ]);
        command.args(words).arg(format!("--output={}", report.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let fio = command.spawn().map_err(|e| format!("cannot run {}: {e}", shown(&command)))?;
        Ok(Self { fio, report: report.to_owned() })
    }

    /// Ends it; the figures of its requests of `kind`: `read`, `write` or `mixed`.
    pub(crate) fn end(mut self, kind: &str) -> Outcome<Sample> {
        let id = libc::pid_t::try_from(self.fio.id()).map_err(|e| e.to_string())?;
        // It reports what it has when it is interrupted.
        // SAFETY: takes numbers; the process is our child and was not waited for.
        unsafe { libc::kill(id, libc::SIGINT) };
        self.fio.wait().map_err(|e| e.to_string())?;
        let text =
            std::fs::read_to_string(&self.report).map_err(|e| format!("{}: {e}", self.report.display()))?;
        let percentiles = &report(&text)?["jobs"][0][kind]["clat_ns"]["percentile"];
        Ok(vec![
            (Metric::LatencyP50Micros, figure(&percentiles["50.000000"])? / 1000.0),
            (Metric::LatencyP99Micros, figure(&percentiles["99.000000"])? / 1000.0),
        ])
    }
}

impl Drop for Steady {
    fn drop(&mut self) {
        let _ = self.fio.kill();
        let _ = self.fio.wait();
    }
}

/// fio's report; it may say something before it.
pub(crate) fn report(text: &str) -> Outcome<Value> {
    let start = text.find('{').ok_or("fio gives no report")?;
    serde_json::from_str(&text[start..]).map_err(|e| format!("fio's report: {e}"))
}

pub(crate) fn figure(value: &Value) -> Outcome<f64> {
    value.as_f64().ok_or_else(|| "the report lacks a figure".to_owned())
}
