//! State that commands share: the open image, and how it was opened.

use crate::arguments::{ForceShareArg, ImageArgs};
use crate::failure::Failure;
use crate::session::Session;
use crate::temporary_overlay::TemporaryOverlay;
use crate::values::{Discard, NamedFormat};
use crate::watch::Watch;
use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::path::Path;
use std::rc::Rc;
use zebu_disks::graph::Filtered;
use zebu_disks::{Context, ImageSpec, Program};
use zebu_engine::storage::{IoBuf, JoinHandle};
use zebu_engine::{Access, CacheMode, Format, Image, RefPolicy, Sharing};

/// How images are opened, if a command does not say it otherwise.
#[derive(Clone)]
pub(crate) struct OpenDefaults {
    pub(crate) context: Context,
    pub(crate) image: ImageArgs,
    pub(crate) format: Option<NamedFormat>,
    pub(crate) cache: CacheMode,
    pub(crate) access: Access,
    pub(crate) force_share: ForceShareArg,
    pub(crate) discard: Discard,
    /// Bytes that buffers lie past an aligned address.
    pub(crate) misalign: usize,
}

impl OpenDefaults {
    /// How `name` is opened.
    pub(crate) fn spec(&self, name: &OsStr) -> Result<ImageSpec, Failure> {
        let mut spec =
            self.image.resolve(&self.context, name, self.format.as_ref(), self.cache, self.access)?;
        self.force_share.apply(&mut spec);
        Ok(spec)
    }
}

/// An open image, and how to open it again.
pub(crate) struct OpenImage {
    /// The image or driver that requests go to.
    pub(crate) image: Image,
    /// The image below its filters, if it has some: it knows what is allocated.
    pub(crate) below: Image,
    pub(crate) spec: ImageSpec,
}

impl OpenImage {
    /// The treatment of discards.
    pub(crate) fn discard(&self, defaults: &OpenDefaults) -> Discard {
        self.spec.discard.unwrap_or(defaults.discard)
    }
}

/// The state between commands.
pub(crate) struct State {
    pub(crate) session: Session,
    /// A signal ends the program between two commands, so that the image is closed.
    pub(crate) watch: Watch,
    pub(crate) defaults: OpenDefaults,
    pub(crate) open: Option<OpenImage>,
    /// The temporary image that is open (`-s`).
    pub(crate) overlay: Option<TemporaryOverlay>,
    /// Asynchronous requests that may still run.
    pub(crate) pending: RefCell<Vec<JoinHandle<()>>>,
    /// Standard output could not be written by an asynchronous request.
    pub(crate) output_failed: Rc<Cell<bool>>,
}

/// The message about an image that can't be opened, without the name that stands before it already: as qemu-io has it.
fn plain<'a>(dialect: Program, path: &Path, message: &'a str) -> &'a str {
    let named = format!("Could not open '{}': ", path.display());
    message.strip_prefix(&named).filter(|_| dialect.is_qemu()).unwrap_or(message)
}

impl State {
    /// Fails once a signal has asked the program to end.
    pub(crate) fn check_signals(&self) -> Result<(), Failure> {
        if self.watch.cancel().is_cancelled() { Err(Failure::interrupted()) } else { Ok(()) }
    }

    /// Opens an image; another one must not be open.
    pub(crate) fn open(&mut self, spec: ImageSpec) -> Result<(), Failure> {
        let dialect = self.session.dialect();
        // The commands look for zeroes themselves.
        let opened = ImageSpec { detect_zeroes: None, ..spec.clone() };
        let Filtered { top, image } = self.session.open_filtered(&opened).map_err(|failure| Failure {
            message: failure.message.map(|message| {
                // qemu-io has no name for it.
                if spec.is_described && dialect.is_qemu() {
                    return format!("can't open: {}", plain(dialect, &spec.path, &message));
                }
                format!("can't open device {}: {}", spec.path.display(), plain(dialect, &spec.path, &message))
            }),
            ..failure
        })?;
        self.open = Some(OpenImage { image: top, below: image, spec });
        Ok(())
    }

    /// Opens a temporary image over the one of `spec`, which stays as it is.
    pub(crate) fn open_snapshot(&mut self, spec: ImageSpec) -> Result<(), Failure> {
        if spec.is_described || !spec.filters.is_empty() {
            return Err(Failure::new("-s needs the name of an image, without drivers above it"));
        }
        let format = spec.options.format.map(Format::name);
        let overlay = TemporaryOverlay::over(&self.defaults.context, spec.path.as_os_str(), format)?;
        let mut options = spec.options.clone();
        options.format = Some(Format::Qcow2);
        // Under its own name, the command asks for writes with an option.
        if !self.session.dialect().is_qemu() {
            options.access = Access::ReadWrite;
        }
        options.sharing = Sharing::Locked;
        options.refs = RefPolicy::All;
        self.open(ImageSpec { path: overlay.path().to_owned(), options, ..spec })?;
        self.overlay = Some(overlay);
        Ok(())
    }

    /// Waits for asynchronous requests and closes the image, if one is open.
    pub(crate) fn close(&mut self) -> Result<(), Failure> {
        self.wait_for_pending();
        match self.open.take() {
            Some(open) => {
                self.overlay = None;
                self.session.close(&open.image, open.spec.options.access)
            }
            None => Ok(()),
        }
    }

    /// Waits until all asynchronous requests have completed and printed what they have to tell.
    pub(crate) fn wait_for_pending(&self) {
        let pending = self.pending.take();
        self.session.worker().block_on(async {
            for request in pending {
                request.await;
            }
        });
    }

    /// A buffer filled with `byte`, as far from an aligned address as was asked for.
    pub(crate) fn buffer(&self, len: usize, byte: u8) -> IoBuf {
        let mut buffer = self.session.worker().buffer(len + self.defaults.misalign);
        drop(buffer.split_to(self.defaults.misalign));
        buffer.as_mut_slice().fill(byte);
        buffer
    }
}
