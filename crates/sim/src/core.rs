//! The machine of a world: pending operations, time, and what happens to each operation when its turn comes.
//!
//! It decides nothing about *when*: the scheduler above it chooses. It calls no foreign code.

use crate::content::BLOCK;
use crate::counts::Tally;
use crate::disk::DiskState;
use crate::fault::{FailedEffect, Fault, FaultPlan};
use crate::log::{LogEvent, LogKeep, SimLog};
use crate::op::{FileNumber, OpFilter, OpInfo, OpNumber, SimOp};
use crate::rng::SimRng;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;
use zebu_storage::simulated::{Completion, Job, OpDone, OpId, OpKind, OpRequest};
use zebu_storage::sync::Mutex;
use zebu_storage::{Alignment, File, FileExtent, Worker};

/// Names a hold: operations that it catches can't take effect before it is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(u64);

/// Limits of a simulated file: operations that it refuses, and the end of its space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileLimits {
    pub(crate) alignment: Alignment,
    pub(crate) direct: bool,
    pub(crate) punch: bool,
    pub(crate) zero_range: bool,
    pub(crate) allocate: bool,
    pub(crate) copy: bool,
    pub(crate) clone: bool,
    pub(crate) max_len: Option<u64>,
    pub(crate) space: Option<u64>,
}

struct Pending {
    info: OpInfo,
    what: SimOp,
    file: FileNumber,
    id: OpId,
    request: Box<OpRequest>,
    fault: Option<Fault>,
    not_before: Duration,
    /// Bytes that took effect already.
    done: u64,
}

/// One worker's side.
#[derive(Default)]
struct Port {
    done: Vec<Completion>,
    jobs: VecDeque<Job>,
    in_flight: usize,
}

/// Why a pending operation does not go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// Nothing is in its way.
    Ready,
    /// Caught by a hold.
    Held(HoldId),
    /// Delayed until this simulated time.
    Until(Duration),
}

pub(crate) struct Core {
    pub(crate) world: u64,
    pub(crate) now: Duration,
    /// Its files, which may be on other threads, ask it how much of it they take.
    pub(crate) disk: Arc<Mutex<DiskState>>,
    pub(crate) log: SimLog,
    pub(crate) tally: Tally,
    pub(crate) plan: FaultPlan,
    names: Vec<Rc<str>>,
    limits: Vec<FileLimits>,
    holds: BTreeMap<HoldId, OpFilter>,
    next_hold: u64,
    pending: BTreeMap<OpNumber, Pending>,
    ports: Vec<Port>,
    next_op: u64,
    splits: u32,
    /// Decides about faults and their effects.
    rng: SimRng,
    off: bool,
    /// Workers of processes that were killed: what they have sent goes on, and they send no more.
    dead: BTreeSet<usize>,
    /// The workers of the world, which owns them.
    pub(crate) workers: Weak<RefCell<Vec<Worker>>>,
    /// Workers that work for others, as on threads of their own: they go on while a worker blocks.
    pub(crate) background: BTreeSet<usize>,
    /// Workers of threads that call and wait: they go on within a call only, and do operations where they begin them.
    pub(crate) callers: BTreeSet<usize>,
    /// Bytes of free buffers that each worker keeps.
    pub(crate) pool_bytes: usize,
}

impl Core {
    pub(crate) fn new(rng: SimRng, keep: LogKeep, splits: u32) -> Self {
        let world = zebu_storage::fresh_number();
        Self {
            world,
            now: Duration::ZERO,
            disk: Arc::default(),
            log: SimLog::new(keep),
            tally: Tally::default(),
            plan: FaultPlan::none(),
            names: Vec::new(),
            limits: Vec::new(),
            holds: BTreeMap::new(),
            next_hold: 0,
            pending: BTreeMap::new(),
            ports: Vec::new(),
            next_op: 0,
            splits,
            rng,
            off: false,
            dead: BTreeSet::new(),
            workers: Weak::new(),
            background: BTreeSet::new(),
            callers: BTreeSet::new(),
            pool_bytes: 0,
        }
    }

    pub(crate) fn record(&mut self, event: LogEvent) {
        self.disk.lock().follow(&event);
        self.log.push(event);
    }

