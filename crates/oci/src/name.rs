//! Names of images: `oci://REGISTRY[:PORT]/NAME:TAG`, `oci://REGISTRY[:PORT]/NAME@DIGEST`, `oci-layout:PATH[:TAG]`.

use crate::digest::Digest;
use std::fmt;
use std::path::{Path, PathBuf};

const REGISTRY: &str = "oci://";
const LAYOUT: &str = "oci-layout:";
/// The longest name of a repository with its registry, in bytes.
const LONGEST_NAME: usize = 255;
/// The longest tag.
const LONGEST_TAG: usize = 128;
/// The tag where none is given.
const DEFAULT_TAG: &str = "latest";

/// The image of a repository that is meant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Reference {
    /// The one that has this tag now.
    Tag(String),
    /// The one with this digest, which is always the same.
    Digest(Digest),
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => digest.fmt(f),
        }
    }
}

/// The name of an image. It holds no secrets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum OciName {
    /// An image of a registry.
    #[non_exhaustive]
    Registry {
        /// The host, and the port if there is one.
        registry: String,
        /// The name of the repository.
        repository: String,
        /// The image.
        reference: Reference,
    },
    /// An image of a layout on this machine.
    #[non_exhaustive]
    Layout {
        /// A directory, or a tar file of one.
        path: PathBuf,
        /// The tag, if one is given.
        tag: Option<String>,
    },
}

impl OciName {
    /// Whether `name` is of a kind that [`OciName::parse`] reads.
    pub fn is_name(name: &str) -> bool {
        [REGISTRY, LAYOUT]
            .iter()
            .any(|kind| name.get(..kind.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(kind)))
    }

    /// Reads a name.
    ///
    /// # Errors
    /// The reason in words: no registry, no repository, characters that names, tags or digests don't have.
    pub fn parse(name: &str) -> Result<Self, String> {
        let after = |kind: &str| Self::is_name(name).then(|| name.get(kind.len()..)).flatten();
        let begins = |kind: &str| name.get(..kind.len()).is_some_and(|text| text.eq_ignore_ascii_case(kind));
        match (after(REGISTRY), after(LAYOUT)) {
            (Some(rest), _) if begins(REGISTRY) => parse_registry(rest),
            (_, Some(rest)) if begins(LAYOUT) => parse_layout(rest),
            _ => Err("a name of an image begins with oci:// or oci-layout:".to_owned()),
        }
    }

    /// Whether it is on this machine.
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Layout { .. })
    }

    /// The same image of a registry by its digest, wherever the tag leads to later. A layout's name stays as it is.
    #[must_use]
    pub fn pinned(&self, digest: &Digest) -> Self {
        match self {
            Self::Registry { registry, repository, .. } => Self::Registry {
                registry: registry.clone(),
                repository: repository.clone(),
                reference: Reference::Digest(digest.clone()),
            },
            Self::Layout { .. } => self.clone(),
        }
    }

    /// The scheme of its names.
    pub fn scheme(&self) -> &'static str {
        match self {
            Self::Registry { .. } => "oci",
            Self::Layout { .. } => "oci-layout",
        }
    }
}

fn parse_registry(rest: &str) -> Result<OciName, String> {
    let (registry, path) = rest.split_once('/').unwrap_or((rest, ""));
    if registry.contains('@') {
        return Err(
            "no user belongs into the name: docker's or podman's files of credentials have it".to_owned()
        );
    }
    if registry.is_empty() {
        return Err("the registry is missing: oci://REGISTRY/NAME:TAG".to_owned());
    }
    // The rules of URLs are those of registries.
    let url = zebu_remote::http::HttpUrl::parse(&format!("https://{registry}"))
        .map_err(|reason| format!("the registry: {reason}"))?;
    if registry.contains('?') || url.host().is_empty() {
        return Err("the registry has characters that no host has".to_owned());
    }
    let (path, digest) = match path.split_once('@') {
        Some((path, digest)) => (
            path,
            Some(digest.parse::<Digest>().map_err(|reason| format!("the digest '{digest}': {reason}"))?),
        ),
        None => (path, None),
    };
    let (repository, tag) = match path.rsplit_once(':') {
        Some((repository, tag)) => (repository, Some(tag)),
        None => (path, None),
    };
    if repository.is_empty() {
        return Err("the repository is missing: oci://REGISTRY/NAME:TAG".to_owned());
    }
    if registry.len() + 1 + repository.len() > LONGEST_NAME {
        return Err(format!("registry and repository have more than {LONGEST_NAME} characters"));
    }
    if !repository.split('/').all(is_part) {
        return Err(format!(
            "'{repository}' is no repository: its parts have lower-case letters and digits, with '.', '_', '__' or '-' between"
        ));
    }
    if let Some(tag) = tag {
        check_tag(tag)?;
    }
    let reference = match (digest, tag) {
        (Some(digest), _) => Reference::Digest(digest),
        (None, tag) => Reference::Tag(tag.unwrap_or(DEFAULT_TAG).to_owned()),
    };
    Ok(OciName::Registry {
        registry: registry.to_ascii_lowercase(),
        repository: repository.to_owned(),
        reference,
    })
}

