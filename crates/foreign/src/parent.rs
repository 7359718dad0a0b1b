//! The image that a differencing image stands on.

/// A mark of one state of an image, by which its children know it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Identity {
    /// VMDK: a number that changes with the content.
    Cid(u32),
    /// VHD and VHDX: a UUID, as it lies in the file.
    Uuid([u8; 16]),
    /// VDI: two UUIDs, as they lie in the file.
    Uuids {
        /// Of the image.
        image: [u8; 16],
        /// Of its content; zero in a child that does not tell.
        content: [u8; 16],
    },
}

impl Identity {
    /// Whether an image with the identity `found` is the one that a child means by this.
    pub fn is_of(self, found: Self) -> bool {
        match (self, found) {
            (Self::Uuids { image, content }, Self::Uuids { image: other, .. }) if content == [0; 16] => {
                image == other
            }
            (told, found) => told == found,
        }
    }
}

/// The format of a parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParentFormat {
    /// That of the image itself.
    Same,
    /// The bytes of the disk.
    Raw,
    /// Not told.
    Unknown,
}

/// The parent as the image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Parent {
    /// Path, with slashes; a relative one is relative to the directory of the image. It is not checked in any way. Empty if the
    /// format tells none.
    pub name: String,
    /// Format.
    pub format: ParentFormat,
    /// Identities of which the parent must have one, if the format tells any.
    pub identities: Vec<Identity>,
}

/// A path of Windows with slashes.
pub(crate) fn with_slashes(path: &str) -> String {
    let path = path.replace('\\', "/");
    path.strip_prefix("./").map_or(path.clone(), str::to_owned)
}
