//! Facts and reports of the engine as dictionaries, whose keys are the fields of the classes in `python/zebu/_types.py`.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::path::Path;
use zebu_engine::check::CheckReport;
use zebu_engine::jobs::{BackupReport, ConvertReport, SkippedRange};
use zebu_engine::verdict::{ConcernLevel, Verdict};
use zebu_engine::{BitmapInfo, EncryptionInfo, Extent, ExtentKind, ImageInfo, SnapshotInfo};

/// Makes a dictionary of names and values.
macro_rules! dictionary {
    ($py:expr, { $($name:literal: $value:expr),* $(,)? }) => {{
        let made = PyDict::new($py);
        $(made.set_item($name, $value)?;)*
        made
    }};
}

/// An extent: offset, length, kind, whether it reads as zero, image of the chain, file, offset there.
pub(crate) type ExtentFacts = (u64, u64, &'static str, bool, u32, u32, Option<u64>);

pub(crate) fn extent(extent: Extent) -> ExtentFacts {
    let (kind, file, host) = match extent.kind {
        ExtentKind::Data { host } => ("data", 0, Some(host)),
        ExtentKind::Elsewhere { file, host } => ("data", file, Some(host)),
        ExtentKind::Compressed => ("compressed", 0, None),
        ExtentKind::Encrypted => ("encrypted", 0, None),
        ExtentKind::Zero { host } => ("zero", 0, host),
        ExtentKind::Unallocated => ("unallocated", 0, None),
        _ => ("other", 0, None),
    };
    (extent.offset, extent.len, kind, extent.is_zero(), extent.depth, file, host)
}

pub(crate) fn snapshots<'py>(py: Python<'py>, snapshots: &[SnapshotInfo]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for snapshot in snapshots {
        list.append(self::snapshot(py, snapshot)?)?;
    }
    Ok(list)
}

pub(crate) fn snapshot<'py>(py: Python<'py>, snapshot: &SnapshotInfo) -> PyResult<Bound<'py, PyDict>> {
    let date = f64::from(snapshot.date_sec) + f64::from(snapshot.date_nsec) / 1e9;
    Ok(dictionary!(py, {
        "id": &snapshot.id,
        "name": &snapshot.name,
        "date": date,
        "disk_size": snapshot.disk_size,
        "vm_state_size": snapshot.vm_state_size,
        "vm_clock_nsec": snapshot.vm_clock_nsec,
    }))
}

pub(crate) fn bitmaps<'py>(py: Python<'py>, bitmaps: &[BitmapInfo]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for bitmap in bitmaps {
        list.append(dictionary!(py, {
            "name": &bitmap.name,
            "granularity": bitmap.granularity,
            "recording": bitmap.auto,
            "consistent": !bitmap.in_use,
            "recovered": bitmap.recovered,
        }))?;
    }
    Ok(list)
}

pub(crate) fn info<'py>(
    py: Python<'py>,
    info: &ImageInfo,
    cluster_size: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let encryption = info.encryption.as_ref().map(|encryption| match encryption {
        EncryptionInfo::Aes => "aes",
        EncryptionInfo::Luks(_) => "luks",
        _ => "unknown",
    });
    let qcow2 = info.qcow2.as_ref();
    Ok(dictionary!(py, {
        "filename": info.filename.as_os_str(),
        "format": info.format.name(),
        "variant": info.foreign.as_ref().map(|foreign| foreign.variant),
        "virtual_size": info.virtual_size,
        "file_length": info.file_length,
        "actual_size": info.actual_size,
        "sector_size": info.logical_sector_size,
        "cluster_size": cluster_size,
        "backing_file": info.backing_file.as_deref(),
        "backing_path": info.backing_path.as_deref().map(Path::as_os_str),
        "backing_format": info.backing_format.as_deref(),
        "data_file": qcow2.and_then(|qcow2| qcow2.data_file.as_deref()),
        "encryption": encryption,
        "version": qcow2.map(|qcow2| qcow2.version),
        "compression": qcow2.map(|qcow2| compression_name(qcow2.compression)),
        "extended_l2": qcow2.is_some_and(|qcow2| qcow2.extended_l2),
        "dirty": qcow2.is_some_and(|qcow2| qcow2.dirty),
        "corrupt": qcow2.is_some_and(|qcow2| qcow2.corrupt),
        "limitations": qcow2.map_or_else(Vec::new, |qcow2| qcow2.limitations.clone()),
    }))
}

