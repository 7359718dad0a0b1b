//! Which files an image may make us open.

use crate::Remedy;
use crate::options::{OpenOptions, RefPolicy};
use crate::remote::RemoteReference;
use crate::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use zebu_storage::{File, OpenFlags};

/// The directory of the image that names a file.
fn directory(image: &Path) -> &Path {
    match image.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// The plain path that `name` in `image` means: relative names are relative to the image's directory.
pub(crate) fn resolve(image: &Path, name: &str) -> PathBuf {
    directory(image).join(name)
}

/// Whether a name is a plain path: it has no protocol (`nbd:...`, `json:...`) and is not empty.
fn is_plain_path(name: &str) -> bool {
    // QEMU takes what stands before a colon for a protocol unless a slash comes first.
    let before_slash = name.split('/').next().unwrap_or_default();
    !name.is_empty() && !before_slash.contains(':')
}

/// The role of a file for the image that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    BackingFile,
    DataFile,
    Extent,
    Overlay,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::BackingFile => "backing file",
            Role::DataFile => "data file",
            Role::Extent => "extent file",
            Role::Overlay => "overlay",
        }
    }
}

fn refused(image: &Path, name: &str, role: Role, remedy: &str) -> Error {
    let shown = without_secrets(name);
    let message = format!("the image names the {} '{shown}', which may not be opened; {remedy}", role.name());
    Error::new(ErrorKind::ReferenceRefused, message).on(image)
}

/// A name without the users, the passwords and the queries of its URLs. It may be a description with several of them.
fn without_secrets(name: &str) -> String {
    let is_description = name.starts_with("json:");
    // Slashes may be escaped in a description.
    let mut rest = if is_description { name.replace("\\/", "/") } else { name.to_owned() };
    let mut shown = String::with_capacity(rest.len());
    while let Some(at) = rest.find("://") {
        let is_of_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        let scheme = rest[..at].trim_end_matches(is_of_scheme).len();
        let is_web = rest.get(scheme..scheme + 4).is_some_and(|begin| begin.eq_ignore_ascii_case("http"));
        let tail = rest.split_off(at + 3);
        shown.push_str(&rest);
        let end = if is_description { tail.find('"').unwrap_or(tail.len()) } else { tail.len() };
        let (url, after) = tail.split_at(end);
        if is_web {
            let (place, query) = url.split_once('?').map_or((url, ""), |(place, _)| (place, "?..."));
            let end = place.find('/').unwrap_or(place.len());
            let host = place[..end].rfind('@').map_or(0, |at| at + 1);
            shown.push_str(&place[host..]);
            shown.push_str(query);
        } else {
            shown.push_str(url);
        }
        after.clone_into(&mut rest);
    }
    shown + &rest
}

/// The URL that a relative name in the image at the URL `image` means; `None` where there is no such thing.
fn beside_url(image: &str, name: &str) -> Option<String> {
    if image.contains(['?', '#']) || name.starts_with('/') {
        return None;
    }
    let authority = image.find("://")? + 3;
    let directory = image.rfind('/').filter(|slash| *slash >= authority)?;
    Some(format!("{}{name}", &image[..=directory]))
}

/// Opens the file `name` that `image` names, if the policies of `options` allow it. The directory that confines it can't be left, by
/// `..`, by an absolute name, or by a symbolic link swapped in meanwhile (openat2, `RESOLVE_BENEATH`).
pub(crate) fn open(
    image: &Path,
    name: &str,
    role: Role,
    options: &OpenOptions,
    flags: &OpenFlags,
) -> Result<(File, PathBuf)> {
    let OpenOptions { refs: policy, remote, .. } = options;
    let local = remote.local_file(image);
    let image = local.as_deref().unwrap_or(image);
    let image_url = image.to_str().filter(|image| remote.is_name(image));
    let url = match image_url {
        Some(image_url) if is_plain_path(name) && !name.starts_with('/') => {
            let remedy = "a name is only relative to a URL with a path: name the file yourself";
            Some(
                beside_url(image_url, name)
                    .ok_or_else(|| refused(image, name, role, remedy).with_remedy(Remedy::NameFile))?,
            )
        }
        _ => None,
    };
    let url = url.as_deref().unwrap_or(name);
    match remote.open_reference(url, flags) {
        RemoteReference::NotRemote => {}
        RemoteReference::Opened(opened) => {
            let file = opened.map_err(|e| failed(image, name, role, e))?;
            // Keys are found by the whole description; a URL is told of without its secrets.
            let path = if url.starts_with("json:") { PathBuf::from(url) } else { file.path().to_owned() };
            return Ok((file, path));
        }
        RemoteReference::Refused => {
            let remedy = "names with a protocol are not allowed";
            return Err(refused(image, name, role, remedy).with_remedy(Remedy::AllowRemoteReferences));
        }
    }
    if !is_plain_path(name) {
        let remedy = "only plain paths are opened: name the file yourself, or rebase";
        return Err(refused(image, name, role, remedy).with_remedy(Remedy::NameFile));
    }
    let path = resolve(image, name);
    let (directories, remedy): (Vec<PathBuf>, Remedy) = match policy {
        RefPolicy::All => {
            let file = File::open(&path, flags).map_err(|e| failed(image, name, role, e))?;
            return Ok((file, path));
        }
        RefPolicy::None => (Vec::new(), Remedy::AllowLocalReferences),
        RefPolicy::Local => (
            if image_url.is_some() { Vec::new() } else { vec![directory(image).to_owned()] },
            Remedy::AllowReferencesWithin(directory(&path).to_owned()),
        ),
        RefPolicy::Within(allowed) => (
            (image_url.is_none().then(|| directory(image).to_owned()).into_iter())
                .chain(allowed.iter().cloned())
                .collect(),
            Remedy::AllowReferencesWithin(directory(&path).to_owned()),
        ),
    };
    for confined_to in directories {
        let Some(beneath) = beneath(&confined_to, &path) else { continue };
        match File::open_beneath(&confined_to, &beneath, flags) {
            Ok(file) => return Ok((file, path)),
            Err(e) if e.kind == zebu_storage::IoErrorKind::Escapes => {}
            Err(e) => return Err(failed(image, name, role, e)),
        }
    }
    Err(refused(image, name, role, "it is not among the files that an image may name").with_remedy(remedy))
}

