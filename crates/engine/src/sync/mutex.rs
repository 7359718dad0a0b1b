//! The mutex without poison of the storage crate; under shuttle, one that its schedules know.

#[cfg(shuttle)]
pub(crate) use scheduled::Mutex;
#[cfg(shuttle)]
pub(crate) use shuttle::sync::MutexGuard;
#[cfg(not(shuttle))]
pub(crate) use zebu_storage::sync::{Mutex, MutexGuard};

#[cfg(shuttle)]
mod scheduled {
    use shuttle::sync as imp;
    use std::sync::PoisonError;
    #[cfg(test)]
    use std::sync::TryLockError;

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(imp::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(imp::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> imp::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// Locks it if nobody has it.
        #[cfg(test)]
        pub(crate) fn try_lock(&self) -> Option<imp::MutexGuard<'_, T>> {
            match self.0.try_lock() {
                Ok(guard) => Some(guard),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            }
        }
    }
}