fn compression_name(compression: zebu_engine::Compression) -> &'static str {
    match compression {
        zebu_engine::Compression::Zlib => "zlib",
        zebu_engine::Compression::Zstd => "zstd",
        _ => "other",
    }
}

fn unreadable<'py>(py: Python<'py>, ranges: &[SkippedRange]) -> PyResult<Bound<'py, PyList>> {
    let told = ranges.iter().map(|range| (range.offset, range.len, range.error.to_string()));
    PyList::new(py, told.collect::<Vec<_>>())
}

pub(crate) fn convert<'py>(py: Python<'py>, report: &ConvertReport) -> PyResult<Bound<'py, PyDict>> {
    Ok(dictionary!(py, {
        "total": report.total,
        "read": report.read,
        "written": report.written,
        "reflinked": report.reflinked,
        "range_copied": report.range_copied,
        "skipped": report.skipped,
        "zeroed": report.zeroed,
        "unreadable": report.unreadable,
        "unreadable_ranges": unreadable(py, &report.unreadable_ranges)?,
        "unreadable_range_count": report.unreadable_range_count,
        "lost_sector_size": report.lost_logical_sector,
    }))
}

pub(crate) fn backup<'py>(py: Python<'py>, report: &BackupReport) -> PyResult<Bound<'py, PyDict>> {
    Ok(dictionary!(py, {
        "total": report.total,
        "resumed_at": report.resumed_at,
        "read": report.read,
        "written": report.written,
        "zero": report.zero,
        "unchanged": report.unchanged,
        "compared": report.compared,
        "unreadable": report.unreadable,
        "unreadable_ranges": unreadable(py, &report.unreadable_ranges)?,
        "unreadable_range_count": report.unreadable_range_count,
        "kept_bitmap": report.kept_bitmap.as_deref(),
        "file_length": report.file_length,
        "disk_hash": report.disk_hash.as_deref(),
        "decrypted": report.decrypted,
    }))
}

pub(crate) fn check<'py>(py: Python<'py>, report: &CheckReport) -> PyResult<Bound<'py, PyDict>> {
    let counts = &report.counts;
    let repaired = report.repair.as_ref().map_or(&[][..], |repair| &repair.findings);
    let findings = repaired.iter().chain(&report.findings);
    Ok(dictionary!(py, {
        "check_errors": counts.check_errors,
        "corruptions": counts.corruptions,
        "leaks": counts.leaks,
        "corruptions_fixed": counts.corruptions_fixed,
        "leaks_fixed": counts.leaks_fixed,
        "image_end_offset": counts.image_end_offset,
        "total_clusters": counts.total_clusters,
        "allocated_clusters": counts.allocated_clusters,
        "fragmented_clusters": counts.fragmented_clusters,
        "compressed_clusters": counts.compressed_clusters,
        "findings": findings.map(ToString::to_string).collect::<Vec<_>>(),
        "findings_left_out": report.findings_left_out,
    }))
}

pub(crate) fn verdict<'py>(py: Python<'py>, verdict: &Verdict) -> PyResult<Bound<'py, PyDict>> {
    let concerns = PyList::empty(py);
    for concern in &verdict.concerns {
        let traits: Vec<&str> = concern.traits().iter().map(|word| word.code()).collect();
        concerns.append(dictionary!(py, {
            "code": concern.code(),
            "unsafe": concern.severity() == ConcernLevel::Unsafe,
            "text": concern.to_string(),
            "name": concern.name(),
            "traits": traits,
        }))?;
    }
    Ok(dictionary!(py, {
        "filename": verdict.filename.as_os_str(),
        "format": verdict.format.name(),
        "safe": verdict.is_safe(),
        "concerns": concerns,
    }))
}
