//! Facts that an image file records of the disk and its extents, for people.

use super::descriptor::{Descriptor, ExtentKind};

/// Facts of a VMDK.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Facts {
    /// The content's number; 0 if the image tells none.
    pub cid: u32,
    /// The content's number of the parent; `None` if there is no parent.
    pub parent_cid: Option<u32>,
    /// Kind of the image, as the image itself calls it; empty if it tells none.
    pub create_type: String,
    /// The parts of the disk, in order.
    pub extents: Vec<Extent>,
    /// Names of the files of extents, each once.
    pub names: Vec<String>,
}

/// A part of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extent {
    /// Bytes of the disk.
    pub len: u64,
    /// Index of the file in [`Facts::names`]; `None` for the image file itself, and for zeroes.
    pub name: Option<u32>,
    /// The word of the descriptor for its kind; empty for the image file itself.
    pub kind: &'static str,
    /// Bytes of a grain, if the image file tells them.
    pub grain: Option<u64>,
    /// Whether grains are compressed.
    pub is_compressed: bool,
}

impl Facts {
    /// Facts of an image file that is itself the one extent.
    pub(super) fn of_file(
        descriptor: Option<&Descriptor>,
        len: u64,
        grain: u64,
        is_compressed: bool,
    ) -> Self {
        let extent = Extent { len, name: None, kind: "", grain: Some(grain), is_compressed };
        Self { extents: vec![extent], names: Vec::new(), ..Self::of(descriptor) }
    }

    /// Facts of a descriptor that names its extents.
    pub(super) fn described(descriptor: &Descriptor) -> Self {
        let extents = descriptor.extents.iter().map(|extent| Extent {
            len: extent.len,
            name: extent.name,
            kind: match extent.kind {
                ExtentKind::Zero => "ZERO",
                ExtentKind::Flat { .. } if descriptor.create_type == "vmfs" => "VMFS",
                ExtentKind::Flat { .. } => "FLAT",
                ExtentKind::Sparse if descriptor.create_type == "vmfsSparse" => "VMFSSPARSE",
                ExtentKind::Sparse => "SPARSE",
                ExtentKind::SeSparse => "SESPARSE",
            },
            grain: None,
            is_compressed: false,
        });
        Self { extents: extents.collect(), names: descriptor.names.clone(), ..Self::of(Some(descriptor)) }
    }

    fn of(descriptor: Option<&Descriptor>) -> Self {
        Self {
            cid: descriptor.and_then(|descriptor| descriptor.cid).unwrap_or_default(),
            parent_cid: descriptor.and_then(|descriptor| descriptor.parent_cid),
            create_type: descriptor.map(|descriptor| descriptor.create_type.clone()).unwrap_or_default(),
            extents: Vec::new(),
            names: Vec::new(),
        }
    }
}
