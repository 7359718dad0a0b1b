//! Layouts of images on this machine: a directory, or a tar file of one (the image layout specification).

use crate::blob::Blob;
use crate::digest::Digest;
use crate::document::{Descriptor, INDEX, Index, LONGEST, MANIFEST, REF_NAME, shown};
use crate::failure::Failure;
use crate::name::Reference;
use crate::registry::Told;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MARK: &str = "oci-layout";
const INDEX_FILE: &str = "index.json";
const MARK_TEXT: &str = "{\"imageLayoutVersion\":\"1.0.0\"}";
/// Members of a tar file that are looked at.
const MOST_MEMBERS: usize = 100_000;

/// Where the bytes of each member begin, and how many there are.
type Members = HashMap<String, (u64, u64)>;

/// A layout.
pub(crate) struct Layout {
    path: PathBuf,
    /// The tar file that it is in.
    members: Option<(File, Members)>,
}

impl Layout {
    /// Opens a layout.
    ///
    /// # Errors
    /// There is none, or one of another version.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let cant_open = |error: &std::io::Error| Failure::of_file("the layout can't be opened", error);
        let members = if std::fs::metadata(path).map_err(|error| cant_open(&error))?.is_dir() {
            None
        } else {
            let file = File::open(path).map_err(|error| cant_open(&error))?;
            let members = members_of(&file).map_err(|failure| failure.during("the layout is no tar file"))?;
            Some((file, members))
        };
        let layout = Self { path: path.to_owned(), members };
        let mark = layout.small(MARK).map_err(|failure| failure.during("it is no layout of images"))?;
        let mark: HashMap<String, serde_json::Value> = serde_json::from_slice(&mark)
            .map_err(|error| Failure::wrong(format!("'{MARK}' in it can't be read: {error}")))?;
        let version = mark.get("imageLayoutVersion").and_then(|value| value.as_str()).unwrap_or_default();
        if !version.starts_with("1.") {
            return Err(Failure::unsupported(format!(
                "layouts of version '{}' are not supported",
                shown(version)
            )));
        }
        Ok(layout)
    }

    /// A member as a file, and where its bytes are in it.
    fn member(&self, name: &str) -> Result<(File, u64, u64), Failure> {
        let missing = || Failure::new(libc::ENOENT, format!("the layout has no '{name}'"));
        let of_file = |error: &std::io::Error| Failure::of_file(&format!("'{name}' of the layout"), error);
        match &self.members {
            None => {
                let file = File::open(self.path.join(name)).map_err(|error| match error.kind() {
                    std::io::ErrorKind::NotFound => missing(),
                    _ => of_file(&error),
                })?;
                let found = file.metadata().map_err(|error| of_file(&error))?;
                if !found.is_file() {
                    return Err(Failure::wrong(format!("'{name}' of the layout is no regular file")));
                }
                Ok((file, 0, found.len()))
            }
            Some((file, members)) => {
                let (offset, len) = *members.get(name).ok_or_else(missing)?;
                Ok((file.try_clone().map_err(|error| of_file(&error))?, offset, len))
            }
        }
    }

    fn small(&self, name: &str) -> Result<Vec<u8>, Failure> {
        let (file, offset, len) = self.member(name)?;
        if len > LONGEST as u64 {
            return Err(Failure::wrong(format!("'{name}' of the layout is too long")));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, offset)
            .map_err(|error| Failure::of_file(&format!("'{name}' of the layout"), &error))?;
        Ok(bytes)
    }

    fn index(&self) -> Result<Index, Failure> {
        let bytes = self.small(INDEX_FILE)?;
        serde_json::from_slice(&bytes)
            .map_err(|error| Failure::wrong(format!("'{INDEX_FILE}' of the layout can't be read: {error}")))
    }

    /// The image of a tag, or the only one.
    pub(crate) fn reference(&self, tag: Option<&str>) -> Result<Reference, Failure> {
        let images = self.index()?.manifests;
        let tag_of = |image: &Descriptor| image.annotations.get(REF_NAME).cloned();
        let fits = |image: &&Descriptor| tag.is_none_or(|tag| tag_of(image).as_deref() == Some(tag));
        let found: Vec<&Descriptor> = images.iter().filter(fits).collect();
        let tags = || {
            let tags: Vec<String> = images.iter().filter_map(tag_of).map(|tag| shown(&tag)).collect();
            if tags.is_empty() { "no tags".to_owned() } else { format!("the tags {}", tags.join(", ")) }
        };
        match (&found[..], tag) {
            ([image], _) => Ok(Reference::Digest(image.digest.clone())),
            ([], None) => Err(Failure::new(libc::ENOENT, "the layout has no image")),
            ([], Some(tag)) => {
                Err(Failure::new(libc::ENOENT, format!("the layout has no image '{tag}': it has {}", tags())))
            }
            _ => Err(Failure::new(
                libc::EINVAL,
                format!("the layout has several images: name one by its tag (it has {})", tags()),
            )),
        }
    }

    /// The document of a digest.
    pub(crate) fn document(&self, reference: &Reference) -> Result<Told, Failure> {
        let digest = match reference {
            Reference::Digest(digest) => digest.clone(),
            Reference::Tag(tag) => match self.reference(Some(tag))? {
                Reference::Digest(digest) => digest,
                Reference::Tag(_) => return Err(Failure::wrong("the layout has tags of tags")),
            },
        };
        let bytes = self.small(&name_of(&digest))?;
        if !digest.fits(&bytes) {
            return Err(Failure::wrong(format!("manifest {digest}: its file has another digest")));
        }
        Ok(Told { digest, bytes, media_type: None })
    }

    /// A blob.
    pub(crate) fn blob(&self, blob: &Descriptor) -> Result<Blob, Failure> {
        let (file, offset, len) = self.member(&name_of(&blob.digest))?;
        if len != blob.size {
            return Err(Failure::wrong(format!("it has {len} bytes, and the manifest says {}", blob.size)));
        }
        Ok(Blob::Local { file, offset, len })
    }

    /// Opens the directory of a layout, or makes one.
    ///
    /// # Errors
    /// There is something else, or it can't be made.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        if path.join(MARK).exists() {
            let layout = Self::open(path)?;
            return Ok(layout);
        }
        let of_file = |error: std::io::Error| Failure::of_file("the layout can't be made", &error);
        let is_taken = std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
        if is_taken || path.is_file() {
            return Err(Failure::new(libc::EEXIST, "there is something else that is no layout of images"));
        }
        std::fs::create_dir_all(path.join("blobs/sha256")).map_err(of_file)?;
        let layout = Self { path: path.to_owned(), members: None };
        let empty = Index { schema_version: 2, media_type: Some(INDEX.to_owned()), manifests: Vec::new() };
        layout.write(INDEX_FILE, &mut text_of(&empty)?.as_slice())?;
        layout.write(MARK, &mut MARK_TEXT.as_bytes())?;
        Ok(layout)
    }

    /// Whether a blob is there, with its length.
    pub(crate) fn has(&self, blob: &Descriptor) -> bool {
        self.member(&name_of(&blob.digest)).is_ok_and(|(_, _, len)| len == blob.size)
    }

    /// Writes a blob.
    pub(crate) fn put(&self, digest: &Digest, reader: &mut dyn Read) -> Result<(), Failure> {
        self.write(&name_of(digest), reader)
    }

    /// Gives a tag to an image, whose blobs are there. Without one, an image that has a tag keeps it.
    pub(crate) fn tag(&self, mut image: Descriptor, tag: Option<&str>) -> Result<(), Failure> {
        self.check_directory()?;
        let mut index = self.index()?;
        let tag_of = |known: &Descriptor| known.annotations.get(REF_NAME).cloned();
        let is_known = |known: &Descriptor| known.digest == image.digest;
        if tag.is_none() && index.manifests.iter().any(is_known) {
            return Ok(());
        }
        index.manifests.retain(|known| match tag_of(known) {
            Some(other) => tag != Some(other.as_str()),
            None => !is_known(known),
        });
        if let Some(tag) = tag {
            image.annotations.insert(REF_NAME.to_owned(), tag.to_owned());
        }
        MANIFEST.clone_into(&mut image.media_type);
        index.manifests.push(image);
        self.write(INDEX_FILE, &mut text_of(&index)?.as_slice())
    }

    /// Refuses to change a tar file.
    fn check_directory(&self) -> Result<(), Failure> {
        if self.members.is_some() {
            return Err(Failure::unsupported("the tar file of a layout can't be changed: name a directory"));
        }
        Ok(())
    }

    /// Writes a file under another name, and gives it its own when all is there.
    fn write(&self, name: &str, reader: &mut dyn Read) -> Result<(), Failure> {
        self.check_directory()?;
        let path = self.path.join(name);
        let part = self.path.join(format!("{name}.{}.part", std::process::id()));
        let mut write = || -> std::io::Result<()> {
            let mut file = File::create(&part)?;
            std::io::copy(reader, &mut file)?;
            file.flush()?;
            file.sync_all()?;
            std::fs::rename(&part, &path)
        };
        write().map_err(|error| {
            let _ = std::fs::remove_file(&part);
            Failure::from(error).during(format!("'{name}' of the layout can't be written"))
        })
    }
}

