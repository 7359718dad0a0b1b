//! A disk in the layers of a container (KubeVirt's containerDisk): the one file in `/disk` that the container would show.

use crate::document::Descriptor;
use crate::failure::Failure;
use crate::image::Store;
use crate::kind::{Packing, SNIFFED};
use crate::spool;
use crate::unpack::unpacked;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use tar::{Archive, EntryType};
use zebu_remote::http::ServersWithoutRanges;

/// The directory of the disk.
const DIRECTORY: &str = "disk";
/// The beginning of a name that hides what layers below have, and the one that hides all of a directory.
const WHITEOUT: &str = ".wh.";
const OPAQUE: &str = ".wh..wh..opq";
/// Entries of one layer that are looked at.
const MOST_ENTRIES: usize = 1 << 20;

/// Names that the layers so far, from the top one down, have shown and hidden.
#[derive(Default)]
struct Seen {
    /// Files and directories that layers below do not show any more.
    hidden: HashSet<String>,
    /// Directories of which layers below show nothing.
    opaque: HashSet<String>,
    found: Option<(String, File)>,
}

impl Seen {
    fn hides(&self, path: &str) -> bool {
        let ends = path.match_indices('/').map(|(at, _)| &path[..at]);
        let mut above = ends.clone();
        self.opaque.contains("")
            || above.any(|directory| self.opaque.contains(directory) || self.hidden.contains(directory))
            || self.hidden.contains(path)
    }
}

/// Unpacks the disk into a file without a name. The digests of all layers are compared.
///
/// # Errors
/// There is none, or more than one; a name leads out of the container; the layers have more than `most` bytes.
pub(crate) fn extract(
    store: &Store,
    layers: &[Descriptor],
    directory: &Path,
    most: u64,
) -> Result<File, Failure> {
    let mut seen = Seen::default();
    for layer in layers.iter().rev() {
        look(store, layer, &mut seen, directory, most)
            .map_err(|failure| failure.during(format!("layer {}", layer.digest)))?;
    }
    let (_, file) = seen.found.ok_or_else(|| {
        Failure::new(
            libc::ENOENT,
            format!("there is no disk in the container: it has no file in /{DIRECTORY}"),
        )
    })?;
    Ok(file)
}

fn look(
    store: &Store,
    layer: &Descriptor,
    seen: &mut Seen,
    directory: &Path,
    most: u64,
) -> Result<(), Failure> {
    let blob = store.blob(layer, ServersWithoutRanges::Stream)?;
    let packing = Packing::of(&blob.first(SNIFFED)?);
    let mut packed = blob.all(layer);
    let mut below = Seen::default();
    {
        // What is not the disk is not kept, but it takes time.
        let bounded = Bounded { reader: unpacked(packing, &mut packed), left: most };
        let mut archive = Archive::new(bounded);
        for (count, entry) in archive.entries()?.enumerate() {
            if count >= MOST_ENTRIES {
                return Err(Failure::unsupported(format!("it has more than {MOST_ENTRIES} entries")));
            }
            let mut entry = entry?;
            let path = path_of(&entry.path_bytes())?;
            let (parent, name) = path.rsplit_once('/').unwrap_or(("", &path));
            if name == OPAQUE {
                below.opaque.insert(parent.to_owned());
                continue;
            }
            if let Some(gone) = name.strip_prefix(WHITEOUT) {
                below.hidden.insert(if parent.is_empty() {
                    gone.to_owned()
                } else {
                    format!("{parent}/{gone}")
                });
                continue;
            }
            if seen.hides(&path) || parent != DIRECTORY {
                continue;
            }
            match entry.header().entry_type() {
                EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {}
                EntryType::Directory => continue,
                _ => return Err(Failure::unsupported(format!("'/{path}' is no regular file"))),
            }
            match &seen.found {
                // A layer above has another version of it.
                Some((known, _)) if *known == path => {}
                Some((known, _)) => {
                    return Err(Failure::new(
                        libc::EINVAL,
                        format!("the container has two disks: '/{known}' and '/{path}'"),
                    ));
                }
                None => {
                    let file = spool::unnamed(directory)?;
                    spool::copy(&mut entry, &file, 0, most, &mut |_| Ok(()))?;
                    seen.found = Some((path, file));
                }
            }
        }
    }
    seen.hidden.extend(below.hidden);
    seen.opaque.extend(below.opaque);
    packed.finish()
}

