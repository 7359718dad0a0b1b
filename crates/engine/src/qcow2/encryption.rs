//! The encryption of an open image: the key that its guest data needs, and what is known of its header.

use crate::crypt::EncryptionInfo;
use crate::crypt::protection::Protection;

/// The protection of an image, and how it is encrypted.
#[derive(Debug)]
pub(crate) struct ImageEncryption {
    protection: Protection,
    /// `None` if it is not encrypted, or its header can't be read and the image is only looked at.
    info: Option<EncryptionInfo>,
}

impl ImageEncryption {
    /// Of an image that is not encrypted.
    pub(crate) const NONE: Self = Self { protection: Protection::None, info: None };

    pub(crate) fn new(protection: Protection, info: Option<EncryptionInfo>) -> Self {
        Self { protection, info }
    }

    /// Whether the image is not encrypted at all.
    pub(crate) fn is_none(&self) -> bool {
        self.protection.is_none() && self.info.is_none()
    }

    /// The protection of the guest's data.
    #[inline]
    pub(crate) fn protection(&self) -> &Protection {
        &self.protection
    }

    /// How the image is encrypted, as far as it could be read.
    pub(crate) fn info(&self) -> Option<&EncryptionInfo> {
        self.info.as_ref()
    }
}
