//! The backing file that the user gives to a new image.

use crate::failure::Failure;
use crate::lock_patience::lock_wait;
use crate::session::Session;
use crate::values::{NamedFormat, ReferenceRule, format_argument};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use zebu_disks::graph::{is_graph_name, reference_node};
use zebu_disks::{Context, allowed_references, given_only, is_server_name, local_name, opener};
use zebu_engine::{Chain, ErrorKind, Format, Image, OpenOptions, Purpose};
use zebu_remote::http::HttpUrl;

/// A backing file as given by the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackingSpec {
    /// As it is written into the image.
    pub(crate) name: String,
    /// Its format, if given.
    pub(crate) format: Option<Format>,
}

/// Whether the name of a backing file has to lead to something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CheckName {
    /// It has: to a local file, a disk on a server, or drivers.
    AnyPlace,
    /// Any name is written into the image as it is given (`-u`).
    Unsafe,
}

/// The name to write for one that was given.
pub(crate) fn found_as(context: &Context, name: &str, check: CheckName) -> Result<String, Failure> {
    let fail = |shown: &str, reason: String| {
        Failure::new(format!("Could not open the backing file '{shown}': {reason}"))
    };
    if check == CheckName::Unsafe
        || is_server_name(name).map_err(|reason| fail(&HttpUrl::hide(name), reason))?
    {
        return Ok(name.to_owned());
    }
    if is_described(name) {
        reference_node(context, name).map_err(|reason| fail(name, reason))?;
        return Ok(name.to_owned());
    }
    local_name(name).map_err(|reason| fail(name, reason))
}

/// Joins the ways of giving a backing file: `-b` (`-B`) with `-F`, and `-o backing_file=,backing_fmt=`.
pub(crate) fn join(
    context: &Context,
    option: Option<&str>,
    option_format: Option<&NamedFormat>,
    create_file: Option<&str>,
    create_format: Option<&str>,
    check: CheckName,
) -> Result<Option<BackingSpec>, Failure> {
    let named_format = create_format
        .map(|name| format_argument(context.dialect, name))
        .transpose()
        .map_err(|reason| Failure::new(format!("backing_fmt: {reason}")))?;
    let format = match (option_format.map(|named| named.format), named_format) {
        (Some(a), Some(b)) if a != b => {
            return Err(Failure::usage("the backing format is given twice, and differently"));
        }
        (a, b) => a.or(b),
    };
    let name = match (option, create_file) {
        (Some(a), Some(b)) if a != b => {
            return Err(Failure::usage("the backing file is given twice, and differently"));
        }
        (a, b) => a.or(b),
    };
    if let (Some(name), Some(format), CheckName::AnyPlace) = (name, option_format, check) {
        let fail = |reason| Failure::new(format!("Could not open the backing file '{name}': {reason}"));
        format.check(OsStr::new(name)).map_err(fail)?;
    }
    match name {
        Some(name) => Ok(Some(BackingSpec { name: found_as(context, name, check)?, format })),
        None if format.is_some() => Err(Failure::usage("a backing format is given, but no backing file")),
        None => Ok(None),
    }
}

/// Whether a name describes a disk with drivers.
pub(crate) fn is_described(name: &str) -> bool {
    is_graph_name(name) || name.starts_with("json:")
}

/// Where a name that the user gave for a backing file of `image` leads: to a server, or where [`resolve`] says.
pub(crate) fn resolve_given(context: &Context, image: &Path, name: &str) -> Result<PathBuf, Failure> {
    if is_server_name(name).is_ok_and(|is_one| is_one) {
        return context.image_path(OsStr::new(name)).map_err(Failure::new);
    }
    if is_described(name) {
        let node = reference_node(context, name).map_err(Failure::new)?;
        return context.disks.names.note_node(PathBuf::from(name), node).map_err(Failure::new);
    }
    Ok(resolve(image, name))
}