    pub(crate) fn add_file(
        &mut self,
        name: &str,
        content: crate::content::Content,
        limits: FileLimits,
    ) -> FileNumber {
        let file = FileNumber(self.names.len());
        self.names.push(name.into());
        self.limits.push(limits);
        self.record(LogEvent::File { file, name: name.to_owned(), content });
        file
    }

    pub(crate) fn find(&self, name: &str) -> Option<FileNumber> {
        self.names.iter().position(|n| **n == *name).map(FileNumber)
    }

    pub(crate) fn limits_mut(&mut self, file: FileNumber) -> &mut FileLimits {
        &mut self.limits[file.0]
    }

    /// A new worker's port, the free buffers it may keep, and the workers of the world, if there is a scheduler.
    pub(crate) fn add_port(&mut self) -> (usize, usize, Option<Rc<RefCell<Vec<Worker>>>>) {
        self.ports.push(Port::default());
        (self.ports.len() - 1, self.pool_bytes, self.workers.upgrade())
    }

    // Holds

    pub(crate) fn hold(&mut self, filter: OpFilter) -> HoldId {
        let id = HoldId(self.next_hold);
        self.next_hold += 1;
        self.holds.insert(id, filter);
        id
    }

    pub(crate) fn release(&mut self, hold: HoldId) {
        self.holds.remove(&hold);
    }

    fn waiting(&self, pending: &Pending) -> Waiting {
        // What has begun to take effect is not stopped half-way by a hold that came later.
        match self.holds.iter().find(|(_, filter)| pending.done == 0 && filter.matches(&pending.info)) {
            Some((hold, _)) => Waiting::Held(*hold),
            None if pending.not_before > self.now => Waiting::Until(pending.not_before),
            None => Waiting::Ready,
        }
    }

    /// Pending operations and what each waits for, in the order of submission.
    pub(crate) fn pending(&self) -> Vec<(OpInfo, Waiting)> {
        self.pending.values().map(|p| (p.info.clone(), self.waiting(p))).collect()
    }

    /// Operations that can go on, in the order of submission.
    pub(crate) fn ready(&self) -> Vec<OpNumber> {
        let ready = |p: &Pending| self.waiting(p) == Waiting::Ready;
        self.pending.iter().filter(|(_, p)| ready(p)).map(|(op, _)| *op).collect()
    }

    /// Whether there is an operation that can go on, or a job.
    pub(crate) fn can_operate(&self) -> bool {
        self.pending.values().any(|p| self.waiting(p) == Waiting::Ready)
            || self.ports.iter().any(|port| !port.jobs.is_empty())
    }

    /// When the next delayed operation can go on.
    pub(crate) fn next_delay(&self) -> Option<Duration> {
        let until = |p: &Pending| match self.waiting(p) {
            Waiting::Until(time) => Some(time),
            Waiting::Ready | Waiting::Held(_) => None,
        };
        self.pending.values().filter_map(until).min()
    }

    // The workers' side

    /// Starts an operation. None if it is over already.
    pub(crate) fn submit(&mut self, worker: usize, id: OpId, request: Box<OpRequest>) -> Option<OpNumber> {
        self.ports[worker].in_flight += 1;
        let is_off = self.off || self.dead.contains(&worker);
        let Some(number) = self.number_of(&request.file).filter(|_| !is_off) else {
            // A file of another world or of the system, or the power is off.
            self.ports[worker].done.push(Completion { id, request, result: Err(libc::EBADF) });
            return None;
        };
        let op = OpNumber(self.next_op);
        self.next_op += 1;
        let what = self.describe(&request);
        let info = OpInfo {
            op,
            worker,
            file: Rc::clone(&self.names[number.0]),
            class: what.class(),
            range: what.range(),
            submitted: self.now,
        };
        self.record(LogEvent::Submitted { op, worker, file: number, what: what.clone() });
        let mut fault = self.plan.decide(&info, &mut self.rng);
        self.tally.change(|counts| {
            counts.operations += 1;
            counts.failures += u64::from(matches!(fault, Some(Fault::Fail { .. })));
        });
        if fault.is_none() && matches!(what, SimOp::Read { .. } | SimOp::Write { .. }) {
            let sectors = (info.range.end - info.range.start).div_ceil(512);
            if sectors > 1 && self.rng.chance(u64::from(self.splits), 1000) {
                fault = Some(Fault::Split { bytes: self.rng.between(1, sectors - 1) * 512 });
            }
        }
        let not_before = match fault {
            Some(Fault::Delay(time)) => self.now + time,
            _ => self.now,
        };
        self.pending
            .insert(op, Pending { info, what, file: number, id, request, fault, not_before, done: 0 });
        Some(op)
    }

