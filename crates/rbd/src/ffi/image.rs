//! An open image, and requests to it.

use super::cluster::Pool;
use super::library::{Handle, ImageInfo, Library};
use super::{checked, done, text};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread::{self, ThreadId};
use zebu_storage::sync::Mutex;

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK: c_int = 1;
/// Bytes of an image's number, with its end.
const ID: usize = 256;

/// An image that is open.
pub(crate) struct Image {
    library: &'static Library,
    /// Null once it is closed.
    handle: AtomicPtr<c_void>,
    /// None once it is closed.
    pool: Mutex<Option<Pool>>,
    callbacks: Arc<Callbacks>,
}

/// Facts about an image that do not change, and its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Bytes.
    pub(crate) size: u64,
    /// Bytes of an object.
    pub(crate) object_size: u64,
    /// Bytes after which striping begins again with another set of objects.
    pub(crate) period: u64,
    /// Whether objects are filled one after the other.
    pub(crate) is_in_order: bool,
    /// The number of the image in its pool; empty for images of the first format.
    pub(crate) id: String,
}

/// A run of an image's bytes that are data, or that were given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) is_data: bool,
}

/// A request of a storage, as librbd has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// Into all of the request's memory.
    Read {
        offset: u64,
    },
    /// All of the request's memory.
    Write {
        offset: u64,
    },
    Flush,
    /// Zeroes that give their space back.
    Punch {
        offset: u64,
        len: u64,
    },
    /// Zeroes that keep their space.
    Zero {
        offset: u64,
        len: u64,
    },
}

/// Result of a request at its end, with its memory: bytes that were read, or 0; or an errno.
type End = Box<dyn FnOnce(Vec<u8>, Result<u64, i32>) + Send>;

/// A request, which owns its memory until librbd is done with it.
struct Request {
    data: Vec<u8>,
    end: End,
    library: &'static Library,
    callbacks: Arc<Callbacks>,
}

/// The threads of librbd's that are in callbacks of an image now.
#[derive(Default)]
struct Callbacks(Mutex<Vec<ThreadId>>);

impl Callbacks {
    /// Does `work` as part of a callback.
    fn during(&self, work: impl FnOnce()) {
        let thread = thread::current().id();
        self.0.lock().push(thread);
        work();
        let mut threads = self.0.lock();
        if let Some(at) = threads.iter().position(|other| *other == thread) {
            threads.swap_remove(at);
        }
    }
}

impl Image {
    /// Opens an image of `pool`, or a snapshot of it.
    pub(crate) fn open(
        pool: Pool,
        name: &str,
        snapshot: Option<&str>,
        is_writable: bool,
    ) -> Result<Self, (Pool, i32)> {
        match Self::open_handle(&pool, name, snapshot, is_writable) {
            Ok(handle) => {
                let library = pool.library();
                Ok(Self {
                    library,
                    handle: AtomicPtr::new(handle),
                    pool: Mutex::new(Some(pool)),
                    callbacks: Arc::default(),
                })
            }
            Err(errno) => Err((pool, errno)),
        }
    }

    fn open_handle(
        pool: &Pool,
        name: &str,
        snapshot: Option<&str>,
        is_writable: bool,
    ) -> Result<Handle, i32> {
        let (name, snapshot) = (text(name)?, snapshot.map(text).transpose()?);
        let snapshot = snapshot.as_ref().map_or(null(), |snapshot| snapshot.as_ptr());
        let rbd = &pool.library().rbd;
        let open = if is_writable { rbd.rbd_open } else { rbd.rbd_open_read_only };
        let mut handle = null_mut();
        // SAFETY: the pool's handle is good; the texts live for the call, and so does the place for the handle.
        done(unsafe { open(pool.handle(), name.as_ptr(), &raw mut handle, snapshot) })?;
        Ok(handle)
    }

    fn handle(&self) -> Handle {
        self.handle.load(Ordering::Acquire)
    }

    /// Its facts. Waits for the cluster.
    pub(crate) fn facts(&self) -> Result<Facts, i32> {
        let (rbd, handle) = (&self.library.rbd, self.handle());
        let mut info = ImageInfo::default();
        let (mut unit, mut count) = (0, 0);
        let mut id = [0 as c_char; ID];
        // SAFETY: the image is open; all places live for the calls and have the sizes that are told. The last byte of the
        // buffer stays zero.
        unsafe {
            done((rbd.rbd_stat)(handle, &raw mut info, size_of::<ImageInfo>()))?;
            done((rbd.rbd_get_stripe_unit)(handle, &raw mut unit))?;
            done((rbd.rbd_get_stripe_count)(handle, &raw mut count))?;
            if (rbd.rbd_get_id)(handle, id.as_mut_ptr(), ID - 1) < 0 {
                id[0] = 0;
            }
            Ok(Facts {
                size: info.size,
                object_size: info.object_size,
                period: info.object_size.saturating_mul(count.max(1)),
                is_in_order: count <= 1 && unit == info.object_size,
                id: CStr::from_ptr(id.as_ptr()).to_string_lossy().into_owned(),
            })
        }
    }

    /// A number of the image that is asked for by one of librbd's functions.
    fn number(&self, ask: unsafe extern "C" fn(Handle, *mut u64) -> c_int) -> Result<u64, i32> {
        let mut number = 0;
        // SAFETY: the image is open; the place lives for the call.
        done(unsafe { ask(self.handle(), &raw mut number) })?;
        Ok(number)
    }

    /// Its features, and which of them are not to be believed now.
    pub(crate) fn features(&self) -> Result<(u64, u64), i32> {
        let rbd = &self.library.rbd;
        Ok((self.number(rbd.rbd_get_features)?, self.number(rbd.rbd_get_flags)?))
    }

