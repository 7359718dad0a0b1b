//! All that a server exports.

use crate::error::ExportError;
use crate::export::Export;
use crate::nbd::MAX_NAME;
use std::sync::Arc;
use zebu_storage::sync::Mutex;

/// All that a server exports; cheap to clone. Exports come and go. The one that was the first at the start is also found under the empty
/// name, as long as it is there.
///
/// NBD clients find views as well: exports of disks as they were at a moment ([`Exports::add_views`]), which commands to the server do
/// not name.
#[derive(Debug, Clone)]
pub struct Exports {
    lists: Arc<Mutex<Lists>>,
    /// The name of the one that was the first.
    first: Option<Arc<str>>,
}

#[derive(Debug, Default)]
struct Lists {
    disks: Vec<Arc<Export>>,
    views: Vec<Arc<Export>>,
}

impl Lists {
    fn all(&self) -> impl Iterator<Item = &Arc<Export>> {
        self.disks.iter().chain(&self.views)
    }

    fn check(&self, export: &Export) -> Result<(), ExportError> {
        if export.name().len() > MAX_NAME {
            return Err(ExportError::LongName(export.name().to_owned()));
        }
        if export.description().len() > MAX_NAME {
            return Err(ExportError::LongDescription(export.name().to_owned()));
        }
        if export.name().contains('\0') || export.description().contains('\0') {
            return Err(ExportError::ZeroByte(export.name().to_owned()));
        }
        if self.all().any(|other| other.name() == export.name()) {
            return Err(ExportError::DuplicateName(export.name().to_owned()));
        }
        Ok(())
    }
}

impl Exports {
    /// Exports under different names.
    ///
    /// # Errors
    /// Two have the same name, or one is too long.
    pub fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
        let first = exports.first().map(|export| export.name().into());
        let list = Self { lists: Arc::default(), first };
        for export in exports {
            list.add(export)?;
        }
        Ok(list)
    }

    /// Adds one, which clients find from now on.
    ///
    /// # Errors
    /// There is one of that name, or the name is too long.
    pub fn add(&self, export: Export) -> Result<Arc<Export>, ExportError> {
        let mut lists = self.lists.lock();
        lists.check(&export)?;
        let export = Arc::new(export);
        lists.disks.push(Arc::clone(&export));
        Ok(export)
    }

    /// Removes one: no further client finds it. Those who use it are not disturbed. False if it is not there any more.
    pub fn remove(&self, export: &Arc<Export>) -> bool {
        let mut lists = self.lists.lock();
        let before = lists.disks.len();
        lists.disks.retain(|other| !Arc::ptr_eq(other, export));
        lists.disks.len() < before
    }

    /// Takes one back that was removed.
    ///
    /// # Errors
    /// Another has its name by now.
    pub fn take_back(&self, export: &Arc<Export>) -> Result<(), ExportError> {
        let mut lists = self.lists.lock();
        lists.check(export)?;
        lists.disks.push(Arc::clone(export));
        Ok(())
    }

    /// Adds views for NBD clients: all of them, or none.
    ///
    /// # Errors
    /// Two have the same name, one that is there has it, or a name is too long.
    pub fn add_views(&self, views: Vec<Export>) -> Result<Vec<Arc<Export>>, ExportError> {
        let mut lists = self.lists.lock();
        let before = lists.views.len();
        for view in views {
            if let Err(error) = lists.check(&view) {
                lists.views.truncate(before);
                return Err(error);
            }
            lists.views.push(Arc::new(view));
        }
        Ok(lists.views[before..].to_vec())
    }

    /// Removes views. Clients that have chosen one keep it.
    pub fn remove_views(&self, views: &[Arc<Export>]) {
        self.lists.lock().views.retain(|view| !views.iter().any(|other| Arc::ptr_eq(other, view)));
    }

    /// The export of that name, unless it is closed.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        let lists = self.lists.lock();
        let of = |name: &str| lists.disks.iter().find(|export| export.name() == name).cloned();
        let by_default = || self.first.as_deref().filter(|_| name.is_empty()).and_then(of);
        of(name).or_else(by_default).filter(|export| !export.is_closed())
    }

    /// The export or view of that name, unless it is closed.
    pub(crate) fn find_any(&self, name: &str) -> Option<Arc<Export>> {
        self.find(name).or_else(|| {
            let lists = self.lists.lock();
            lists.views.iter().find(|view| view.name() == name && !view.is_closed()).cloned()
        })
    }

    /// All there are now, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = Arc<Export>> + use<> {
        let disks = self.lists.lock().disks.clone();
        disks.into_iter()
    }

    /// Exports and views that are there now.
    pub(crate) fn all(&self) -> Vec<Arc<Export>> {
        self.lists.lock().all().cloned().collect()
    }

    /// Number of the exports.
    pub fn len(&self) -> usize {
        self.lists.lock().disks.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets all requests go that wait for limits, and all that come: the server is about to end, and they are answered first.
    pub fn end_limits(&self) {
        self.iter().for_each(|export| export.end_limits());
    }
}
