//! Names of disks over the network on the command line: which there are, and who opens them.
//!
//! A name that is taken here is noted with its options, and called by a URL that has no secrets from then on. The engine
//! gets that URL, and asks back when it is to be opened.

use crate::context::Context;
use crate::error::DiskError;
use crate::graph::{is_graph_name, name_node, open_node, reference_node};
use crate::local_name::local_path;
use crate::reference::Reference;
use crate::reference_defaults::remote_references;
use crate::remote_disk::{RemoteDisks, RemoteName};
use crate::words::ReferenceRule;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_engine::storage::{File, IoError, IoErrorKind, Op, OpenFlags};
use zebu_engine::{OpenRemote, Remote, RemoteRefs};
use zebu_remote::http::HttpUrl;
use zebu_remote::nbd::TlsFiles;
use zebu_store::points::{PointName, PointsPlace};

impl Context {
    /// The file that `name` on the command line leads to: a local path, or the URL of a disk over the network.
    ///
    /// # Errors
    /// The name has a protocol that is not known, or can't be read.
    pub fn image_path(&self, name: &OsStr) -> Result<PathBuf, String> {
        let path = Path::new(name);
        if self.disks.names.named(path).is_some() {
            return Ok(path.to_owned());
        }
        self.disks.names.note_reference(path, self.reference(name)?)
    }

    /// Reads what `name` on the command line leads to.
    ///
    /// # Errors
    /// The name has a protocol that is not known, or can't be read.
    pub fn reference(&self, name: &OsStr) -> Result<Reference, String> {
        Ok(match name.to_str() {
            Some(name) if is_graph_name(name) => Reference::Graph(name_node(self, name)?),
            Some(name) if RemoteName::is_name(name) => {
                Reference::Remote(RemoteName::parse(name, &self.disks.remote)?)
            }
            _ => Reference::Local(local_path(name)?),
        })
    }

    /// Opens what a name leads to, under that name.
    ///
    /// # Errors
    /// The file's, or the server's.
    pub fn open_reference(
        &self,
        reference: &Reference,
        name: &Path,
        flags: &OpenFlags,
    ) -> Result<File, IoError> {
        let shown = name.to_string_lossy();
        match reference {
            Reference::Local(path) => File::open(path, flags),
            Reference::Remote(remote) => {
                let disk = self.disks.remote.open(remote.clone(), flags.access)?;
                File::from_storage(disk, &remote.shown(), flags)
            }
            Reference::Graph(node) => open_node(self, node, &shown, flags),
            Reference::Opened(file) => {
                let file = file.descriptor().try_clone_to_owned().map_err(|error| {
                    let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
                    IoError::of_file(Op::Open, IoErrorKind::Os(errno), name)
                })?;
                File::from_descriptor(file, name, flags)
            }
            Reference::Shared(disk) => File::from_storage(disk.0.clone(), &shown, flags),
        }
    }

    /// The place where an image is to be made: a local path; the URL of a disk on an NBD server, which is overwritten; or the name of
    /// an image of RBD, which is made when it is opened.
    ///
    /// # Errors
    /// The name can't be read, or leads to what can't be written.
    pub fn new_image_path(&self, name: &OsStr) -> Result<PathBuf, String> {
        let Some(text) = name.to_str().filter(|name| RemoteName::is_name(name)) else {
            return local_path(name);
        };
        match RemoteName::parse(text, &self.disks.remote)? {
            RemoteName::Http { .. } => Err("files on web servers can be read, not written".to_owned()),
            RemoteName::Object { .. } => {
                Err("objects in stores are made by convert and backup only".to_owned())
            }
            RemoteName::Oci { .. } => Err("images of registries are made by push only".to_owned()),
            RemoteName::Point { .. } => Err("points of stores are made by backup only".to_owned()),
            name @ RemoteName::Nbd { .. } => self.disks.names.note_remote(name),
            RemoteName::Rbd { name } if name.snapshot.is_some() => {
                Err("snapshots can be read, not written".to_owned())
            }
            name @ RemoteName::Rbd { .. } => {
                let path = self.disks.names.note_remote(name.clone())?;
                self.disks.remote.make_first(name);
                Ok(path)
            }
        }
    }
}