fn parse_layout(rest: &str) -> Result<OciName, String> {
    // A colon in the last part of the path begins a tag.
    let cut = rest.rfind('/').map_or(0, |slash| slash + 1);
    let (path, tag) = match rest[cut..].rsplit_once(':') {
        Some((last, tag)) => (&rest[..cut + last.len()], Some(tag)),
        None => (rest, None),
    };
    if path.is_empty() {
        return Err("the path of the layout is missing: oci-layout:PATH[:TAG]".to_owned());
    }
    if let Some(tag) = tag {
        check_tag(tag)?;
    }
    Ok(OciName::Layout { path: Path::new(path).to_owned(), tag: tag.map(str::to_owned) })
}

fn check_tag(tag: &str) -> Result<(), String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    let begins = tag.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if !begins || tag.len() > LONGEST_TAG || !tag.bytes().all(fits) {
        return Err(format!(
            "'{tag}' is no tag: a tag has up to {LONGEST_TAG} letters, digits, '_', '.' and '-', and begins with none of the last two"
        ));
    }
    Ok(())
}

/// Whether a part of a repository's name is one: letters and digits with separators between them.
fn is_part(part: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_ended = part.starts_with(is_letter) && part.ends_with(is_letter);
    let mut separators = part.split(is_letter).filter(|between| !between.is_empty());
    let fits =
        |between: &str| matches!(between, "." | "_" | "__") || between.bytes().all(|byte| byte == b'-');
    is_ended && separators.all(fits)
}

impl fmt::Display for OciName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry { registry, repository, reference } => {
                let sign = if matches!(reference, Reference::Digest(_)) { '@' } else { ':' };
                write!(f, "{REGISTRY}{registry}/{repository}{sign}{reference}")
            }
            Self::Layout { path, tag } => {
                write!(f, "{LAYOUT}{}", path.display())?;
                tag.as_ref().map_or(Ok(()), |tag| write!(f, ":{tag}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_shown() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (name, shown) in [
            ("oci://ghcr.io/a/b-c:v1.0", "oci://ghcr.io/a/b-c:v1.0"),
            ("oci://h:5000/x", "oci://h:5000/x:latest"),
            ("oci://[::1]:5000/x:t", "oci://[::1]:5000/x:t"),
            ("OCI://H/a__b/c.d/e--f:T_1", "oci://h/a__b/c.d/e--f:T_1"),
            (&format!("oci://h/x@{digest}"), &format!("oci://h/x@{digest}")),
            // The digest decides.
            (&format!("oci://h/x:t@{digest}"), &format!("oci://h/x@{digest}")),
            ("oci-layout:dir", "oci-layout:dir"),
            ("oci-layout:/a:b/dir:v1", "oci-layout:/a:b/dir:v1"),
            ("oci-layout:x.tar", "oci-layout:x.tar"),
        ] {
            assert_eq!(OciName::parse(name).map(|found| found.to_string()).as_deref(), Ok(shown), "{name}");
            assert!(OciName::is_name(name));
        }
        assert!(!OciName::is_name("oci:x") && !OciName::is_name("http://h/x") && !OciName::is_name("é"));
        let pinned = OciName::parse("oci://h/x:t").unwrap().pinned(&digest.parse().unwrap());
        assert_eq!(pinned.to_string(), format!("oci://h/x@{digest}"));
        let OciName::Layout { path, tag } = OciName::parse("oci-layout:/a:b/dir").unwrap() else { panic!() };
        assert_eq!((path.as_path(), tag), (Path::new("/a:b/dir"), None));
    }

    #[test]
    fn what_is_no_name_is_refused_with_what_is_wrong() {
        for (name, word) in [
            ("oci://", "registry is missing"),
            ("oci:///x", "registry is missing"),
            ("oci://h", "repository is missing"),
            ("oci://h/", "repository is missing"),
            ("oci://h/:t", "repository is missing"),
            ("oci://u:secret@h/x", "no user"),
            ("oci://h:0/x", "port"),
            ("oci://h:x/x", "port"),
            ("oci://h?x/y", "registry"),
            ("oci://h/A", "'A'"),
            ("oci://h/a//b", "repository"),
            ("oci://h/a/../b", "repository"),
            ("oci://h/a._b", "repository"),
            ("oci://h/-a", "repository"),
            ("oci://h/a:", "tag"),
            ("oci://h/a:.t", "tag"),
            ("oci://h/a:t/x", "tag"),
            ("oci://h/a@sha256:0", "digest"),
            ("oci://h/a@md5:0", "digest"),
            ("oci-layout:", "path"),
            ("oci-layout::t", "path"),
            ("oci-layout:d:", "tag"),
            ("http://h/x", "begins"),
        ] {
            let error = OciName::parse(name).unwrap_err();
            assert!(error.contains(word) && !error.contains("secret"), "{name}: {error}");
        }
        let long = format!("oci://h/{}", "a".repeat(300));
        assert!(OciName::parse(&long).unwrap_err().contains("255"));
        let long = format!("oci://h/a:{}", "a".repeat(129));
        assert!(OciName::parse(&long).unwrap_err().contains("128"));
    }
}
