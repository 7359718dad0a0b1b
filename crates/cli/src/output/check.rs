//! The report of `check`, as QEMU words it.

use crate::failure::Failure;
use serde::Serialize;
use std::fmt::Write as _;
use zebu_disks::{Program, printable};
use zebu_engine::check::{CheckCounts, CheckReport};

/// The report for people.
pub(crate) fn human_text(report: &CheckReport) -> String {
    let mut out = String::new();
    let counts = &report.counts;
    if let Some(repair) = &report.repair {
        let _ = write!(
            out,
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} corruptions\n\n\
             Double checking the fixed image now...\n",
            repair.counts.leaks_fixed, repair.counts.corruptions_fixed
        );
    }
    if report.is_clean() {
        out.push_str("No errors were found on the image.\n");
    }
    if counts.corruptions > 0 {
        let _ = write!(
            out,
            "\n{} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.\n",
            counts.corruptions
        );
    }
    if counts.leaks > 0 {
        let _ = write!(
            out,
            "\n{} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.\n",
            counts.leaks
        );
    }
    if counts.check_errors > 0 {
        let _ = writeln!(out, "\n{} internal errors have occurred during the check.", counts.check_errors);
    }
    push_clusters(&mut out, counts);
    out
}

fn push_clusters(out: &mut String, counts: &CheckCounts) {
    if counts.total_clusters > 0 && counts.allocated_clusters > 0 {
        let percent = |part: u64, of: u64| part as f64 * 100.0 / of as f64;
        let _ = writeln!(
            out,
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            counts.allocated_clusters,
            counts.total_clusters,
            percent(counts.allocated_clusters, counts.total_clusters),
            percent(counts.fragmented_clusters, counts.allocated_clusters),
            percent(counts.compressed_clusters, counts.allocated_clusters),
        );
    }
    if counts.image_end_offset > 0 {
        let _ = writeln!(out, "Image end offset: {}", counts.image_end_offset);
    }
}

/// QEMU's `ImageCheck`: numbers that are 0 are left out, but for `check-errors`.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct ImageCheck<'a> {
    filename: &'a str,
    format: &'static str,
    check_errors: u64,
    #[serde(skip_serializing_if = "is_zero")]
    image_end_offset: u64,
    #[serde(skip_serializing_if = "is_zero")]
    corruptions: u64,
    #[serde(skip_serializing_if = "is_zero")]
    leaks: u64,
    #[serde(skip_serializing_if = "is_zero")]
    corruptions_fixed: u64,
    #[serde(skip_serializing_if = "is_zero")]
    leaks_fixed: u64,
    #[serde(skip_serializing_if = "is_zero")]
    total_clusters: u64,
    #[serde(skip_serializing_if = "is_zero")]
    allocated_clusters: u64,
    #[serde(skip_serializing_if = "is_zero")]
    fragmented_clusters: u64,
    #[serde(skip_serializing_if = "is_zero")]
    compressed_clusters: u64,
    /// QEMU's report has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    findings: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    findings_left_out: Option<u64>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// The report for programs.
pub(crate) fn json_text(dialect: Program, report: &CheckReport, filename: &str) -> Result<String, Failure> {
    let counts = &report.counts;
    let with_own_keys = !dialect.is_qemu();
    super::json::to_text(
        dialect,
        &ImageCheck {
            filename,
            format: "qcow2",
            check_errors: counts.check_errors,
            image_end_offset: counts.image_end_offset,
            corruptions: counts.corruptions,
            leaks: counts.leaks,
            corruptions_fixed: counts.corruptions_fixed,
            leaks_fixed: counts.leaks_fixed,
            total_clusters: counts.total_clusters,
            allocated_clusters: counts.allocated_clusters,
            fragmented_clusters: counts.fragmented_clusters,
            compressed_clusters: counts.compressed_clusters,
            findings: with_own_keys.then(|| report.findings.iter().map(ToString::to_string).collect()),
            findings_left_out: with_own_keys.then_some(report.findings_left_out),
        },
    )
}

/// Findings, a line each, for standard error.
pub(crate) fn findings_text(dialect: Program, report: &CheckReport) -> String {
    let mut out = String::new();
    if let Some(repair) = &report.repair {
        if dialect.is_qemu() && !repair.rebuilt {
            // qemu-img looks twice, and tells wrong counts of references both times.
            let lines = repair.findings.iter().map(ToString::to_string);
            lines.filter_map(|line| as_found(&line)).for_each(|line| out.push_str(&line));
        }
        for finding in &repair.findings {
            let _ = writeln!(out, "{}", printable(&finding.to_string()));
        }
        push_left_out(&mut out, repair.findings_left_out);
        if repair.rebuilt {
            out.push_str("Rebuilding refcount structure\n");
        }
    }
    for finding in &report.findings {
        let _ = writeln!(out, "{}", printable(&finding.to_string()));
    }
    push_left_out(&mut out, report.findings_left_out);
    out
}

/// The line about a wrong count of references, as it was before its repair.
fn as_found(line: &str) -> Option<String> {
    let rest = line.strip_prefix("Repairing cluster ")?;
    let (_, counts) = rest.split_once(" refcount=")?;
    let (refcount, references) = counts.split_once(" reference=")?;
    let is_leak = refcount.parse::<u64>().ok()? > references.parse::<u64>().ok()?;
    Some(format!("{} cluster {rest}\n", if is_leak { "Leaked" } else { "ERROR" }))
}

fn push_left_out(out: &mut String, number: u64) {
    if number > 0 {
        let _ = writeln!(out, "... and {number} more");
    }
}
