//! Choices for a new image. The names are those of QEMU's options.

use crate::disk::Format;
use crate::error::{Error, Result};
use crate::limits::MAX_DISK;

/// Bytes of a sector as almost every guest sees it.
pub(crate) const SECTOR: u32 = 512;
/// Bytes of the other sector that a VHDX can have.
pub(crate) const LARGE_SECTOR: u32 = 4096;

/// Whether the blocks of a disk have places of their own from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Allocation {
    /// A block gets the next place when it is first written.
    #[default]
    Dynamic,
    /// All have a place, in the order of the disk.
    Fixed,
}

/// Identity of an image, which differs from all others: drawn by the caller, because nothing here does I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Birth {
    /// Random bytes for identities.
    pub random: [[u8; 16]; 3],
    /// Seconds since 1970.
    pub time: u64,
}

impl Birth {
    /// One of the identities, as a UUID of version 4.
    pub(super) fn uuid(&self, number: usize) -> [u8; 16] {
        let mut uuid = self.random.get(number).copied().unwrap_or_default();
        if let Some(byte) = uuid.get_mut(6) {
            *byte = *byte & 0x0f | 0x40;
        }
        if let Some(byte) = uuid.get_mut(8) {
            *byte = *byte & 0x3f | 0x80;
        }
        uuid
    }
}

/// The format of a new image, and what there is to choose of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewImage {
    /// A VMDK.
    Vmdk(NewVmdk),
    /// A VHDX.
    Vhdx(NewVhdx),
    /// A VHD.
    Vpc(NewVpc),
    /// A VDI.
    Vdi(NewVdi),
}

/// Kinds of VMDK that are written (`subformat`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VmdkKind {
    /// Grains as they are, in any order.
    #[default]
    MonolithicSparse,
    /// Compressed grains in the order of the disk.
    StreamOptimized,
    /// A descriptor, and the bytes of the disk in a file beside it.
    MonolithicFlat,
}

/// Disk controllers that a descriptor names (`adapter_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VmdkAdapter {
    /// IDE.
    #[default]
    Ide,
    /// BusLogic SCSI.
    BusLogic,
    /// LSI Logic SCSI.
    LsiLogic,
    /// SCSI of old ESX.
    LegacyEsx,
}

/// A new VMDK.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewVmdk {
    /// Kind.
    pub kind: VmdkKind,
    /// Controller.
    pub adapter: VmdkAdapter,
    /// Version of the virtual hardware (`hwversion`).
    pub hardware_version: u32,
    /// Version of the guest tools (`toolsversion`).
    pub tools_version: u32,
    /// Whether the header allows grains that are marked as zero (`zeroed_grain`); needs version 2 of the format.
    pub zeroed_grain: bool,
}

impl Default for NewVmdk {
    fn default() -> Self {
        Self {
            kind: VmdkKind::default(),
            adapter: VmdkAdapter::default(),
            hardware_version: 4,
            tools_version: i32::MAX as u32,
            zeroed_grain: false,
        }
    }
}

/// A new VHDX.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewVhdx {
    /// Whether all blocks have places (`subformat`).
    pub allocation: Allocation,
    /// Bytes of a block: a power of two from 1 MiB to 256 MiB; by the size of the disk if `None` (`block_size`).
    pub block_size: Option<u32>,
    /// Bytes of the log: a multiple of 1 MiB (`log_size`).
    pub log_size: u32,
    /// Bytes of a sector as the guest sees it: 512 or 4096; 512 if `None` (`logical_sector_size`).
    pub logical_sector: Option<u32>,
    /// Whether blocks that were never written are marked as zero, rather than as not there (`block_state_zero`).
    pub zero_blocks: bool,
}

impl Default for NewVhdx {
    fn default() -> Self {
        Self {
            allocation: Allocation::Dynamic,
            block_size: None,
            log_size: 1 << 20,
            logical_sector: None,
            zero_blocks: true,
        }
    }
}

/// The size of the disk of a VHD.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VpcSize {
    /// The next that cylinders, heads and sectors can express, as Virtual PC needs it.
    #[default]
    ByGeometry,
    /// The size as it is; that of a fixed image rounded up to whole MiB, as Azure needs it (`force_size`).
    Exact,
}

/// A new VHD.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewVpc {
    /// Whether the disk lies in the file as it is (`subformat`).
    pub allocation: Allocation,
    /// Size.
    pub size: VpcSize,
}

/// A new VDI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewVdi {
    /// Whether all blocks have places (`static`).
    pub allocation: Allocation,
    /// Bytes of a block: a power of two from 4 KiB to 256 MiB. VirtualBox and QEMU read 1 MiB alone.
    pub block_size: u32,
}

impl Default for NewVdi {
    fn default() -> Self {
        Self { allocation: Allocation::Dynamic, block_size: 1 << 20 }
    }
}

impl NewImage {
    /// The usual image of a format; `None` for formats that are only read.
    pub fn of(format: Format) -> Option<Self> {
        match format {
            Format::Vmdk => Some(Self::Vmdk(NewVmdk::default())),
            Format::Vhdx => Some(Self::Vhdx(NewVhdx::default())),
            Format::Vpc => Some(Self::Vpc(NewVpc::default())),
            Format::Vdi => Some(Self::Vdi(NewVdi::default())),
            Format::Qed | Format::Parallels | Format::Qcow | Format::Cloop | Format::Dmg => None,
        }
    }

    /// Its format.
    pub fn format(&self) -> Format {
        match self {
            Self::Vmdk(_) => Format::Vmdk,
            Self::Vhdx(_) => Format::Vhdx,
            Self::Vpc(_) => Format::Vpc,
            Self::Vdi(_) => Format::Vdi,
        }
    }

    /// Bytes of a sector as the guest sees it.
    pub fn logical_sector(&self) -> u32 {
        match self {
            Self::Vhdx(vhdx) => vhdx.logical_sector.unwrap_or(SECTOR),
            Self::Vmdk(_) | Self::Vpc(_) | Self::Vdi(_) => SECTOR,
        }
    }

    /// The same image, with the sectors of the disk that is written to it if the format has such sectors and none were
    /// chosen.
    #[must_use]
    pub fn for_sectors(mut self, sector: u32) -> Self {
        if let Self::Vhdx(vhdx) = &mut self
            && matches!(sector, SECTOR | LARGE_SECTOR)
        {
            vhdx.logical_sector.get_or_insert(sector);
        }
        self
    }

    /// The name of the file with the bytes of the disk, if that is another than the image file, whose name is `name`.
    pub fn flat_name(&self, name: &str) -> Option<String> {
        match self {
            Self::Vmdk(NewVmdk { kind: VmdkKind::MonolithicFlat, .. }) => {
                let (stem, ending) = name.rfind('.').map_or((name, ""), |dot| name.split_at(dot));
                Some(format!("{stem}-flat{ending}"))
            }
            _ => None,
        }
    }

    /// Whether its blocks have to be written in the order of the disk, as a [`super::Stream`].
    pub fn is_stream(&self) -> bool {
        matches!(self, Self::Vmdk(NewVmdk { kind: VmdkKind::StreamOptimized, .. }))
    }
}

/// The size of a disk, rounded up.
pub(super) fn whole_sectors(size: u64) -> Result<u64> {
    let size = size.checked_next_multiple_of(512).filter(|size| *size <= MAX_DISK);
    size.ok_or_else(|| Error::unsupported("the disk is too large"))
}
