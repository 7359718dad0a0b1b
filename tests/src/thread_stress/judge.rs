//! The judgement of a case: what its threads saw, what QEMU reads when the image is closed, what crashes leave.

use super::copies::{self, Through};
use super::disk::{BASE, DATA, IMAGE, for_image, initial};
use super::history::{Counts, History};
use super::operator::snapshot_name;
use super::plan::Case;
use super::process::read_journals;
use super::sector::{SECTOR, Seen, Tearing, look_at_all};
use crate::qemu::Qemu;
use std::path::Path;

/// Violations that are shown of each kind.
const MOST: usize = 4;
/// Bit 0 of the incompatible features: the refcounts are stale, and whoever opens the image next makes them right.
const DIRTY: u8 = 1;

/// The verdict on a case.
#[derive(Debug, Clone, Default)]
pub struct Verdict {
    /// Violations, in words.
    pub violations: Vec<String>,
    /// Counts of requests and observations.
    pub counts: Counts,
    /// Crashes that were judged.
    pub crashes: u64,
}

/// Judges cases of one directory.
#[derive(Debug)]
pub struct Judge<'a> {
    qemu: Qemu,
    case: &'a Case,
    dir: &'a Path,
}

impl<'a> Judge<'a> {
    /// A judge of this case.
    pub fn new(qemu: &Qemu, case: &'a Case, dir: &'a Path) -> Self {
        Self { qemu: for_image(qemu, case), case, dir }
    }

    fn history(&self) -> Result<History, String> {
        let journals = read_journals(self.dir).map_err(|e| format!("the journals: {e}"))?;
        let tearing = if self.case.encrypted { Tearing::CipherBlocks } else { Tearing::Bytes };
        Ok(History::new(initial(self.case), self.case.cluster_sectors(), tearing, journals))
    }

    /// The disk of a directory's image, as QEMU reads it.
    fn content(&self, dir: &Path) -> Result<Vec<Seen>, String> {
        let out = self.qemu.on_image(dir, "convert", &["-U", "-O", "raw"], IMAGE, &["content.raw"]);
        if out.code != Some(0) {
            return Err(out.to_string());
        }
        let path = dir.join("content.raw");
        let bytes = std::fs::read(&path).map_err(|e| e.to_string())?;
        let _ = std::fs::remove_file(path);
        Ok(look_at_all(&bytes, 0))
    }

    /// Judges a case that has ended by itself.
    pub fn closed(&self) -> Verdict {
        let mut verdict = Verdict::default();
        if let Err(what) = self.qemu.check_clean(self.dir, IMAGE) {
            verdict.violations.push(format!("qemu-img check of the closed image: {what}"));
        }
        let mut history = match self.history() {
            Ok(history) => history,
            Err(what) => {
                verdict.violations.push(what);
                return verdict;
            }
        };
        match self.content(self.dir) {
            Ok(seen) => history.add_final(seen),
            Err(what) => verdict.violations.push(what),
        }
        verdict.violations.extend(self.snapshots(&history));
        verdict.violations.extend(history.judge(MOST));
        verdict.counts = history.counts();
        verdict
    }

    /// Compares the snapshots that are left, as QEMU reads them, with their content when they were taken.
    fn snapshots(&self, history: &History) -> Vec<String> {
        let info = self.qemu.info(self.dir, IMAGE);
        let mut violations = Vec::new();
        for number in 0.. {
            let Some(taken) = history.snapshot(number) else { break };
            let name = snapshot_name(number);
            let listed = info["snapshots"].as_array().map(Vec::as_slice).unwrap_or_default();
            if !listed.iter().any(|entry| entry["name"] == name) {
                continue;
            }
            let found = look_at_all(&self.qemu.read_all(self.dir, IMAGE, Some(&name)), 0);
            // QEMU shows it with the size that the disk has now.
            let differs = taken.iter().zip(&found).position(|(taken, found)| taken != found);
            if let Some(sector) = differs {
                let [was, is] = [&taken[sector], &found[sector]].map(|seen| format!("{seen:x?}"));
                violations.push(format!("snapshot {name}, sector {sector}: {was} was taken, {is} is there"));
            }
        }
        violations
    }

    /// Judges the files as they are now, as a crash leaves them: their process stands still or is dead.
    pub fn crashed(&self) -> Verdict {
        let mut verdict = Verdict { crashes: 1, ..Verdict::default() };
        if let Err(what) = self.crash(&mut verdict) {
            verdict.violations.push(format!("after a crash: {what}"));
        }
        verdict
    }

    fn crash(&self, verdict: &mut Verdict) -> Result<(), String> {
        let copy = self.dir.join("crash");
        let through = if self.case.cache.is_direct() { Through::Direct } else { Through::PageCache };
        copies::take(self.dir, &copy, &[IMAGE, DATA], through).map_err(|e| format!("the copy: {e}"))?;
        let history = self.history()?;
        if self.dir.join(BASE).exists() && !copy.join(BASE).exists() {
            std::fs::hard_link(self.dir.join(BASE), copy.join(BASE)).map_err(|e| e.to_string())?;
        }
        verdict.counts = history.counts();
        let header = std::fs::read(copy.join(IMAGE)).map_err(|e| e.to_string())?;
        if header.len() < 512 || header[..4] != *b"QFI\xfb" {
            // It was being made.
            return Ok(());
        }
        if header[79] & DIRTY != 0 {
            self.qemu.on_image(&copy, "check", &["-q", "-r", "all"], IMAGE, &[]);
        }
        let check = self.qemu.on_image(&copy, "check", &[], IMAGE, &[]);
        // Leaks are no errors.
        if !matches!(check.code, Some(0 | 3)) {
            verdict.violations.push(format!("qemu-img check after a crash: {check}"));
        }
        let left = self.content(&copy)?;
        if (left.len() as u64) < self.case.sectors {
            return Err(format!(
                "the disk has {} sectors, {} at least expected",
                left.len(),
                self.case.sectors
            ));
        }
        verdict.violations.extend(history.judge_crash(&left, MOST));
        Ok(())
    }

    /// Requests that were under way when nothing went on any more.
    pub fn under_way(&self) -> Vec<String> {
        self.history().map_or_else(|what| vec![what], |history| history.under_way())
    }

    /// Sectors of the disk, for a message.
    pub fn bytes(&self) -> u64 {
        self.case.sectors * SECTOR as u64
    }
}