    /// Lets an operation take effect to its end, or as far as nothing is in its way.
    pub(crate) fn do_at_once(&mut self, op: OpNumber) {
        while self.pending.get(&op).is_some_and(|pending| self.waiting(pending) == Waiting::Ready) {
            self.advance(op);
        }
    }

    /// The number of a file of this world.
    fn number_of(&self, file: &File) -> Option<FileNumber> {
        let file = file.in_simulation().filter(|file| file.world == self.world)?;
        Some(FileNumber(file.number))
    }

    fn describe(&self, request: &OpRequest) -> SimOp {
        let (offset, len) = (request.offset, request.len);
        // A file of elsewhere is refused when its turn comes.
        let source_of = |file: &File| self.number_of(file).unwrap_or(FileNumber(usize::MAX));
        match &request.kind {
            OpKind::Read => SimOp::Read { offset, len },
            OpKind::Write => {
                let mut data = vec![0; len as usize];
                request.bufs.copy_to(0, &mut data);
                SimOp::Write { offset, data: data.into() }
            }
            OpKind::Flush => SimOp::Flush,
            OpKind::Punch => SimOp::Punch { offset, len },
            OpKind::ZeroRange => SimOp::ZeroRange { offset, len },
            OpKind::Allocate => SimOp::Allocate { offset, len },
            OpKind::SetLen => SimOp::SetLen { len: offset },
            OpKind::ExtentAt => SimOp::ExtentAt { offset },
            OpKind::CopyRange { src, src_offset } => {
                SimOp::Copy { source: source_of(src), source_offset: *src_offset, offset, len }
            }
            OpKind::CloneRange { src, src_offset } => {
                SimOp::Clone { source: source_of(src), source_offset: *src_offset, offset, len }
            }
        }
    }

    pub(crate) fn reap(&mut self, worker: usize, done: &mut Vec<Completion>) {
        let port = &mut self.ports[worker];
        port.in_flight -= port.done.len();
        done.append(&mut port.done);
    }

    pub(crate) fn has_done(&self, worker: usize) -> bool {
        !self.ports[worker].done.is_empty()
    }

    pub(crate) fn in_flight(&self, worker: usize) -> usize {
        self.ports[worker].in_flight + self.ports[worker].jobs.len()
    }

    pub(crate) fn add_job(&mut self, worker: usize, job: Job) {
        self.ports[worker].jobs.push_back(job);
    }

    /// Workers with jobs to run.
    pub(crate) fn jobs(&self) -> Vec<usize> {
        (0..self.ports.len()).filter(|&w| !self.ports[w].jobs.is_empty()).collect()
    }

    /// The oldest job of a worker. It is run without a hold on the core.
    pub(crate) fn take_job(&mut self, worker: usize) -> Option<Job> {
        self.ports[worker].jobs.pop_front()
    }

    // What happens to an operation

    /// The turn of `op`: a part of it takes effect, or it completes.
    pub(crate) fn advance(&mut self, op: OpNumber) {
        let Some(mut pending) = self.pending.remove(&op) else { return };
        let whole = pending.info.range.clone();
        if pending.done == 0 {
            if let Some(Fault::Fail { errno, effect }) = pending.fault {
                self.apply_failed(&pending, effect);
                return self.complete(pending, Err(errno));
            }
            if let Err(errno) = self.admit(&pending) {
                self.apply_what_fits(&pending);
                return self.complete(pending, Err(errno));
            }
            if let Some(Fault::Split { bytes }) = pending.fault
                && bytes < whole.end - whole.start
                && matches!(pending.what, SimOp::Read { .. } | SimOp::Write { .. })
            {
                pending.done = bytes;
                self.apply(&mut pending, whole.start..whole.start + bytes);
                self.pending.insert(op, pending);
                return;
            }
        }
        let rest = whole.start + pending.done..whole.end;
        let result = self.apply(&mut pending, rest);
        self.complete(pending, Ok(result));
    }

    fn complete(&mut self, pending: Pending, result: Result<OpDone, i32>) {
        let Pending { info, id, request, .. } = pending;
        self.record(LogEvent::Completed { op: info.op, result: result.map(drop) });
        self.ports[info.worker].done.push(Completion { id, request, result });
    }

