//! Opening files: which may be opened, how, and the errors otherwise.

mod fixtures;

use fixtures::{Mode, Mounted, open, or_skip, worker};
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use zebu_storage::{
    Access, Create, Engine, File, FileKind, FsKind, IoBuf, IoError, IoErrorKind, LockMode, Op, OpenFlags,
};

fn read_only() -> OpenFlags {
    OpenFlags::default()
}

fn read_write() -> OpenFlags {
    OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Write)
}

fn opened(path: &Path, flags: &OpenFlags) -> Result<(), IoError> {
    File::open(path, flags).map(drop)
}

#[test]
fn only_files_and_block_devices_are_opened_and_nothing_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let cases = [
        (dir.path().to_owned(), "directory"),
        (fifo, "FIFO"),
        (socket, "socket"),
        ("/dev/null".into(), "character device"),
    ];
    for (path, word) in cases {
        for flags in [read_only(), read_write(), read_only().direct(true)] {
            let error = opened(&path, &flags).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.op, Op::Open, "{text}");
            // With O_DIRECT, the kernel refuses some of these before anyone can ask what they are.
            if error.kind != IoErrorKind::Unsupported {
                assert_eq!(error.kind, IoErrorKind::NotAFile, "{text}");
                assert!(text.contains(word), "{text}");
            }
            assert!(text.contains(&format!("{path:?}")) && !text.contains('\n'), "{text}");
        }
    }
    let error = opened(&dir.path().join("absent"), &read_only()).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::Os(libc::ENOENT));
    assert!(error.to_string().ends_with("absent\": No such file or directory"), "{error}");
}

#[test]
fn creation_makes_cuts_and_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let new = read_write().create(Create::New);
    opened(&path, &new).unwrap();
    // As many bits of 0644 as the umask leaves.
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & !0o644 & 0o777, 0);
    assert_eq!(opened(&path, &new).unwrap_err().kind, IoErrorKind::Os(libc::EEXIST));
    fs::write(&path, b"something").unwrap();
    assert_eq!(File::open(&path, &read_only()).unwrap().len(), 9);

    let truncate = read_write().create(Create::Truncate);
    let holder = File::open(&path, &read_write()).unwrap();
    assert_eq!(opened(&path, &truncate).unwrap_err().kind, IoErrorKind::Locked);
    assert_eq!(fs::read(&path).unwrap(), b"something", "not cut before it is locked");
    drop(holder);
    assert_eq!(File::open(&path, &truncate).unwrap().len(), 0);
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn facts_are_those_of_the_system() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    fs::write(&path, vec![1; 10_000]).unwrap();
    let file = File::open(&path, &read_only()).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((file.id().dev, file.id().ino, file.len()), (metadata.dev(), metadata.ino(), 10_000));
    assert_eq!(file.disk_usage().unwrap(), metadata.blocks() * 512);
    assert_eq!(file.kind(), FileKind::Regular);
    assert!(!file.is_writable() && !file.is_direct());
    let worker = worker(Engine::Auto);
    let (result, _) = worker.block_on(worker.write(&file, 0, IoBuf::zeroed(1).into()));
    assert_eq!(result.unwrap_err().kind, IoErrorKind::Os(libc::EBADF));
    let link = dir.path().join("link");
    fs::hard_link(&path, &link).unwrap();
    assert_eq!(File::open(&link, &read_only()).unwrap().id(), file.id());
}

#[test]
fn names_in_images_do_not_lead_out_of_their_directory() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("images");
    fs::DirBuilder::new().mode(0o755).create(&inside).unwrap();
    fs::create_dir(inside.join("sub")).unwrap();
    fs::write(inside.join("sub/base"), b"base").unwrap();
    fs::write(dir.path().join("secret"), b"secret").unwrap();
    symlink("sub/base", inside.join("good-link")).unwrap();
    symlink("../secret", inside.join("bad-link")).unwrap();
    symlink(dir.path().join("secret"), inside.join("absolute-link")).unwrap();
    symlink("/proc/self/root", inside.join("magic")).unwrap();

    let beneath = |name: &str| File::open_beneath(&inside, Path::new(name), &read_only());
    for name in ["sub/base", "good-link", "sub/../sub/base", "./sub/base"] {
        let file = beneath(name).unwrap();
        assert_eq!(file.len(), 4);
        assert_eq!(file.path(), inside.join(name));
    }
    let absolute = inside.join("sub/base");
    for name in ["../secret", "bad-link", "absolute-link", "magic/etc/passwd", absolute.to_str().unwrap()] {
        let error = beneath(name).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::Escapes, "{error}");
    }
    assert_eq!(beneath("absent").unwrap_err().kind, IoErrorKind::Os(libc::ENOENT));
    let new = read_write().create(Create::New);
    drop(File::open_beneath(&inside, Path::new("made"), &new).unwrap());
    assert!(inside.join("made").exists());
}

