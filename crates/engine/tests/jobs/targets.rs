//! `convert` to overlays, existing images and devices, from snapshots and from damaged images, against `qemu-img`.

use crate::mounted::LoopDevice;
use crate::support::{
    Images, Seeded, assert_same_bytes, disk, guest_bytes, on_worker, qemu_img, qemu_io, text, tool,
    write_sparse,
};
use crate::variants::scribble;
use std::io::Read;
use std::path::Path;
use zebu_engine::jobs::{
    ConvertOptions, ConvertReport, ConvertTarget, CopyMode, JobControl, NewTarget, ReadErrors, TargetContent,
    convert, measure_image,
};
use zebu_engine::{
    Access, CacheMode, CreateOptions, ErrorKind, Format, Image, OpenOptions, RefPolicy, Result,
};

fn qcow2(access: Access) -> OpenOptions {
    OpenOptions::default().format(Some(Format::Qcow2)).access(access)
}

fn raw(access: Access) -> OpenOptions {
    OpenOptions::default().format(Some(Format::Raw)).access(access)
}

fn new_image(path: &Path, create: CreateOptions) -> ConvertTarget {
    let open = OpenOptions::default().cache(CacheMode::Unsafe).refs(RefPolicy::All);
    ConvertTarget::New(Box::new(NewTarget::new(path.to_owned()).create(create).open(open)))
}

fn convert_new(
    source: (&Path, &OpenOptions),
    target: (&Path, CreateOptions),
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    on_worker(async |worker| {
        let image = Image::open(worker, source.0, source.1).await?;
        convert(worker, &[image], new_image(target.0, target.1), options).await
    })
}

fn over(backing: &Path, format: Format) -> CreateOptions {
    CreateOptions::default().backing(Some((text(backing).into(), format)))
}

#[test]
fn a_target_with_the_same_backing_file_gets_only_what_the_top_image_holds() {
    let images = Images::new();
    let (base, top) = (images.path("base"), images.path("top"));
    for (seed, sectors) in [(1, 12_000), (2, 12_001)] {
        let mut random = Seeded(seed);
        let bytes = disk(seed, sectors);
        write_sparse(&base, &bytes);
        let size = (bytes.len() + (1 << 20)).to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", text(&top), &size]);
        let mut longer = bytes.clone();
        longer.resize(bytes.len() + (1 << 20), 0);
        let expected = scribble(&top, &longer, &mut random);
        let (ours, theirs) = (images.path("ours"), images.path("theirs"));
        let target = (&*ours, over(&base, Format::Raw));
        let report =
            convert_new((&top, &qcow2(Access::ReadOnly)), target, &ConvertOptions::default()).unwrap();
        assert_same_bytes(&guest_bytes(&ours, "qcow2"), &expected, "ours");
        assert!(report.skipped > report.total / 4, "{report:?}");
        let options = ["-O", "qcow2", "-B", text(&base), "-F", "raw"];
        qemu_img(&[&["convert", "-f", "qcow2"], &options[..], &[text(&top), text(&theirs)]].concat());
        qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", text(&ours), text(&theirs)]);
        qemu_img(&["check", "-f", "qcow2", text(&ours)]);
        for file in [&ours, &theirs] {
            std::fs::remove_file(file).unwrap();
        }
    }
}

#[test]
fn a_single_source_hides_all_of_the_targets_backing_file() {
    let images = Images::new();
    let (base, source, target) = (images.path("base"), images.path("source"), images.path("target"));
    // Every byte of the backing file would show through a zero that was left out.
    std::fs::write(&base, vec![0xbb; 3 << 20]).unwrap();
    let bytes = disk(7, 9000);
    write_sparse(&source, &bytes);
    let create = over(&base, Format::Raw);
    convert_new((&source, &raw(Access::ReadOnly)), (&target, create), &ConvertOptions::default()).unwrap();
    assert_same_bytes(&guest_bytes(&target, "qcow2"), &bytes, "target");
    qemu_img(&["check", "-f", "qcow2", text(&target)]);
}

