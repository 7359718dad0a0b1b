//! Objects in stores that a command writes.

use crate::failure::Failure;
use std::ffi::OsStr;
use std::sync::Arc;
use zebu_disks::Uploads;
use zebu_engine::storage::{Access, File, OpenFlags};
use zebu_store::{Existing, StoreName, Upload, UploadOptions};

/// The most bytes of a command's buffers that are for reading. The rest is for parts of the object.
const MOST_FOR_READING: usize = 16 << 20;

/// The object that a name leads to; `None` if it is the name of something else.
///
/// # Errors
/// It is the name of an object, and can't be read.
pub(crate) fn store_name(name: &OsStr) -> Result<Option<StoreName>, Failure> {
    match name.to_str().filter(|text| StoreName::is_name(text)) {
        None => Ok(None),
        Some(text) => {
            StoreName::parse(text).map(Some).map_err(|reason| Failure::creating_name(name, &reason))
        }
    }
}

/// The division of a command's buffers: bytes for reading, and for parts of the object.
pub(crate) fn divide(buffer_memory: usize) -> (usize, u64) {
    let reading = (buffer_memory / 4).min(MOST_FOR_READING);
    (reading, (buffer_memory - reading) as u64)
}

/// An object that is being written.
pub(crate) struct StoreTarget(Arc<Upload>);

impl StoreTarget {
    /// Begins; nothing is sent yet.
    ///
    /// # Errors
    /// There are no credentials, or the memory is too small for so many bytes.
    pub(crate) fn begin(uploads: &Uploads, name: StoreName, options: UploadOptions) -> Result<Self, Failure> {
        let shown = name.to_string();
        let upload = Upload::begin(name, options).map_err(|error| {
            let remedy = if error.reason().contains("MiB of memory") {
                " (--buffer-memory, of which a quarter is for reading)"
            } else {
                ""
            };
            Failure::new(format!("Could not create '{shown}': {}{remedy}", error.reason()))
        })?;
        let upload = Arc::new(upload);
        uploads.note(Arc::clone(&upload));
        Ok(Self(upload))
    }

    /// Refuses a name that another object has. One that an interrupted run may have made is compared at the end, and stays.
    pub(crate) fn must_not_exist(&self) -> Result<(), Failure> {
        let name = self.0.name();
        match self.0.existing() {
            Ok(Existing::Nothing) => {
                self.0.must_be_new();
                Ok(())
            }
            Ok(Existing::PerhapsTheSame { etag }) => {
                self.0.only_compare(etag);
                Ok(())
            }
            Ok(_) => {
                Err(Failure::new(format!("'{name}' exists already: remove it first, or give another name")))
            }
            Err(error) => Err(Failure::new(format!("Could not create '{name}': {}", error.reason()))),
        }
    }

    /// The object as a file.
    pub(crate) fn file(&self) -> Result<File, Failure> {
        let flags = OpenFlags::default().access(Access::ReadWrite);
        File::from_storage(Arc::clone(&self.0) as Arc<_>, &self.0.name().to_string(), &flags)
            .map_err(|error| Failure::new(format!("Could not create '{}': {error}", self.0.name())))
    }

    /// Ends it: the object is there if `done` says so, else the store forgets its parts.
    pub(crate) fn end<T>(self, done: Result<T, Failure>) -> Result<T, Failure> {
        let fail = |reason: &str| Failure::new(format!("could not write '{}': {reason}", self.0.name()));
        let ended = match done {
            Ok(value) => self.0.finish().map(|()| value).map_err(|error| fail(error.reason())),
            // What the job saw is only that a write failed.
            Err(failure) => Err(self.0.failure().map_or(failure, |reason| fail(&reason))),
        };
        if ended.is_err() {
            self.0.abort();
        }
        ended
    }
}