    /// Lets a part of the operation take effect.
    fn apply(&mut self, pending: &mut Pending, range: Range<u64>) -> OpDone {
        let op = pending.info.op;
        match &pending.what {
            SimOp::Read { offset, .. } => {
                let disk = self.disk.lock();
                let bytes = disk.files[pending.file.0].volatile.bytes(range.clone());
                pending.request.bufs.copy_from((range.start - offset) as usize, &bytes);
                OpDone::Done
            }
            SimOp::Flush => OpDone::Done,
            SimOp::ExtentAt { offset } => {
                let disk = self.disk.lock();
                // At the end, because the file was cut meanwhile: as lseek(2)'s ENXIO is told.
                let (len, hole) =
                    disk.files[pending.file.0].volatile.run_at(*offset).unwrap_or((u64::MAX - offset, true));
                OpDone::Extent(FileExtent { offset: *offset, len, hole })
            }
            SimOp::Copy { source, source_offset, len, .. } => {
                let limit = match pending.fault {
                    Some(Fault::Split { bytes }) => bytes,
                    _ => u64::MAX,
                };
                let end = self.disk.lock().files[source.0].volatile.len();
                let copied = (*len).min(end.saturating_sub(*source_offset)).min(limit);
                self.record(LogEvent::Applied { op, range: range.start..range.start + copied });
                OpDone::Copied(copied)
            }
            _ => {
                self.record(LogEvent::Applied { op, range });
                OpDone::Done
            }
        }
    }

    /// Applies the part of a failing operation that takes effect.
    fn apply_failed(&mut self, pending: &Pending, effect: FailedEffect) {
        let op = pending.info.op;
        let whole = pending.info.range.clone();
        if !pending.what.changes_file() || self.admit(pending).is_err() {
            return;
        }
        let partial =
            !matches!(pending.what, SimOp::SetLen { .. } | SimOp::Clone { .. } | SimOp::Copy { .. });
        match effect {
            FailedEffect::All => self.record(LogEvent::Applied { op, range: whole }),
            FailedEffect::Part if partial => {
                // A few runs of sectors.
                let sectors = (whole.end - whole.start).div_ceil(512);
                let mut at = 0;
                while at < sectors {
                    let run = self.rng.between(1, (sectors - at).min(1 + sectors / 4));
                    if self.rng.chance(1, 2) {
                        let end = (whole.start + (at + run) * 512).min(whole.end);
                        self.record(LogEvent::Applied { op, range: whole.start + at * 512..end });
                    }
                    at += run;
                }
            }
            FailedEffect::Nothing | FailedEffect::Part => {}
        }
    }

    /// An allocation that runs out of space keeps what it got, as on ext4.
    fn apply_what_fits(&mut self, pending: &Pending) {
        const BLOCK: u64 = 4096;
        let limits = self.limits[pending.file.0];
        let (SimOp::Allocate { offset, .. }, Some(space), true) =
            (&pending.what, limits.space, limits.allocate)
        else {
            return;
        };
        let fits = {
            let disk = self.disk.lock();
            let content = &disk.files[pending.file.0].volatile;
            let room = space.saturating_sub(content.disk_usage());
            let whole = pending.info.range.end.min(content.len());
            let mut end = *offset;
            while end + BLOCK <= whole && content.space_needed(*offset..end + BLOCK) <= room {
                end += BLOCK;
            }
            *offset..end
        };
        if !fits.is_empty() {
            self.record(LogEvent::Applied { op: pending.info.op, range: fits });
        }
    }

