//! `convert` between raw images and options that concern every target.

use crate::mounted::Mounted;
use crate::support::{
    Images, Seeded, assert_same_bytes, disk, disk_usage, on_worker, qemu_img, text, write_sparse,
};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zebu_engine::jobs::{
    Cancel, ConvertOptions, ConvertReport, ConvertTarget, CopyMode, JobControl, NewTarget, Phase, Progress,
    TargetContent, convert,
};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, CacheMode, CreateOptions, Durability, ErrorKind, Format, Image, OpenOptions, Result, Sharing,
};

fn raw_new(path: &Path) -> ConvertTarget {
    ConvertTarget::New(Box::new(
        NewTarget::new(path.to_owned())
            .create(CreateOptions::default().format(Format::Raw))
            .open(OpenOptions::default().cache(CacheMode::Unsafe)),
    ))
}

async fn open(worker: &Worker, path: &Path, access: Access) -> Image {
    let options = OpenOptions::default().format(Some(Format::Raw)).access(access);
    Image::open(worker, path, &options).await.unwrap()
}

fn convert_raw(sources: &[&Path], target: &Path, options: &ConvertOptions) -> Result<ConvertReport> {
    on_worker(async |worker| {
        let mut images = Vec::new();
        for path in sources {
            images.push(open(worker, path, Access::ReadOnly).await);
        }
        convert(worker, &images, raw_new(target), options).await
    })
}

#[test]
fn every_division_of_the_work_gives_the_same_bytes() {
    let images = Images::new();
    for seed in 0..24 {
        let mut random = Seeded(seed);
        let bytes = disk(seed, 1 + random.below(60_000));
        let (source, target) = (images.path("source"), images.path(&format!("target{seed}")));
        write_sparse(&source, &bytes);
        let options = ConvertOptions::default()
            .workers(1 + random.below(3) as usize)
            .requests(1 + random.below(12) as usize)
            .buffer_memory((64 << 10) + random.below(8 << 20) as usize)
            .sparse_size([512, 4096, 65536][random.below(3) as usize])
            .copy(CopyMode::Buffers);
        let report = convert_raw(&[&source], &target, &options).unwrap();
        assert_same_bytes(&std::fs::read(&target).unwrap(), &bytes, &format!("seed {seed}, {options:?}"));
        assert_eq!(report.total, bytes.len() as u64);
        assert_eq!(report.written + report.skipped, report.total, "{report:?}");
        assert_eq!((report.zeroed, report.reflinked, report.unreadable), (0, 0, 0));
        let block = options.sparse_size as usize;
        let filled = bytes.chunks(block).filter(|block| block.iter().any(|&b| b != 0)).count() * block;
        assert!(report.written <= filled as u64, "seed {seed}: {} > {filled}", report.written);
    }
}

#[test]
fn zero_blocks_in_data_become_holes_and_with_sparse_size_0_nothing_does() {
    let images = Images::new();
    let (source, sparse, full) = (images.path("source"), images.path("sparse"), images.path("full"));
    // Written zeroes: no mapping knows of them.
    std::fs::write(&source, vec![0; 8 << 20]).unwrap();
    convert_raw(&[&source], &sparse, &ConvertOptions::default()).unwrap();
    assert!(disk_usage(&sparse) < 64 << 10);
    let everything = ConvertOptions::default().sparse_size(0);
    convert_raw(&[&source], &full, &everything).unwrap();
    assert!(disk_usage(&full) >= 8 << 20);
    // Holes, too.
    convert_raw(&[&sparse], &images.path("full again"), &everything).unwrap();
    assert!(disk_usage(&images.path("full again")) >= 8 << 20);
    assert_same_bytes(&std::fs::read(&sparse).unwrap(), &vec![0; 8 << 20], "sparse");
}

