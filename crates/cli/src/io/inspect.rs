//! Commands that look at the image: `length`, `info`, `map`, `alloc`.

use super::call::{Call, Outcome, fail};
use super::numbers::offset;
use super::state::{OpenImage, State};
use crate::failure::Failure;
use crate::output::info_human::push_qcow2;
use crate::output::stdout;
use crate::output::units::size_exact;
use std::fmt::Write as _;
use zebu_disks::errno_text;
use zebu_engine::{Extent, ExtentKind, Qcow2Info};

/// Bytes that `alloc` looks at if not told otherwise.
const SECTOR: u64 = 512;

pub(crate) fn length(open: &OpenImage) -> Result<Outcome, Failure> {
    stdout::print(&format!("{}\n", size_exact(open.below.virtual_size() as f64)))?;
    Ok(Outcome::Done)
}

pub(crate) fn info(open: &OpenImage) -> Result<Outcome, Failure> {
    // A driver that is no format tells its name alone, as a format and as a protocol; and QEMU's fails then.
    if let Some(driver) = open.spec.driver.as_deref().filter(|_| open.spec.filters.is_empty()) {
        stdout::print(&format!("format name: {driver}\nformat name: {driver}\n"))?;
        return Ok(Outcome::Failed);
    }
    let info = open.below.info()?;
    let format = open.spec.driver.as_deref().unwrap_or(info.format.name());
    let (cluster_size, vm_state) = match &info.qcow2 {
        Some(qcow2) => (qcow2.cluster_size, vm_state_offset(info.virtual_size, qcow2)),
        None => (0, 0),
    };
    let mut text = format!(
        "format name: {}\ncluster size: {}\nvm state offset: {}\n",
        format,
        size_exact(cluster_size as f64),
        size_exact(vm_state as f64)
    );
    if let Some(qcow2) = &info.qcow2 {
        text.push_str("Format specific information:\n");
        push_qcow2(&mut text, qcow2, info.encryption.as_ref());
    }
    stdout::print(&text)?;
    Ok(Outcome::Done)
}

/// The VM state begins behind the last L2 table that the disk needs.
fn vm_state_offset(virtual_size: u64, info: &Qcow2Info) -> u64 {
    let entry = if info.extended_l2 { 16 } else { 8 };
    let per_table = info.cluster_size.saturating_mul(info.cluster_size / entry).max(1);
    virtual_size.div_ceil(per_table).saturating_mul(per_table)
}

/// Whether the image itself, not its backing file, holds a range.
fn is_allocated(extent: &Extent) -> bool {
    extent.depth == 0 && extent.kind != ExtentKind::Unallocated
}

pub(crate) fn alloc(state: &State, open: &OpenImage, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("")? else { return Ok(Outcome::Failed) };
    let mut numbers = parsed.operands.iter().map(|text| offset(text));
    let start = match numbers.next() {
        Some(Ok(start)) => start,
        Some(Err(message)) => return fail(&message),
        None => return call.usage(),
    };
    let count = match numbers.next() {
        Some(Ok(count)) => count,
        Some(Err(message)) => return fail(&message),
        None => SECTOR,
    };
    let end = start.saturating_add(count).min(open.below.virtual_size());
    let (mut allocated, mut seen) = (0, 0);
    let (worker, mut extents) = (state.session.worker(), open.below.extents(start..end));
    loop {
        let extent = match worker.block_on(extents.next(worker)) {
            Ok(Some(extent)) => extent,
            Ok(None) => break,
            Err(error) => return fail(&format!("is_allocated failed: {}", errno_text(error.errno()))),
        };
        seen += extent.len;
        if is_allocated(&extent) {
            allocated += extent.len;
        }
    }
    stdout::print(&format!("{allocated}/{seen} bytes allocated at offset {}\n", size_exact(start as f64)))?;
    Ok(Outcome::Done)
}

pub(crate) fn map(state: &State, open: &OpenImage) -> Result<Outcome, Failure> {
    let size = open.below.virtual_size();
    let mut text = String::new();
    let (mut run_start, mut run_allocated) = (0, None);
    let (worker, mut extents) = (state.session.worker(), open.below.extents(0..size));
    loop {
        let at = extents.position();
        let extent = match worker.block_on(extents.next(worker)) {
            Ok(Some(extent)) => extent,
            Ok(None) => break,
            Err(error) => {
                stdout::print(&text)?;
                return fail(&format!(
                    "Failed to get allocation status: {} at offset {at}",
                    errno_text(error.errno())
                ));
            }
        };
        let allocated = is_allocated(&extent);
        match run_allocated {
            Some(before) if before != allocated => {
                push_run(&mut text, run_start, at, before);
                run_start = at;
            }
            _ => {}
        }
        run_allocated = Some(allocated);
    }
    if let Some(allocated) = run_allocated {
        push_run(&mut text, run_start, extents.position(), allocated);
    }
    stdout::print(&text)?;
    Ok(Outcome::Done)
}

fn push_run(text: &mut String, start: u64, end: u64, allocated: bool) {
    let state = if allocated { "    allocated" } else { "not allocated" };
    let length = end - start;
    let _ = writeln!(
        text,
        "{} (0x{length:x}) bytes {state} at offset {} (0x{start:x})",
        size_exact(length as f64),
        size_exact(start as f64)
    );
}
