//! A bitmap by its name, and whether it can be used.

use super::{Bitmap, Condition};
use crate::Remedy;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};

impl Qcow2 {
    pub(super) fn bitmap_error(&self, kind: ErrorKind, message: impl Into<String>) -> Error {
        Error::new(kind, message).on(self.path())
    }

    /// Where the bitmap of this name is in the list.
    pub(super) fn find_bitmap(&self, list: &[Bitmap], name: &str) -> Result<(usize, Bitmap)> {
        let found = (0..).zip(list).find(|(_, bitmap)| bitmap.name() == name && !bitmap.is_record());
        found.map(|(index, bitmap)| (index, bitmap.clone())).ok_or_else(|| self.no_bitmap(name))
    }

    pub(crate) fn no_bitmap(&self, name: &str) -> Error {
        self.bitmap_error(ErrorKind::NotFound, format!("Dirty bitmap '{name}' not found"))
    }

    pub(super) fn check_sound(&self, bitmap: &Bitmap) -> Result<()> {
        if bitmap.condition == Condition::Sound {
            return Ok(());
        }
        let message = format!("Bitmap '{}' is inconsistent and cannot be used; remove it", bitmap.name());
        Err(self.bitmap_error(ErrorKind::InvalidArgument, message).with_remedy(Remedy::RemoveBitmap))
    }
}
