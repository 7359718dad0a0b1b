//! `zebu backup` to an object in a store: written in order, without a copy on this machine.

use super::BackupArgs;
use crate::failure::Failure;
use crate::session::Session;
use crate::store_target::{StoreTarget, divide};
use zebu_engine::jobs::{BackupOptions, BackupReport, backup_streamed, measure_image};
use zebu_engine::{CreateOptions, Format, Image};
use zebu_store::{Length, StoreName, UploadOptions};

/// Refuses what a backup in a store can't have, before anything is opened.
pub(super) fn check(args: &BackupArgs) -> Result<(), Failure> {
    let refused = [
        (args.previous.is_some(), "an earlier backup below it (--previous)"),
        (args.bitmap.is_some(), "a bitmap that says what changed (--bitmap)"),
        (args.target_cache.is_some(), "a cache mode (-t)"),
        (args.resume, "--resume: the next run resumes by itself"),
    ];
    match refused.iter().find(|(is_wanted, _)| *is_wanted) {
        None => Ok(()),
        Some((_, what)) => Err(Failure::usage(format!(
            "'{}': a backup that is an object in a store can't have {what}",
            args.target.display()
        ))),
    }
}

/// Backs the image up into a new object.
pub(super) fn back_up(
    session: &Session,
    image: &Image,
    name: StoreName,
    mut options: BackupOptions,
) -> Result<BackupReport, Failure> {
    let worker = session.worker();
    let failed = |error: zebu_engine::Error| match error.image() {
        Some(path) if path == image.path() => Failure::during("error while reading the source", &error),
        _ => Failure::during("error while making the backup", &error),
    };
    let (reading, parts) = divide(options.buffer_memory);
    options.buffer_memory = reading;
    let create = CreateOptions::default().format(Format::Qcow2).cluster_size(options.cluster_size);
    let measured = worker.block_on(measure_image(worker, image, &create, &options.control));
    let most = measured.map_err(failed)?.required;
    let disks = &session.context().disks;
    let target = StoreTarget::begin(
        &disks.uploads,
        name,
        UploadOptions::new(parts, most, Length::Growing, disks.remote.http_options()),
    )?;
    target.must_not_exist()?;
    let file = target.file()?;
    let done = worker.block_on(backup_streamed(worker, image, file, &options)).map_err(failed);
    // The manifest comes after the object that it is of.
    target.end(done)?.publish().map_err(failed)
}
