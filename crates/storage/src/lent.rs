//! Bytes that a caller lends for the time of a call: I/O uses them in place.
//!
//! A view of lent bytes may travel to another thread, into the kernel, or into an operation that nobody waits for any more.
//! So the call ends when the last view is gone, however the work with them ended. A view that is kept for ever makes the call
//! wait for ever, which is safe.

use crate::buf::{IoBuf, IoBufs};
use crate::lender::{Lender, UntilReturned, Views};
use std::sync::Arc;

/// Lends bytes that I/O may change, and returns when no view of them is left.
///
/// The work gets one buffer for each part. It must not keep a buffer, nor give one back as a part of its result: the call
/// would never end.
///
/// ```
/// use zebu_storage::lend_mut;
///
/// let mut bytes = [0; 3];
/// lend_mut([&mut bytes[..]], |mut bufs| bufs.fill(1, 2, 7));
/// assert_eq!(bytes, [0, 7, 7]);
/// ```
pub fn lend_mut<'a, T>(parts: impl IntoIterator<Item = &'a mut [u8]>, work: impl FnOnce(IoBufs) -> T) -> T {
    let views = Arc::new(Views::default());
    let _until_returned = UntilReturned(&views);
    let mut bufs = IoBufs::new();
    for part in parts {
        // SAFETY: the bytes are borrowed for `'a`, which outlasts this call, and the call does not end (nor unwind past
        // `_until_returned`) before every view has dropped its lender. Nobody else uses them meanwhile: `part` is
        // exclusive. Each part has a lender of its own, so views of two parts are never joined.
        bufs.push(unsafe { IoBuf::lent(Lender::new(&views), part.as_mut_ptr(), part.len()) });
    }
    work(bufs)
}

/// As [`lend_mut`], of bytes that may only be read. I/O that would change such a buffer panics before it begins.
pub fn lend<'a, T>(parts: impl IntoIterator<Item = &'a [u8]>, work: impl FnOnce(IoBufs) -> T) -> T {
    let views = Arc::new(Views::default());
    let _until_returned = UntilReturned(&views);
    let mut bufs = IoBufs::new();
    for part in parts {
        // SAFETY: as in `lend_mut`. Others may read the bytes meanwhile, and views of this kind are only read.
        bufs.push(unsafe { IoBuf::lent_to_read(Lender::new(&views), part.as_ptr(), part.len()) });
    }
    work(bufs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::Duration;

    #[test]
    fn a_call_outlasts_the_views_it_lent() {
        for panics in [false, true] {
            let gone = Arc::new(AtomicBool::new(false));
            let mut bytes = vec![0u8; 8192];
            let (first, second) = bytes.split_at_mut(4096);
            let theirs = Arc::clone(&gone);
            let call = catch_unwind(AssertUnwindSafe(|| {
                lend_mut([first, second], |mut bufs| {
                    assert_eq!(bufs.0.len(), 2, "neighbours of different parts are not joined");
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(20));
                        bufs.fill(4000, 200, 9);
                        theirs.store(true, SeqCst);
                    });
                    assert!(!panics);
                });
            }));
            assert_eq!(call.is_err(), panics);
            assert!(gone.load(SeqCst));
            assert_eq!((bytes[3999], bytes[4000], bytes[4199], bytes[4200]), (0, 9, 9, 0));
        }
    }

    #[test]
    fn bytes_that_were_lent_to_be_read_are_not_changed() {
        let bytes = *b"never changed";
        lend([&bytes[..], &[], &bytes[..5]], |mut bufs| {
            let mut copy = [0; 18];
            bufs.copy_to(0, &mut copy);
            assert_eq!(&copy, b"never changednever");
            let rest = bufs.split_to(3);
            let changed = catch_unwind(AssertUnwindSafe(|| {
                let mut rest = rest;
                rest.fill(0, 1, 0);
            }));
            assert!(changed.is_err());
        });
        assert_eq!(&bytes, b"never changed");
    }
}
