//! The functions of librados and librbd that are used, found when they are first wanted.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// Names of the libraries: their functions keep their types under these.
const RADOS: &str = "librados.so.2";
const RBD: &str = "librbd.so.1";

/// A cluster, a pool, an image or a completion, as the libraries hand them out.
pub(super) type Handle = *mut c_void;
/// `rbd_callback_t`.
pub(super) type Ended = unsafe extern "C" fn(Handle, *mut c_void);
/// The callback of `rbd_diff_iterate2`: offset, length, whether there is data, argument.
pub(super) type Found = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

macro_rules! functions {
    ($(#[$doc:meta])* $library:ident { $($name:ident($($argument:ty),*) $(-> $result:ty)?;)* }) => {
        $(#[$doc])*
        pub(super) struct $library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $library {
            /// # Safety
            /// The library is one that has functions of these types, and is never unloaded.
            unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller says so.
                unsafe { Ok(Self { $($name: *library.get(concat!(stringify!($name), "\0"))?,)* }) }
            }
        }
    };
}

functions! {
    /// Functions by librados's names.
    Rados {
        rados_create(*mut Handle, *const c_char) -> c_int;
        rados_conf_read_file(Handle, *const c_char) -> c_int;
        rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
        rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
        rados_connect(Handle) -> c_int;
        rados_shutdown(Handle);
        rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
        rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
        rados_ioctx_set_namespace(Handle, *const c_char);
        rados_ioctx_get_id(Handle) -> i64;
        rados_ioctx_destroy(Handle);
    }
}

functions! {
    /// Functions by librbd's names.
    Rbd {
        rbd_create(Handle, *const c_char, u64, *mut c_int) -> c_int;
        rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_close(Handle) -> c_int;
        rbd_get_size(Handle, *mut u64) -> c_int;
        rbd_get_features(Handle, *mut u64) -> c_int;
        rbd_get_flags(Handle, *mut u64) -> c_int;
        rbd_get_overlap(Handle, *mut u64) -> c_int;
        rbd_get_stripe_unit(Handle, *mut u64) -> c_int;
        rbd_get_stripe_count(Handle, *mut u64) -> c_int;
        rbd_get_id(Handle, *mut c_char, usize) -> c_int;
        rbd_stat(Handle, *mut ImageInfo, usize) -> c_int;
        rbd_resize(Handle, u64) -> c_int;
        rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, Found, *mut c_void) -> c_int;
        rbd_aio_create_completion(*mut c_void, Ended, *mut Handle) -> c_int;
        rbd_aio_get_return_value(Handle) -> isize;
        rbd_aio_release(Handle);
        rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
        rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
        rbd_aio_flush(Handle, Handle) -> c_int;
    }
}

/// `rbd_aio_write_zeroes`.
pub(super) type WriteZeroes = unsafe extern "C" fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int;

/// `rbd_image_info_t`.
#[repr(C)]
#[derive(Default)]
pub(super) struct ImageInfo {
    pub(super) size: u64,
    pub(super) object_size: u64,
    objects: u64,
    order: c_int,
    /// Texts of 24 and 96 bytes around `parent_pool`, which lies at a multiple of 8.
    block_name_prefix: [[c_char; 8]; 3],
    parent_pool: i64,
    parent_name: [[c_char; 8]; 12],
}

/// Both libraries, which stay in memory.
pub(crate) struct Library {
    pub(super) rados: Rados,
    pub(super) rbd: Rbd,
    /// Ceph has it since version 16.
    pub(super) write_zeroes: Option<WriteZeroes>,
}

/// Why there is no librbd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NoLibrary {
    /// The program is linked statically: it can load nothing.
    StaticProgram,
    /// The loader's words.
    NotFound(String),
}

impl Library {
    /// The libraries, loaded at the first call.
    pub(crate) fn get() -> Result<&'static Self, NoLibrary> {
        static LOADED: OnceLock<Result<Library, NoLibrary>> = OnceLock::new();
        if cfg!(target_feature = "crt-static") {
            return Err(NoLibrary::StaticProgram);
        }
        LOADED
            .get_or_init(|| Self::load().map_err(|error| NoLibrary::NotFound(in_words(&error))))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Whether there is a way to zero a range that promises zeroes.
    pub(crate) fn can_zero(&self) -> bool {
        self.write_zeroes.is_some()
    }

    fn load() -> Result<Self, libloading::Error> {
        // SAFETY: their own initialization and end have no conditions. The types are those of their headers, which are the
        // same in all versions of these names. What is found outlives the call because the libraries are forgotten, not
        // unloaded.
        unsafe {
            let (rados, rbd) = (libloading::Library::new(RADOS)?, libloading::Library::new(RBD)?);
            let write_zeroes = rbd.get(b"rbd_aio_write_zeroes\0").ok().map(|found| *found);
            let found = Self { rados: Rados::find(&rados)?, rbd: Rbd::find(&rbd)?, write_zeroes };
            std::mem::forget((rados, rbd));
            Ok(found)
        }
    }
}

fn in_words(error: &libloading::Error) -> String {
    // The loader's own words are below.
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
