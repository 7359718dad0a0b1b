//! The threads that compress, inflate, encrypt and decrypt, and the slots that limit how much they have to do.
//!
//! A request takes a slot, which has room for one cluster's result, waits for its work to be done, and gives the
//! slot back: slots are made once and reused, and whoever finds none waits for one (back-pressure).

use super::burst::{Bursts, sleep_exactly};
use super::codec;
use super::method::{Method, Packing};
use crate::crypt::cipher_run::{Direction, apply};
use crate::sync::{Clock, with_patience};
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use zebu_luks::SectorCipher;
use zebu_storage::sync::{Condvar, Mutex};
use zebu_storage::{IoBufs, Worker, WorkerKind};

/// Slots per thread: one that is worked on, and enough behind it that no thread waits for a worker's turn.
const SLOTS_PER_THREAD: usize = 4;

/// Threads that compress and inflate clusters, and encrypt and decrypt large requests; clones are the same ones. They are
/// started when there is work, and end when the last handle is dropped.
///
/// Adaptive backups compress on as many threads again, so that nothing else waits for them.
///
/// The default is one pool for the process with a thread per core; an embedder that wants fewer, or none, gives images
/// a pool of its own.
#[derive(Clone)]
pub struct CodecPool(Arc<Owner>);

/// Ends the threads when the last handle goes.
struct Owner(Arc<Shared>);

struct Shared {
    /// Threads at most; 0: the work is done where it is asked for.
    most_threads: usize,
    most_slots: usize,
    state: Mutex<State>,
    work: Condvar,
    /// Threads and slots for work in short bursts, made when there is some: other work never waits for it.
    background: OnceLock<CodecPool>,
    /// Number of waits for work in short bursts: its threads don't sleep meanwhile.
    hurried: AtomicUsize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Slot>>,
    free: Vec<Arc<Slot>>,
    /// Slots that exist.
    slots: usize,
    /// How often one was given back.
    given_back: u64,
    threads: usize,
    idle: usize,
    closed: bool,
    waiting: VecDeque<(u64, Waker)>,
    /// Number of the next who waits.
    next_wait: u64,
}

/// The work on a cluster.
pub(crate) enum Work {
    /// Compress `input`, with zeroes behind it up to `cluster` bytes.
    Compress { method: Method, bursts: Bursts, input: IoBufs, cluster: usize },
    /// Inflate one cluster from `input`, after its first `skip` bytes, into memory that may be `output`'s.
    Inflate { packing: Packing, input: IoBufs, skip: usize, cluster: usize, output: Vec<u8> },
    /// Encrypt or decrypt whole sectors of `input` in place. The first has the number `first`.
    Crypt { cipher: Arc<SectorCipher>, direction: Direction, first: u64, input: IoBufs },
}

/// How work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The first so many bytes of the output are the result.
    Bytes(usize),
    /// The cluster does not become shorter.
    Incompressible,
    /// The stream is damaged.
    Damaged(&'static str),
}

struct Slot(Mutex<SlotState>);

struct SlotState {
    phase: Phase,
    output: Vec<u8>,
}

enum Phase {
    Free,
    Queued(Work, Option<Waker>),
    Running(Option<Waker>),
    Done(IoBufs, Outcome),
    /// Nobody waits for the result any more.
    Abandoned,
}

impl Work {
    /// Does the work. A codec that panics (they are other people's code) fails this cluster, and nobody waits for good.
    ///
    /// `hurried` counts those who wait for such work. `None`: the thread is not the pool's, and must not sleep.
    fn execute(&mut self, hurried: Option<&AtomicUsize>, output: &mut Vec<u8>) -> Outcome {
        catch_unwind(AssertUnwindSafe(|| self.execute_once(hurried, output)))
            .unwrap_or(Outcome::Damaged("the codec failed; its message is on standard error"))
    }

