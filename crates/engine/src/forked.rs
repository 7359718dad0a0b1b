//! Disks that go on in another image: handles of the earlier one lead to it.

use crate::node::{Driver, Node};
use crate::qcow2::fork_seal::{overlay_path, sealed_error};
use crate::{Error, Image, Result};
use std::path::PathBuf;
use std::sync::Arc;
use zebu_qcow2::SealState;
use zebu_storage::sabotage::{self, Fault};

impl Image {
    /// The image in which the disk goes on: itself, or, after [`crate::jobs::fork`], the overlay. Reads, changes, flushes and
    /// [`Image::close`] go there by themselves, whichever handle they are asked of. Everything else is about the image of the handle.
    pub fn current(&self) -> Image {
        let Some(mut latest) = self.0.continued.get() else { return self.clone() };
        let mut hops = 1;
        while let Some(later) = latest.continued.get() {
            latest = later;
            hops += 1;
        }
        if hops > 1 {
            // The next one takes a single step.
            self.0.continued.shorten(&latest);
        }
        Self(latest)
    }

    /// The latest image, if it is another one.
    pub(crate) fn moved_to(&self) -> Option<Image> {
        if sabotage::is(Fault::WriteSealed) {
            return None;
        }
        self.0.continued.get().map(|_| self.current())
    }

    /// The overlay that the seal of the image names, a path; `None`: the image is not sealed, or its seal can't be read.
    pub fn sealed_by(&self) -> Option<PathBuf> {
        match self.0.seal() {
            SealState::Sealed(seal) => Some(overlay_path(&seal)),
            SealState::Open | SealState::Unreadable => None,
        }
    }

    /// The error of a change of the image, if it is sealed.
    pub(crate) fn sealed_error(&self) -> Option<Error> {
        let state = self.0.seal();
        state.is_sealed().then(|| sealed_error(self.path(), &state))
    }

    /// Whether the image is sealed: it is only read, since its disk goes on in an overlay.
    pub fn is_sealed(&self) -> bool {
        self.0.seal().is_sealed()
    }
}

impl Node {
    fn seal(&self) -> SealState {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.seal(),
            Driver::Raw(_) | Driver::Foreign(_) => SealState::Open,
        }
    }
}

/// Ends the images of a chain that went on in `top`, which was closed with `result`: they lead nowhere any more.
pub(crate) fn end_with(top: &Node, result: &Result<()>) {
    let below = std::iter::successors(top.backing.as_ref(), |node| node.backing.as_ref());
    for node in below.map(Arc::as_ref) {
        if node.continued.end() {
            node.note_closed(result.clone());
        }
    }
}