#[test]
fn file_systems_and_their_attributes() {
    for (kind, fs) in [("xfs", FsKind::Xfs), ("btrfs", FsKind::Btrfs), ("ext4", FsKind::Ext4)] {
        let Some(mounted) = or_skip(kind, Mounted::new(kind)) else { continue };
        let path = mounted.dir.path().join("f");
        let file = open(&path, Mode::Direct, Create::New);
        assert_eq!(file.fs(), fs);
        let hint = file.set_extent_size_hint(1 << 20);
        let nocow = file.set_nocow();
        if fs == FsKind::Xfs {
            hint.unwrap();
            let output = Command::new("xfs_io").args(["-c", "extsize"]).arg(&path).output().unwrap();
            assert!(String::from_utf8_lossy(&output.stdout).contains("1048576"), "{output:?}");
            assert_eq!(file.extent_size_hint(), Some(1 << 20));
            file.set_extent_size_hint(0).unwrap();
            let refused = file.set_extent_size_hint(5000).unwrap_err();
            assert_eq!(refused.kind, IoErrorKind::Os(libc::EINVAL), "{refused}");
        } else {
            assert_eq!(hint.unwrap_err().kind, IoErrorKind::Unsupported);
        }
        assert_eq!(file.extent_size_hint(), None);
        if fs == FsKind::Btrfs {
            nocow.unwrap();
            let output = Command::new("lsattr").arg(&path).output().unwrap();
            assert!(String::from_utf8_lossy(&output.stdout).contains('C'), "{output:?}");
        } else {
            assert_eq!(nocow.unwrap_err().kind, IoErrorKind::Unsupported);
        }
    }
}

#[test]
fn a_file_system_without_fallocate_modes_is_remembered() {
    // ext2 through the ext4 driver has no extents, so no ZERO_RANGE and no plain allocation.
    let Some(mounted) = or_skip("ext2", Mounted::new("ext2")) else { return };
    let file = open(&mounted.dir.path().join("f"), Mode::Buffered, Create::New);
    let worker = worker(Engine::Auto);
    worker.block_on(async {
        worker.write(&file, 0, IoBuf::copy_of(&vec![7; 65_536]).into()).await.0.unwrap();
        let error = worker.zero_range(&file, 4096, 4096).await.unwrap_err();
        assert_eq!(error.kind, IoErrorKind::Unsupported);
        assert!(!file.can_zero_range());
        let error = worker.allocate(&file, 65_536, 65_536).await.unwrap_err();
        assert_eq!((error.kind, file.can_allocate()), (IoErrorKind::Unsupported, false));
        let tried = worker.stats().fallocates;
        assert!(worker.zero_range(&file, 4096, 4096).await.is_err());
        assert!(worker.allocate(&file, 65_536, 65_536).await.is_err());
        assert_eq!(worker.stats().fallocates, tried, "not tried again");
        worker.write_zero_bytes(&file, 4096, 4096).await.unwrap();
        assert_eq!(fixtures::read(&worker, &file, 4000, 200).await, [[7; 96].as_slice(), &[0; 104]].concat());
    });
}

#[test]
fn o_direct_is_refused_in_words_where_there_is_none() {
    // Since Linux 6.6, tmpfs accepts it.
    let path = Path::new("/proc/self/status");
    let error = opened(path, &read_only().direct(true).lock(LockMode::None)).unwrap_err();
    assert_eq!(error.kind, IoErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("O_DIRECT"), "{error}");
}

#[test]
fn flushes_of_an_unsafe_file_do_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let flags = read_write().create(Create::New).no_flush(true);
    let file = File::open(&dir.path().join("f"), &flags).unwrap();
    let worker = worker(Engine::Auto);
    worker.block_on(worker.flush(&file)).unwrap();
    assert_eq!(worker.stats().flushes, 0);
}