    fn execute_once(&mut self, hurried: Option<&AtomicUsize>, output: &mut Vec<u8>) -> Outcome {
        match self {
            Work::Compress { method, bursts, input, cluster } => {
                let hurried = hurried.filter(|_| *bursts == Bursts::Short);
                codec::compress(*method, hurried, input, *cluster, output)
                    .map_or(Outcome::Incompressible, Outcome::Bytes)
            }
            Work::Inflate { packing, input, skip, cluster, .. } => {
                match codec::inflate(*packing, input, *skip, *cluster, output) {
                    Ok(len) => Outcome::Bytes(len),
                    Err(why) => Outcome::Damaged(why),
                }
            }
            Work::Crypt { cipher, direction, first, input } => {
                apply(cipher, *direction, *first, input);
                Outcome::Bytes(0)
            }
        }
    }

    fn bursts(&self) -> Bursts {
        match self {
            Work::Compress { bursts, .. } => *bursts,
            Work::Inflate { .. } | Work::Crypt { .. } => Bursts::Whole,
        }
    }

    /// The memory that the result is to have, if it does not matter which.
    fn take_output(&mut self) -> Option<Vec<u8>> {
        match self {
            Work::Compress { .. } | Work::Crypt { .. } => None,
            Work::Inflate { output, .. } => {
                Some(std::mem::take(output)).filter(|output| output.capacity() > 0)
            }
        }
    }

    fn into_input(self) -> IoBufs {
        match self {
            Work::Compress { input, .. } | Work::Inflate { input, .. } | Work::Crypt { input, .. } => input,
        }
    }
}

impl CodecPool {
    /// A pool of at most `threads` threads, and as many again for adaptive backups; 0: clusters are compressed and inflated on the thread that asks.
    pub fn new(threads: usize) -> Self {
        Self(Arc::new(Owner(Arc::new(Shared {
            most_threads: threads,
            most_slots: (threads * SLOTS_PER_THREAD).max(1),
            state: Mutex::default(),
            work: Condvar::new(),
            background: OnceLock::new(),
            hurried: AtomicUsize::new(0),
        }))))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }

    /// Whether work is done where it is asked for.
    pub(crate) fn has_no_threads(&self) -> bool {
        self.shared().most_threads == 0
    }

    /// Clusters that are worth having under way at once.
    pub(crate) fn parallelism(&self) -> usize {
        self.shared().most_slots
    }

    /// The threads for work in short bursts.
    fn background(&self) -> &Self {
        let shared = self.shared();
        shared.background.get_or_init(|| Self::new(shared.most_threads))
    }

    /// Has work in short bursts done without further sleep, as long as the result lives.
    pub(crate) fn hurry(&self) -> Hurry {
        let background = self.background().clone();
        background.shared().hurried.fetch_add(1, Relaxed);
        Hurry(background)
    }

    /// Does `work`, once there is a slot.
    pub(crate) async fn run(&self, worker: &Worker, mut work: Work) -> Finished {
        let shared = match work.bursts() {
            Bursts::Whole => self.shared(),
            Bursts::Short => self.background().shared(),
        };
        let given = work.take_output();
        if worker.kind() == WorkerKind::Simulated {
            // Nothing but the simulation may decide when something happens: not another thread, nor a slot of it.
            let mut output = given.unwrap_or_default();
            let outcome = work.execute(None, &mut output);
            let shared = Arc::clone(shared);
            return Finished { shared, slot: None, input: work.into_input(), outcome, output };
        }
        let slot = shared.take_slot(worker).await;
        let slot = Abandon { shared, slot };
        slot.slot.queue(work, given);
        if !shared.push(&slot.slot) {
            slot.slot.execute(None);
        }
        let (input, outcome) = poll_fn(|cx| slot.slot.poll(cx.waker())).await;
        let output = std::mem::take(&mut slot.slot.0.lock().output);
        Finished { shared: Arc::clone(shared), slot: Some(Arc::clone(&slot.slot)), input, outcome, output }
    }
}

/// Somebody waits for work in short bursts.
#[must_use]
pub(crate) struct Hurry(CodecPool);

impl Drop for Hurry {
    fn drop(&mut self) {
        self.0.shared().hurried.fetch_sub(1, Relaxed);
    }
}

impl Default for CodecPool {
    fn default() -> Self {
        static SHARED: OnceLock<CodecPool> = OnceLock::new();
        SHARED
            .get_or_init(|| Self::new(std::thread::available_parallelism().map_or(1, std::num::NonZero::get)))
            .clone()
    }
}