#[test]
fn a_backing_file_that_ends_early_does_not_cut_off_what_the_sources_one_holds() {
    let images = Images::new();
    let (long, short) = (images.path("long"), images.path("short"));
    let bytes = disk(8, 10_000);
    write_sparse(&long, &bytes);
    write_sparse(&short, &bytes[..5000 * 512]);
    let (source, target) = (images.path("source"), images.path("target"));
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "long", "-F", "raw", text(&source)]);
    let create = over(&short, Format::Raw);
    let report =
        convert_new((&source, &qcow2(Access::ReadOnly)), (&target, create), &ConvertOptions::default())
            .unwrap();
    assert_same_bytes(&guest_bytes(&target, "qcow2"), &bytes, "target");
    assert!(report.skipped >= 5000 * 512, "{report:?}");
}

#[test]
fn a_snapshot_is_converted_as_it_was() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    let plain = images.path("plain");
    let before = disk(9, 8000);
    write_sparse(&plain, &before);
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", text(&plain), text(&source)]);
    qemu_img(&["snapshot", "-c", "then", text(&source)]);
    let now = scribble(&source, &before, &mut Seeded(3));
    for (snapshot, expected) in [(Some("then".to_owned()), &before), (None, &now)] {
        let open = qcow2(Access::ReadOnly).snapshot(snapshot);
        convert_new((&source, &open), (&target, CreateOptions::default()), &ConvertOptions::default())
            .unwrap();
        assert_same_bytes(&guest_bytes(&target, "qcow2"), expected, "target");
        std::fs::remove_file(&target).unwrap();
    }
}

#[test]
fn an_existing_image_shows_the_source_wherever_it_had_data() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    let bytes = disk(10, 20_000);
    write_sparse(&source, &bytes);
    for options in ["cluster_size=64k", "cluster_size=4k", "extended_l2=on", "compat=0.10"] {
        for copy in [CopyMode::Auto, CopyMode::Buffers] {
            qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, text(&target), "12M"]);
            qemu_io(&target, "qcow2", &["write -P 0xee 0 12M"]);
            on_worker(async |worker| {
                let from = Image::open(worker, &source, &raw(Access::ReadOnly)).await.unwrap();
                let to = Image::open(worker, &target, &qcow2(Access::ReadWrite)).await.unwrap();
                let existing = ConvertTarget::Existing { image: to.clone(), content: TargetContent::Unknown };
                let options = ConvertOptions::default().copy(copy);
                convert(worker, &[from], existing, &options).await.unwrap();
                to.close(worker).await.unwrap();
            });
            let mut expected = bytes.clone();
            expected.resize(12 << 20, 0xee);
            assert_same_bytes(&guest_bytes(&target, "qcow2"), &expected, options);
            qemu_img(&["check", "-f", "qcow2", text(&target)]);
        }
    }
}

/// Makes a compressed image and damages some of its data, not its tables.
fn damaged(images: &Images, bytes: &[u8]) -> std::path::PathBuf {
    let (plain, path) = (images.path("plain"), images.path("damaged"));
    write_sparse(&plain, bytes);
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", text(&plain), text(&path)]);
    let mut file = std::fs::read(&path).unwrap();
    // The streams follow the first tables. 0xff begins no block of deflate, and each range covers a beginning.
    let end = file.len();
    let mut random = Seeded(4);
    for _ in 0..3 {
        let at = (5 << 16) + random.below((end - (5 << 16) - 65536) as u64) as usize;
        file[at..at + 65536].fill(0xff);
    }
    std::fs::write(&path, file).unwrap();
    path
}