/// Whether a name that is to be written into an image has a protocol that leads to a server.
///
/// # Errors
/// It can't be read, or has a password in it.
pub fn is_server_name(name: &str) -> Result<bool, String> {
    if !RemoteName::is_name(name) {
        return Ok(false);
    }
    if let RemoteName::Http { url, .. } = RemoteName::parse(name, &RemoteDisks::default())?
        && url.has_credentials()
    {
        return Err("the password would be written into the image: a netrc file can have it".to_owned());
    }
    Ok(true)
}

/// The name of a disk over the network as an image above it is to name it; `None` for a local file.
///
/// # Errors
/// It has a password in it, or is no plain name.
pub fn backing_argument(name: &OsStr) -> Result<Option<String>, String> {
    let Some(text) = name.to_str() else { return Ok(None) };
    if is_graph_name(text) || text.starts_with("json:") {
        return Err("an overlay needs the plain name of what it stands on".to_owned());
    }
    if PointName::is_name(text) && PointName::parse(text)?.point().is_none() {
        return Err(
            "an overlay needs the point that it stands on: store:...@POINT, as 'zebu points' lists them"
                .to_owned(),
        );
    }
    Ok(is_server_name(text)?.then(|| text.to_owned()))
}

/// The opener of names for the engine; `given` are the `--allow-refs` of the command line.
///
/// # Errors
/// As of the defaults of `--allow-refs`.
pub fn opener(context: &Context, given: &[ReferenceRule]) -> Result<Remote, DiskError> {
    let references = remote_references(given)?;
    let opener = Opener { context: context.clone(), references: references.clone() };
    Ok(Remote::new(Arc::new(opener), references))
}

/// An opener of names that the command line gave, and of no others.
pub fn given_only(context: &Context) -> Remote {
    let opener = Opener { context: context.clone(), references: RemoteRefs::None };
    Remote::new(Arc::new(opener), RemoteRefs::None)
}

/// Opens what the command line named, and what was unpacked.
struct Opener {
    context: Context,
    /// Names that images may name.
    references: RemoteRefs,
}

impl Opener {
    /// Refuses a name that stands in an image and chooses whom to believe, by local files or by another host's name, or the
    /// settings of a library; unless the rule that allows it says so itself.
    fn check_settings(&self, name: &str, parsed: &RemoteName) -> Result<(), String> {
        let is_said = |goes_on: fn(&str) -> bool| match &self.references {
            RemoteRefs::All => true,
            RemoteRefs::Prefixes(prefixes) => {
                prefixes.iter().any(|prefix| goes_on(prefix) && name.starts_with(prefix.as_str()))
            }
            _ => false,
        };
        match parsed {
            RemoteName::Nbd { address, .. } => {
                if address.tls.as_ref().is_none_or(|tls| *tls == TlsFiles::default())
                    || is_said(goes_on_to_tls)
                {
                    return Ok(());
                }
            }
            RemoteName::Rbd { name } => {
                // Ceph's settings name files to read and to write, and code to load.
                if !name.has_settings() || is_said(|_| false) {
                    return Ok(());
                }
                return Err(
                    "the image names a configuration, a user or settings of Ceph; --allow-refs all allows it"
                        .to_owned(),
                );
            }
            RemoteName::Oci { name, .. } if name.is_local() => {
                if is_said(|_| false) {
                    return Ok(());
                }
                return Err("the image names a layout on this machine; --allow-refs all allows it".to_owned());
            }
            RemoteName::Point { name, .. } if matches!(name.place(), PointsPlace::Folder(_)) => {
                if is_said(|_| false) {
                    return Ok(());
                }
                return Err("the image names a store on this machine; --allow-refs all allows it".to_owned());
            }
            RemoteName::Http { .. }
            | RemoteName::Object { .. }
            | RemoteName::Oci { .. }
            | RemoteName::Point { .. } => return Ok(()),
        }
        Err("the image names certificates or keys of TLS; --allow-refs all, or a prefix that goes on to '?tls-...' or '&tls-...', allows it"
            .to_owned())
    }
}

/// Whether the prefix of a name has a parameter of TLS.
fn goes_on_to_tls(prefix: &str) -> bool {
    prefix.split_once('?').is_some_and(|(_, query)| query.starts_with("tls-") || query.contains("&tls-"))
}

impl OpenRemote for Opener {
    fn open(&self, name: &Path, flags: &OpenFlags) -> Option<Result<File, IoError>> {
        if let Some(unpacked) = self.context.disks.unpacked.open(name, flags) {
            return Some(unpacked);
        }
        let found = self.context.disks.names.named(name)?;
        Some(self.context.open_reference(&found, name, flags))
    }

