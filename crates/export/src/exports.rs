//! All that a server exports.

use crate::error::ExportError;
use crate::export::Export;
use crate::nbd::MAX_NAME;
use std::sync::Arc;
use zebu_storage::sync::Mutex;

/// All that a server exports; cheap to clone. The first one is also found under the empty name.
///
/// Some are there from the beginning. NBD clients find others as well, which come and go ([`Exports::add`]).
#[derive(Debug, Clone)]
pub struct Exports {
    first: Arc<[Arc<Export>]>,
    added: Arc<Mutex<Vec<Arc<Export>>>>,
}

impl Exports {
    /// Exports under different names.
    ///
    /// # Errors
    /// Two have the same name, or one is too long.
    pub fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
        for (index, export) in exports.iter().enumerate() {
            check(export)?;
            if exports[..index].iter().any(|other| other.name() == export.name()) {
                return Err(ExportError::DuplicateName(export.name().to_owned()));
            }
        }
        Ok(Self { first: exports.into_iter().map(Arc::new).collect(), added: Arc::default() })
    }

    /// Adds exports for NBD clients: all of them, or none.
    ///
    /// # Errors
    /// Two have the same name, one that is there has it, or a name is too long.
    pub fn add(&self, exports: Vec<Export>) -> Result<Vec<Arc<Export>>, ExportError> {
        let mut added = self.added.lock();
        let before = added.len();
        for export in exports {
            let is_taken = self.first.iter().chain(added.iter()).any(|other| other.name() == export.name());
            let checked = check(&export);
            if is_taken || checked.is_err() {
                added.truncate(before);
                checked?;
                return Err(ExportError::DuplicateName(export.name().to_owned()));
            }
            added.push(Arc::new(export));
        }
        Ok(added[before..].to_vec())
    }

    /// Removes exports that were added. Clients that have chosen one keep it.
    pub fn remove(&self, exports: &[Arc<Export>]) {
        self.added.lock().retain(|added| !exports.iter().any(|export| Arc::ptr_eq(export, added)));
    }

    /// The export of that name, unless it is closed; of those that are there from the beginning.
    pub fn find(&self, name: &str) -> Option<&Arc<Export>> {
        self.first
            .iter()
            .find(|export| export.name() == name)
            .or_else(|| if name.is_empty() { self.first.first() } else { None })
            .filter(|export| !export.is_closed())
    }

    /// The export of that name, unless it is closed; of all.
    pub(crate) fn find_any(&self, name: &str) -> Option<Arc<Export>> {
        self.find(name).cloned().or_else(|| {
            let added = self.added.lock();
            added.iter().find(|export| export.name() == name && !export.is_closed()).cloned()
        })
    }

    /// Those that are there from the beginning, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Export>> {
        self.first.iter()
    }

    /// Those that are there now.
    pub(crate) fn all(&self) -> Vec<Arc<Export>> {
        self.first.iter().chain(self.added.lock().iter()).cloned().collect()
    }
}

fn check(export: &Export) -> Result<(), ExportError> {
    if export.name().len() > MAX_NAME {
        return Err(ExportError::LongName(export.name().to_owned()));
    }
    if export.description().len() > MAX_NAME {
        return Err(ExportError::LongDescription(export.name().to_owned()));
    }
    if export.name().contains('\0') || export.description().contains('\0') {
        return Err(ExportError::ZeroByte(export.name().to_owned()));
    }
    Ok(())
}
