//! An open disk.

use crate::buffer::Buffer;
use crate::error::to_python;
use crate::interpreter::detached;
use crate::options::{self, Options, format_named, local};
use crate::report::{self, ExtentFacts};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use zebu_engine::{
    Access, BitmapRecording, Disk, DiskExtents, Error, ErrorKind, NewBitmap, NewSnapshot, Shrink,
    SnapshotRef, ZeroMode,
};

/// Opens a disk.
#[pyfunction]
pub(crate) fn open(
    py: Python<'_>,
    name: PathBuf,
    writable: bool,
    format: Option<&str>,
    given: &Bound<'_, PyDict>,
) -> PyResult<NativeDisk> {
    let name = local(py, name)?;
    let options = Options::new("open", given)?;
    let access = if writable { Access::ReadWrite } else { Access::ReadOnly };
    let open = options::open(py, &options)?.format(format.map(format_named).transpose()?).access(access);
    options.end()?;
    let disk = detached(py, || Disk::open(&name, &open))?;
    Ok(NativeDisk { disk: Mutex::new(Some(disk)), owner: Owner::new(name) })
}

/// The process that opened a disk. In a child of fork(), nothing of the engine's is touched: a thread that is not there may hold it.
struct Owner {
    process: u32,
    name: PathBuf,
}

impl Owner {
    fn new(name: PathBuf) -> Self {
        Self { process: std::process::id(), name }
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        let message = "the disk was opened by the parent of this process; open it after fork()";
        Err(to_python(py, &Error::new(ErrorKind::InvalidArgument, message).on(&self.name)))
    }
}

/// A disk of the engine. Each method waits for its request without the GIL.
#[pyclass(frozen, module = "zebu._zebu")]
pub(crate) struct NativeDisk {
    /// `None` once it is closed. Locked for moments, with the GIL.
    disk: Mutex<Option<Disk>>,
    owner: Owner,
}

impl NativeDisk {
    fn lock(&self) -> MutexGuard<'_, Option<Disk>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk, unless it was closed or is another process's.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Disk> {
        let disk = self.lock().clone();
        let disk = disk.ok_or_else(|| PyValueError::new_err("I/O operation on a closed disk"))?;
        self.owner.check(py)?;
        Ok(disk)
    }

    fn detached<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Disk) -> zebu_engine::Result<T> + Send,
    ) -> PyResult<T> {
        let disk = self.get(py)?;
        detached(py, move || work(&disk))
    }
}

/// How many of `len` bytes from `offset` on are on the disk.
fn within(disk: &Disk, offset: u64, len: usize) -> usize {
    let left = disk.virtual_size().saturating_sub(offset);
    usize::try_from(left).map_or(len, |left| len.min(left))
}

