//! Which files of the sources the kernel moves data from.

use crate::transfer::Transfer;
use crate::{Error, ErrorKind};
use zebu_storage::{File, FileId};

/// The files of the sources that the kernel moves data from.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// `None`: from none.
    pub(super) how: Option<Transfer>,
    /// Files, and why the kernel moves nothing from them.
    pub(super) tried: Vec<(FileId, Option<Error>)>,
}

impl Moves {
    /// Why the kernel moves nothing from a file; `None`: it does.
    pub(super) fn refusal(&self, file: &File) -> Option<Error> {
        match self.tried.iter().find(|(id, _)| *id == file.id()) {
            Some((_, refusal)) => refusal.clone(),
            None => Some(Error::new(ErrorKind::Unsupported, "the file is too short").on(file.path())),
        }
    }
}