    /// Bytes that it shares with the snapshot that it was cloned from.
    pub(crate) fn overlap(&self) -> Result<u64, i32> {
        self.number(self.library.rbd.rbd_get_overlap)
    }

    /// Bytes now. Others may have changed it.
    pub(crate) fn size(&self) -> Result<u64, i32> {
        self.number(self.library.rbd.rbd_get_size)
    }

    /// Changes the size. Waits for the cluster.
    pub(crate) fn resize(&self, size: u64) -> Result<(), i32> {
        // SAFETY: the image is open.
        done(unsafe { (self.library.rbd.rbd_resize)(self.handle(), size) })
    }

    /// The runs in a range that were written ever, in order. Waits for the cluster. By `whole_objects`, an object that is there
    /// counts as data.
    pub(crate) fn runs(&self, offset: u64, len: u64, whole_objects: bool) -> Result<Vec<Run>, i32> {
        unsafe extern "C" fn found(offset: u64, len: usize, exists: c_int, runs: *mut c_void) -> c_int {
            // SAFETY: the argument is the list below, which nobody else uses during the call.
            let runs = unsafe { &mut *runs.cast::<Vec<Run>>() };
            runs.push(Run { offset, len: len as u64, is_data: exists != 0 });
            0
        }
        let mut runs: Vec<Run> = Vec::new();
        let list = (&raw mut runs).cast();
        let whole = u8::from(whole_objects);
        let iterate = self.library.rbd.rbd_diff_iterate2;
        // SAFETY: the image is open; the list lives for the call, which makes all callbacks before it returns.
        done(unsafe { iterate(self.handle(), null(), offset, len, 1, whole, found, list) })?;
        runs.sort_unstable_by_key(|run| run.offset);
        Ok(runs)
    }

    /// Whether the calling thread is one that librbd needs to end requests of the image: it must not wait for any.
    pub(crate) fn is_calling_back(&self) -> bool {
        self.callbacks.0.lock().contains(&thread::current().id())
    }

    /// Hands a request to librbd, with what is written, or the place for what is read. `end` is called once, on any thread,
    /// perhaps before this returns.
    pub(crate) fn start(
        &self,
        call: Call,
        data: Vec<u8>,
        end: impl FnOnce(Vec<u8>, Result<u64, i32>) + Send + 'static,
    ) {
        let callbacks = Arc::clone(&self.callbacks);
        let mut request = Request { data, end: Box::new(end), library: self.library, callbacks };
        let handle = self.handle();
        if handle.is_null() {
            return request.end_with(Err(libc::ESHUTDOWN));
        }
        let (data, size) = (request.data.as_mut_ptr().cast::<c_char>(), request.data.len());
        let rbd = &self.library.rbd;
        let argument = Box::into_raw(Box::new(request));
        let mut completion = null_mut();
        // SAFETY: the argument is what the callback expects. It comes back here if there is no completion.
        let made = unsafe { (rbd.rbd_aio_create_completion)(argument.cast(), ended, &raw mut completion) };
        if let Err(errno) = done(made) {
            // SAFETY: nobody else has it.
            return unsafe { Box::from_raw(argument) }.end_with(Err(errno));
        }
        // SAFETY: the image is open. The memory belongs to the request, has the size that is told, and lives until the callback
        // takes it back.
        let started = unsafe {
            match call {
                Call::Read { offset } => (rbd.rbd_aio_read)(handle, offset, size, data, completion),
                Call::Write { offset } => (rbd.rbd_aio_write)(handle, offset, size, data, completion),
                Call::Flush => (rbd.rbd_aio_flush)(handle, completion),
                Call::Punch { offset, len } | Call::Zero { offset, len } => {
                    let flags = if matches!(call, Call::Zero { .. }) { THICK } else { 0 };
                    match self.library.write_zeroes {
                        Some(write_zeroes) => {
                            write_zeroes(handle, offset, len as usize, completion, flags, 0)
                        }
                        None => -libc::EOPNOTSUPP,
                    }
                }
            }
        };
        if let Err(errno) = done(started) {
            // SAFETY: a request that was not taken has no callback, so nobody else has these.
            let request = unsafe {
                (rbd.rbd_aio_release)(completion);
                Box::from_raw(argument)
            };
            request.end_with(Err(errno));
        }
    }

    /// Closes it and ends the connection. Waits for the cluster. No request is under way or comes later.
    pub(crate) fn close(&self) {
        let handle = self.handle.swap(null_mut(), Ordering::AcqRel);
        if !handle.is_null() {
            // SAFETY: nobody gets the handle any more.
            unsafe { (self.library.rbd.rbd_close)(handle) };
        }
        drop(self.pool.lock().take());
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // Of an image that was not closed, requests may be under way: its connection stays until the process ends.
        std::mem::forget(self.pool.get_mut().take());
    }
}

/// The end of a request, on a thread of librbd's.
unsafe extern "C" fn ended(completion: Handle, argument: *mut c_void) {
    // SAFETY: `Image::start` has handed over the request, and this is called once.
    let request = unsafe { Box::from_raw(argument.cast::<Request>()) };
    let rbd = &request.library.rbd;
    // SAFETY: the completion is the one that has ended; it is not used afterwards.
    let value = unsafe {
        let value = (rbd.rbd_aio_get_return_value)(completion);
        (rbd.rbd_aio_release)(completion);
        value
    };
    let callbacks = Arc::clone(&request.callbacks);
    callbacks.during(|| request.end_with(checked(value as i64)));
}

impl Request {
    fn end_with(self, result: Result<u64, i32>) {
        (self.end)(self.data, result);
    }
}
