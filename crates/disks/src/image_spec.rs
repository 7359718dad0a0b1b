//! How one image is opened.

use crate::graph::{Description, Filter};
use crate::secrets::Secrets;
use crate::words::{Aio, Discard};
use std::path::PathBuf;
use zebu_engine::{OpenOptions, ZeroMode};

/// How a command opens one image, once everything on the command line has been looked at.
#[derive(Debug, Clone)]
pub struct ImageSpec {
    /// The file.
    pub path: PathBuf,
    /// How it is opened.
    pub options: OpenOptions,
    /// The engine of the I/O, from the image options.
    pub aio: Option<Aio>,
    /// The treatment of discards, from the image options.
    pub discard: Option<Discard>,
    /// How zeroes in writes are zeroed, if they are looked for.
    pub detect_zeroes: Option<ZeroMode>,
    /// Secrets of the command line, which image options name.
    pub secrets: Secrets,
    /// Filters above the image, the top first.
    pub filters: Vec<Filter>,
    /// The driver on top, if it is no format.
    pub driver: Option<String>,
    /// Whether it is described by options alone, without a name.
    pub is_described: bool,
    /// Drivers below and above the image, as options describe them.
    pub described: Option<Description>,
    /// Names of nodes, which can't be changed later.
    pub node_names: Vec<(String, String)>,
    /// How the command line says that the image is raw.
    pub called_raw: &'static str,
    /// Whether the command can read the image without locks.
    pub force_share: ForceShare,
}

/// Whether a command has `-U` for an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ForceShare {
    /// It has not.
    #[default]
    Missing,
    /// It has.
    Offered,
}

impl ImageSpec {
    /// The image at `path`, of which no option says anything but `options`.
    pub fn new(path: PathBuf, options: OpenOptions) -> Self {
        Self {
            path,
            options,
            aio: None,
            discard: None,
            detect_zeroes: None,
            secrets: Secrets::default(),
            filters: Vec::new(),
            driver: None,
            is_described: false,
            described: None,
            node_names: Vec::new(),
            called_raw: "-f raw",
            force_share: ForceShare::Missing,
        }
    }
}
