//! Jobs on whole images.

use crate::disk::NativeDisk;
use crate::interpreter::detached;
use crate::job::{CancelSwitch, Watch, run};
use crate::options::{self, Options, format_named, local};
use crate::report;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::{Path, PathBuf};
use zebu_engine::jobs::{ConvertTarget, JobControl, VerifyOptions, VerifyReport};
use zebu_engine::storage::Worker;
use zebu_engine::{Access, Disk, Error, ErrorKind, Format, Image, OpenOptions};

/// Makes an image.
#[pyfunction]
pub(crate) fn create(
    py: Python<'_>,
    name: PathBuf,
    size: Option<u64>,
    format: &str,
    given: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let name = local(py, name)?;
    let options = Options::new("create", given)?;
    let create = options::create(&options, format_named(format)?)?.size(size);
    options.end()?;
    detached(py, || Disk::create(&name, &create))
}

/// The source of a job: an open disk, which stays open meanwhile, or the name of one.
enum Source {
    Open(Disk),
    Named(PathBuf, Box<OpenOptions>),
}

impl Source {
    fn of(object: &Bound<'_, PyAny>, format: Option<&str>, access: Access) -> PyResult<Self> {
        let py = object.py();
        if let Ok(disk) = object.cast::<NativeDisk>() {
            return Ok(Self::Open(disk.get().get(py)?));
        }
        let name = local(py, object.extract()?)?;
        let format = format.map(format_named).transpose()?;
        Ok(Self::Named(name, Box::new(options::source(format, access))))
    }

    /// Does `work` with its image. One that is opened here is closed again.
    async fn with<T>(
        self,
        worker: &Worker,
        work: impl AsyncFnOnce(&Image) -> zebu_engine::Result<T>,
    ) -> zebu_engine::Result<T> {
        match self {
            Self::Open(disk) => work(disk.image()).await,
            Self::Named(name, options) => {
                let image = Image::open(worker, &name, &options).await?;
                let done = work(&image).await;
                let closed = image.close(worker).await;
                let done = done?;
                closed.map(|()| done)
            }
        }
    }
}

/// Copies an image into a new one.
#[pyfunction]
pub(crate) fn convert<'py>(
    source: &Bound<'py, PyAny>,
    target: PathBuf,
    source_format: Option<&str>,
    format: &str,
    progress: Option<Bound<'py, PyAny>>,
    cancel: Option<&CancelSwitch>,
    given: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = source.py();
    let from = Source::of(source, source_format, Access::ReadOnly)?;
    let options = Options::new("convert", given)?;
    let target = options::target(&options, local(py, target)?, format_named(format)?)?;
    let convert = options::convert(&options)?;
    let rate = options::rate(&options)?;
    options.end()?;
    let report = run(py, &Watch::new(progress, cancel), async move |worker: Worker, control: JobControl| {
        let options = convert.control(control.rate_limit(rate));
        from.with(&worker, async |image: &Image| {
            let target = ConvertTarget::New(Box::new(target));
            zebu_engine::jobs::convert(&worker, std::slice::from_ref(image), target, &options).await
        })
        .await
    })?;
    report::convert(py, &report)
}

/// Checks an image, and repairs it if asked to.
#[pyfunction]
pub(crate) fn check<'py>(
    py: Python<'py>,
    name: PathBuf,
    progress: Option<Bound<'py, PyAny>>,
    cancel: Option<&CancelSwitch>,
    given: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyDict>> {
    let name = local(py, name)?;
    let options = Options::new("check", given)?;
    let check = options::check(&options)?;
    let rate = options::rate(&options)?;
    options.end()?;
    let report = run(py, &Watch::new(progress, cancel), async move |worker: Worker, control: JobControl| {
        let options = check.control(control.rate_limit(rate));
        zebu_engine::check::check(&worker, &name, &options).await
    })?;
    report::check(py, &report)
}

/// Copies a disk into a new compressed image.
#[pyfunction]
pub(crate) fn backup<'py>(
    source: &Bound<'py, PyAny>,
    target: PathBuf,
    source_format: Option<&str>,
    progress: Option<Bound<'py, PyAny>>,
    cancel: Option<&CancelSwitch>,
    given: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = source.py();
    let options = Options::new("backup", given)?;
    let backup = options::backup(&options, &local(py, target)?)?;
    let rate = options::rate(&options)?;
    options.end()?;
    // The bitmap is cleared at the end.
    let access = if backup.bitmap.is_some() { Access::ReadWrite } else { Access::ReadOnly };
    let from = Source::of(source, source_format, access)?;
    let report = run(py, &Watch::new(progress, cancel), async move |worker: Worker, control: JobControl| {
        let options = backup.control(control.rate_limit(rate));
        from.with(&worker, async |image: &Image| zebu_engine::jobs::backup(&worker, image, &options).await).await
    })?;
    report::backup(py, &report)
}

/// Compares a backup with its manifest, if there is one, and copies it into a new image.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are told by their order only here")]
pub(crate) fn restore<'py>(
    py: Python<'py>,
    backup: PathBuf,
    target: PathBuf,
    manifest: Option<PathBuf>,
    format: &str,
    progress: Option<Bound<'py, PyAny>>,
    cancel: Option<&CancelSwitch>,
    given: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyDict>> {
    let name = local(py, backup)?;
    let from = Source::Named(name.clone(), Box::new(options::source(Some(Format::Qcow2), Access::ReadOnly)));
    let options = Options::new("restore", given)?;
    let target = options::target(&options, local(py, target)?, format_named(format)?)?;
    let convert = options::convert(&options)?;
    let rate = options::rate(&options)?;
    options.end()?;
    let report = run(py, &Watch::new(progress, cancel), async move |worker: Worker, control: JobControl| {
        let control = control.rate_limit(rate);
        let options = convert.control(control.clone());
        from.with(&worker, async |image: &Image| {
            if let Some(manifest) = manifest {
                let verify = VerifyOptions::default().manifest(manifest).control(control);
                is_sound(&zebu_engine::jobs::verify(&worker, image, &verify).await?, &name)?;
            }
            let target = ConvertTarget::New(Box::new(target));
            zebu_engine::jobs::convert(&worker, std::slice::from_ref(image), target, &options).await
        })
        .await
    })?;
    report::convert(py, &report)
}

/// Fails if the backup is not what its manifest says.
fn is_sound(report: &VerifyReport, backup: &Path) -> zebu_engine::Result<()> {
    let Some(first) = report.bad_ranges.first() else { return Ok(()) };
    let message = format!(
        "the backup is not what its manifest says: {} bytes can't be read or differ, the first because: {}",
        report.bad, first.error
    );
    Err(Error::new(ErrorKind::Corrupt, message).on(backup).at_guest(first.offset))
}

/// Judges whether an image may be handed to another tool.
#[pyfunction]
pub(crate) fn verdict<'py>(
    py: Python<'py>,
    name: PathBuf,
    format: Option<&str>,
    lock: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let name = local(py, name)?;
    let mut open = options::source(format.map(format_named).transpose()?, Access::ReadOnly);
    if !lock {
        open.sharing = zebu_engine::Sharing::Unlocked;
    }
    let verdict =
        detached(py, || zebu_engine::block_on(async |worker| zebu_engine::verdict::assess(&worker, &name, &open).await))?;
    report::verdict(py, &verdict)
}
