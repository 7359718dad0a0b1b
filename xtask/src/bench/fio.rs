//! fio, and what it finds.

use crate::Outcome;
use crate::process::output;
use serde_json::Value;
use std::process::Command;

/// What fio asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    /// In tables.
    pub(super) name: &'static str,
    /// fio's word.
    pub(super) rw: &'static str,
    /// Bytes of a request.
    pub(super) block: u64,
    /// Offsets are multiples of so many bytes.
    pub(super) align: u64,
    pub(super) depth: u32,
    /// Each with so many requests in flight.
    pub(super) connections: u32,
    /// Bytes between the places where connections begin; 0: all ask everywhere.
    pub(super) apart: u64,
}

/// What a load found.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) requests: f64,
    pub(super) iops: f64,
    pub(super) p99_nanoseconds: f64,
}

pub(super) fn figure(value: &Value) -> Outcome<f64> {
    value.as_f64().ok_or_else(|| "the report lacks a figure".to_owned())
}

/// Has fio ask `target` (arguments that say what and how) for `seconds`, all over the first `size` bytes.
pub(super) fn fio(ask: Ask, size: u64, seconds: u32, target: &[&str]) -> Outcome<Found> {
    let text = output(Command::new("fio").arg("--name=load").args(target).args([
        "--time_based",
        &format!("--rw={}", ask.rw),
        &format!("--bs={}", ask.block),
        &format!("--blockalign={}", ask.align),
        &format!("--iodepth={}", ask.depth),
        &format!("--numjobs={}", ask.connections),
        &format!("--size={size}"),
        &format!("--offset_increment={}", ask.apart),
        &format!("--runtime={seconds}"),
        "--randrepeat=0",
        // Else it keeps a map of all blocks of the disk.
        "--norandommap",
        "--group_reporting",
        "--output-format=json",
    ]))?;
    // fio may say something before its report.
    let start = text.find('{').ok_or("fio gives no report")?;
    let report: Value = serde_json::from_str(&text[start..]).map_err(|e| format!("fio's report: {e}"))?;
    let side = if ask.rw.ends_with("read") { "read" } else { "write" };
    let figures = &report["jobs"][0][side];
    Ok(Found {
        requests: figure(&figures["total_ios"])?,
        iops: figure(&figures["iops"])?,
        p99_nanoseconds: figure(&figures["clat_ns"]["percentile"]["99.000000"])?,
    })
}
