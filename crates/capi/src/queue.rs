//! Queues: requests that are submitted, and completions that are polled.

use crate::arguments::{buffers, options};
use crate::disk::{ZebuDisk, durability, zero_mode};
use crate::failure::{Failure, Outcome, answer, answer_long, handle, text_of_c};
use crate::handles::{self, no_handle};
use crate::of_thread::{Held, with_queues};
use crate::options::queueing;
use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr;
use zebu_engine::{Completion, Request};

/// A queue, behind a handle.
#[repr(C)]
pub struct ZebuQueue {
    _nothing: [u8; 0],
}

/// `struct zebu_completion`.
#[repr(C)]
pub struct ZebuCompletion {
    user_data: u64,
    error: *const c_char,
    result: i32,
    reserved: i32,
}

/// Does `work` with a queue of this thread, which it is from the first time on.
fn with<T>(queue: *mut ZebuQueue, work: impl FnOnce(&mut Held) -> Outcome<T>) -> Outcome<T> {
    with_queues(|all| {
        if !all.contains_key(&queue.addr())
            && let Some(detached) = handles::take_queue(queue)
        {
            all.insert(queue.addr(), Held::new(detached.attach()));
        }
        let held = all.get_mut(&queue.addr()).filter(|held| held.made_in.is_here());
        work(held.ok_or_else(|| no_queue(queue))?)
    })
}

fn no_queue(queue: *mut ZebuQueue) -> Failure {
    no_handle(if queue.is_null() {
        "the queue is NULL"
    } else {
        "no queue of this thread: it was freed, belongs to another thread, was made before fork(), or is none"
    })
}

fn submit(queue: *mut ZebuQueue, user_data: u64, request: impl FnOnce() -> Outcome<Request>) -> c_int {
    answer(|| {
        with(queue, |held| {
            held.queue.submit(request()?, user_data);
            Ok(0)
        })
    })
}

/// Makes a queue for the first thread that uses it.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_queue_new(disk: *mut ZebuDisk, words: *const c_char) -> *mut ZebuQueue {
    handle(|| {
        let disk = handles::disk(disk)?;
        // SAFETY: a string of the caller's, during the call.
        let queueing = queueing(unsafe { options(words)? })?;
        let mut builder = disk.queue().engine(queueing.engine);
        if let Some(depth) = queueing.depth {
            builder = builder.depth(depth);
        }
        Ok(handles::add_queue(builder.detached()?))
    })
}

/// Waits for the requests of a queue and frees it.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_free(queue: *mut ZebuQueue) -> c_int {
    if queue.is_null() {
        return 0;
    }
    answer(|| {
        with(queue, |_| Ok(()))?;
        // Its end is not within the borrow.
        let removed = with_queues(|all| all.remove(&queue.addr()));
        drop(removed);
        Ok(0)
    })
}

/// The descriptor of a queue.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_fd(queue: *mut ZebuQueue) -> c_int {
    answer(|| match handles::waiting_queue_fd(queue) {
        Some(fd) => Ok(fd),
        None => with(queue, |held| Ok(held.queue.as_raw_fd())),
    })
}

/// Takes a read over.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_queue_read(
    queue: *mut ZebuQueue,
    buf: *mut c_void,
    len: usize,
    offset: u64,
    user_data: u64,
) -> c_int {
    let iov = libc::iovec { iov_base: buf, iov_len: len };
    // SAFETY: one buffer, of which the caller keeps the promise of the header.
    unsafe { zebu_queue_readv(queue, &raw const iov, 1, offset, user_data) }
}

/// Takes a read into several buffers over.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_queue_readv(
    queue: *mut ZebuQueue,
    iov: *const libc::iovec,
    iovcnt: c_int,
    offset: u64,
    user_data: u64,
) -> c_int {
    // SAFETY: the caller keeps the memory until the request has ended.
    submit(queue, user_data, || Ok(Request::Read { offset, bufs: unsafe { buffers(iov, iovcnt)? } }))
}