    fn local_file(&self, name: &Path) -> Option<PathBuf> {
        if let Some(found) = self.context.disks.names.named(name) {
            return found.local_file().map(Path::to_owned);
        }
        // A description in an image, which nobody noted.
        let text = name.to_str().filter(|text| text.starts_with("json:"))?;
        reference_node(&self.context, text).ok()?.local_file().map(Path::to_owned)
    }

    fn is_name(&self, name: &str) -> bool {
        RemoteName::is_name(name) || is_graph_name(name) || name.starts_with("json:")
    }

    fn open_reference(&self, name: &str, flags: &OpenFlags) -> Result<File, IoError> {
        let invalid = |reason: String| {
            let shown = HttpUrl::hide(name);
            IoError::of_file(Op::Open, IoErrorKind::Os(libc::EINVAL), shown).with_detail(reason)
        };
        let reference = if RemoteName::is_name(name) {
            let parsed = RemoteName::parse(name, &self.context.disks.remote).map_err(invalid)?;
            self.check_settings(name, &parsed).map_err(invalid)?;
            Reference::Remote(parsed)
        } else {
            Reference::Graph(reference_node(&self.context, name).map_err(invalid)?)
        };
        self.context.open_reference(&reference, Path::new(name), flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nbd_are_noted_and_others_are_paths() {
        let context = Context::default();
        let path = context.image_path(OsStr::new("nbd:localhost:10809:exportname=a b")).unwrap();
        assert_eq!(path, PathBuf::from("nbd://localhost/a%20b"));
        assert!(
            context.disks.names.is_remote(&path)
                && !context.disks.names.is_remote(Path::new("nbd://localhost/other"))
        );
        assert_eq!(context.image_path(OsStr::new("./nbd:x")), Ok(PathBuf::from("./nbd:x")));
        assert_eq!(context.image_path(OsStr::new("rbd:p/n/i@s")), Ok(PathBuf::from("rbd:p/n/i@s")));
        assert!(context.image_path(OsStr::new("rbd:x")).unwrap_err().contains("image is missing"));
        assert!(context.new_image_path(OsStr::new("rbd:p/n/i@s")).unwrap_err().contains("snapshots"));
        assert!(context.image_path(OsStr::new("ssh://h/x")).unwrap_err().contains("'ssh'"));
        assert!(context.image_path(OsStr::new("nbd://h:0")).unwrap_err().contains("port"));
        assert_eq!(context.image_path(OsStr::new("nbd://localhost/a%20b")), Ok(path));
    }

    #[test]
    fn parameters_of_tls_stand_in_the_query() {
        for prefix in
            ["nbds://h/e?tls-", "nbds+unix:///?socket=/s&tls-psk-file=/k", "nbds://h/?tls-hostname=x&a"]
        {
            assert!(goes_on_to_tls(prefix), "{prefix}");
        }
        for prefix in
            ["nbds://h/", "nbds://h/e&tls-", "nbds+unix:///?socket=/s", "nbds+unix:///?socket=/s?tls-"]
        {
            assert!(!goes_on_to_tls(prefix), "{prefix}");
        }
    }

    #[test]
    fn urls_are_noted_without_their_secrets_and_told_apart() {
        let context = Context::default();
        let note =
            |name: &str| context.image_path(OsStr::new(name)).map(|path| path.to_string_lossy().into_owned());
        assert_eq!(note("https://u:p@h/d.raw?sig=1").as_deref(), Ok("https://h/d.raw?..."));
        assert_eq!(note("https://u:p@h/d.raw?sig=2").as_deref(), Ok("https://h/d.raw?...#2"));
        assert_eq!(note("https://u:p@h/d.raw?sig=1").as_deref(), Ok("https://h/d.raw?..."));
        assert_eq!(context.disks.names.driver(Path::new("https://h/d.raw?...")), Some("https"));
        assert!(
            context.image_path(OsStr::new("http://h/secret d")).is_err_and(|error| !error.contains("secret"))
        );
        assert_eq!(is_server_name("http://h/d.raw"), Ok(true));
        assert_eq!(is_server_name("d.raw"), Ok(false));
        assert!(is_server_name("http://u:secret@h/d.raw").is_err_and(|error| error.contains("netrc")));
        assert!(
            context
                .image_path(OsStr::new("./http://x"))
                .is_ok_and(|path| !context.disks.names.is_remote(&path))
        );
    }
}
