//! Distinguishing a process from its children by fork(2).
//!
//! A child has a copy of the memory, but none of the other threads, and shares rings and locks of files with its parent. So
//! nothing that was made before a fork may be used, or be ended in an orderly way, by the child.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks lie between the process that loaded this code and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A mark of the process in which something was made. Looking costs no system call. It knows of fork(3) of the C library;
/// a process that was made by the system call `clone` itself can't be told from its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkMark(u32);

impl ForkMark {
    /// A mark of this process.
    pub fn here() -> Self {
        static WATCHED: OnceLock<()> = OnceLock::new();
        WATCHED.get_or_init(|| {
            // SAFETY: the function does nothing but change an atomic, which the child of a fork may do. Where the system has
            // no memory for it, forks are not seen.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is still the process of the mark, and not a child of it.
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_told_from_its_parent() {
        let mark = ForkMark::here();
        assert!(mark.is_here());
        // SAFETY: the child calls nothing but `_exit`, which a child of a process with threads may.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(mark.is_here())) };
        }
        let mut status = -1;
        // SAFETY: plain system call with a place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(mark.is_here());
    }
}
