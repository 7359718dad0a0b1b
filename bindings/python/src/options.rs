//! Options by name, as keyword arguments of Python give them.

use crate::buffer::Buffer;
use crate::error::to_python;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::fmt::Display;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use zebu_engine::check::{CheckOptions, Repair};
use zebu_engine::jobs::{
    BackupOptions, ConvertOptions, CopyBitmaps, Decryption, Identities, Interrupted, NewTarget,
    PreviousBackup, ReadErrors, SourceErrors, TargetClusters,
};
use zebu_engine::{
    Access, CacheMode, Compression, CreateOptions, Error, ErrorKind, Format, Keys, OpenOptions, Passphrase,
    Preallocation, RefPolicy, Sharing,
};

/// Words and what they stand for.
type Words<T> = &'static [(&'static str, T)];

const CACHES: Words<CacheMode> = &[
    ("none", CacheMode::None),
    ("writeback", CacheMode::Writeback),
    ("writethrough", CacheMode::Writethrough),
    ("directsync", CacheMode::Directsync),
    ("unsafe", CacheMode::Unsafe),
];
const COMPRESSIONS: Words<Compression> = &[("zlib", Compression::Zlib), ("zstd", Compression::Zstd)];
const PREALLOCATIONS: Words<Preallocation> = &[
    ("off", Preallocation::Off),
    ("metadata", Preallocation::Metadata),
    ("falloc", Preallocation::Falloc),
    ("full", Preallocation::Full),
];
const POLICIES: Words<RefPolicy> =
    &[("none", RefPolicy::None), ("local", RefPolicy::Local), ("all", RefPolicy::All)];
const REPAIRS: Words<Repair> = &[("none", Repair::None), ("leaks", Repair::Leaks), ("all", Repair::All)];
const BITMAPS: Words<CopyBitmaps> =
    &[("none", CopyBitmaps::No), ("all", CopyBitmaps::All), ("sound", CopyBitmaps::Sound)];

/// Keyword arguments that are taken one after the other. `None` stands for the default.
pub(crate) struct Options<'py> {
    function: &'static str,
    left: Bound<'py, PyDict>,
}

impl<'py> Options<'py> {
    /// The options of a function.
    pub(crate) fn new(function: &'static str, given: &Bound<'py, PyDict>) -> PyResult<Self> {
        Ok(Self { function, left: given.copy()? })
    }

    fn object(&self, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(value) = self.left.get_item(name)? else { return Ok(None) };
        self.left.del_item(name)?;
        Ok((!value.is_none()).then_some(value))
    }

    fn value<T: FromPyObjectOwned<'py>>(&self, name: &str) -> PyResult<Option<T>> {
        let Some(value) = self.object(name)? else { return Ok(None) };
        value.extract::<T>().map(Some).map_err(Into::into)
    }

    /// Puts a value where it belongs, if it was given.
    fn set<T: FromPyObjectOwned<'py>>(&self, name: &str, place: &mut T) -> PyResult<()> {
        if let Some(value) = self.value(name)? {
            *place = value;
        }
        Ok(())
    }

    fn is_set(&self, name: &str) -> PyResult<bool> {
        Ok(self.value::<bool>(name)?.unwrap_or(false))
    }

    fn word<T: Clone>(&self, name: &str, words: Words<T>) -> PyResult<Option<T>> {
        self.value::<String>(name)?.map(|word| meaning(name, &word, words)).transpose()
    }

    fn set_word<T: Clone>(&self, name: &str, words: Words<T>, place: &mut T) -> PyResult<()> {
        if let Some(value) = self.word(name, words)? {
            *place = value;
        }
        Ok(())
    }

    fn format(&self, name: &str) -> PyResult<Option<Format>> {
        self.value::<String>(name)?.map(|word| format_named(&word)).transpose()
    }

    /// Fails if an option is left that nobody knows.
    pub(crate) fn end(self) -> PyResult<()> {
        match self.left.keys().iter().next() {
            None => Ok(()),
            Some(name) => Err(PyTypeError::new_err(format!("{}() has no option '{name}'", self.function))),
        }
    }
}

fn meaning<T: Clone>(name: impl Display, word: &str, words: Words<T>) -> PyResult<T> {
    let found = words.iter().find(|(known, _)| *known == word);
    found.map(|(_, meaning)| meaning.clone()).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        PyValueError::new_err(format!("{name} is one of {}, not '{word}'", known.join(", ")))
    })
}

/// The format of this name.
pub(crate) fn format_named(word: &str) -> PyResult<Format> {
    Format::from_name(word).ok_or_else(|| PyValueError::new_err(format!("there is no format '{word}'")))
}

/// The name of a file or device.
pub(crate) fn local(py: Python<'_>, name: PathBuf) -> PyResult<PathBuf> {
    let protocol = name.to_str().and_then(|name| name.split_once("://")).map(|(protocol, _)| protocol);
    let is_protocol = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphabetic())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    };
    match protocol.filter(|word| is_protocol(word)) {
        None => Ok(name),
        Some(protocol) => {
            let message = format!(
                "names with a protocol ('{protocol}') are not implemented here, only files and devices: attach the \
                 disk with the command zebu, or put ./ before the name of a file"
            );
            Err(to_python(py, &Error::new(ErrorKind::Unsupported, message).on(&name)))
        }
    }
}

/// A policy by its word, or by a list of directories.
fn refs(options: &Options<'_>) -> PyResult<Option<RefPolicy>> {
    let Some(given) = options.object("refs")? else { return Ok(None) };
    if given.is_instance_of::<PyString>() {
        return meaning("refs", &given.extract::<String>()?, POLICIES).map(Some);
    }
    Ok(Some(RefPolicy::Within(given.extract::<Vec<PathBuf>>()?)))
}

