//! What is exported.

use crate::error::ExportError;
use crate::metrics::ExportMetrics;
use crate::nbd::MAX_NAME;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use zebu::{Access, Format, Image};

/// Whoever tells clients of a new size.
pub(crate) trait SizeWatcher: std::fmt::Debug + Send + Sync {
    fn size_changed(&self);
}

/// An image under a name.
#[derive(Debug)]
pub struct Export {
    name: String,
    description: String,
    image: Image,
    access: Access,
    cache_is_of_use: bool,
    zeroes_fast: bool,
    bitmaps: Vec<String>,
    metrics: ExportMetrics,
    watchers: Mutex<Vec<Weak<dyn SizeWatcher>>>,
}

impl Export {
    /// Exports `image`, which must have been opened for writing if `access` is [`Access::ReadWrite`]. The caller closes
    /// it when nothing serves it any more.
    pub fn new(name: impl Into<String>, image: &Image, access: Access) -> Self {
        // Of version 2, zeroes can't be told from data without writing them. A raw file is punched, which all file
        // systems that matter can; devices write zeroes in their own time.
        let info = image.info().ok();
        let zeroes_fast = match image.format() {
            Format::Qcow2 => info.and_then(|info| info.qcow2).is_some_and(|qcow2| qcow2.version >= 3),
            Format::Raw => std::fs::metadata(image.path()).is_ok_and(|metadata| metadata.is_file()),
        };
        Self {
            name: name.into(),
            description: String::new(),
            image: image.clone(),
            access,
            cache_is_of_use: true,
            zeroes_fast,
            bitmaps: Vec::new(),
            metrics: ExportMetrics::default(),
            watchers: Mutex::default(),
        }
    }

    /// With a description, which clients may ask for.
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// Says that reading ahead is of no use, since the image is open with O_DIRECT.
    pub fn without_page_cache(mut self) -> Self {
        self.cache_is_of_use = false;
        self
    }

    /// With persistent dirty bitmaps of the image, which clients may look at.
    pub fn with_bitmaps(mut self, names: impl IntoIterator<Item = String>) -> Self {
        self.bitmaps = names.into_iter().collect();
        self
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The description; empty if there is none.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The image.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Whether clients may write.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Names of the bitmaps that clients may look at.
    pub fn bitmaps(&self) -> &[String] {
        &self.bitmaps
    }

    /// What clients did.
    pub fn metrics(&self) -> &ExportMetrics {
        &self.metrics
    }

    /// Tells clients that can be told (guests over vhost-user-blk) that the image has a new size. To be called after
    /// [`Image::resize`].
    pub fn announce_size(&self) {
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for watcher in watchers.iter().filter_map(Weak::upgrade) {
            watcher.size_changed();
        }
    }

    /// Has somebody told of new sizes as long as it lives.
    #[cfg_attr(not(feature = "vhost-user"), expect(dead_code, reason = "other clients can't be told"))]
    pub(crate) fn watch_size(&self, watcher: Weak<dyn SizeWatcher>) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Whether what is read stays in the page cache.
    pub(crate) fn has_page_cache(&self) -> bool {
        self.cache_is_of_use
    }

    /// Whether zeroing is never as slow as writing.
    pub(crate) fn zeroes_fast(&self) -> bool {
        self.zeroes_fast
    }
}

/// All that a server exports; cheap to clone. The first one is also found under the empty name.
#[derive(Debug, Clone)]
pub struct Exports(Arc<[Arc<Export>]>);

impl Exports {
    /// Exports under different names.
    ///
    /// # Errors
    /// Two have the same name, or one is too long.
    pub fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
        for (index, export) in exports.iter().enumerate() {
            if export.name.len() > MAX_NAME {
                return Err(ExportError::LongName(export.name.clone()));
            }
            if exports[..index].iter().any(|other| other.name == export.name) {
                return Err(ExportError::DuplicateName(export.name.clone()));
            }
        }
        Ok(Self(exports.into_iter().map(Arc::new).collect()))
    }

    /// The export of that name.
    pub fn find(&self, name: &str) -> Option<&Arc<Export>> {
        self.0
            .iter()
            .find(|export| export.name == name)
            .or_else(|| if name.is_empty() { self.0.first() } else { None })
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Export>> {
        self.0.iter()
    }
}
