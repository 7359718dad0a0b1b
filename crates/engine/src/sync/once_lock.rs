//! A cell that is written once.

#[cfg(shuttle)]
pub(crate) use scheduled::OnceLock;
#[cfg(not(shuttle))]
pub(crate) use std::sync::OnceLock;

#[cfg(shuttle)]
mod scheduled {
    use crate::sync::Mutex;

    /// As the standard library's, whose waiters would hold up the one thread that all schedules share.
    #[derive(Debug)]
    pub(crate) struct OnceLock<T> {
        value: std::sync::OnceLock<T>,
        filling: Mutex<()>,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self { value: std::sync::OnceLock::new(), filling: Mutex::new(()) }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            shuttle::thread::sleep(std::time::Duration::ZERO);
            self.value.get()
        }

        pub(crate) fn set(&self, value: T) -> Result<(), T> {
            let _one = self.filling.lock();
            self.value.set(value)
        }

        pub(crate) fn get_or_init(&self, fill: impl FnOnce() -> T) -> &T {
            if let Some(value) = self.get() {
                return value;
            }
            let _one = self.filling.lock();
            if self.value.get().is_none() {
                let _ = self.value.set(fill());
            }
            self.value.get().expect("it was filled just now")
        }
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> Self {
            Self::new()
        }
    }
}