#[pymethods]
impl NativeDisk {
    #[getter]
    fn closed(&self) -> bool {
        self.lock().is_none()
    }

    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.get(py)?.virtual_size())
    }

    #[getter]
    fn format(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.get(py)?.format().name())
    }

    /// Fills a buffer as far as the disk goes, and returns how many bytes that are.
    fn pread(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, offset: u64) -> PyResult<usize> {
        let mut buffer = Buffer::writable(buffer)?;
        let disk = self.get(py)?;
        let bytes = buffer.bytes_mut();
        let len = within(&disk, offset, bytes.len());
        let bytes = &mut bytes[..len];
        if len > 0 {
            detached(py, move || disk.read(offset, bytes))?;
        }
        Ok(len)
    }

    /// Bytes of the disk, as far as it goes.
    fn read_at<'py>(&self, py: Python<'py>, offset: u64, length: usize) -> PyResult<Bound<'py, PyBytes>> {
        let disk = self.get(py)?;
        let len = within(&disk, offset, length);
        if isize::try_from(len).is_err() {
            return Err(PyMemoryError::new_err("more bytes than an object can have"));
        }
        PyBytes::new_with(py, len, |bytes| {
            if len == 0 { Ok(()) } else { detached(py, move || disk.read(offset, bytes)) }
        })
    }

    /// Writes all of a buffer.
    fn pwrite(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>, offset: u64) -> PyResult<usize> {
        let buffer = Buffer::readable(buffer)?;
        let bytes = buffer.bytes();
        self.detached(py, move |disk| disk.write(offset, bytes))?;
        Ok(bytes.len())
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.detached(py, Disk::flush)
    }

    fn discard(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<()> {
        self.detached(py, move |disk| disk.discard(offset, length))
    }

    fn write_zeroes(&self, py: Python<'_>, offset: u64, length: u64, keep: bool) -> PyResult<()> {
        let mode = if keep { ZeroMode::Keep } else { ZeroMode::Unmap };
        self.detached(py, move |disk| disk.write_zeroes(offset, length, mode))
    }

    fn resize(&self, py: Python<'_>, size: u64, shrink: bool) -> PyResult<()> {
        let shrink = if shrink { Shrink::Allow } else { Shrink::Refuse };
        self.detached(py, move |disk| disk.resize(size, shrink))
    }

    /// The extents of a range, in batches.
    fn extents(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<ExtentBatches> {
        let disk = self.get(py)?;
        let size = disk.virtual_size();
        let end = length.map_or(Some(size), |length| offset.checked_add(length));
        let end = end.filter(|end| *end <= size && offset <= size);
        let end = end.ok_or_else(|| PyValueError::new_err(format!("the disk has {size} bytes")))?;
        let owner = Owner::new(self.owner.name.clone());
        Ok(ExtentBatches { walk: Mutex::new(disk.extents(offset..end)), owner })
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (info, cluster_size) = self.detached(py, |disk| Ok((disk.info()?, disk.cluster_size())))?;
        report::info(py, &info, cluster_size)
    }

    fn snapshots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        report::snapshots(py, &self.detached(py, |disk| Ok(disk.snapshots()))?)
    }

    fn create_snapshot<'py>(&self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyDict>> {
        report::snapshot(py, &self.detached(py, |disk| disk.create_snapshot(NewSnapshot::named(name)))?)
    }

    fn apply_snapshot(&self, py: Python<'_>, which: String) -> PyResult<()> {
        self.detached(py, |disk| disk.apply_snapshot(&SnapshotRef::IdOrName(which)))
    }

    fn delete_snapshot(&self, py: Python<'_>, which: String) -> PyResult<()> {
        self.detached(py, |disk| disk.delete_snapshot(&SnapshotRef::IdOrName(which)))
    }

    fn bitmaps<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        report::bitmaps(py, &self.detached(py, |disk| Ok(disk.bitmaps()))?)
    }

    fn add_bitmap(
        &self,
        py: Python<'_>,
        name: String,
        granularity: Option<u64>,
        recording: bool,
    ) -> PyResult<()> {
        let recording = if recording { BitmapRecording::On } else { BitmapRecording::Off };
        let new = NewBitmap::named(name).granularity(granularity).recording(recording);
        self.detached(py, move |disk| disk.add_bitmap(&new))
    }

    fn remove_bitmap(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.detached(py, move |disk| disk.remove_bitmap(name))
    }

    fn clear_bitmap(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.detached(py, move |disk| disk.clear_bitmap(name))
    }

    /// Offsets and lengths of what is dirty.
    fn dirty(&self, py: Python<'_>, name: &str) -> PyResult<Vec<(u64, u64)>> {
        self.detached(py, move |disk| {
            let bits = disk.bitmap_bits(name)?;
            let mut runs = Vec::new();
            let mut from = 0;
            while let Some(run) = bits.next_dirty(from) {
                runs.push((run.start, run.end - run.start));
                from = run.end;
            }
            Ok(runs)
        })
    }

    /// Flushes and closes. In a child of fork() the disk is only forgotten.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(disk) = self.lock().take() else { return Ok(()) };
        if !self.owner.is_here() {
            return Ok(());
        }
        let closing = disk.clone();
        let closed = detached(py, move || match closing.close() {
            Err(error) if error.kind() == ErrorKind::Busy => Ok(Err(error)),
            done => done.map(Ok),
        })?;
        closed.map_err(|error| {
            // It is still open.
            *self.lock() = Some(disk);
            to_python(py, &error)
        })
    }
}

/// A walk over extents.
#[pyclass(frozen, module = "zebu._zebu")]
pub(crate) struct ExtentBatches {
    /// Locked without the GIL only.
    walk: Mutex<DiskExtents>,
    owner: Owner,
}

/// Extents that are fetched at once.
const BATCH: usize = 256;

#[pymethods]
impl ExtentBatches {
    /// The next extents; none at the end.
    fn next_batch(&self, py: Python<'_>) -> PyResult<Vec<ExtentFacts>> {
        self.owner.check(py)?;
        detached(py, || {
            let mut walk = self.walk.lock().unwrap_or_else(PoisonError::into_inner);
            walk.by_ref().take(BATCH).map(|found| found.map(report::extent)).collect()
        })
    }
}