#[test]
fn sources_are_laid_out_one_behind_the_other_as_qemu_img_does() {
    let images = Images::new();
    let parts: Vec<_> = (0..4).map(|i| images.path(&format!("part{i}"))).collect();
    for (i, part) in parts.iter().enumerate() {
        write_sparse(part, &disk(100 + i as u64, [777, 1, 20_000, 4097][i]));
    }
    let paths: Vec<&Path> = parts.iter().map(|part| part.as_path()).collect();
    for workers in [1, 3] {
        let (ours, theirs) = (images.path(&format!("ours{workers}")), images.path("theirs"));
        let options = ConvertOptions::default().workers(workers);
        convert_raw(&paths, &ours, &options).unwrap();
        let mut args = vec!["convert", "-f", "raw", "-O", "raw"];
        args.extend(paths.iter().map(|path| text(path)));
        args.push(text(&theirs));
        qemu_img(&args);
        assert_same_bytes(&std::fs::read(ours).unwrap(), &std::fs::read(theirs).unwrap(), "concatenated");
    }
}

#[test]
fn what_an_existing_target_held_shows_only_behind_the_source() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    let bytes = disk(5, 9000);
    write_sparse(&source, &bytes);
    for copy in [CopyMode::Auto, CopyMode::Buffers, CopyMode::Range] {
        std::fs::write(&target, vec![0xee; bytes.len() + 65536]).unwrap();
        on_worker(async |worker| {
            let from = open(worker, &source, Access::ReadOnly).await;
            let to = open(worker, &target, Access::ReadWrite).await;
            let existing = ConvertTarget::Existing { image: to.clone(), content: TargetContent::Unknown };
            let options = ConvertOptions::default().copy(copy);
            convert(worker, &[from], existing, &options).await.unwrap();
            to.close(worker).await.unwrap();
        });
        let found = std::fs::read(&target).unwrap();
        assert_same_bytes(&found[..bytes.len()], &bytes, "the source's part");
        assert!(found[bytes.len()..].iter().all(|&b| b == 0xee), "the rest was touched");
    }
}

#[test]
fn a_target_said_to_be_zero_is_written_only_where_there_is_data() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    let mut bytes = vec![0; 4 << 20];
    bytes[1 << 20..(1 << 20) + 4096].fill(7);
    write_sparse(&source, &bytes);
    std::fs::write(&target, vec![0xee; bytes.len()]).unwrap();
    on_worker(async |worker| {
        let from = open(worker, &source, Access::ReadOnly).await;
        let to = open(worker, &target, Access::ReadWrite).await;
        let existing = ConvertTarget::Existing { image: to.clone(), content: TargetContent::Zero };
        convert(worker, &[from], existing, &ConvertOptions::default()).await.unwrap();
        to.close(worker).await.unwrap();
    });
    // The caller's word is taken: what was said to be zero stays as it was.
    let mut expected = vec![0xee; bytes.len()];
    expected[1 << 20..(1 << 20) + 4096].fill(7);
    assert_same_bytes(&std::fs::read(&target).unwrap(), &expected, "target");
}

#[test]
fn a_target_that_is_too_small_is_refused_and_untouched() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    write_sparse(&source, &disk(1, 100));
    std::fs::write(&target, vec![0xee; 99 * 512]).unwrap();
    on_worker(async |worker| {
        let from = open(worker, &source, Access::ReadOnly).await;
        let to = open(worker, &target, Access::ReadWrite).await;
        let existing = ConvertTarget::Existing { image: to, content: TargetContent::Unknown };
        let error = convert(worker, &[from], existing, &ConvertOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("output file is smaller than input file"));
    });
    assert!(std::fs::read(&target).unwrap().iter().all(|&b| b == 0xee));
}

