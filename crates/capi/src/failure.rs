//! Failures: an errno for the caller, and words for `zebu_error`.

use crate::of_thread;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use zebu_disks::DiskError;
use zebu_engine::{Error, ErrorKind};

/// A call that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Positive.
    pub(crate) errno: c_int,
    pub(crate) message: String,
}

/// The result of what a function does.
pub(crate) type Outcome<T = c_int> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(errno: c_int, message: impl Into<String>) -> Self {
        Self { errno, message: message.into() }
    }

    /// An argument that can't be taken.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, message)
    }

    /// Says it to `zebu_error` and gives the errno, positive.
    fn tell(self) -> c_int {
        say(self.message);
        if self.errno > 0 { self.errno } else { libc::EIO }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let errno = match error.kind() {
            ErrorKind::OutOfRange => libc::EINVAL,
            _ => error.errno(),
        };
        Self::new(errno, error.to_string())
    }
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::Engine(error) => error.into(),
            other => Self::invalid(other.to_string()),
        }
    }
}

/// Words as C has them.
pub(crate) fn text_of_c(words: String) -> CString {
    let mut bytes = words.into_bytes();
    bytes.retain(|byte| *byte != 0);
    CString::new(bytes).unwrap_or_default()
}

/// Makes `words` what `zebu_error` returns on this thread.
pub(crate) fn say(words: String) {
    of_thread::say(text_of_c(words));
}

/// Does what a function is called for. A panic goes no further than this.
fn run<T>(work: impl FnOnce() -> Outcome<T>) -> Result<T, c_int> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err(Failure::new(libc::EIO, "zebu panicked; its message is on standard error")))
        .map_err(Failure::tell)
}

/// The same, for a function that returns an int.
pub(crate) fn answer(work: impl FnOnce() -> Outcome) -> c_int {
    run(work).unwrap_or_else(|errno| -errno)
}

/// The same, for a function that returns 64 bits.
pub(crate) fn answer_long(work: impl FnOnce() -> Outcome<i64>) -> i64 {
    run(work).unwrap_or_else(|errno| -i64::from(errno))
}

/// The same, for a function that returns a handle: NULL and errno after a failure.
pub(crate) fn handle<T>(work: impl FnOnce() -> Outcome<*mut T>) -> *mut T {
    run(work).unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

fn set_errno(errno: c_int) {
    #[cfg(target_os = "linux")]
    use libc::__errno_location as place;
    #[cfg(any(target_os = "macos", target_os = "freebsd"))]
    use libc::__error as place;
    // SAFETY: the C library's own place for the errno of this thread.
    unsafe { *place() = errno };
}

/// The words of the last failure on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn zebu_error() -> *const c_char {
    of_thread::said()
}
