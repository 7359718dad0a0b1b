//! Bytes of Python objects, used in place.

use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;

/// The bytes of an object that is kept from being resized or freed. Not `Send`: it is given back with the GIL.
pub(crate) struct Buffer {
    /// In a box, because an exporter may point into it.
    view: Box<ffi::Py_buffer>,
}

impl Buffer {
    /// Bytes to be read, in one piece.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_SIMPLE)
    }

    /// Bytes to be written, in one piece.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_WRITABLE)
    }

    fn get(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive, `view` is where the exporter may write, and the GIL is held.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self { view })
    }

    fn len(&self) -> usize {
        // What a buffer in one piece says of its length is in memory.
        usize::try_from(self.view.len).unwrap_or(0)
    }

    /// The bytes. Another thread of the program may change them meanwhile, as a guest may change its memory: then what is
    /// written is unspecified.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.view.buf.is_null() {
            return &[];
        }
        // SAFETY: the exporter keeps so many bytes in place until the buffer is released, which is by `drop`.
        unsafe { std::slice::from_raw_parts(self.view.buf.cast(), self.len()) }
    }

    /// The bytes, to be written. What another thread of the program sees in them meanwhile is unspecified.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.view.buf.is_null() {
            return &mut [];
        }
        // SAFETY: as in `bytes`; the exporter was asked for bytes that may be written.
        unsafe { std::slice::from_raw_parts_mut(self.view.buf.cast(), self.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: got by `PyObject_GetBuffer` and released once, with the GIL: the value does not leave its thread, and no
        // closure that runs without the GIL can own it.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.view) };
    }
}