#[test]
fn what_can_not_be_read_is_an_error_or_zero_as_in_qemu_img() {
    let images = Images::new();
    // Data that does not compress well, so that the damage hits single clusters.
    let mut bytes = vec![0; 6 << 20];
    let mut random = Seeded(5);
    bytes
        .chunks_mut(8)
        .for_each(|word| word.copy_from_slice(&(random.next() & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes()));
    let source = damaged(&images, &bytes);
    let (ours, theirs) = (images.path("ours"), images.path("theirs"));
    let create = CreateOptions::default().format(Format::Raw);

    let strict = tool("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(&source), text(&theirs)]);
    assert!(!strict.status.success(), "the damage does not show");
    let read_only = qcow2(Access::ReadOnly);
    let error =
        convert_new((&source, &read_only), (&ours, create.clone()), &ConvertOptions::default()).unwrap_err();
    assert_eq!(error.image(), Some(source.as_path()));
    assert!(!ours.exists());

    qemu_img(&["convert", "--salvage", "-q", "-f", "qcow2", "-O", "raw", text(&source), text(&theirs)]);
    for requests in [1, 8] {
        let options = ConvertOptions::default().read_errors(ReadErrors::Zero).requests(requests);
        let report = convert_new((&source, &read_only), (&ours, create.clone()), &options).unwrap();
        let found = std::fs::read(&ours).unwrap();
        let told: u64 = report.unreadable_ranges.iter().map(|range| range.len).sum();
        assert!(report.unreadable > 0 && told == report.unreadable, "{report:?}");
        // What we can't read is zero. QEMU takes a stream whose end is damaged for good if it has given a whole cluster
        // by then, so it gives up fewer clusters; never others.
        let mut expected = std::fs::read(&theirs).unwrap();
        for range in &report.unreadable_ranges {
            expected[range.offset as usize..(range.offset + range.len) as usize].fill(0);
        }
        assert_same_bytes(&found, &expected, "salvaged");
        std::fs::remove_file(&ours).unwrap();
    }
}

#[test]
fn a_device_that_held_something_else_shows_the_source() {
    let images = Images::new();
    let Some(device) = LoopDevice::new(&images.path("device"), 16 << 20) else { return };
    let source = images.path("source");
    let bytes = disk(11, 20_000);
    write_sparse(&source, &bytes);
    for format in [Format::Raw, Format::Qcow2] {
        std::fs::write(device.path(), vec![0xee; 16 << 20]).unwrap();
        let create = CreateOptions::default().format(format);
        let report = convert_new(
            (&source, &raw(Access::ReadOnly)),
            (device.path(), create),
            &ConvertOptions::default().copy(CopyMode::Buffers),
        )
        .unwrap_or_else(|error| panic!("{format:?}: {error}"));
        let found = guest_bytes(device.path(), format.name());
        assert_same_bytes(&found[..bytes.len()], &bytes, &format!("{format:?}, {report:?}"));
        if format == Format::Qcow2 {
            qemu_img(&["check", "-f", "qcow2", text(device.path())]);
        }
    }
}

#[test]
fn what_measure_says_is_enough_for_a_device() {
    let images = Images::new();
    let source = images.path("source");
    for (seed, cluster_size) in [(12, 65536), (13, 4096), (14, 2 << 20)] {
        let bytes = disk(seed, 40_000);
        write_sparse(&source, &bytes);
        let create = CreateOptions::default().cluster_size(cluster_size);
        let needed = on_worker(async |worker| {
            let image = Image::open(worker, &source, &raw(Access::ReadOnly)).await.unwrap();
            measure_image(worker, &image, &create, &JobControl::default()).await.unwrap()
        });
        let Some(device) = LoopDevice::new(&images.path("device"), needed.required) else { return };
        for requests in [1, 16] {
            let options = ConvertOptions::default().requests(requests).copy(CopyMode::Buffers);
            convert_new((&source, &raw(Access::ReadOnly)), (device.path(), create.clone()), &options)
                .unwrap_or_else(|error| panic!("{needed:?} with clusters of {cluster_size}: {error}"));
            assert_same_bytes(&guest_bytes(device.path(), "qcow2"), &bytes, "device");
            qemu_img(&["check", "-f", "qcow2", text(device.path())]);
        }
    }
}

#[test]
fn an_image_in_use_by_qemu_is_left_alone() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    qemu_img(&["create", "-q", "-f", "qcow2", text(&source), "1M"]);
    let mut user = std::process::Command::new("qemu-io")
        .args(["-f", "qcow2", text(&source)])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // It prompts once it has the image open. (Looking with another program would take locks that refuse it.)
    let mut prompt = [0; 8];
    user.stdout.as_mut().unwrap().read_exact(&mut prompt).unwrap();
    let error = convert_new(
        (&source, &qcow2(Access::ReadOnly)),
        (&target, CreateOptions::default()),
        &ConvertOptions::default(),
    )
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    drop(user.stdin.take());
    drop(user.stdout.take());
    user.wait().unwrap();
    assert_eq!(images.names(), ["source"]);
}