/// Where a name that `image` holds leads: relative names start from the directory of the image.
pub(crate) fn resolve(image: &Path, name: &str) -> PathBuf {
    image.parent().map_or_else(|| PathBuf::from(name), |directory| directory.join(name))
}

/// The format that must be given: the failure says which one the file seems to have.
pub(crate) fn required_format(
    session: &Session,
    image: &Path,
    backing: &BackingSpec,
) -> Result<Format, Failure> {
    if let Some(format) = backing.format {
        return Ok(format);
    }
    let path = resolve_given(session.context(), image, &backing.name)?;
    let detected = match header(session, &path, None) {
        Ok(found) => format!("; '{}' looks like {}: add -F {1}", path.display(), found.format().name()),
        Err(error) if error.kind() == ErrorKind::ForeignFormat => format!("; {error} (-F raw)"),
        Err(_) => "; add -F FMT".to_owned(),
    };
    Err(Failure::new(format!("{}: Backing file specified without backing format{detected}", image.display())))
}

/// Bytes of the disk of a backing file, looking at its header only.
pub(crate) fn virtual_size(session: &Session, path: &Path, format: Format) -> Result<u64, Failure> {
    header(session, path, Some(format))
        .map(|image| image.virtual_size())
        .map_err(|error| Failure::opening(session.context(), path, &error))
}

/// An image, opened with what it stands on, and closed.
pub(crate) fn opened_chain(
    session: &Session,
    path: &Path,
    format: Format,
    allowed: &[ReferenceRule],
) -> Result<Image, Failure> {
    let options = OpenOptions::default()
        .format(Some(format))
        .lock_wait(lock_wait(session.dialect()))
        .refs(allowed_references(session.dialect(), allowed)?)
        .remote(opener(session.context(), allowed)?);
    let worker = session.worker();
    let opened = worker.block_on(async {
        let image = Image::open(worker, path, &options).await?;
        image.close(worker).await.map(|()| image)
    });
    opened.map_err(|error| Failure::opening(session.context(), path, &error))
}

fn header(session: &Session, path: &Path, format: Option<Format>) -> Result<Image, zebu_engine::Error> {
    let options = OpenOptions::default()
        .format(format)
        .probe(session.dialect().probe())
        .purpose(Purpose::Inspect)
        .chain(Chain::TopOnly)
        .lock_wait(lock_wait(session.dialect()))
        .remote(given_only(session.context()));
    let worker = session.worker();
    worker.block_on(async {
        let image = Image::open(worker, path, &options).await?;
        // Nothing was written: that the header could be read is all that matters.
        let _ = image.close(worker).await;
        Ok(image)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_names_start_at_the_image() {
        assert_eq!(resolve(Path::new("dir/a.qcow2"), "b.raw"), PathBuf::from("dir/b.raw"));
        assert_eq!(resolve(Path::new("a.qcow2"), "b.raw"), PathBuf::from("b.raw"));
        assert_eq!(resolve(Path::new("dir/a.qcow2"), "/b.raw"), PathBuf::from("/b.raw"));
    }

    #[test]
    fn both_ways_of_giving_a_backing_file_agree_or_fail() {
        let joined = join(
            &Context::default(),
            Some("a"),
            Some(&Format::Raw.into()),
            Some("a"),
            Some("raw"),
            CheckName::AnyPlace,
        )
        .unwrap()
        .unwrap();
        assert_eq!(joined, BackingSpec { name: "a".into(), format: Some(Format::Raw) });
        assert!(join(&Context::default(), Some("a"), None, Some("b"), None, CheckName::AnyPlace).is_err());
        assert!(
            join(&Context::default(), None, Some(&Format::Raw.into()), None, None, CheckName::AnyPlace)
                .is_err()
        );
        assert!(
            join(&Context::default(), None, None, Some("a"), Some("nosuch"), CheckName::AnyPlace).is_err()
        );
        assert_eq!(join(&Context::default(), None, None, None, None, CheckName::AnyPlace).unwrap(), None);
    }
}
