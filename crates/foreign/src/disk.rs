//! An image of any of the formats.

use crate::error::{Error, Result};
use crate::files::Files;
use crate::limits::MAX_DISK;
use crate::opened::Opened;
use crate::parent::{Identity, Parent};
use crate::run::{Kind, Run};
use crate::units::within_file;
use crate::{cloop, dmg, parallels, qcow1, qed, vdi, vhdx, vmdk, vpc};

/// A format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// VMware.
    Vmdk,
    /// Hyper-V.
    Vhdx,
    /// Virtual PC, Hyper-V, Azure: VHD.
    Vpc,
    /// VirtualBox.
    Vdi,
    /// QEMU enhanced disk.
    Qed,
    /// Parallels.
    Parallels,
    /// Version 1 of qcow.
    Qcow,
    /// Compressed loop, version 2.
    Cloop,
    /// Apple disk image.
    Dmg,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Vmdk,
        Self::Vhdx,
        Self::Vpc,
        Self::Vdi,
        Self::Qed,
        Self::Parallels,
        Self::Qcow,
        Self::Cloop,
        Self::Dmg,
    ];

    /// The name that QEMU gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vpc => "vpc",
            Self::Vdi => "vdi",
            Self::Qed => "qed",
            Self::Parallels => "parallels",
            Self::Qcow => "qcow",
            Self::Cloop => "cloop",
            Self::Dmg => "dmg",
        }
    }
}

/// The tables of an image.
#[derive(Debug, Clone)]
enum Map {
    Vmdk(vmdk::Map),
    Vhdx(Box<vhdx::Map>),
    Vpc(vpc::Map),
    Vdi(vdi::Map),
    Qed(qed::Map),
    Parallels(parallels::Map),
    Qcow(qcow1::Map),
    Cloop(cloop::Map),
    Dmg(dmg::Map),
}

/// An image: its size, and its map.
#[derive(Debug, Clone)]
pub struct Disk {
    size: u64,
    unit: u64,
    variant: &'static str,
    parent: Option<Parent>,
    identity: Option<Identity>,
    map: Map,
}

/// The names of the files that the image consists of beside the image file, in order: those of a VMDK descriptor, as they
/// are written. They are the files 1, 2 and so on when the image is opened. They are not checked in any way.
///
/// # Errors
/// The descriptor is damaged, or uses what is not implemented.
pub fn extent_files(format: Format, files: &dyn Files) -> Result<Vec<String>> {
    match format {
        Format::Vmdk => vmdk::extent_files(files),
        _ => Ok(Vec::new()),
    }
}

/// An image that is being opened. Bytes that are missing end a step; the next one goes on with what was read before, so that
/// a log is replayed once, and each file of a VMDK is looked at once.
#[derive(Debug)]
pub struct Opening {
    format: Format,
    kept: Kept,
}

#[derive(Debug, Default)]
struct Kept {
    vmdk: vmdk::Reading,
    vhdx: Option<vhdx::Replayed>,
}

impl Opening {
    /// Begins to open an image.
    pub fn new(format: Format) -> Self {
        Self { format, kept: Kept::default() }
    }

    /// Reads the headers of the image. The files are the same ones in each call, and have not changed.
    ///
    /// # Errors
    /// As [`Disk::open`]. After [`Error::Missing`] it goes on where it was; after any other it is of no more use.
    pub fn open(&mut self, files: &dyn Files) -> Result<Disk> {
        Disk::open_step(self.format, files, &mut self.kept)
    }

    /// Reads the headers of the image without the files that it names, as [`Disk::inspect`].
    ///
    /// # Errors
    /// As [`Opening::open`].
    pub fn inspect(&mut self, files: &dyn Files) -> Result<Disk> {
        match self.format {
            Format::Vmdk => Disk::of(vmdk::inspect(files)?.map(Map::Vmdk)),
            _ => self.open(files),
        }
    }
}

impl Disk {
    /// Reads the headers of an image at once; [`Opening`] is for files of which bytes may be missing.
    ///
    /// # Errors
    /// They are damaged, or use what is not implemented.
    pub fn open(format: Format, files: &dyn Files) -> Result<Self> {
        Opening::new(format).open(files)
    }

