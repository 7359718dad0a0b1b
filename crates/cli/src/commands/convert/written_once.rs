//! Targets whose every byte is written once.

use crate::failure::Failure;
use zebu_engine::jobs::{ConvertOptions, ConvertReport, ConvertTarget, TargetContent, convert};
use zebu_engine::storage::{File, Worker};
use zebu_engine::{Access, Format, Image, OpenOptions, OpenedFile, ZeroMode};

/// Writes all `size` bytes of a raw disk into a file that is written once.
pub(super) async fn write_raw(
    worker: &Worker,
    images: &[Image],
    file: File,
    size: u64,
    options: &ConvertOptions,
) -> zebu_engine::Result<ConvertReport> {
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
pub(super) fn failed(images: &[Image], error: &zebu_engine::Error) -> Failure {
    match error.image() {
        Some(image) if images.iter().any(|source| source.path() == image) => {
            Failure::during("error while reading the source", error)
        }
        _ => Failure::during("error while converting", error),
    }
}
