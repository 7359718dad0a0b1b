//! Images of several blobs that stand on each other: one qcow2 file is made of them.

use crate::blob_digests;
use crate::failure::Failure;
use crate::watch::Watch;
use std::ffi::OsStr;
use std::path::Path;
use zebu_disks::{Context, printable};
use zebu_engine::jobs::{ConvertOptions, ConvertTarget, NewTarget, convert};
use zebu_engine::storage::{Worker, WorkerConfig};
use zebu_engine::{Access, OpenOptions};
use zebu_oci::{OciName, Readers};

/// Makes a qcow2 image of the disk that `name` leads to; its length.
///
/// # Errors
/// The target is there, or can't be written; the image can't be read, or is not what its digests say.
pub(super) fn pull(name: &OciName, target: &Path, context: &Context, watch: &Watch) -> Result<u64, Failure> {
    let fail = |reason: &str| Failure::new(format!("could not pull '{name}': {}", printable(reason)));
    if target.symlink_metadata().is_ok() {
        return Err(fail(&format!("'{}' exists already", target.display())));
    }
    context.disks.remote.expect(Readers::All);
    let config = WorkerConfig::default();
    let worker = Worker::new(&config)?;
    let options = OpenOptions::default().access(Access::ReadOnly);
    let source = context.open(&worker, OsStr::new(&name.to_string()), options)?;
    let options = ConvertOptions::default().worker_config(config).control(watch.control());
    let new = ConvertTarget::New(Box::new(NewTarget::new(target.to_owned())));
    let copied = worker.block_on(convert(&worker, std::slice::from_ref(&source), new, &options));
    let closed = worker.block_on(source.close(&worker));
    copied.and(closed).map_err(|error| {
        context.disks.remote.tell_given_up();
        Failure::during(&format!("could not pull '{name}'"), &error)
    })?;
    blob_digests::compare(context, watch, [target])?;
    target.metadata().map(|found| found.len()).map_err(|error| fail(&error.to_string()))
}
