//! Jobs on file systems that fill up, and on file systems that share blocks.

use crate::mounted::Mounted;
use crate::support::{Images, assert_same_bytes, disk, on_worker, qemu_img, text, write_sparse};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zebu_engine::jobs::{
    CloneMethod, CloneMode, CloneOptions, ConvertOptions, ConvertReport, ConvertTarget, CopyMode, NewTarget,
    ReadErrors, clone_image, convert,
};
use zebu_engine::{CacheMode, CreateOptions, ErrorKind, Format, Image, OpenOptions, Preallocation, Result};

fn convert_one(
    source: (&Path, Format),
    target: (&Path, Format),
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    on_worker(async |worker| {
        let open = OpenOptions::default().format(Some(source.1));
        let image = Image::open(worker, source.0, &open).await?;
        let new = NewTarget::new(target.0.to_owned())
            .create(CreateOptions::default().format(target.1))
            .open(OpenOptions::default().cache(CacheMode::Writeback));
        convert(worker, &[image], ConvertTarget::New(Box::new(new)), options).await
    })
}

fn with(copy: CopyMode) -> ConvertOptions {
    ConvertOptions::default().copy(copy)
}

#[test]
fn a_full_file_system_is_an_error_and_nothing_stays() {
    let images = Images::new();
    let Some(small) = Mounted::tmpfs(8 << 20) else { return };
    let source = images.path("source");
    std::fs::write(&source, vec![1; 32 << 20]).unwrap();
    for format in [Format::Raw, Format::Qcow2] {
        let error =
            convert_one((&source, Format::Raw), (&small.path("target"), format), &with(CopyMode::Auto))
                .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{format:?}: {error}");
        assert_eq!(small.names(), [""; 0], "{format:?}");
    }
}

#[test]
fn reflinks_share_what_they_can_and_copy_the_rest() {
    let images = Images::new();
    let Some(xfs) = Mounted::xfs(&images.path("fs"), 600 << 20) else { return };
    let source = xfs.path("source");
    let mut bytes = disk(21, 200_000);
    bytes[20 << 20..60 << 20].fill(9);
    bytes.truncate((90 << 20) + 512);
    write_sparse(&source, &bytes);
    for format in [Format::Raw, Format::Qcow2] {
        for copy in [CopyMode::Auto, CopyMode::Reflink] {
            let target = xfs.path(&format!("target {format:?} {copy:?}"));
            let before = xfs.used();
            let report = convert_one((&source, Format::Raw), (&target, format), &with(copy)).unwrap();
            let grown = xfs.used().saturating_sub(before);
            assert!(report.reflinked >= 40 << 20, "{format:?} {copy:?}: {report:?}");
            // XFS gives small writes a MiB each (the extent size hint), but shares the large ranges.
            assert!(
                grown < report.reflinked / 2,
                "{format:?} {copy:?}: {grown} bytes more in use, {report:?}"
            );
            if format == Format::Qcow2 {
                qemu_img(&["compare", "-f", "raw", "-F", "qcow2", text(&source), text(&target)]);
                qemu_img(&["check", "-f", "qcow2", text(&target)]);
            }
            // And back: the same bytes, again shared.
            let back = xfs.path("back");
            let report = convert_one((&target, format), (&back, Format::Raw), &with(copy)).unwrap();
            assert!(report.reflinked >= 40 << 20, "{format:?} {copy:?} back: {report:?}");
            assert_same_bytes(&std::fs::read(&back).unwrap(), &bytes, &format!("{format:?} {copy:?}"));
            std::fs::remove_file(&back).unwrap();
        }
    }
}

