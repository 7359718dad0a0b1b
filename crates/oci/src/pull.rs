//! Images as files: fetched, compared with their digests, and only then given their names.

use crate::document::Descriptor;
use crate::failure::Failure;
use crate::image::Image;
use crate::kind::{Kind, Packing};
use crate::layers;
use crate::name::OciName;
use crate::open::{LookedAt, anywhere, blob_of, kind_of};
use crate::options::OciOptions;
use crate::spool;
use crate::unpack::unpacked;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use zebu_remote::RemoteError;

/// A file that was made of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pulled {
    /// The digest of the image's manifest.
    pub digest: crate::Digest,
    /// Bytes of the file.
    pub len: u64,
    /// Bytes that an interrupted run had fetched.
    pub resumed_at: u64,
}

/// Fetches an image into the file `target`, which must not be there. `on` hears of bytes that are done, and of how many there
/// are to fetch; it may end the work (`false`).
///
/// The part of a plain blob that was fetched stays beside the target if that is interrupted, and the next run goes on with it.
///
/// # Errors
/// As of [`crate::open()`]; also that the target is there, or can't be written.
pub fn pull(
    name: &OciName,
    target: &Path,
    options: &OciOptions,
    on: &dyn Fn(u64, u64) -> bool,
) -> Result<Pulled, RemoteError> {
    let taken = || RemoteError::new(&target.display().to_string(), libc::EEXIST, "it is there already");
    if target.symlink_metadata().is_ok() {
        return Err(taken());
    }
    anywhere(name, options, |image| pull_disk(&image, target, options, on))
}

fn pull_disk(
    image: &Image,
    target: &Path,
    options: &OciOptions,
    on: &dyn Fn(u64, u64) -> bool,
) -> Result<Pulled, Failure> {
    let looked_at = LookedAt::default();
    let most = options.most_unpacked_bytes();
    let (file, part, resumed_at) = match kind_of(image, options, &looked_at)? {
        Kind::InLayers(layers) => {
            drop(looked_at);
            let directory = parent_of(target);
            let file = layers::extract(&image.store, layers, directory, most)?;
            let part = part_of(target, &image.digest.to_string());
            give_name(&file, &part)?;
            (file, part, 0)
        }
        Kind::Stack(layers) => {
            let count = layers.len();
            return Err(Failure::unsupported(format!(
                "the disk is in {count} blobs that stand on each other: convert it into one file"
            )));
        }
        Kind::Disk(of, packing) => {
            let part = part_of(target, &of.digest.to_string());
            let blob = blob_of(image, of, looked_at)?;
            let file = open_part(&part)?;
            let had = if packing == Packing::None { kept(&file, of)? } else { 0 };
            if had == 0 {
                file.set_len(0).map_err(|error| cant_write(&error))?;
            }
            let run = |from: u64| -> Result<(), Failure> {
                let mut hasher = of.digest.hasher();
                hash(&file, from, &mut hasher)?;
                let mut packed = blob.checked(of, from, hasher);
                let mut on = |end: u64| {
                    // Where it is packed, nobody knows how much there will be.
                    let all = if packing == Packing::None { of.size } else { end };
                    if packing == Packing::None {
                        file.set_len(end).map_err(|error| cant_write(&error))?;
                    }
                    if on(end, all) { Ok(()) } else { Err(Failure::new(libc::ECANCELED, "interrupted")) }
                };
                spool::copy(&mut *unpacked(packing, &mut packed), &file, from, most, &mut on)?;
                packed.finish()
            };
            let done = run(had).or_else(|failure| {
                // Perhaps what was there from before is wrong.
                if had == 0 || failure.errno == libc::ECANCELED {
                    return Err(failure);
                }
                file.set_len(0).map_err(|error| cant_write(&error))?;
                run(0)
            });
            if let Err(failure) = done {
                if packing != Packing::None || failure.reason.contains("another digest") {
                    let _ = std::fs::remove_file(&part);
                }
                return Err(failure.during(format!("blob {}", of.digest)));
            }
            (file, part, had)
        }
    };
    file.sync_all().map_err(|error| cant_write(&error))?;
    finish(&part, target)?;
    let len = file.metadata().map_err(|error| cant_write(&error))?.len();
    Ok(Pulled { digest: image.digest.clone(), len, resumed_at })
}

fn cant_write(error: &io::Error) -> Failure {
    Failure::of_file("the target can't be written", error)
}

fn parent_of(target: &Path) -> &Path {
    target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The name of a file while it is not whole.
fn part_of(target: &Path, digest: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let hex = digest.split_once(':').map_or(digest, |(_, hex)| hex);
    parent_of(target).join(format!(".{name}.{}.part", hex.get(..16).unwrap_or(hex)))
}

fn open_part(part: &Path) -> Result<File, Failure> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).open(part);
    let file = file.map_err(|error| cant_write(&error))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| Failure::new(libc::EBUSY, format!("another run writes '{}'", part.display())))?;
    Ok(file)
}

/// Bytes of a blob that an interrupted run has fetched.
fn kept(file: &File, of: &Descriptor) -> Result<u64, Failure> {
    let len = file.metadata().map_err(|error| cant_write(&error))?.len();
    Ok(if len <= of.size { len } else { 0 })
}

fn hash(file: &File, until: u64, hasher: &mut crate::digest::Hasher) -> Result<(), Failure> {
    let mut piece = vec![0; 256 << 10];
    let mut at = 0;
    while at < until {
        let most = piece.len().min((until - at) as usize);
        file.read_exact_at(&mut piece[..most], at).map_err(|error| cant_write(&error))?;
        hasher.update(&piece[..most]);
        at += most as u64;
    }
    Ok(())
}

/// Gives a file without a name one.
fn give_name(file: &File, part: &Path) -> Result<(), Failure> {
    use std::os::fd::AsRawFd;
    let _ = std::fs::remove_file(part);
    let from = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, from, CWD, part, rustix::fs::AtFlags::SYMLINK_FOLLOW)
        .map_err(|error| cant_write(&error.into()))
}

/// Gives the file its own name, if nobody else has it.
fn finish(part: &Path, target: &Path) -> Result<(), Failure> {
    match renameat_with(CWD, part, CWD, target, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(rustix::io::Errno::EXIST) => {
            return Err(Failure::new(libc::EEXIST, format!("'{}' was made meanwhile", target.display())));
        }
        // A file system that has no such renaming.
        Err(_) => std::fs::rename(part, target).map_err(|error| cant_write(&error))?,
    }
    let directory = File::open(parent_of(target)).map_err(|error| cant_write(&error))?;
    directory.sync_all().map_err(|error| cant_write(&error))
}
