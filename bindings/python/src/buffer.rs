//! Bytes of Python objects, used in place.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

/// The bytes of an object, in one piece. It is kept from being resized or freed.
pub(crate) struct Buffer(PyUntypedBuffer);

impl Buffer {
    /// Bytes to be read.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the bytes of the buffer are not in one piece"));
        }
        Ok(Self(buffer))
    }

    /// Bytes to be written.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = Self::readable(object)?;
        if buffer.0.readonly() {
            return Err(PyBufferError::new_err("the buffer is for reading only"));
        }
        Ok(buffer)
    }

    /// The bytes. Another thread of the program may change them meanwhile, as a guest may change its memory: then what is
    /// written is unspecified.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.0.buf_ptr().is_null() {
            return &[];
        }
        // SAFETY: the object keeps so many bytes in place until the buffer is released, which outlives the slice.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }

    /// The bytes, to be written. What another thread of the program sees in them meanwhile is unspecified.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.0.readonly() || self.0.buf_ptr().is_null() {
            return &mut [];
        }
        // SAFETY: as in `bytes`, and the object says that its bytes may be written.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), self.0.len_bytes()) }
    }
}