impl fmt::Debug for CodecPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CodecPool").field("threads", &self.shared().most_threads).finish()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.0.work.notify_all();
    }
}

impl State {
    fn new_slot(&mut self) -> Arc<Slot> {
        self.slots += 1;
        Arc::new(Slot(Mutex::new(SlotState { phase: Phase::Free, output: Vec::new() })))
    }
}

impl Shared {
    /// A slot that nobody uses.
    fn slot(&self) -> SlotWait<'_> {
        SlotWait { shared: self, number: None }
    }

    /// The same for a request. Slots belong to requests until these look at their results, and some of those may belong to
    /// workers that are not polled: where none is given back for as long as patience lasts, there is one more.
    async fn take_slot(&self, clock: &impl Clock) -> Arc<Slot> {
        let mut slot = pin!(self.slot());
        let mut given_back = self.state.lock().given_back;
        loop {
            if let Some(slot) = with_patience(clock, slot.as_mut()).await {
                return slot;
            }
            let mut state = self.state.lock();
            if state.given_back == given_back {
                return state.free.pop().unwrap_or_else(|| state.new_slot());
            }
            given_back = state.given_back;
        }
    }

    fn give_back(&self, slot: Arc<Slot>) {
        let mut state = self.state.lock();
        state.given_back += 1;
        if state.slots > self.most_slots {
            state.slots -= 1;
            return;
        }
        state.free.push(slot);
        let next = state.waiting.pop_front();
        drop(state);
        if let Some((_, waker)) = next {
            waker.wake();
        }
    }

    /// Queues a slot with work; false if the caller has to do it, because there are no threads.
    fn push(self: &Arc<Self>, slot: &Arc<Slot>) -> bool {
        if self.most_threads == 0 {
            return false;
        }
        let mut state = self.state.lock();
        if state.idle <= state.queue.len() && state.threads < self.most_threads {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("zebu-codec".to_owned());
            if thread.spawn(move || shared.run_thread()).is_ok() {
                state.threads += 1;
            }
        }
        if state.threads == 0 {
            return false;
        }
        state.queue.push_back(Arc::clone(slot));
        drop(state);
        self.work.notify_one();
        true
    }

    fn run_thread(&self) {
        sleep_exactly();
        let mut state = self.state.lock();
        loop {
            if let Some(slot) = state.queue.pop_front() {
                drop(state);
                if slot.execute(Some(&self.hurried)) == Wanted::No {
                    self.give_back(slot);
                }
                state = self.state.lock();
                continue;
            }
            if state.closed {
                return;
            }
            state.idle += 1;
            state = self.work.wait(state);
            state.idle -= 1;
        }
    }
}

/// The wait for a slot. Each slot that is given back wakes one who waits, in the order in which they came; whoever is
/// woken and dropped before looking wakes the next.
struct SlotWait<'a> {
    shared: &'a Shared,
    /// Its number in the list of those who wait. (Wakers don't tell them apart: all waits of one task have the same.)
    number: Option<u64>,
}

impl SlotWait<'_> {
    /// Leaves the list; false if it was woken already, or never waited.
    fn leave(&mut self, state: &mut State) -> bool {
        let Some(own) = self.number.take() else { return false };
        let at = state.waiting.iter().position(|(number, _)| *number == own);
        at.and_then(|at| state.waiting.remove(at)).is_some()
    }
}

impl Future for SlotWait<'_> {
    type Output = Arc<Slot>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Arc<Slot>> {
        let mut state = self.shared.state.lock();
        if let Some(slot) = state.free.pop() {
            self.leave(&mut state);
            return Poll::Ready(slot);
        }
        if state.slots < self.shared.most_slots {
            self.leave(&mut state);
            return Poll::Ready(state.new_slot());
        }
        let Some(own) = self.number else {
            let number = state.next_wait;
            state.next_wait += 1;
            state.waiting.push_back((number, cx.waker().clone()));
            self.number = Some(number);
            return Poll::Pending;
        };
        match state.waiting.iter_mut().find(|(number, _)| *number == own) {
            Some((_, waker)) => waker.clone_from(cx.waker()),
            // Woken, but somebody else was faster: it is the next.
            None => state.waiting.push_front((own, cx.waker().clone())),
        }
        Poll::Pending
    }
}