#[test]
fn a_new_target_has_its_name_only_when_it_is_complete() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    let bytes = disk(11, 40_000);
    write_sparse(&source, &bytes);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (sink, directory) = (Arc::clone(&seen), source.parent().unwrap().to_owned());
    let progress = move |_: Progress| {
        let names = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
        sink.lock().unwrap().extend(names.map(|name| name.into_string().unwrap()));
    };
    let control = JobControl::default().progress(progress);
    convert_raw(&[&source], &target, &ConvertOptions::default().control(control)).unwrap();
    let seen = seen.lock().unwrap();
    assert!(seen.iter().any(|name| name.starts_with(".target.zebu-")), "no temporary name: {seen:?}");
    assert!(!seen.iter().any(|name| name == "target"), "the name was there too early");
    assert_eq!(images.names(), ["source", "target"]);
}

#[test]
fn a_cancelled_job_ends_soon_and_leaves_nothing() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    std::fs::write(&source, vec![1; 64 << 20]).unwrap();
    for workers in [1, 2] {
        let cancel = Cancel::new();
        let seen = Arc::new(Mutex::new(0));
        let (sink, switch) = (Arc::clone(&seen), cancel.clone());
        let progress = move |at: Progress| {
            *sink.lock().unwrap() = at.done;
            if at.done >= 8 << 20 {
                switch.cancel();
            }
        };
        let control = JobControl::default().cancel(cancel).progress(progress);
        let options = ConvertOptions::default().control(control).workers(workers).copy(CopyMode::Buffers);
        let error = convert_raw(&[&source], &target, &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert!(*seen.lock().unwrap() <= 40 << 20, "it went on for {} bytes", seen.lock().unwrap());
        assert_eq!(images.names(), ["source"]);
    }
}

#[test]
fn a_job_that_is_slowed_down_can_be_cancelled_at_once() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    std::fs::write(&source, vec![1; 4 << 20]).unwrap();
    let control = JobControl::default().rate_limit(std::num::NonZeroU64::new(1));
    let cancel = control.cancel.clone();
    let switch = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        cancel.cancel();
    });
    let options = ConvertOptions::default().control(control).copy(CopyMode::Buffers);
    // Else it waits for weeks.
    let error = convert_raw(&[&source], &target, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    switch.join().unwrap();
    assert_eq!(images.names(), ["source"]);
}

#[test]
fn the_rate_limit_holds() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    std::fs::write(&source, vec![1; 12 << 20]).unwrap();
    let control = JobControl::default().rate_limit(std::num::NonZeroU64::new(16 << 20));
    let options = ConvertOptions::default().control(control).copy(CopyMode::Buffers).buffer_memory(1 << 20);
    let begin = Instant::now();
    convert_raw(&[&source], &target, &options).unwrap();
    // 0.75 s, less a burst of 0.1 s and one round of buffers (1 MiB) that need not wait for their own time.
    assert!(begin.elapsed() > Duration::from_millis(500), "{:?}", begin.elapsed());
}

#[test]
fn a_reflink_that_is_refused_costs_nothing_of_the_rate() {
    let Some(no_reflinks) = Mounted::tmpfs(16 << 20) else { return };
    let (source, target) = (no_reflinks.path("source"), no_reflinks.path("target"));
    std::fs::write(&source, vec![1; 1 << 20]).unwrap();
    // A first piece may always move. Charged twice, it waits for 12 days; the switch ends that.
    let control = JobControl::default().rate_limit(std::num::NonZeroU64::new(1));
    let (cancel, ended) = (control.cancel.clone(), Arc::new(Mutex::new(false)));
    let over = Arc::clone(&ended);
    let switch = std::thread::spawn(move || {
        let begin = Instant::now();
        while !*over.lock().unwrap() && begin.elapsed() < Duration::from_secs(600) {
            std::thread::sleep(Duration::from_millis(20));
        }
        cancel.cancel();
    });
    let options = ConvertOptions::default().control(control);
    let report = convert_raw(&[&source], &target, &options);
    *ended.lock().unwrap() = true;
    switch.join().unwrap();
    let report = report.unwrap();
    assert_eq!((report.written, report.reflinked), (1 << 20, 0));
}

