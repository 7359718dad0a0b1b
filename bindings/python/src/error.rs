//! Errors of the engine as Python's.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::Path;
use zebu_engine::{Error, ErrorKind};

/// The exception `zebu.Error` for an error of the engine.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).unwrap_or_else(|instead| instead)
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let facts = PyDict::new(py);
    facts.set_item("kind", kind_name(error.kind()))?;
    facts.set_item("offset", error.guest_offset())?;
    facts.set_item("file_offset", error.host_offset())?;
    facts.set_item("retryable", error.is_retryable())?;
    let file = error.image().map(Path::as_os_str);
    let class = py.import("zebu._error")?.getattr("Error")?;
    Ok(PyErr::from_value(class.call((error.errno(), error.message(), file), Some(&facts))?))
}

/// The word for a kind, which stays as it is.
fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NoSpace => "no-space",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::ForeignFormat => "foreign-format",
        ErrorKind::Locked => "locked",
        ErrorKind::Busy => "busy",
        ErrorKind::InvalidArgument => "invalid-argument",
        ErrorKind::ReferenceRefused => "reference-refused",
        ErrorKind::ReadOnly => "read-only",
        ErrorKind::OutOfRange => "out-of-range",
        ErrorKind::Poisoned => "poisoned",
        ErrorKind::Panicked => "panicked",
        ErrorKind::Cancelled => "cancelled",
        ErrorKind::NotFound => "not-found",
        ErrorKind::Exists => "exists",
        ErrorKind::KeyMissing => "key-missing",
        ErrorKind::WrongKey => "wrong-key",
        _ => "io",
    }
}