impl Drop for SlotWait<'_> {
    fn drop(&mut self) {
        if self.number.is_none() {
            return;
        }
        let next = {
            let mut state = self.shared.state.lock();
            if self.leave(&mut state) { None } else { state.waiting.pop_front() }
        };
        if let Some((_, waker)) = next {
            waker.wake();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Yes,
    /// The future that asked was dropped: the slot is free.
    No,
}

impl Slot {
    fn queue(&self, work: Work, output: Option<Vec<u8>>) {
        let mut state = self.0.lock();
        state.phase = Phase::Queued(work, None);
        if let Some(output) = output {
            state.output = output;
        }
    }

    /// Does the work that is queued, and wakes who waits for it.
    fn execute(&self, hurried: Option<&AtomicUsize>) -> Wanted {
        let (mut work, mut output) = {
            let mut state = self.0.lock();
            match std::mem::replace(&mut state.phase, Phase::Free) {
                Phase::Queued(work, waker) => {
                    state.phase = Phase::Running(waker);
                    (work, std::mem::take(&mut state.output))
                }
                // The future that asked was dropped before.
                _ => return Wanted::No,
            }
        };
        let outcome = work.execute(hurried, &mut output);
        let input = work.into_input();
        let mut state = self.0.lock();
        state.output = output;
        match std::mem::replace(&mut state.phase, Phase::Free) {
            Phase::Running(waker) => {
                state.phase = Phase::Done(input, outcome);
                drop(state);
                if let Some(waker) = waker {
                    waker.wake();
                }
                Wanted::Yes
            }
            _ => Wanted::No,
        }
    }

    fn poll(&self, waker: &Waker) -> Poll<(IoBufs, Outcome)> {
        let mut state = self.0.lock();
        match std::mem::replace(&mut state.phase, Phase::Free) {
            Phase::Done(input, outcome) => return Poll::Ready((input, outcome)),
            Phase::Queued(work, _) => state.phase = Phase::Queued(work, Some(waker.clone())),
            Phase::Running(_) => state.phase = Phase::Running(Some(waker.clone())),
            other @ (Phase::Free | Phase::Abandoned) => state.phase = other,
        }
        Poll::Pending
    }
}

/// A slot in use. Dropped before the work is done, it leaves giving the slot back to the thread that has it.
struct Abandon<'a> {
    shared: &'a Shared,
    slot: Arc<Slot>,
}

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        let mut state = self.slot.0.lock();
        match std::mem::replace(&mut state.phase, Phase::Free) {
            Phase::Queued(..) | Phase::Running(_) => state.phase = Phase::Abandoned,
            // Done, and nobody took the result.
            Phase::Done(..) => {
                drop(state);
                self.shared.give_back(Arc::clone(&self.slot));
            }
            // The result was taken: the slot belongs to it.
            Phase::Free | Phase::Abandoned => {}
        }
    }
}

/// Work that is done. Its slot is free again when this is dropped.
pub(crate) struct Finished {
    shared: Arc<Shared>,
    slot: Option<Arc<Slot>>,
    /// The input, as it was given.
    pub(crate) input: IoBufs,
    pub(crate) outcome: Outcome,
    output: Vec<u8>,
}

impl Finished {
    /// The result.
    pub(crate) fn output(&self) -> &[u8] {
        match self.outcome {
            Outcome::Bytes(len) => self.output.get(..len).unwrap_or_default(),
            Outcome::Incompressible | Outcome::Damaged(_) => &[],
        }
    }

    /// The result, to keep; the slot gets a new buffer when it is used again.
    pub(crate) fn take_output(&mut self) -> Vec<u8> {
        let mut output = std::mem::take(&mut self.output);
        output.truncate(match self.outcome {
            Outcome::Bytes(len) => len,
            Outcome::Incompressible | Outcome::Damaged(_) => 0,
        });
        output
    }
}

