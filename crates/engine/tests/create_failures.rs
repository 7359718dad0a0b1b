//! Creating an image that fails leaves no file behind, and keeps what was there before.

use std::path::Path;
use zebu_engine::storage::{Worker, WorkerConfig};
use zebu_engine::{CreateOptions, Format, Image, Result};

fn create(path: &Path, options: &CreateOptions) -> Result<()> {
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    worker.block_on(Image::create(&worker, path, options))
}

/// More than any file system here has: the tables' or the data's growth fails after the file was made.
fn too_large() -> CreateOptions {
    CreateOptions::default().format(Format::Raw).size(Some(i64::MAX as u64 / 512 * 512))
}

#[test]
fn what_was_made_goes_and_what_was_there_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new.raw");
    create(&path, &too_large()).unwrap_err();
    assert!(!path.exists(), "a file was left behind");
    std::fs::write(&path, b"somebody's").unwrap();
    create(&path, &too_large()).unwrap_err();
    assert!(path.exists(), "a file that was there before is gone");
}

#[test]
fn a_data_file_goes_with_its_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new.qcow2");
    let options = CreateOptions::default()
        .size(1 << 20)
        // Made after the image file; raw images know no such thing.
        .data_file("no/such/folder/data".to_owned());
    create(&path, &options).unwrap_err();
    let too_large = too_large().data_file(Some("data".to_owned())).format(Format::Qcow2);
    create(&path, &too_large).unwrap_err();
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}
