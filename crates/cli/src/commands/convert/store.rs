//! `zebu convert` to an object in a store: what is written in order, without a copy on this machine.

use super::ConvertArgs;
use crate::create_opts::CreateOpts;
use crate::failure::Failure;
use crate::remote_disk::http_options;
use crate::session::Session;
use crate::store_target::{StoreTarget, divide};
use crate::watch::Watch;
use zebu::jobs::{
    ConvertOptions, ConvertReport, ConvertTarget, StreamedTarget, TargetContent, convert, measure_image,
};
use zebu::storage::{File, Worker};
use zebu::{Access, CreateOptions, Format, Image, OpenOptions, OpenedFile, Preallocation, ZeroMode};
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
        return refuse("-n: it is always a new one, which takes the place of another at the end");
    }
    if args.backing.is_some() || opts.backing_file.is_some() {
        return refuse("a backing file (-B)");
    }
    if args.target_cache.is_some() {
        return refuse("a cache mode (-t)");
    }
    let create = opts.create_options(args.target_format());
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
            let target =
                StoreTarget::begin(name, UploadOptions::new(parts, most, Length::Growing, http_options()))?;
            let new = StreamedTarget::new(target.file()?).create(create).compress(args.compression.options());
            let target_of_job = ConvertTarget::Stream(Box::new(new));
            let done = worker.block_on(convert(worker, images, target_of_job, &options));
            target.end(done.map_err(|error| failed(images, &error)))
        }
        other => refuse(&format!("the format {}: raw and qcow2 are written in order", other.name())),
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
    let target = StoreTarget::begin(name, UploadOptions::new(parts, size, Length::Fixed, http_options()))?;
    let file = target.file()?;
    let done = worker.block_on(write_raw(worker, images, file, size, options));
    target.end(done.map_err(|error| failed(images, &error)))
}

/// Writes all `size` bytes of a raw disk into a file that is written once.
pub(super) async fn write_raw(
    worker: &Worker,
    images: &[Image],
    file: File,
    size: u64,
    options: &ConvertOptions,
) -> zebu::Result<ConvertReport> {
    let total: u64 = images.iter().map(Image::virtual_size).sum();
    let open = OpenOptions::default().access(Access::ReadWrite);
    let image = Image::open_files(worker, vec![OpenedFile::new(file, Format::Raw)], &open).await?;
    let to = ConvertTarget::Existing { image: image.clone(), content: TargetContent::Unknown };
    let report = convert(worker, images, to, options).await?;
    if total < size {
        image.write_zeroes(worker, total, size - total, ZeroMode::Unmap).await?;
    }
    image.close(worker).await?;
    Ok(report)
}

/// The failure of a job, in the words of its side.
pub(super) fn failed(images: &[Image], error: &zebu::Error) -> Failure {
    match error.image() {
        Some(image) if images.iter().any(|source| source.path() == image) => {
            Failure::during("error while reading the source", error)
        }
        _ => Failure::during("error while converting", error),
    }
}