/// The path of an entry within the container, without `.` and slashes at its ends.
fn path_of(bytes: &[u8]) -> Result<String, Failure> {
    // What is no text is no disk, and hides none.
    let text = String::from_utf8_lossy(bytes);
    let shown = crate::document::shown(&text);
    if text.starts_with('/') || text.split('/').any(|part| part == "..") {
        return Err(Failure::new(libc::EACCES, format!("'{shown}' leads out of the container")));
    }
    let parts: Vec<&str> = text.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    Ok(parts.join("/"))
}

/// A stream that may have so many bytes.
struct Bounded<R> {
    reader: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(out)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            io::Error::from(Failure::new(libc::EFBIG, "it unpacks to more bytes than are allowed"))
        })?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::layout::Layout;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::{Seek, Write};

    /// Layers, the lowest first: names and contents, a name that ends with '/' is a directory.
    fn extracted(layers: &[&[(&str, &str)]]) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        std::fs::write(dir.path().join("oci-layout"), "{\"imageLayoutVersion\":\"1.0.0\"}").unwrap();
        let blobs: Vec<Descriptor> = layers
            .iter()
            .map(|entries| {
                let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
                for (name, content) in *entries {
                    let mut header = tar::Header::new_gnu();
                    header.set_size(content.len() as u64);
                    header.set_entry_type(if name.ends_with('/') {
                        EntryType::Directory
                    } else {
                        EntryType::Regular
                    });
                    if *content == "->" {
                        header.set_entry_type(EntryType::Symlink);
                        header.set_size(0);
                    }
                    // `set_path` refuses what is tried here.
                    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
                    header.set_cksum();
                    let content = if *content == "->" { "" } else { content };
                    archive.append(&header, content.as_bytes()).unwrap();
                }
                let bytes = archive.into_inner().unwrap().finish().unwrap();
                let digest = Digest::of(&bytes);
                let path = dir.path().join("blobs/sha256").join(digest.hex());
                std::fs::File::create(path).unwrap().write_all(&bytes).unwrap();
                Descriptor::new("x", digest, bytes.len() as u64)
            })
            .collect();
        let store = Store::Layout(Layout::open(dir.path()).unwrap());
        let mut file = extract(&store, &blobs, dir.path(), 1 << 20).map_err(|failure| failure.reason)?;
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        Ok(text)
    }

    #[test]
    fn the_file_that_the_container_shows_is_the_disk() {
        let disk = ("disk/a.img", "disk");
        assert_eq!(extracted(&[&[("disk/", ""), disk, ("etc/x", "")]]).as_deref(), Ok("disk"));
        assert_eq!(extracted(&[&[("./disk/", ""), ("./disk/a.img", "disk")]]).as_deref(), Ok("disk"));
        assert_eq!(extracted(&[&[disk], &[("disk/a.img", "newer")]]).as_deref(), Ok("newer"));
        let other = ("disk/b.img", "other");
        assert_eq!(extracted(&[&[other], &[disk, ("disk/.wh.b.img", "")]]).as_deref(), Ok("disk"));
        assert_eq!(extracted(&[&[other], &[disk, ("disk/.wh..wh..opq", "")]]).as_deref(), Ok("disk"));
        assert_eq!(extracted(&[&[other], &[(".wh.disk", "")], &[disk]]).as_deref(), Ok("disk"));
    }

    #[test]
    fn what_is_no_one_disk_is_refused_by_name() {
        let disk = ("disk/a.img", "disk");
        for (layers, words) in [
            (&[&[disk, ("disk/b.img", "")][..]][..], &["two disks", "/disk/a.img", "/disk/b.img"][..]),
            (&[&[("disk/b.img", "")], &[disk]], &["two disks"]),
            (&[&[("etc/x", "")]], &["no disk"]),
            (&[&[disk], &[("disk/.wh.a.img", "")]], &["no disk"]),
            (&[&[("disk/../../etc/x", "")]], &["'disk/../../etc/x'", "leads out"]),
            (&[&[("/disk/a.img", "")]], &["leads out"]),
            (&[&[("disk/a.img", "->")]], &["no regular file"]),
        ] {
            let error = extracted(layers).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        let large = "x".repeat(2 << 20);
        let error = extracted(&[&[("etc/large", &large)]]).unwrap_err();
        assert!(error.contains("more bytes") && error.contains("sha256:"), "{error}");
    }
}
