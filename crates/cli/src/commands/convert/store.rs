//! `zebu convert` to an object in a store: what is written in order, without a copy on this machine.

use super::args::ConvertArgs;
use super::written_once::{failed, write_raw};
use crate::create_opts::CreateOpts;
use crate::failure::Failure;
use crate::session::Session;
use crate::store_target::{StoreTarget, divide};
use crate::watch::Watch;
use zebu_engine::jobs::{
    ConvertOptions, ConvertReport, ConvertTarget, StreamedTarget, convert, measure_image,
};
use zebu_engine::{CreateOptions, Format, Image, Preallocation};
use zebu_store::{Length, StoreName, UploadOptions};

/// Converts into a new object, which takes the place of one of that name at the end.
pub(super) fn convert_to_object(
    args: &ConvertArgs,
    opts: &CreateOpts,
    session: &Session,
    watch: &Watch,
    images: &[Image],
    name: StoreName,
    mut options: ConvertOptions,
) -> Result<ConvertReport, Failure> {
    let refuse =
        |what: &str| Err(Failure::usage(format!("'{name}': an object in a store can't have {what}")));
    if args.no_create {
        return refuse("-n: it is always a new one, which replaces an existing one at the end");
    }
    if args.backing.is_some() || opts.backing_file.is_some() {
        return refuse("a backing file (-B)");
    }
    if args.target_cache.is_some() {
        return refuse("a cache mode (-t)");
    }
    let create = opts.create_options(session.dialect(), args.target_format());
    let total: u64 = images.iter().map(Image::virtual_size).sum();
    let size = create.size.unwrap_or(total).next_multiple_of(512);
    if size < total {
        return Err(Failure::new(format!("'{name}': output file is smaller than input file")));
    }
    let (reading, parts) = divide(args.buffer_memory);
    options.buffer_memory = reading;
    match args.target_format() {
        Format::Raw => raw(session, images, name, &create, size, parts, &options),
        Format::Qcow2 => {
            let worker = session.worker();
            let measure = async |image: &Image| measure_image(worker, image, &create, &watch.control()).await;
            let mut most = 0u64;
            for image in images {
                let measured = worker.block_on(measure(image));
                most = most.saturating_add(
                    measured.map_err(|e| Failure::during("error while reading the source", &e))?.required,
                );
            }
            let disks = &session.context().disks;
            let target = StoreTarget::begin(
                &disks.uploads,
                name,
                UploadOptions::new(parts, most, Length::Growing, disks.remote.http_options()),
            )?;
            let new = StreamedTarget::new(target.file()?).create(create).compress(args.compression.options());
            let target_of_job = ConvertTarget::Stream(Box::new(new));
            let done = worker.block_on(convert(worker, images, target_of_job, &options));
            target.end(done.map_err(|error| failed(images, &error)))
        }
        other => refuse(&format!("the format {}: only raw and qcow2 can be written in order", other.name())),
    }
}

/// A raw image has every byte of the disk.
fn raw(
    session: &Session,
    images: &[Image],
    name: StoreName,
    create: &CreateOptions,
    size: u64,
    parts: u64,
    options: &ConvertOptions,
) -> Result<ConvertReport, Failure> {
    if create.preallocation != Preallocation::Off {
        return Err(Failure::usage(format!("'{name}': an object in a store can't have preallocation")));
    }
    let worker = session.worker();
    let disks = &session.context().disks;
    let target = StoreTarget::begin(
        &disks.uploads,
        name,
        UploadOptions::new(parts, size, Length::Fixed, disks.remote.http_options()),
    )?;
    let file = target.file()?;
    let done = worker.block_on(write_raw(worker, images, file, size, options));
    target.end(done.map_err(|error| failed(images, &error)))
}