fn failed(image: &Path, name: &str, role: Role, e: zebu_storage::IoError) -> Error {
    let error = Error::from(e);
    let shown = without_secrets(name);
    let message = format!("could not open the {} '{shown}': {}", role.name(), error.message());
    Error::new(error.kind(), message).with_errno(error.errno()).on(image)
}

/// `path` as seen from `directory`, by name only; `None` if the names differ from the start.
fn beneath(directory: &Path, path: &Path) -> Option<PathBuf> {
    if let Ok(rest) = path.strip_prefix(directory) {
        return Some(rest.to_owned());
    }
    // "." and what is not absolute mean the same directory.
    if directory == Path::new(".") && path.is_relative() {
        return Some(path.to_owned());
    }
    let absolute = std::path::absolute(path).ok()?;
    let directory = std::path::absolute(directory).ok()?;
    absolute.strip_prefix(directory).ok().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_a_protocol_are_no_paths() {
        for name in ["nbd:localhost", "json:{}", "file:x", "", "nbd://h/x", "a:b"] {
            assert!(!is_plain_path(name), "{name}");
        }
        for name in ["base.img", "/abs/base:1.img", "./a:b", "dir/a:b"] {
            assert!(is_plain_path(name), "{name}");
        }
    }

    #[test]
    fn names_are_told_of_without_their_secrets() {
        for (name, shown) in [
            ("base.img", "base.img"),
            ("HTTP://u:PW@h/x?sig=S", "HTTP://h/x?..."),
            ("nbd+unix:///e?socket=/s", "nbd+unix:///e?socket=/s"),
            (
                "json:{\"url\":\"https:\\/\\/u:PW@h/x?S\",\"b\":\"http://u:PW@h\"}",
                "json:{\"url\":\"https://h/x?...\",\"b\":\"http://h\"}",
            ),
        ] {
            assert_eq!(without_secrets(name), shown);
        }
        let url = "http://u:PW@h/x?sig=S";
        let error = zebu_storage::IoError::of_file(
            zebu_storage::Op::Open,
            zebu_storage::IoErrorKind::Os(libc::ENOENT),
            "http://h/x?...",
        );
        let message = failed(Path::new("a.qcow2"), url, Role::BackingFile, error).to_string();
        assert!(!message.contains("PW") && !message.contains("sig"), "{message}");
    }

    #[test]
    fn names_are_relative_to_a_url_with_a_path() {
        assert_eq!(beside_url("http://h/d/a.qcow2", "b").as_deref(), Some("http://h/d/b"));
        assert_eq!(beside_url("nbd://h/a", "../b").as_deref(), Some("nbd://h/../b"));
        for image in ["nbd+unix:///a?socket=s", "nbd:h:1", "http://h"] {
            assert_eq!(beside_url(image, "b"), None, "{image}");
        }
    }

    #[test]
    fn names_are_relative_to_the_image() {
        assert_eq!(resolve(Path::new("/d/a.qcow2"), "b.img"), Path::new("/d/b.img"));
        assert_eq!(resolve(Path::new("a.qcow2"), "b.img"), Path::new("./b.img"));
        assert_eq!(resolve(Path::new("/d/a.qcow2"), "/x/b.img"), Path::new("/x/b.img"));
    }
}