#[test]
fn the_kernel_copies_ranges_into_every_format() {
    let images = Images::new();
    let source = images.path("source");
    let mut bytes = disk(23, 60_000);
    bytes.truncate((20 << 20) + 512);
    write_sparse(&source, &bytes);
    for format in [Format::Raw, Format::Qcow2] {
        let (target, back) = (images.path("target"), images.path("back"));
        let report = convert_one((&source, Format::Raw), (&target, format), &with(CopyMode::Range)).unwrap();
        assert!(report.range_copied > 4 << 20, "{format:?}: {report:?}");
        if format == Format::Qcow2 {
            qemu_img(&["check", "-f", "qcow2", text(&target)]);
        } else {
            assert_eq!(report.written, 0);
        }
        let report = convert_one((&target, format), (&back, Format::Raw), &with(CopyMode::Range)).unwrap();
        assert!(report.range_copied > 4 << 20 && report.written == 0, "{format:?} back: {report:?}");
        assert_same_bytes(&std::fs::read(&back).unwrap(), &bytes, &format!("{format:?}"));
        for file in [target, back] {
            std::fs::remove_file(file).unwrap();
        }
    }
}

#[test]
fn what_the_kernel_does_not_copy_goes_through_buffers() {
    let images = Images::new();
    let Some(other) = Mounted::tmpfs(64 << 20) else { return };
    let source = images.path("source");
    std::fs::write(&source, vec![3; (40 << 20) + 512]).unwrap();
    for format in [Format::Raw, Format::Qcow2] {
        let target = other.path("target");
        let report = convert_one((&source, Format::Raw), (&target, format), &with(CopyMode::Range)).unwrap();
        assert_eq!((report.range_copied, report.written), (0, (40 << 20) + 512), "{format:?}");
        let name = if format == Format::Raw { "raw" } else { "qcow2" };
        qemu_img(&["compare", "-f", "raw", "-F", name, text(&source), text(&target)]);
        // Nothing was set aside for what the kernel refused. (What the file has grown by ahead of use takes no blocks.)
        assert!(std::fs::metadata(&target).unwrap().blocks() * 512 < 41 << 20);
        std::fs::remove_file(target).unwrap();
    }
}

