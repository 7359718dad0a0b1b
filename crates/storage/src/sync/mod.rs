//! Locks that do not poison, and lists of tasks that wait.

mod mutex;
mod wait_list;

pub use mutex::{Condvar, Mutex, MutexGuard};
pub use wait_list::{WaitList, WaitPlace, WaitRoom, Wakers};