impl Drop for Finished {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.0.lock().output = std::mem::take(&mut self.output);
            self.shared.give_back(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::{Either, join_all, select};
    use futures_util::stream::{FuturesOrdered, StreamExt};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use zebu_storage::{IoBuf, WorkerConfig};

    fn compress(content: &[u8]) -> Work {
        Work::Compress {
            method: Method::Deflate { level: 1 },
            bursts: Bursts::Whole,
            input: IoBuf::copy_of(content).into(),
            cluster: content.len(),
        }
    }

    fn in_short_bursts(content: &[u8]) -> Work {
        let mut work = compress(content);
        if let Work::Compress { bursts, .. } = &mut work {
            *bursts = Bursts::Short;
        }
        work
    }

    #[test]
    fn other_work_has_slots_of_its_own_beside_work_in_short_bursts() {
        let (worker, idle) = (worker(), worker());
        let pool = CodecPool::new(1);
        let content: Vec<u8> =
            (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 25) as u8).collect();
        let asked: Vec<_> = (0..3 * SLOTS_PER_THREAD)
            .map(|_| {
                let (pool, work) = (pool.clone(), in_short_bursts(&content));
                idle.spawn_with(|on| async move { drop(pool.run(&on, work).await) })
            })
            .collect();
        // They have all slots for such work, and give none back as long as their worker is not polled.
        idle.poll();
        drop(worker.block_on(pool.run(&worker, compress(&[1; 512]))));
        assert_eq!(free_slots(&pool), (1, 1));
        assert_eq!(free_slots(pool.background()), (0, SLOTS_PER_THREAD));
        idle.block_on(join_all(asked));
    }

    #[test]
    fn a_hurry_ends_when_it_is_dropped() {
        let pool = CodecPool::new(1);
        let count = || pool.background().shared().hurried.load(Relaxed);
        let (one, other) = (pool.hurry(), pool.clone().hurry());
        assert_eq!(count(), 2);
        drop((one, other));
        assert_eq!(count(), 0);
    }

    #[test]
    fn work_in_short_bursts_comes_back_as_other_work_does() {
        let worker = worker();
        let pool = CodecPool::new(1);
        let content: Vec<u8> = (0..65536u32).map(|i| (i / 7 % 251) as u8).collect();
        for work in [compress(&content), in_short_bursts(&content)] {
            let done = worker.block_on(pool.run(&worker, work));
            assert!(matches!(done.outcome, Outcome::Bytes(_)));
            let (stream, mut back) = (done.output().to_vec(), Vec::new());
            let packing = Packing::Cluster(zebu_qcow2::Compression::Zlib);
            codec::inflate(packing, &IoBuf::copy_of(&stream).into(), 0, 65536, &mut back).unwrap();
            assert!(back == content);
        }
    }

    fn worker() -> Worker {
        Worker::new(&WorkerConfig::default()).unwrap()
    }

    fn free_slots(pool: &CodecPool) -> (usize, usize) {
        let state = pool.shared().state.lock();
        (state.free.len(), state.slots)
    }

    #[test]
    fn more_work_than_slots_gets_done_and_slots_are_reused() {
        let worker = worker();
        for threads in [0, 1, 3] {
            let pool = CodecPool::new(threads);
            let contents: Vec<Vec<u8>> = (0..40u8).map(|i| vec![i; 4096]).collect();
            worker.block_on(join_all(contents.iter().map(|content| {
                let (pool, worker) = (&pool, &worker);
                async move {
                    let packed = pool.run(worker, compress(content)).await;
                    let input = IoBufs::from(IoBuf::copy_of(packed.output()));
                    drop(packed);
                    // Memory of any size, with anything in it.
                    let output = vec![0xee; content[0] as usize * 512];
                    let compression = zebu_qcow2::Compression::Zlib;
                    let work = Work::Inflate {
                        packing: Packing::Cluster(compression),
                        input,
                        skip: 0,
                        cluster: 4096,
                        output,
                    };
                    let back = pool.run(worker, work).await;
                    assert_eq!(back.output(), content);
                }
            })));
            let (free, made) = free_slots(&pool);
            assert_eq!(free, made);
            assert!(made <= (threads * SLOTS_PER_THREAD).max(1));
        }
    }

