//! Consistency check and repair of qcow2 images.
//!
//! The check works on the file itself: it shares nothing with the mapping cache and the allocator, whose judge it
//! is. It counts every reference to every host cluster (header, L1 and L2 tables of the disk and of all snapshots,
//! snapshot table, bitmaps, LUKS header, refcount structures), compares the counts with the refcounts in the image,
//! and the COPIED flags with those. Each L2 table is read once, many at a time; memory is bounded, and no table can
//! make it loop: what is reachable in many ways is looked at once and counted by the number of ways.
//!
//! Findings, repairs and their order are described in `docs/design/check.md`.

mod bitmaps;
mod compare;
mod count;
mod entries;
mod examine;
mod finding;
mod flags;
mod inventory;
mod luks;
mod options;
mod rebuild;
mod refmap;
mod reftable;
mod report;
mod snapshots;
mod source;
mod sweep;
mod width;

pub use finding::{Finding, FindingKind, Outcome, Severity, TableKind};
pub use options::{CheckOptions, Repair};
pub use report::{CheckCounts, CheckReport, RepairReport};

pub(crate) use width::change_refcount_width;

use crate::{Error, ErrorKind, Result, Sharing};
use examine::{Examination, examine};
use source::Source;
use std::path::Path;
use zebu_storage::{Access, Create, File, LockMode, OpenFlags, Worker};

/// Checks the qcow2 image at `path`, and repairs it as `options` say.
///
/// Files that the image names (backing file, data file) are not opened.
///
/// # Errors
/// The errors of opening and locking the file, [`ErrorKind::Corrupt`] or [`ErrorKind::Unsupported`] if the header is
/// refused, [`ErrorKind::Cancelled`], and failed writes of a repair. Damage is no error but part of the report, and
/// so are tables that cannot be read.
pub async fn check(worker: &Worker, path: &Path, options: &CheckOptions) -> Result<CheckReport> {
    let repairing = options.repair != Repair::None;
    let lock = match (repairing, options.sharing) {
        (true, _) => LockMode::Write,
        (false, Sharing::Locked) => LockMode::Read,
        (false, Sharing::Unlocked) => LockMode::None,
    };
    let flags = OpenFlags::default()
        .access(if repairing { Access::ReadWrite } else { Access::ReadOnly })
        .direct(options.cache.is_direct())
        .create(Create::No)
        .lock(lock)
        .lock_wait(options.lock_wait.clone())
        .no_flush(options.cache == crate::CacheMode::Unsafe);
    let file = options.remote.open(path, &flags).map_err(|e| Error::from(e).on(path))?;
    let result = check_file(worker, &file, options).await;
    let unlocked = file.unlock().map_err(|e| Error::from(e).on(path));
    let report = result?;
    unlocked.map(|()| report)
}

/// Checks the image in an open file, which the caller has locked: against writers for a check, alone for a repair.
/// [`CheckOptions::cache`] and [`CheckOptions::sharing`] mean nothing here.
///
/// After a repair the caller must read the header again.
///
/// # Errors
/// As [`check`], and [`ErrorKind::ReadOnly`] for a repair of a file that was opened for reading.
pub async fn check_file(worker: &Worker, file: &File, options: &CheckOptions) -> Result<CheckReport> {
    if options.repair == Repair::None {
        return Ok(examine(&mut Source::open(worker, file, options).await?).await?.into_report());
    }
    if !file.is_writable() {
        return Err(Error::new(ErrorKind::ReadOnly, "a repair needs write access").on(file.path()));
    }
    let mut source = Source::open(worker, file, options).await?;
    source.refuse_sealed()?;
    let mut repair = examine(&mut source).await?;
    if repair.snapshot_table_moved {
        // The old table's clusters are known to be free only now.
        repair = repair.followed_by(examine(&mut source).await?);
    }
    let report = if repair.changed {
        let looking = CheckOptions { repair: Repair::None, ..options.clone() };
        let after = examine(&mut Source::open(worker, file, &looking).await?).await?;
        after.into_report_after(repair)
    } else {
        repair.into_report()
    };
    if report.is_clean() {
        source.clear_dirty_and_corrupt().await?;
    }
    Ok(report)
}

/// Makes the refcounts of an image right whose dirty bit is set (because a program with lazy refcounts did not close
/// it), and clears that bit, last. Snapshots and bitmaps are counted like everything else. The file must be open for
/// writing and locked alone, and the caller must read the header again afterwards.
///
/// # Errors
/// As [`check_file`], and [`ErrorKind::Corrupt`] if the image has damage that leaves its refcounts unknown, or a
/// corruption that cannot be repaired. [`CheckOptions::repair`] means nothing here.
pub async fn rebuild_refcounts(worker: &Worker, file: &File, options: &CheckOptions) -> Result<CheckReport> {
    let options = CheckOptions { repair: Repair::All, ..options.clone() };
    let report = check_file(worker, file, &options).await?;
    if !report.is_clean() {
        let CheckCounts { check_errors, corruptions, leaks, .. } = report.counts;
        let first = report.findings.first().map_or_else(String::new, |finding| format!(": {finding}"));
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "the image was not closed properly and cannot be made consistent ({corruptions} corruptions, \
                 {leaks} leaks, {check_errors} parts that cannot be checked){first}; see what `zebu check` says, \
                 and copy what can be read to a new image"
            ),
        )
        .on(file.path()));
    }
    Ok(report)
}

impl Examination {
    fn into_report(self) -> CheckReport {
        let (counts, findings, findings_left_out) = self.tally.into_findings();
        CheckReport { counts, findings, findings_left_out, repair: None }
    }

    /// The report of this examination, made after `repair`.
    fn into_report_after(self, repair: Self) -> CheckReport {
        let rebuilt = repair.rebuilt;
        let (counts, findings, findings_left_out) = repair.tally.into_findings();
        let mut report = self.into_report();
        report.counts.corruptions_fixed = counts.corruptions_fixed;
        report.counts.leaks_fixed = counts.leaks_fixed;
        report.repair = Some(RepairReport { counts, findings, findings_left_out, rebuilt });
        report
    }
}