fn text_of(index: &Index) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(index).map_err(|error| Failure::wrong(error.to_string()))
}

fn name_of(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm(), digest.hex())
}

fn members_of(file: &File) -> Result<Members, Failure> {
    let mut archive = tar::Archive::new(file);
    let mut members = HashMap::new();
    for entry in archive.entries_with_seek()?.take(MOST_MEMBERS) {
        let entry = entry?;
        if entry.header().entry_type() != tar::EntryType::Regular {
            continue;
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).trim_start_matches("./").to_owned();
        members.insert(name, (entry.raw_file_position(), entry.size()));
    }
    Ok(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(layout: &Layout, bytes: &[u8]) -> Descriptor {
        let digest = Digest::of(bytes);
        layout.put(&digest, &mut &*bytes).unwrap();
        Descriptor::new(MANIFEST, digest, bytes.len() as u64)
    }

    #[test]
    fn layouts_are_made_and_read_as_directories_and_tar_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layout");
        let made = Layout::create(&path).unwrap();
        assert!(made.reference(None).unwrap_err().reason.contains("no image"));
        let (one, two) = (descriptor(&made, b"one"), descriptor(&made, b"two"));
        made.tag(one.clone(), Some("v1")).unwrap();
        assert_eq!(made.reference(None), Ok(Reference::Digest(one.digest.clone())));
        made.tag(two.clone(), Some("v2")).unwrap();
        made.tag(two.clone(), Some("v1")).unwrap();
        assert_eq!(made.reference(Some("v1")), Ok(Reference::Digest(two.digest.clone())));
        assert!(made.reference(None).unwrap_err().reason.contains("v2, v1"));
        assert!(made.reference(Some("v3")).unwrap_err().reason.contains("v3"));
        let tar_path = dir.path().join("layout.tar");
        let mut archive = tar::Builder::new(File::create(&tar_path).unwrap());
        archive.append_dir_all(".", &path).unwrap();
        archive.into_inner().unwrap();
        let packed = Layout::open(&tar_path).unwrap();
        assert_eq!(packed.reference(Some("v2")), Ok(Reference::Digest(two.digest.clone())));
        assert_eq!(packed.document(&Reference::Digest(one.digest.clone())).unwrap().bytes, b"one");
        assert_eq!(packed.blob(&two).unwrap().first(10), Ok(b"two".to_vec()));
        assert!(packed.tag(two, None).unwrap_err().reason.contains("tar file"));
        // A file that is not what its name says.
        std::fs::write(path.join(name_of(&one.digest)), "zap").unwrap();
        assert!(
            made.document(&Reference::Digest(one.digest.clone())).is_err_and(|e| e.reason.contains("digest"))
        );
        std::fs::remove_file(path.join(name_of(&one.digest))).unwrap();
        assert!(made.blob(&one).is_err_and(|e| e.reason.contains(one.digest.hex())));
    }

    #[test]
    fn a_push_without_a_tag_takes_none_away() {
        let dir = tempfile::tempdir().unwrap();
        let made = Layout::create(&dir.path().join("layout")).unwrap();
        let one = descriptor(&made, b"one");
        let is = |tag: Option<&str>| made.reference(tag) == Ok(Reference::Digest(one.digest.clone()));
        made.tag(one.clone(), Some("v1")).unwrap();
        made.tag(one.clone(), None).unwrap();
        assert!(is(Some("v1")) && is(None));
        made.tag(one.clone(), Some("v2")).unwrap();
        made.tag(one.clone(), None).unwrap();
        assert!(is(Some("v1")) && is(Some("v2")));
        let two = descriptor(&made, b"two");
        made.tag(two.clone(), None).unwrap();
        assert!(made.reference(None).unwrap_err().reason.contains("several"));
        made.tag(two.clone(), Some("v3")).unwrap();
        assert_eq!(made.index().unwrap().manifests.len(), 3);
    }

    #[test]
    fn what_is_no_layout_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let open = |path: &Path| Layout::open(path).err().unwrap().reason;
        assert!(open(dir.path()).contains("no layout"));
        let file = dir.path().join("x");
        assert!(open(&file).contains("can't be opened"));
        std::fs::write(&file, vec![7; 2048]).unwrap();
        assert!(open(&file).contains("no tar"));
        assert!(Layout::create(dir.path()).err().unwrap().reason.contains("something else"));
        std::fs::write(dir.path().join(MARK), "{\"imageLayoutVersion\":\"2.0\"}").unwrap();
        assert!(open(dir.path()).contains("version '2.0'"));
    }
}