    fn open_step(format: Format, files: &dyn Files, kept: &mut Kept) -> Result<Self> {
        Self::of(match format {
            Format::Vmdk => vmdk::open(files, &mut kept.vmdk)?.map(Map::Vmdk),
            Format::Vhdx => vhdx::open(files, &mut kept.vhdx)?.map(|map| Map::Vhdx(Box::new(map))),
            Format::Vpc => vpc::open(files)?.map(Map::Vpc),
            Format::Vdi => vdi::open(files)?.map(Map::Vdi),
            Format::Qed => qed::open(files)?.map(Map::Qed),
            Format::Parallels => parallels::open(files)?.map(Map::Parallels),
            Format::Qcow => qcow1::open(files)?.map(Map::Qcow),
            Format::Cloop => cloop::open(files)?.map(Map::Cloop),
            Format::Dmg => dmg::open(files)?.map(Map::Dmg),
        })
    }

    fn of(opened: Opened<Map>) -> Result<Self> {
        let Opened { size, unit, variant, parent, identity, map } = opened;
        if size > MAX_DISK {
            return Err(Error::unsupported(format!("a disk of {size} bytes is too large")));
        }
        Ok(Self { size, unit, variant, parent, identity, map })
    }

    /// Reads the headers of an image without the files that it names. The sizes are those that the image file tells, and of
    /// such files the disk maps zeroes: no guest data may be read by it.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn inspect(format: Format, files: &dyn Files) -> Result<Self> {
        Opening::new(format).inspect(files)
    }

    /// The format.
    pub fn format(&self) -> Format {
        match self.map {
            Map::Vmdk(_) => Format::Vmdk,
            Map::Vhdx(_) => Format::Vhdx,
            Map::Vpc(_) => Format::Vpc,
            Map::Vdi(_) => Format::Vdi,
            Map::Qed(_) => Format::Qed,
            Map::Parallels(_) => Format::Parallels,
            Map::Qcow(_) => Format::Qcow,
            Map::Cloop(_) => Format::Cloop,
            Map::Dmg(_) => Format::Dmg,
        }
    }

    /// Bytes of the virtual disk: whole sectors of 512 bytes.
    pub fn virtual_size(&self) -> u64 {
        self.size
    }

    /// Bytes of the unit of allocation; 0 if there is none, because the disk lies in one piece.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// Bytes of a logical sector, in which the guest's partition table counts: 512 but for a VHDX that says 4096.
    pub fn logical_sector(&self) -> u32 {
        match &self.map {
            Map::Vhdx(map) => map.sector(),
            _ => 512,
        }
    }

    /// The kind of image within its format, as its format calls it (`subformat=` of QEMU, or "dynamic").
    pub fn variant(&self) -> &'static str {
        self.variant
    }

    /// Facts of a VMDK that was inspected ([`Disk::inspect`]).
    pub fn vmdk(&self) -> Option<&vmdk::facts::Facts> {
        match &self.map {
            Map::Vmdk(map) => map.facts(),
            _ => None,
        }
    }

    /// The image that this one stands on.
    pub fn parent(&self) -> Option<&Parent> {
        self.parent.as_ref()
    }

    /// The identity by which children know this image.
    pub fn identity(&self) -> Option<Identity> {
        self.identity
    }

    /// The run at `guest`, at most `max_len` bytes. Past the end of the disk, everything is a hole. Data that lies in the file
    /// in part is mapped as far as the file reaches, in whole sectors.
    ///
    /// # Errors
    /// The table entry is damaged, or leads out of the file.
    pub fn map(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        if guest >= self.size {
            return Ok(Run { kind: Kind::Hole, len: max_len });
        }
        let max_len = max_len.min(self.size.saturating_sub(guest));
        let run = match &self.map {
            Map::Vmdk(map) => map.run(files, guest, max_len),
            Map::Vhdx(map) => map.run(files, guest, max_len),
            Map::Vpc(map) => map.run(files, guest, max_len),
            Map::Vdi(map) => map.run(files, guest, max_len),
            Map::Qed(map) => map.run(files, guest, max_len),
            Map::Parallels(map) => map.run(files, guest, max_len),
            Map::Qcow(map) => map.run(files, guest, max_len),
            Map::Cloop(map) => map.run(files, guest, max_len),
            Map::Dmg(map) => Ok(map.run(guest, max_len)),
        };
        within_file(files, guest, run?)
    }
}