#[test]
fn progress_ends_at_the_total() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    let bytes = disk(3, 30_001);
    write_sparse(&source, &bytes);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let progress = move |at: Progress| sink.lock().unwrap().push(at);
    let control = JobControl::default().progress(progress);
    let options = ConvertOptions::default().control(control).workers(2);
    convert_raw(&[&source], &target, &options).unwrap();
    let seen = seen.lock().unwrap();
    let copying: Vec<u64> = seen.iter().filter(|at| at.phase == Phase::Copying).map(|at| at.done).collect();
    assert!(copying.is_sorted() && copying[0] == 0);
    assert_eq!(*copying.last().unwrap(), bytes.len() as u64);
    assert_eq!(seen.last().unwrap().phase, Phase::Finishing);
    assert!(seen.iter().all(|at| at.total == bytes.len() as u64));
}

#[test]
fn an_existing_file_is_made_anew_in_place() {
    use std::os::unix::fs::MetadataExt;
    let images = Images::new();
    let (source, target, link) = (images.path("source"), images.path("target"), images.path("link"));
    let bytes = disk(8, 5000);
    write_sparse(&source, &bytes);
    std::fs::write(&target, vec![0xee; 10 << 20]).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let inode = std::fs::metadata(&target).unwrap().ino();
    convert_raw(&[&source], &link, &ConvertOptions::default()).unwrap();
    assert_eq!(std::fs::metadata(&target).unwrap().ino(), inode);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_same_bytes(&std::fs::read(&target).unwrap(), &bytes, "target");
    assert_eq!(images.names(), ["link", "source", "target"]);
}

#[test]
fn a_source_is_never_its_own_target() {
    let images = Images::new();
    let source = images.path("source");
    let bytes = disk(8, 5000);
    write_sparse(&source, &bytes);
    let error = convert_raw(&[&source], &source, &ConvertOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_same_bytes(&std::fs::read(&source).unwrap(), &bytes, "source");
}

#[test]
fn an_empty_disk_and_a_directory_that_is_not_there() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    std::fs::write(&source, b"").unwrap();
    let report = convert_raw(&[&source], &target, &ConvertOptions::default()).unwrap();
    assert_eq!((report.total, std::fs::metadata(&target).unwrap().len()), (0, 0));
    let error = convert_raw(&[&source], &images.path("no/target"), &ConvertOptions::default()).unwrap_err();
    assert_eq!(error.image(), Some(images.path("no/target").as_path()));
    assert_eq!(
        convert_raw(&[], &target, &ConvertOptions::default()).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
}

/// A reader without a lock finds what a writer has added to the file since the reader opened it.
#[test]
fn a_source_that_grows_meanwhile_is_not_taken_for_zeroes() {
    let images = Images::new();
    let (source, target) = (images.path("source"), images.path("target"));
    let bytes = disk(5, 8192);
    on_worker(async |worker| {
        let write = async |image: &Image, range: std::ops::Range<usize>| {
            let bufs = IoBuf::copy_of(&bytes[range.clone()]).into();
            image.write(worker, range.start as u64, bufs, Durability::Durable).await.0.unwrap();
        };
        Image::create(worker, &source, &CreateOptions::default().size(bytes.len() as u64)).await.unwrap();
        let writable = OpenOptions::default().access(Access::ReadWrite);
        let writer = Image::open(worker, &source, &writable).await.unwrap();
        write(&writer, 0..65536).await;
        writer.close(worker).await.unwrap();
        let unlocked = OpenOptions::default().sharing(Sharing::Unlocked);
        let reader = Image::open(worker, &source, &unlocked).await.unwrap();
        let writer = Image::open(worker, &source, &writable).await.unwrap();
        write(&writer, 65536..bytes.len()).await;
        convert(worker, &[reader], raw_new(&target), &ConvertOptions::default()).await.unwrap();
        writer.close(worker).await.unwrap();
    });
    assert_same_bytes(&std::fs::read(&target).unwrap(), &bytes, "a copy beside a writer");
}
