//! The native part of the Python package `zebu`: requests and jobs of the engine, with the GIL released. What a Python programmer
//! sees is in `python/zebu`.

mod buffer;
mod disk;
mod error;
mod interpreter;
mod job;
mod jobs;
mod options;
mod report;

use pyo3::prelude::*;

/// Functions and classes for the Python files of the package.
#[pymodule(name = "_zebu")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<disk::NativeDisk>()?;
    module.add_class::<disk::ExtentBatches>()?;
    module.add_class::<job::CancelSwitch>()?;
    module.add_function(wrap_pyfunction!(disk::open, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::create, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::convert, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::check, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::backup, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::restore, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::verdict, module)?)?;
    module.add_function(wrap_pyfunction!(interpreter::end, module)?)?;
    module.add_function(wrap_pyfunction!(interpreter::forked, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
