//! A store in a folder. An object gets its name when it is whole and durable.

use super::error::PointsErrorKind;
use super::object::{Document, Failed, Held, Holder, LARGEST_DOCUMENT, Wrote};
use super::sha::of_bytes;
use super::unique::new_id;
use rustix::fs::{FlockOperation, RenameFlags, flock, renameat_with};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The folder of files that are no objects yet.
const UNFINISHED: &str = "tmp";
/// The end of the name of a small one.
const UNNAMED: &str = ".part";
/// Parts of a store.
pub(super) const PARTS: [&str; 7] = ["points", "layers", "hashes", "claims", "marks", "verified", "damaged"];
/// Bytes read at once.
const PIECE: usize = 1 << 20;
/// How often a name is tried for a file that somebody tidied away.
const TRIES: u32 = 8;

#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
}

fn io(error: &std::io::Error) -> Failed {
    let kind =
        if error.kind() == ErrorKind::NotFound { PointsErrorKind::NotFound } else { PointsErrorKind::Io };
    (kind, error.to_string())
}

fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()
}

impl Folder {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn at(&self, key: &str) -> PathBuf {
        self.path.join(key)
    }

    /// Refuses a store whose parts are links: what they lead to is not the store's.
    pub(super) fn check(&self) -> Result<(), Failed> {
        for part in PARTS.iter().chain(&[UNFINISHED]) {
            match std::fs::symlink_metadata(self.at(part)) {
                Ok(found) if !found.is_dir() => {
                    let reason =
                        format!("'{part}' is a link or a file, and must be a folder of the store itself");
                    return Err((PointsErrorKind::Refused, reason));
                }
                Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                    return Err(io(&error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn prepare(&self) -> Result<(), Failed> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        for part in PARTS.iter().chain(&[UNFINISHED]) {
            builder.create(self.at(part)).map_err(|error| io(&error))?;
        }
        let above = self.path.parent().filter(|above| *above != Path::new("")).unwrap_or(Path::new("."));
        sync_directory(&self.path).and_then(|()| sync_directory(above)).map_err(|error| io(&error))
    }

    fn open(&self, key: &str) -> Result<Option<File>, Failed> {
        // A link could lead out of the store.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        match OpenOptions::new().read(true).custom_flags(flags).open(self.at(key)) {
            Ok(file) if file.metadata().is_ok_and(|found| found.is_file()) => Ok(Some(file)),
            Ok(_) => Err((PointsErrorKind::Damaged, "it is no regular file".to_owned())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                Err((PointsErrorKind::Damaged, "it is a link, and a store has none".to_owned()))
            }
            Err(error) => Err(io(&error)),
        }
    }

    pub(super) fn get(&self, key: &str) -> Result<Option<Document>, Failed> {
        let Some(file) = self.open(key)? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(LARGEST_DOCUMENT + 1).read_to_end(&mut bytes).map_err(|error| io(&error))?;
        if bytes.len() as u64 > LARGEST_DOCUMENT {
            return Err((PointsErrorKind::Damaged, format!("it has more than {LARGEST_DOCUMENT} bytes")));
        }
        let version = of_bytes(&bytes);
        Ok(Some(Document { bytes, version }))
    }

    /// A file with these bytes, durable and locked, that is no object yet.
    fn unfinished(&self, bytes: &[u8]) -> std::io::Result<(PathBuf, File)> {
        let path = self.at(UNFINISHED).join(format!("{}{UNNAMED}", new_id()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok((path, file))
    }

    /// Makes an object of a file, if there is none of that name.
    fn give_name(&self, file: &Path, key: &str) -> std::io::Result<Wrote> {
        let target = self.at(key);
        let here = rustix::fs::CWD;
        let named = match renameat_with(here, file, here, &target, RenameFlags::NOREPLACE) {
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                std::fs::hard_link(file, &target).and_then(|()| std::fs::remove_file(file))
            }
            named => named.map_err(Into::into),
        };
        match named {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(Wrote::Lost),
            Err(error) => return Err(error),
        }
        target.parent().map_or(Ok(()), sync_directory)?;
        Ok(Wrote::Done)
    }

    fn create_held(&self, key: &str, bytes: &[u8]) -> Result<(Wrote, File), Failed> {
        let mut tries = 1;
        loop {
            let (path, file) = self.unfinished(bytes).map_err(|error| io(&error))?;
            match self.give_name(&path, key) {
                Ok(wrote) => {
                    if wrote == Wrote::Lost {
                        let _ = std::fs::remove_file(&path);
                    }
                    return Ok((wrote, file));
                }
                // It was tidied away before it was locked.
                Err(error) if error.kind() == ErrorKind::NotFound && tries < TRIES => tries += 1,
                Err(error) => {
                    let _ = std::fs::remove_file(&path);
                    return Err(io(&error));
                }
            }
        }
    }

    pub(super) fn create(&self, key: &str, bytes: &[u8]) -> Result<Wrote, Failed> {
        self.create_held(key, bytes).map(|(wrote, _)| wrote)
    }

    pub(super) fn put(&self, key: &str, bytes: &[u8]) -> Result<(), Failed> {
        let put = || {
            let (path, _lock) = self.unfinished(bytes)?;
            let target = self.at(key);
            std::fs::rename(&path, &target)?;
            target.parent().map_or(Ok(()), sync_directory)
        };
        put().map_err(|error| io(&error))
    }

    pub(super) fn replace(&self, key: &str, version: &str, bytes: &[u8]) -> Result<Wrote, Failed> {
        let mut open = OpenOptions::new();
        open.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let lock = open.open(self.at("lock")).map_err(|error| io(&error))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| io(&error.into()))?;
        match self.get(key)? {
            Some(found) if found.version == version => self.put(key, bytes).map(|()| Wrote::Done),
            _ => Ok(Wrote::Lost),
        }
    }

    pub(super) fn delete(&self, key: &str) -> Result<(), Failed> {
        let path = self.at(key);
        match std::fs::remove_file(&path) {
            Ok(()) => path.parent().map_or(Ok(()), sync_directory).map_err(|error| io(&error)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io(&error)),
        }
    }

    pub(super) fn list(&self, part: &str) -> Result<Vec<(String, u64)>, Failed> {
        let entries = match std::fs::read_dir(self.at(part)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io(&error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| io(&error))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.metadata() {
                Ok(entry) => found.push((name, entry.len())),
                // It went meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(io(&error)),
            }
        }
        found.sort();
        Ok(found)
    }

    pub(super) fn length(&self, key: &str) -> Result<Option<u64>, Failed> {
        let Some(file) = self.open(key)? else { return Ok(None) };
        file.metadata().map(|found| Some(found.len())).map_err(|error| io(&error))
    }

    pub(super) fn take_in(&self, key: &str, file: &Path) -> Result<(), Failed> {
        let take = || {
            File::open(file)?.sync_all()?;
            // One of that name has the same bytes, unless it is damaged.
            std::fs::rename(file, self.at(key))?;
            self.at(key).parent().map_or(Ok(()), sync_directory)
        };
        take().map_err(|error| io(&error))
    }

    pub(super) fn read(
        &self,
        key: &str,
        tell: &mut dyn FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<bool, Failed> {
        let Some(mut file) = self.open(key)? else { return Ok(false) };
        let mut piece = vec![0; PIECE];
        loop {
            match file.read(&mut piece).map_err(|error| io(&error))? {
                0 => return Ok(true),
                read => tell(&piece[..read]).map_err(|reason| (PointsErrorKind::Io, reason))?,
            }
        }
    }

    pub(super) fn hold(&self, key: &str, bytes: &[u8]) -> Result<Held, Failed> {
        match self.create_held(key, bytes)? {
            (Wrote::Done, file) => Ok(Held::new(key, Some(file))),
            (Wrote::Lost, _) => Err((PointsErrorKind::Busy, "it is there already".to_owned())),
        }
    }

    pub(super) fn holder(&self, key: &str) -> Result<Holder, Failed> {
        let file = match self.open(key) {
            Ok(Some(file)) => file,
            // A link holds nothing.
            Ok(None) | Err((PointsErrorKind::Damaged, _)) => return Ok(Holder::Gone),
            Err(failed) => return Err(failed),
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Holder::Gone),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(Holder::Alive),
            Err(error) => Err(io(&error.into())),
        }
    }

    pub(super) fn work_directory(&self, id: &str) -> Result<PathBuf, Failed> {
        let path = self.at(UNFINISHED).join(id);
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| io(&error))?;
        Ok(path)
    }

    pub(super) fn tidy(&self) -> Result<(), Failed> {
        for (name, _) in self.list(UNFINISHED)? {
            let key = format!("{UNFINISHED}/{name}");
            let path = self.at(&key);
            if name.strip_suffix(UNNAMED).is_some() {
                if self.holder(&key)? == Holder::Gone {
                    self.delete(&key)?;
                }
            } else if path.is_dir() && self.holder(&format!("claims/{name}.json"))? == Holder::Gone {
                // The claim is there before the directory, and goes after it.
                match std::fs::remove_dir_all(&path) {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(&error)),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}
