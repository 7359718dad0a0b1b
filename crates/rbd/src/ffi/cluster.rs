//! A connection to a cluster, and a pool of it.

use super::library::{Handle, Library};
use super::{done, text};
use std::ffi::{CStr, c_char, c_int};
use std::ptr::null;

/// Bytes of a value of the configuration, or of a cluster's number, with its end.
const VALUE: usize = 256;

/// A client of a cluster. Its connection ends when it is dropped, which may wait for the cluster.
pub(crate) struct Cluster {
    library: &'static Library,
    handle: Handle,
}

// SAFETY: librados's handles may be used from all threads; each call locks what it needs.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// A client that is not connected. `user` has no `client.`; without it, librados's own is meant.
    pub(crate) fn new(library: &'static Library, user: Option<&str>) -> Result<Self, i32> {
        let user = user.map(text).transpose()?;
        let mut handle = std::ptr::null_mut();
        let user = user.as_ref().map_or(null(), |user| user.as_ptr());
        // SAFETY: the text lives for the call; the place for the handle, too.
        done(unsafe { (library.rados.rados_create)(&raw mut handle, user) })?;
        Ok(Self { library, handle })
    }

    /// Reads a file of settings; without a name, the one that librados looks for.
    pub(crate) fn read_file(&self, path: Option<&str>) -> Result<(), i32> {
        let path = path.map(text).transpose()?;
        let path = path.as_ref().map_or(null(), |path| path.as_ptr());
        // SAFETY: the handle is good as long as `self` is; the text lives for the call.
        done(unsafe { (self.library.rados.rados_conf_read_file)(self.handle, path) })
    }

    /// Sets a value of the configuration.
    pub(crate) fn set(&self, key: &str, value: &str) -> Result<(), i32> {
        let (key, value) = (text(key)?, text(value)?);
        // SAFETY: the handle is good as long as `self` is; the texts live for the call.
        done(unsafe { (self.library.rados.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) })
    }

    /// A value of the configuration.
    pub(crate) fn get(&self, key: &str) -> Result<String, i32> {
        let key = text(key)?;
        let get = self.library.rados.rados_conf_get;
        // SAFETY: the handle is good as long as `self` is; the text lives for the call; the buffer has the size that is told.
        filled(|buffer, size| unsafe { get(self.handle, key.as_ptr(), buffer, size) })
    }

    /// Connects. Waits for the cluster.
    pub(crate) fn connect(&self) -> Result<(), i32> {
        // SAFETY: the handle is good as long as `self` is.
        done(unsafe { (self.library.rados.rados_connect)(self.handle) })
    }

    /// The number of the cluster, which is connected.
    pub(crate) fn fsid(&self) -> Result<String, i32> {
        let fsid = self.library.rados.rados_cluster_fsid;
        // SAFETY: the handle is good as long as `self` is; the buffer has the size that is told.
        filled(|buffer, size| unsafe { fsid(self.handle, buffer, size) })
    }

    /// A namespace of a pool of this cluster, which is connected.
    pub(crate) fn pool(self, name: &str, namespace: &str) -> Result<Pool, (Self, i32)> {
        match self.io(name, namespace) {
            Ok(handle) => Ok(Pool { handle, cluster: self }),
            Err(errno) => Err((self, errno)),
        }
    }

    fn io(&self, name: &str, namespace: &str) -> Result<Handle, i32> {
        let (name, namespace) = (text(name)?, text(namespace)?);
        let rados = &self.library.rados;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the cluster's handle is good as long as `self` is; the texts live for the calls; the pool's handle is good
        // after the first one.
        unsafe {
            done((rados.rados_ioctx_create)(self.handle, name.as_ptr(), &raw mut handle))?;
            (rados.rados_ioctx_set_namespace)(handle, namespace.as_ptr());
        }
        Ok(handle)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is not used afterwards. Pools own their cluster, and go first.
        unsafe { (self.library.rados.rados_shutdown)(self.handle) };
    }
}

/// The text that a call writes into a buffer.
fn filled(call: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<String, i32> {
    let mut buffer = [0 as c_char; VALUE];
    // One less: a zero stands at the end whatever the call does.
    super::checked(call(buffer.as_mut_ptr(), VALUE - 1))?;
    // SAFETY: the last byte is zero.
    Ok(unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_string_lossy().into_owned())
}

/// A namespace of a pool, with its connection.
pub(crate) struct Pool {
    handle: Handle,
    cluster: Cluster,
}

// SAFETY: as of `Cluster`.
unsafe impl Send for Pool {}
// SAFETY: as of `Cluster`.
unsafe impl Sync for Pool {}

impl Pool {
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    pub(super) fn library(&self) -> &'static Library {
        self.cluster.library
    }

    /// The pool's number.
    pub(crate) fn id(&self) -> i64 {
        // SAFETY: the handle is good as long as `self` is.
        unsafe { (self.library().rados.rados_ioctx_get_id)(self.handle) }
    }

    /// Makes an image of `size` bytes, with the features and the size of objects that the configuration has.
    pub(crate) fn create(&self, image: &str, size: u64) -> Result<(), i32> {
        let (image, mut order) = (text(image)?, 0);
        // SAFETY: the handle is good as long as `self` is; the text lives for the call, and so does the place for the order.
        done(unsafe { (self.library().rbd.rbd_create)(self.handle, image.as_ptr(), size, &raw mut order) })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the handle is not used afterwards. Images own their pool, and go first.
        unsafe { (self.library().rados.rados_ioctx_destroy)(self.handle) };
    }
}
