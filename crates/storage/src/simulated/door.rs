//! A place for something simulated, which costs a build without simulation nothing.

/// Something simulated: there is one with the feature `simulated` alone.
#[cfg(feature = "simulated")]
pub(crate) type Door<T> = Box<T>;

/// Something simulated, which no value is.
#[cfg(not(feature = "simulated"))]
pub(crate) type Door<T> = shut::Door<T>;

#[cfg(not(feature = "simulated"))]
mod shut {
    use std::convert::Infallible;
    use std::marker::PhantomData;
    use std::ops::{Deref, DerefMut};

    pub(crate) struct Door<T: ?Sized>(Infallible, PhantomData<T>);

    impl<T: ?Sized> Deref for Door<T> {
        type Target = T;
        fn deref(&self) -> &T {
            match self.0 {}
        }
    }

    impl<T: ?Sized> DerefMut for Door<T> {
        fn deref_mut(&mut self) -> &mut T {
            match self.0 {}
        }
    }

    /// Not even a tag is left of a variant that holds one.
    const _: () = {
        enum Variants {
            _Real(u64),
            _Simulated(Door<dyn std::any::Any>),
        }
        assert!(size_of::<Variants>() == size_of::<u64>());
    };
}