    /// Whether the file can do this, as the kernel would say.
    fn admit(&mut self, pending: &Pending) -> Result<(), i32> {
        let limits = self.limits[pending.file.0];
        let range = &pending.info.range;
        let disk = Arc::clone(&self.disk);
        let disk = disk.lock();
        let content = &disk.files[pending.file.0].volatile;
        let source = |number: &FileNumber| disk.files.get(number.0).map(|f| &f.volatile);
        match &pending.what {
            SimOp::Read { .. } | SimOp::Write { .. } if limits.direct => {
                aligned(&limits.alignment, &pending.request)?;
            }
            SimOp::Punch { .. } if !limits.punch => return Err(libc::EOPNOTSUPP),
            SimOp::ZeroRange { .. } if !limits.zero_range => return Err(libc::EOPNOTSUPP),
            SimOp::Allocate { .. } if !limits.allocate => return Err(libc::EOPNOTSUPP),
            SimOp::Copy { source: from, source_offset, len, .. } => {
                let from_same = *from == pending.file;
                let apart = source_offset.abs_diff(range.start) >= *len;
                if !limits.copy || source(from).is_none() {
                    return Err(libc::EXDEV);
                }
                if from_same && !apart {
                    return Err(libc::EINVAL);
                }
            }
            SimOp::Clone { source: from, source_offset, len, .. } => {
                let Some(content) = source(from).filter(|_| limits.clone) else {
                    return Err(libc::EOPNOTSUPP);
                };
                let end = source_offset.checked_add(*len).ok_or(libc::EINVAL)?;
                let to_end = end == content.len();
                let whole = source_offset.is_multiple_of(BLOCK) && range.start.is_multiple_of(BLOCK);
                let from_same = *from == pending.file;
                let apart = source_offset.abs_diff(range.start) >= *len;
                if !whole
                    || !(len.is_multiple_of(BLOCK) || to_end)
                    || end > content.len()
                    || from_same && !apart
                {
                    return Err(libc::EINVAL);
                }
            }
            _ => {}
        }
        let reaches = match &pending.what {
            SimOp::SetLen { len } => *len,
            SimOp::Write { .. }
            | SimOp::ZeroRange { .. }
            | SimOp::Allocate { .. }
            | SimOp::Copy { .. }
            | SimOp::Clone { .. } => range.end,
            _ => 0,
        };
        if reaches > content.len() && limits.max_len.is_some_and(|max| reaches > max) {
            return Err(libc::ENOSPC);
        }
        let takes_space = matches!(
            pending.what,
            SimOp::Write { .. } | SimOp::ZeroRange { .. } | SimOp::Allocate { .. } | SimOp::Copy { .. }
        );
        if let Some(space) = limits.space.filter(|_| takes_space) {
            let needed = content.space_needed(range.clone());
            if needed > 0 && content.disk_usage() + needed > space {
                return Err(libc::ENOSPC);
            }
        }
        Ok(())
    }

    /// The power goes off: nothing that is pending takes effect any more, nothing is accepted.
    pub(crate) fn power_off(&mut self) {
        self.off = true;
        while let Some((_, pending)) = self.pending.pop_first() {
            let Pending { info, id, request, .. } = pending;
            self.ports[info.worker].done.push(Completion { id, request, result: Err(libc::EIO) });
        }
        for port in &mut self.ports {
            port.jobs.clear();
        }
    }

    /// The process of all workers made so far is killed. What they have sent is with the disk, which answers each request some
    /// time within `longest`.
    pub(crate) fn kill(&mut self, longest: Duration) {
        self.dead.extend(0..self.ports.len());
        for port in &mut self.ports {
            port.jobs.clear();
        }
        for pending in self.pending.values_mut() {
            let late = self.rng.below(longest.as_nanos() as u64 + 1);
            pending.not_before = pending.not_before.max(self.now + Duration::from_nanos(late));
        }
    }

    /// Whether requests of killed processes are with the disk.
    pub(crate) fn has_left(&self) -> bool {
        self.pending.values().any(|pending| self.dead.contains(&pending.info.worker))
    }

    /// Gives up the operations of a worker that waits for nothing else.
    pub(crate) fn give_up(&mut self, worker: usize) {
        let stuck: Vec<OpNumber> =
            self.pending.iter().filter(|(_, p)| p.info.worker == worker).map(|(op, _)| *op).collect();
        for op in stuck {
            if let Some(pending) = self.pending.remove(&op) {
                self.complete(pending, Err(libc::ECANCELED));
            }
        }
    }
}

/// Whether the request suits O_DIRECT: `EINVAL` if not, as from the kernel.
fn aligned(alignment: &Alignment, request: &OpRequest) -> Result<(), i32> {
    let multiple = |value: u64, of: u32| value.is_multiple_of(u64::from(of.max(1)));
    let memory = request.bufs.parts().iter().all(|buf| {
        multiple(buf.as_ptr() as usize as u64, alignment.memory)
            && multiple(buf.len() as u64, alignment.length)
    });
    let fits = memory && multiple(request.offset, alignment.offset);
    if fits { Ok(()) } else { Err(libc::EINVAL) }
}