/// Takes a write over.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_queue_write(
    queue: *mut ZebuQueue,
    buf: *const c_void,
    len: usize,
    offset: u64,
    user_data: u64,
    flags: u32,
) -> c_int {
    let iov = libc::iovec { iov_base: buf.cast_mut(), iov_len: len };
    // SAFETY: one buffer, of which the caller keeps the promise of the header.
    unsafe { zebu_queue_writev(queue, &raw const iov, 1, offset, user_data, flags) }
}

/// Takes a write from several buffers over.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_queue_writev(
    queue: *mut ZebuQueue,
    iov: *const libc::iovec,
    iovcnt: c_int,
    offset: u64,
    user_data: u64,
    flags: u32,
) -> c_int {
    submit(queue, user_data, || {
        let durability = durability(flags)?;
        // SAFETY: the caller keeps the memory until the request has ended.
        Ok(Request::Write { offset, bufs: unsafe { buffers(iov, iovcnt)? }, durability })
    })
}

/// Takes zeroing over.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_write_zeroes(
    queue: *mut ZebuQueue,
    offset: u64,
    len: u64,
    user_data: u64,
    flags: u32,
) -> c_int {
    submit(queue, user_data, || Ok(Request::WriteZeroes { offset, len, mode: zero_mode(flags)? }))
}

/// Takes a discard over.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_discard(queue: *mut ZebuQueue, offset: u64, len: u64, user_data: u64) -> c_int {
    submit(queue, user_data, || Ok(Request::Discard { offset, len }))
}

/// Takes a flush over.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_flush(queue: *mut ZebuQueue, user_data: u64) -> c_int {
    submit(queue, user_data, || Ok(Request::Flush))
}

/// Starts what was submitted.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_start(queue: *mut ZebuQueue) -> c_int {
    answer(|| {
        with(queue, |held| {
            held.queue.start();
            held.show_what_is_left();
            Ok(0)
        })
    })
}

/// A completion as C has it. Its words live as long as `words`.
fn told(words: &mut Vec<CString>, completion: Completion) -> ZebuCompletion {
    let (error, result) = match completion.result {
        Ok(()) => (ptr::null(), 0),
        Err(error) => {
            let failure = Failure::from(error);
            let text = text_of_c(failure.message);
            let error = text.as_ptr();
            words.push(text);
            (error, -failure.errno)
        }
    };
    ZebuCompletion { user_data: completion.user_data, error, result, reserved: 0 }
}

/// Stores what has ended, and waits for it if that is asked for.
///
/// # Safety
/// As `zebu.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn zebu_queue_poll(
    queue: *mut ZebuQueue,
    completions: *mut ZebuCompletion,
    max: c_int,
    timeout: c_int,
) -> c_int {
    answer(|| {
        with(queue, |held| {
            let most = usize::try_from(max).ok().filter(|most| *most > 0 && !completions.is_null());
            let Some(most) = most else {
                return Err(Failure::invalid("there is no room for a completion"));
            };
            held.words.clear();
            let ended = held.poll(most, timeout);
            let count = ended.len();
            for (place, completion) in ended.into_iter().enumerate() {
                let told = told(&mut held.words, completion);
                // SAFETY: by the caller's word there is room for `max`, and there are no more than that.
                unsafe { completions.add(place).write(told) };
            }
            Ok(count as c_int)
        })
    })
}

/// The number of requests whose completions were not polled.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_pending(queue: *mut ZebuQueue) -> i64 {
    answer_long(|| with(queue, |held| Ok((held.queue.pending() + held.left.len()) as i64)))
}

/// Milliseconds until a poll has something to do.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_queue_timeout(queue: *mut ZebuQueue) -> c_int {
    // Not through `answer`: -1 is no failure, and a failure is one of its own.
    let left = answer_long(|| {
        with(queue, |held| {
            let timer = held.queue.next_timer().map(|left| left.as_micros().div_ceil(1000));
            Ok(timer.map_or(-1, |left| left.min(c_int::MAX as u128) as i64))
        })
    });
    left as c_int
}
