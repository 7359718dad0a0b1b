//! A disk with latency: a file that passes reads through after a pause, by FUSE. Many threads, so that the pauses of
//! requests in flight overlap, as those of a disk or a network do.

use crate::Outcome;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyOpen, Request,
    Session,
};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// Requests whose pauses overlap.
const THREADS: usize = 64;

/// A file that is served slowly; gone when dropped.
pub(crate) struct SlowFile {
    session: Option<BackgroundSession>,
    path: PathBuf,
}

struct Passthrough {
    file: File,
    len: u64,
    pause: Duration,
}

impl SlowFile {
    /// Serves `source`, for reading, at `path`. Needs root.
    pub(crate) fn new(source: &Path, path: PathBuf, pause: Duration) -> Outcome<Self> {
        let said = |e: io::Error| format!("a slow {}: {e}", source.display());
        let file = File::open(source).map_err(said)?;
        let len = file.metadata().map_err(said)?.len();
        File::create(&path).map_err(said)?;
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("zebu-slow".to_owned()), MountOption::RO];
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let session = Session::new(Passthrough { file, len, pause }, &path, &config)
            .and_then(Session::spawn)
            .map_err(said)?;
        Ok(Self { session: Some(session), path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether a command succeeds; what it says is of no interest.
fn succeeds(command: &mut Command) -> bool {
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        // The kernel may hold the files of a killed process's ring for moments.
        let is_unmounted = (0..40).any(|_| {
            let done = succeeds(Command::new("umount").arg(&self.path));
            if !done {
                std::thread::sleep(Duration::from_millis(50));
            }
            done
        });
        if let Some(session) = self.session.take()
            && let Err(error) = session.umount_and_join()
            && !is_unmounted
        {
            eprintln!("note: the mount {} stays behind: {error}", self.path.display());
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Passthrough {
    fn attributes(&self) -> FileAttr {
        let time = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: INodeNo::ROOT,
            size: self.len,
            blocks: self.len.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: FileType::RegularFile,
            perm: 0o444,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Passthrough {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_background(256);
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::from_secs(3600), &self.attributes());
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        std::thread::sleep(self.pause);
        let len = u64::from(size).min(self.len.saturating_sub(offset));
        let mut bytes = vec![0; len as usize];
        match self.file.read_exact_at(&mut bytes, offset) {
            Ok(()) => reply.data(&bytes),
            Err(_) => reply.error(Errno::EIO),
        }
    }
}