/// To share a block that can't be read is not to save it.
#[test]
fn what_can_not_be_read_is_salvaged_where_blocks_can_be_shared() {
    let images = Images::new();
    let image = images.path("fs");
    let Some(btrfs) = Mounted::btrfs(&image, 300 << 20) else { return };
    let bytes: Vec<u8> = (0..4u32 << 20).flat_map(|n| (n / 64).to_le_bytes()).collect();
    std::fs::write(btrfs.path("source"), &bytes).unwrap();
    btrfs.used();
    drop(btrfs);
    // A byte of the only copy changes, so that its checksum is wrong.
    let place = 3 << 20;
    let mut device = std::fs::read(&image).unwrap();
    let wanted = &bytes[place..place + 1024];
    let block = device.chunks(4096).position(|block| block.starts_with(wanted)).unwrap();
    device[block * 4096] ^= 1;
    std::fs::write(&image, device).unwrap();
    let Some(btrfs) = Mounted::btrfs_again(&image) else { return };
    let source = btrfs.path("source");
    assert!(std::fs::read(&source).is_err());
    for format in [Format::Raw, Format::Qcow2] {
        let target = btrfs.path("target");
        let salvage = ConvertOptions::default().read_errors(ReadErrors::Zero);
        let report = convert_one((&source, Format::Raw), (&target, format), &salvage).unwrap();
        assert_eq!((report.unreadable, report.reflinked), (4096, 0), "{format:?}");
        assert_eq!(report.unreadable_ranges[0].offset, place as u64);
        let back = btrfs.path("back");
        convert_one((&target, format), (&back, Format::Raw), &with(CopyMode::Buffers)).unwrap();
        let mut expected = bytes.clone();
        expected[place..place + 4096].fill(0);
        assert_same_bytes(&std::fs::read(&back).unwrap(), &expected, "salvaged");
        for copy in [CopyMode::Reflink, CopyMode::Range] {
            let options = salvage.clone().copy(copy);
            let error =
                convert_one((&source, Format::Raw), (&btrfs.path("none"), format), &options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{copy:?}");
        }
        for file in [target, back] {
            std::fs::remove_file(file).unwrap();
        }
    }
}

#[test]
fn space_that_was_set_aside_is_not_given_up_for_shared_blocks() {
    let images = Images::new();
    let Some(xfs) = Mounted::xfs(&images.path("fs"), 400 << 20) else { return };
    let source = xfs.path("source");
    std::fs::write(&source, vec![5; 20 << 20]).unwrap();
    let empty = xfs.used();
    for preallocation in [Preallocation::Falloc, Preallocation::Full] {
        for format in [Format::Raw, Format::Qcow2] {
            let target = xfs.path("target");
            // What was removed is free some time after.
            let mut before = xfs.used();
            let begin = std::time::Instant::now();
            while before > empty + (1 << 20) {
                assert!(begin.elapsed().as_secs() < 600, "{before} bytes stay in use");
                std::thread::sleep(std::time::Duration::from_millis(50));
                before = xfs.used();
            }
            on_worker(async |worker| {
                let open = OpenOptions::default().format(Some(Format::Raw));
                let image = Image::open(worker, &source, &open).await.unwrap();
                let new = NewTarget::new(target.clone())
                    .create(CreateOptions::default().format(format).preallocation(preallocation))
                    .open(OpenOptions::default());
                let target = ConvertTarget::New(Box::new(new));
                convert(worker, &[image], target, &ConvertOptions::default()).await.unwrap()
            });
            let grown = xfs.used().saturating_sub(before);
            assert!(grown >= 20 << 20, "{preallocation:?} {format:?}: {grown} bytes more in use");
            std::fs::remove_file(&target).unwrap();
        }
    }
}

#[test]
fn a_reflink_that_was_asked_for_and_can_not_be_made_is_an_error() {
    let images = Images::new();
    let Some(small) = Mounted::tmpfs(32 << 20) else { return };
    let (source, target) = (small.path("source"), small.path("target"));
    std::fs::write(&source, vec![1; 8 << 20]).unwrap();
    let reflink = with(CopyMode::Reflink);
    let error = convert_one((&source, Format::Raw), (&target, Format::Raw), &reflink).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(small.names(), ["source"]);
    // Without being asked for, it is no error that there is none.
    let report = convert_one((&source, Format::Raw), (&target, Format::Raw), &with(CopyMode::Auto)).unwrap();
    assert_eq!((report.written, report.reflinked), (8 << 20, 0));
    drop(images);
}

#[test]
fn a_clone_shares_blocks_with_its_source_and_nothing_else() {
    let images = Images::new();
    let Some(xfs) = Mounted::xfs(&images.path("fs"), 400 << 20) else { return };
    let (source, target) = (xfs.path("source"), xfs.path("clone"));
    let mut bytes = disk(22, 60_000);
    bytes.extend([7; 512]);
    write_sparse(&source, &bytes);
    let before = xfs.used();
    let options = CloneOptions::default().format(Some(Format::Raw));
    let report = on_worker(async |worker| clone_image(worker, &source, &target, &options).await.unwrap());
    assert_eq!(report.method, CloneMethod::Reflink);
    assert_eq!((report.format, report.virtual_size), (Format::Raw, bytes.len() as u64));
    assert!(xfs.used().saturating_sub(before) < 1 << 20);
    assert_same_bytes(&std::fs::read(&target).unwrap(), &bytes, "clone");
    std::fs::write(&source, b"overwritten").unwrap();
    assert_same_bytes(&std::fs::read(&target).unwrap(), &bytes, "clone after the source was overwritten");

    let again = on_worker(async |worker| clone_image(worker, &source, &target, &options).await.unwrap_err());
    assert_eq!(again.kind(), ErrorKind::InvalidArgument);
    assert_eq!(xfs.names(), ["clone", "source"]);
}

#[test]
fn only_a_reflink_was_wanted_and_there_is_none() {
    let images = Images::new();
    let Some(small) = Mounted::tmpfs(32 << 20) else { return };
    let (source, target) = (small.path("source"), small.path("clone"));
    std::fs::write(&source, vec![1; 1 << 20]).unwrap();
    let options = CloneOptions::default().format(Some(Format::Raw)).mode(CloneMode::Reflink);
    let error = on_worker(async |worker| clone_image(worker, &source, &target, &options).await.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(small.names(), ["source"]);
    drop(images);
}
