//! `clone` where the file system shares no blocks, and of images that do not stand alone.

use crate::support::{
    Images, assert_same_bytes, disk, guest_bytes, on_worker, qemu_img, qemu_io, text, write_sparse,
};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use zebu_engine::jobs::{CloneMethod, CloneMode, CloneOptions, CloneReport, clone_image};
use zebu_engine::{Format, RefPolicy, Result};

fn clone(source: &Path, target: &Path, mode: CloneMode) -> Result<CloneReport> {
    let options = CloneOptions::default().mode(mode).refs(RefPolicy::All);
    on_worker(async |worker| clone_image(worker, source, target, &options).await)
}

#[test]
fn an_overlay_shows_the_source_and_takes_writes() {
    let images = Images::new();
    std::fs::create_dir(images.path("sub")).unwrap();
    let bytes = disk(31, 6000);
    let (plain, base) = (images.path("plain"), images.path("base"));
    write_sparse(&plain, &bytes);
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=32k", text(&plain), text(&base)]);
    for (target, backing) in [("clone", Path::new("base").to_owned()), ("sub/clone", images.path("base"))] {
        let target = images.path(target);
        let report = clone(&base, &target, CloneMode::Overlay).unwrap();
        let CloneMethod::Overlay { backing: found, .. } = &report.method else { panic!("{report:?}") };
        assert_eq!(
            std::fs::canonicalize(target.parent().unwrap().join(found)).unwrap(),
            base.canonicalize().unwrap()
        );
        assert_eq!(found.is_absolute(), backing.is_absolute());
        assert_eq!((report.format, report.virtual_size), (Format::Qcow2, bytes.len() as u64));
        assert_same_bytes(&guest_bytes(&target, "qcow2"), &bytes, "clone");
        qemu_io(&target, "qcow2", &["write -P 0x11 0 64k"]);
        qemu_img(&["check", "-f", "qcow2", text(&target)]);
        assert_same_bytes(&guest_bytes(&base, "qcow2"), &bytes, "source");
    }
}

#[test]
fn images_that_do_not_stand_alone_get_an_overlay() {
    let images = Images::new();
    let (base, top, data) = (images.path("base"), images.path("top"), images.path("data"));
    write_sparse(&base, &disk(32, 3000));
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&top)]);
    let external = images.path("external");
    let options = format!("data_file={}", text(&data));
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-o", &options, text(&base), text(&external)]);
    for (source, why) in [(&top, "backing file"), (&external, "data file")] {
        let target = images.path("clone");
        let report = clone(source, &target, CloneMode::Auto).unwrap();
        let CloneMethod::Overlay { reason, .. } = &report.method else { panic!("{report:?}") };
        assert!(reason.contains(why), "{reason}");
        assert_same_bytes(&guest_bytes(&target, "qcow2"), &guest_bytes(source, "qcow2"), "clone");
        std::fs::remove_file(&target).unwrap();
        assert!(clone(source, &target, CloneMode::Reflink).is_err());
        assert!(!target.exists());
    }
    let mut left = images.names();
    left.sort();
    assert_eq!(left, ["base", "data", "external", "top"]);
}

#[test]
fn a_clone_is_for_no_other_eyes_than_its_source() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    std::fs::write(&source, vec![1; 1 << 20]).unwrap();
    std::fs::set_permissions(&source, std::fs::Permissions::from_mode(0o400)).unwrap();
    let report = clone(&source, &target, CloneMode::Auto).unwrap();
    let mode = std::fs::metadata(&target).unwrap().permissions().mode() & 0o777;
    match report.method {
        CloneMethod::Reflink => assert_eq!(mode, 0o600),
        // An overlay holds nothing of the source.
        CloneMethod::Overlay { .. } => assert_eq!(mode & 0o200, 0o200),
        other => panic!("{other:?}"),
    }
}