    /// Counts its wakes.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Wake for Counting {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn waits_of_one_task_are_woken_once_each() {
        let pool = CodecPool::new(0);
        let shared = pool.shared();
        let counting = Arc::new(Counting::default());
        let waker = Waker::from(Arc::clone(&counting));
        let mut cx = Context::from_waker(&waker);
        let Poll::Ready(slot) = pin!(shared.slot()).poll(&mut cx) else { panic!("there is one slot") };
        let (mut first, mut second) = (pin!(shared.slot()), pin!(shared.slot()));
        assert!(first.as_mut().poll(&mut cx).is_pending() && second.as_mut().poll(&mut cx).is_pending());
        shared.give_back(slot);
        assert_eq!(counting.0.load(Ordering::Relaxed), 1);
        let Poll::Ready(slot) = first.as_mut().poll(&mut cx) else { panic!("it is its turn") };
        shared.give_back(slot);
        assert_eq!(counting.0.load(Ordering::Relaxed), 2, "nobody told the second that there is a slot");
        assert!(second.as_mut().poll(&mut cx).is_ready());
    }

    /// Lanes of one task that wait for a slot, have work done, and wait for something else in between.
    #[test]
    fn lanes_of_many_tasks_all_come_to_their_end() {
        let worker = worker();
        let pool = CodecPool::new(2);
        let content = vec![7; 512];
        let mut under_way = FuturesOrdered::new();
        for task in 0..4000 {
            let (pool, worker, content) = (&pool, &worker, &content);
            under_way.push_back(join_all((0..8).map(move |lane| async move {
                for round in 0..=(task * 7 + lane * 5) % 3 {
                    drop(pool.run(worker, compress(content)).await);
                    if (task + lane + round) % 3 == 0 {
                        worker.run_blocking(|| ()).await;
                    }
                }
            })));
            if under_way.len() == 32 {
                let patience = pin!(worker.sleep(std::time::Duration::from_secs(600)));
                let ended = worker.block_on(select(under_way.next(), patience));
                assert!(matches!(ended, Either::Left(_)), "task {task} or one before is never woken");
            }
        }
        worker.block_on(under_way.collect::<Vec<_>>());
    }

    #[test]
    fn a_worker_that_is_not_polled_keeps_no_slot_from_others() {
        let (idle, worker) = (worker(), worker());
        let pool = CodecPool::new(1);
        let asked: Vec<_> = (0..3 * SLOTS_PER_THREAD)
            .map(|_| {
                let pool = pool.clone();
                idle.spawn_with(|on| async move { drop(pool.run(&on, compress(&[7; 512])).await) })
            })
            .collect();
        // Some of them have a slot now, and others are the next to get one. None looks again.
        idle.poll();
        for _ in 0..3 * SLOTS_PER_THREAD {
            let patience = pin!(worker.sleep(std::time::Duration::from_secs(600)));
            let run = pin!(pool.run(&worker, compress(&[1; 512])));
            let ended = worker.block_on(select(run, patience));
            assert!(matches!(ended, Either::Left(_)), "slots that nobody uses are not to be had");
        }
        idle.block_on(join_all(asked));
        let (free, made) = free_slots(&pool);
        assert_eq!((free, made), (SLOTS_PER_THREAD, SLOTS_PER_THREAD));
    }

    #[test]
    fn work_that_nobody_waits_for_gives_its_slot_back() {
        let worker = worker();
        let pool = CodecPool::new(1);
        for _ in 0..50 {
            let content = vec![7; 1 << 16];
            let mut cx = Context::from_waker(Waker::noop());
            {
                let mut run = pin!(pool.run(&worker, compress(&content)));
                let _ = run.as_mut().poll(&mut cx);
            }
            let done = worker.block_on(pool.run(&worker, compress(&content)));
            assert!(matches!(done.outcome, Outcome::Bytes(_)));
        }
        drop(worker.block_on(pool.run(&worker, compress(&[1; 512]))));
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(600);
        while free_slots(&pool).0 != free_slots(&pool).1 {
            assert!(std::time::Instant::now() < deadline, "a slot was lost");
            std::thread::yield_now();
        }
    }
}
