//! Jobs on whole images: convert and check.

use crate::arguments::{options, path};
use crate::failure::{Failure, Outcome, answer, say};
use crate::options::{Opening, checking, opening, target};
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use zebu_engine::check::{CheckOptions, check};
use zebu_engine::jobs::{ConvertOptions, ConvertTarget, JobControl, NewTarget, convert};
use zebu_engine::storage::{Engine, Worker, WorkerConfig};
use zebu_engine::{Access, Error, Image};
use zebu_storage::sync::Mutex;

/// `zebu_progress`: a C++ exception may come out of it, and ends the process then.
pub type ZebuProgress = Option<unsafe extern "C-unwind" fn(*mut c_void, u64, u64) -> c_int>;

/// A function of the caller's with its argument.
struct Watcher {
    progress: unsafe extern "C-unwind" fn(*mut c_void, u64, u64) -> c_int,
    user_data: *mut c_void,
}

// SAFETY: the header says that the function is called on any thread with its argument, by one at a time.
unsafe impl Send for Watcher {}

impl Watcher {
    /// Tells it how far the job is; whether the job is to go on.
    fn tell(&self, done: u64, total: u64) -> bool {
        // SAFETY: the function and the argument that belong together. Its exceptions go no further than this: Rust catches none
        // that is not its own, and aborts.
        let told = catch_unwind(AssertUnwindSafe(|| unsafe { (self.progress)(self.user_data, done, total) }));
        told.is_ok_and(|answer| answer == 0)
    }
}

/// The control of a job that a function of C watches.
fn control(progress: ZebuProgress, user_data: *mut c_void) -> JobControl {
    let control = JobControl::default();
    let Some(progress) = progress else { return control };
    let watcher = Mutex::new(Watcher { progress, user_data });
    let cancel = control.cancel.clone();
    control.progress(move |now| {
        let watcher = watcher.lock();
        if !cancel.is_cancelled() && !watcher.tell(now.done, now.total) {
            cancel.cancel();
        }
    })
}

/// Does a job on this thread.
pub(crate) fn run<T>(engine: Engine, work: impl AsyncFnOnce(&Worker) -> Result<T, Error>) -> Outcome<T> {
    let worker = Worker::new(&WorkerConfig::default().engine(engine)).map_err(Error::from)?;
    worker.promise_to_drive();
    Ok(worker.block_on(work(&worker))?)
}

/// Copies a disk into a new image.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_convert(
    source: *const c_char,
    source_words: *const c_char,
    target_name: *const c_char,
    target_words: *const c_char,
    progress: ZebuProgress,
    user_data: *mut c_void,
) -> c_int {
    answer(|| {
        // SAFETY: strings of the caller's, during the call.
        let (source, from, new, to) = unsafe {
            (
                path(source, "source")?,
                options(source_words)?,
                path(target_name, "target")?,
                options(target_words)?,
            )
        };
        let from = opening(from)?;
        if from.options.access == Access::ReadWrite {
            return Err(Failure::invalid("a source is only read: leave the option 'rw' out"));
        }
        let (create, clusters) = target(to)?;
        let mut new = NewTarget::new(new).create(create);
        new.open = new.open.cache(new.create.cache);
        let options = ConvertOptions::default()
            .clusters(clusters)
            .worker_config(WorkerConfig::default().engine(from.engine))
            .control(control(progress, user_data));
        converted(source, from, new, &options)?;
        Ok(0)
    })
}

fn converted(source: &Path, from: Opening, new: NewTarget, options: &ConvertOptions) -> Outcome<()> {
    run(from.engine, async |worker| {
        let source = Image::open(worker, source, &from.options).await?;
        let target = ConvertTarget::New(Box::new(new));
        let copied = convert(worker, std::slice::from_ref(&source), target, options).await;
        let closed = source.close(worker).await;
        copied.map(drop).and(closed)
    })
}

/// `struct zebu_check_counts`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ZebuCheckCounts {
    /// Parts that could not be checked.
    pub check_errors: u64,
    /// Corruptions that stand.
    pub corruptions: u64,
    /// Leaks that stand.
    pub leaks: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
}

/// The size of `struct zebu_check_counts` in version 0.1. It may grow at its end.
const FIRST_COUNTS: usize = 40;

/// Checks an image, and repairs it.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_check(
    name: *const c_char,
    words: *const c_char,
    counts: *mut ZebuCheckCounts,
    size: usize,
    progress: ZebuProgress,
    user_data: *mut c_void,
) -> c_int {
    answer(|| {
        // SAFETY: strings of the caller's, during the call.
        let (path, words) = unsafe { (path(name, "name")?, options(words)?) };
        if !counts.is_null() && size < FIRST_COUNTS {
            let message = format!("counts of {size} bytes are too small: they have {FIRST_COUNTS} at least");
            return Err(Failure::invalid(message));
        }
        let checking = checking(words)?;
        let options = CheckOptions::default()
            .repair(checking.repair)
            .cache(checking.cache)
            .sharing(checking.sharing)
            .control(control(progress, user_data));
        let report = run(checking.engine, async |worker| check(worker, path, &options).await)?;
        let found = ZebuCheckCounts {
            check_errors: report.counts.check_errors,
            corruptions: report.counts.corruptions,
            leaks: report.counts.leaks,
            corruptions_fixed: report.counts.corruptions_fixed,
            leaks_fixed: report.counts.leaks_fixed,
        };
        if !counts.is_null() {
            let known = size.min(size_of::<ZebuCheckCounts>());
            // SAFETY: the caller has room for `size` bytes, of which no more are written.
            unsafe {
                counts.cast::<u8>().write_bytes(0, size);
                counts.cast::<u8>().copy_from_nonoverlapping((&raw const found).cast(), known);
            }
        }
        if !report.is_clean() {
            let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
            say(lines.join("\n"));
        }
        Ok(c_int::from(report.exit_code()))
    })
}
