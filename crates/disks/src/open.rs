//! Images by their names.

use crate::context::Context;
use crate::error::DiskError;
use crate::graph::filtered;
use crate::image_opts::ImageOpts;
use crate::image_spec::ImageSpec;
use crate::packed::{Order, PackedChoice, Reader, prepare};
use crate::reference::Reference;
use crate::reference_defaults::allowed_references;
use crate::remote_names::opener;
use crate::watch::Watch;
use crate::words::ReferenceRule;
use std::ffi::OsStr;
use std::path::Path;
use zebu_engine::jobs::Cancel;
use zebu_engine::storage::Worker;
use zebu_engine::{Format, Image, OpenOptions};
use zebu_store::points::PointName;

impl Context {
    /// Opens the image that `name` leads to: a path, a URL, `json:` with options, or a packed file, which is unpacked first. An
    /// image may name others by the defaults of the system.
    ///
    /// It blocks until the image is open.
    ///
    /// # Errors
    /// The name can't be read, or the image can't be opened.
    pub fn open(&self, worker: &Worker, name: &OsStr, options: OpenOptions) -> Result<Image, DiskError> {
        let mut spec = self.describe(name, self.with_references(options, &[])?)?;
        let reader = || Ok::<_, DiskError>(Reader { order: Order::Any, target_size: None });
        let watch = Watch::new(Cancel::default(), &|_, _, _| {});
        prepare(self, &PackedChoice::default(), &mut spec, &[], reader, &watch)?;
        let image = worker.block_on(Image::open(worker, &spec.path, &spec.options))?;
        if spec.filters.is_empty() { Ok(image) } else { Ok(filtered(&self.disks, worker, &spec, image)?.top) }
    }

    /// The options with what an image may name, as `rules` say, or the defaults of the system where there are none.
    ///
    /// # Errors
    /// The rules contradict each other, or those of the system can't be read.
    pub fn with_references(
        &self,
        options: OpenOptions,
        rules: &[ReferenceRule],
    ) -> Result<OpenOptions, DiskError> {
        Ok(options
            .refs(allowed_references(self.dialect, rules)?)
            .remote(opener(self, rules)?)
            .probe(self.dialect.probe()))
    }

    /// Reads what `name` says of an image; `options` hold where it says nothing.
    ///
    /// # Errors
    /// The name can't be read.
    pub fn describe(&self, name: &OsStr, options: OpenOptions) -> Result<ImageSpec, DiskError> {
        let mut spec = ImageSpec::new(name.into(), options);
        self.describe_in(&mut spec, name).map_err(|reason| DiskError::of_name(name, reason))?;
        Ok(spec)
    }

    /// Puts what `name` says of an image over what is in `spec`.
    ///
    /// # Errors
    /// The name can't be read.
    pub fn describe_in(&self, spec: &mut ImageSpec, name: &OsStr) -> Result<(), String> {
        if let Some(opts) = name.to_str().and_then(|name| ImageOpts::of_json_name(self, name)) {
            return opts?.apply(self, spec);
        }
        spec.path = self.image_path(name)?;
        // The disk of a point or a stack is what its layers show. Its guest may have written anything there, even what looks like an image.
        if name.to_str().is_some_and(PointName::is_name) || self.is_stack(&spec.path) {
            spec.options.format.get_or_insert(Format::Raw);
        }
        Ok(())
    }

    /// Whether a name that was noted leads to the disk of a chain of blobs.
    fn is_stack(&self, path: &Path) -> bool {
        matches!(self.disks.names.named(path), Some(Reference::Remote(name)) if self.disks.remote.is_stack(&name))
    }
}
