//! Sources whose length shows when they have been read.

use crate::support::{Images, disk, guest_bytes, on_worker, write_sparse};
use std::path::Path;
use std::sync::{Arc, Mutex};
use zebu_engine::jobs::{
    ConvertOptions, ConvertReport, ConvertTarget, CopyMode, JobControl, NewTarget, ReadErrors, SourceEnd,
    TargetClusters, TargetContent, convert,
};
use zebu_engine::{
    Access, CreateOptions, Error, ErrorKind, Format, Image, OpenOptions, Preallocation, Result,
};

/// Bytes of the disk, and of the source, which is zero behind it.
const LEN: u64 = (5 << 20) + 1536;
const MOST: u64 = 1 << 30;

fn options(end: &SourceEnd) -> ConvertOptions {
    ConvertOptions::default().workers(3).copy(CopyMode::Buffers).source_end(end.clone())
}

fn known() -> SourceEnd {
    let end = SourceEnd::new();
    end.set(LEN);
    end
}

fn new(path: &Path, create: CreateOptions) -> ConvertTarget {
    ConvertTarget::New(Box::new(NewTarget::new(path).create(create)))
}

async fn open(worker: &zebu_engine::storage::Worker, path: &Path, format: Format, access: Access) -> Image {
    Image::open(worker, path, &OpenOptions::default().format(format).access(access)).await.unwrap()
}

fn converted(source: &Path, target: ConvertTarget, options: &ConvertOptions) -> Result<ConvertReport> {
    on_worker(async |worker| {
        let source = open(worker, source, Format::Raw, Access::ReadOnly).await;
        convert(worker, &[source], target, options).await
    })
}

fn source(images: &Images) -> (std::path::PathBuf, Vec<u8>) {
    let bytes = disk(3, LEN / 512);
    let path = images.path("source");
    write_sparse(&path, &bytes);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(MOST).unwrap();
    (path, bytes)
}

#[test]
fn a_new_target_is_as_long_as_the_source_was() {
    let images = Images::new();
    let (source, bytes) = source(&images);
    assert_eq!(bytes.len() as u64, LEN);
    for sparse_size in [0, 4096] {
        let totals = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&totals);
        let control = JobControl::default().progress(move |p| seen.lock().unwrap().push((p.done, p.total)));
        let raw = images.path("raw");
        let options = options(&known()).sparse_size(sparse_size).control(control);
        let report =
            converted(&source, new(&raw, CreateOptions::default().format(Format::Raw)), &options).unwrap();
        assert_eq!(report.total, LEN);
        assert!(std::fs::read(&raw).unwrap() == bytes);
        let totals = totals.lock().unwrap();
        assert_eq!(totals.last(), Some(&(LEN, LEN)));
        std::fs::remove_file(raw).unwrap();
    }
    for clusters in [TargetClusters::Plain, TargetClusters::Compressed] {
        let qcow2 = images.path("qcow2");
        let create = CreateOptions::default().format(Format::Qcow2);
        converted(&source, new(&qcow2, create), &options(&known()).clusters(clusters)).unwrap();
        on_worker(async |worker| {
            let image = open(worker, &qcow2, Format::Qcow2, Access::ReadOnly).await;
            assert_eq!(image.virtual_size(), LEN);
        });
        assert!(guest_bytes(&qcow2, "qcow2") == bytes, "{clusters:?}");
        std::fs::remove_file(qcow2).unwrap();
    }
    let sized = images.path("sized");
    let create = CreateOptions::default().format(Format::Raw).size(MOST);
    converted(&source, new(&sized, create), &options(&known())).unwrap();
    assert_eq!(std::fs::metadata(&sized).unwrap().len(), MOST);
}

#[test]
fn a_target_that_exists_is_written_up_to_the_end_alone() {
    let images = Images::new();
    let (source, mut expected) = source(&images);
    let target = images.path("target");
    expected.resize(8 << 20, 7);
    std::fs::write(&target, vec![7; 8 << 20]).unwrap();
    std::fs::File::options().write(true).open(&source).unwrap().set_len(8 << 20).unwrap();
    on_worker(async |worker| {
        let from = open(worker, &source, Format::Raw, Access::ReadOnly).await;
        let image = open(worker, &target, Format::Raw, Access::ReadWrite).await;
        let to = ConvertTarget::Existing { image: image.clone(), content: TargetContent::Unknown };
        convert(worker, &[from], to, &options(&known())).await.unwrap();
        image.close(worker).await.unwrap();
    });
    assert!(std::fs::read(&target).unwrap() == expected);
}

#[test]
fn targets_that_must_know_the_length_first_are_refused() {
    let images = Images::new();
    let (source, _) = source(&images);
    let path = images.path("target");
    let kind = |done: Result<ConvertReport>| done.map_err(|e: Error| e.kind()).err();
    let refused = Some(ErrorKind::InvalidArgument);
    let raw = || CreateOptions::default().format(Format::Raw);
    for create in [
        raw().preallocation(Preallocation::Falloc),
        CreateOptions::default().format(Format::from_name("vdi").unwrap()),
    ] {
        assert_eq!(kind(converted(&source, new(&path, create), &options(&known()))), refused);
    }
    for options in [options(&known()).range(0..512), options(&known()).read_errors(ReadErrors::Zero)] {
        assert_eq!(kind(converted(&source, new(&path, raw()), &options)), refused);
    }
    assert!(!path.exists());
}