/// How an image is opened, but for its format and what it is opened for.
pub(crate) fn open(py: Python<'_>, options: &Options<'_>) -> PyResult<OpenOptions> {
    let mut open = OpenOptions::default();
    options.set_word("cache", CACHES, &mut open.cache)?;
    if let Some(policy) = refs(options)? {
        open.refs = policy;
    }
    if options.value::<bool>("lock")? == Some(false) {
        open.sharing = Sharing::Unlocked;
    }
    open.snapshot = options.value("snapshot")?;
    open.cache_size = options.value("cache_size")?;
    open.data_file = options.value("data_file")?;
    let backing_format = options.format("backing_format")?;
    match options.value::<PathBuf>("backing")? {
        Some(path) => open.backing = Some((path, backing_format)),
        None => open.backing_formats = backing_format.map(|format| vec![Some(format)]).unwrap_or_default(),
    }
    if let Some(passphrase) = options.object("passphrase")? {
        let bytes = Buffer::readable(&passphrase)?;
        let passphrase = Passphrase::new(bytes.bytes()).map_err(|error| to_python(py, &error))?;
        open.keys = Keys::of_top(passphrase);
    }
    Ok(open)
}

/// How a source is opened by its name.
pub(crate) fn source(format: Option<Format>, access: Access) -> OpenOptions {
    OpenOptions::default().format(format).access(access)
}

/// How an image is made.
pub(crate) fn create(options: &Options<'_>, format: Format) -> PyResult<CreateOptions> {
    let mut create = CreateOptions::default().format(format);
    options.set("cluster_size", &mut create.cluster_size)?;
    options.set("extended_l2", &mut create.extended_l2)?;
    options.set("refcount_bits", &mut create.refcount_bits)?;
    options.set_word("compression", COMPRESSIONS, &mut create.compression)?;
    options.set_word("preallocation", PREALLOCATIONS, &mut create.preallocation)?;
    options.set_word("cache", CACHES, &mut create.cache)?;
    match (options.value::<String>("backing")?, options.format("backing_format")?) {
        (Some(name), Some(format)) => create.backing = Some((name, format)),
        (None, None) => {}
        _ => return Err(PyValueError::new_err("backing and backing_format are given together")),
    }
    Ok(create)
}

/// A new image as the target of a job.
pub(crate) fn target(options: &Options<'_>, path: PathBuf, format: Format) -> PyResult<NewTarget> {
    let create = create(options, format)?;
    let open = OpenOptions::default().cache(create.cache);
    Ok(NewTarget::new(path).create(create).open(open))
}

/// How data gets to the target.
pub(crate) fn convert(options: &Options<'_>) -> PyResult<ConvertOptions> {
    let mut convert = ConvertOptions::default();
    options.set("workers", &mut convert.workers)?;
    options.set("requests", &mut convert.requests)?;
    options.set("buffer_memory", &mut convert.buffer_memory)?;
    options.set("sparse_size", &mut convert.sparse_size)?;
    options.set_word("bitmaps", BITMAPS, &mut convert.bitmaps)?;
    if options.is_set("compress")? {
        convert.clusters = TargetClusters::Compressed;
    }
    if options.is_set("salvage")? {
        convert.read_errors = ReadErrors::Zero;
    }
    if let Some(seed) = options.value("seed")? {
        convert.identities = Identities::Seed(seed);
    }
    Ok(convert)
}

/// The rate that a job keeps to, in bytes a second.
pub(crate) fn rate(options: &Options<'_>) -> PyResult<Option<NonZeroU64>> {
    let Some(rate) = options.value::<u64>("rate_limit")? else { return Ok(None) };
    NonZeroU64::new(rate).map(Some).ok_or_else(|| PyValueError::new_err("rate_limit is more than 0"))
}

/// How an image is checked.
pub(crate) fn check(options: &Options<'_>) -> PyResult<CheckOptions> {
    let mut check = CheckOptions::default();
    options.set_word("repair", REPAIRS, &mut check.repair)?;
    options.set_word("cache", CACHES, &mut check.cache)?;
    options.set("memory", &mut check.memory)?;
    options.set("max_findings", &mut check.max_findings)?;
    if options.value::<bool>("lock")? == Some(false) {
        check.sharing = Sharing::Unlocked;
    }
    Ok(check)
}

/// How a backup is made.
pub(crate) fn backup(options: &Options<'_>, target: &Path) -> PyResult<BackupOptions> {
    // Not past the page cache, unless that is asked for: not every file system can.
    let mut backup = BackupOptions::new(target).cache(CacheMode::Writeback);
    options.set_word("cache", CACHES, &mut backup.cache)?;
    options.set("cluster_size", &mut backup.cluster_size)?;
    options.set_word("compression", COMPRESSIONS, &mut backup.compression)?;
    options.set("buffer_memory", &mut backup.buffer_memory)?;
    backup.manifest = options.value("manifest")?;
    backup.bitmap = options.value("bitmap")?;
    let previous_manifest: Option<PathBuf> = options.value("previous_manifest")?;
    match options.value::<PathBuf>("previous")? {
        Some(image) => backup.previous = Some(PreviousBackup::new(image).manifest(previous_manifest)),
        None if previous_manifest.is_some() => {
            return Err(PyValueError::new_err("previous_manifest is given together with previous"));
        }
        None => {}
    }
    if let Some(policy) = refs(options)? {
        backup.refs = policy;
    }
    if options.is_set("resume")? {
        backup.interrupted = Interrupted::Resume;
    }
    if options.is_set("allow_decryption")? {
        backup.decryption = Decryption::Allow;
    }
    if options.is_set("skip_errors")? {
        backup.source_errors = SourceErrors::Skip;
    }
    Ok(backup)
}
