//! How a command opens one image.

use crate::context::Context;
use crate::failure::Failure;
use crate::graph::{Description, Filter};
use crate::program::Program;
use crate::secrets::Secrets;
use crate::values::{Aio, Discard};
use std::path::PathBuf;
use zebu::{Access, ErrorKind, OpenOptions, Remedy, ZeroMode};

/// How a command opens one image, once everything on the command line has been looked at.
#[derive(Debug, Clone)]
pub(crate) struct ImageSpec {
    /// The file.
    pub(crate) path: PathBuf,
    /// How it is opened.
    pub(crate) options: OpenOptions,
    /// The engine of the I/O, from the image options.
    pub(crate) aio: Option<Aio>,
    /// The treatment of discards, from the image options.
    pub(crate) discard: Option<Discard>,
    /// How zeroes in writes are zeroed, if they are looked for.
    pub(crate) detect_zeroes: Option<ZeroMode>,
    /// Secrets of the command line, which image options name.
    pub(crate) secrets: Secrets,
    /// Filters above the image, the top first.
    pub(crate) filters: Vec<Filter>,
    /// The driver on top, if it is no format.
    pub(crate) driver: Option<String>,
    /// Whether it is described by options alone, without a name.
    pub(crate) is_described: bool,
    /// Drivers below and above the image, as options describe them.
    pub(crate) described: Option<Description>,
    /// Names of nodes, which can't be changed later.
    pub(crate) node_names: Vec<(String, String)>,
    /// How the command line says that the image is raw.
    pub(crate) called_raw: &'static str,
    /// Whether the command can read the image without locks.
    pub(crate) force_share: ForceShare,
}

/// Whether a command has `-U` for an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ForceShare {
    /// It has not.
    #[default]
    Missing,
    /// It has.
    Offered,
}

/// The option of a command that gives the key of a backing file, where one is missing or wrong.
pub(crate) fn backing_key_remedy(dialect: Program, error: &zebu::Error) -> Option<&'static str> {
    let is_one =
        matches!(error.kind(), ErrorKind::KeyMissing | ErrorKind::WrongKey) && error.remedy().is_none();
    (is_one && !dialect.is_qemu()).then_some(
        " (--object secret,id=KEY,file=PATH gives a key, and --backing-key-secret KEY names it, once for each image down the chain)",
    )
}

impl ImageSpec {
    /// The key is missing of an image of the chain.
    fn key_missing(&self, context: &Context, error: &zebu::Error) -> Failure {
        if context.dialect.is_qemu() {
            return Failure::opening(context, &self.path, error);
        }
        let backing = if error.image() == Some(&self.path) { "" } else { ", with backing. before it" };
        let remedy = format!(
            " (the image is encrypted: --object secret,id=KEY,file=PATH gives a key, and this parameter names it in \
             --image-opts{backing})"
        );
        Failure::opening_with_remedy(context, &self.path, error, &remedy)
    }

    /// Why the image can't be opened, and which option of this command line is a remedy.
    pub(crate) fn failure(&self, context: &Context, error: &zebu::Error) -> Failure {
        let is_named = error.image() == Some(&self.path);
        let remedy = match error.kind() {
            ErrorKind::ForeignFormat
                if is_named
                    && context.disks.names.is_remote(&self.path)
                    && error.message().contains("packed") =>
            {
                format!(" ({}); no packed file on a server is unpacked: download it first", self.called_raw)
            }
            ErrorKind::ForeignFormat if is_named => format!(" ({})", self.called_raw),
            _ if is_named && error.remedy() == Some(&Remedy::NameFormatRaw) => {
                format!(" ({})", self.called_raw)
            }
            ErrorKind::ForeignFormat => {
                " (zebu rebase -u -F raw names the format in the image above it)".to_owned()
            }
            ErrorKind::Locked
                if error.remedy() != Some(&Remedy::WaitForWrites)
                    && self.force_share == ForceShare::Offered
                    && self.options.access == Access::ReadOnly =>
            {
                " (stop that program first; to read all the same, there is -U)".to_owned()
            }
            ErrorKind::KeyMissing => return self.key_missing(context, error),
            _ => return Failure::opening(context, &self.path, error),
        };
        Failure::opening_with_remedy(context, &self.path, error, &remedy)
    }
}
