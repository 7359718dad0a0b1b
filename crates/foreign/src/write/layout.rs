//! Images whose blocks are written in any order.

use super::blocks::BlockTable;
use super::options::Allocation;
use super::options::{Birth, NewImage, whole_sectors};
use super::places::{Part, Places};
use super::{vdi, vhdx, vmdk, vpc};
use crate::error::{Error, Result};

#[derive(Debug, Clone)]
enum Tables {
    Vmdk(vmdk::Tables),
    /// None: the text is that of another file.
    FlatVmdk {
        text: Vec<u8>,
    },
    Vhdx(vhdx::Tables),
    Vpc(vpc::Tables),
    Vdi(vdi::Tables),
}

/// An image that is being made, whose blocks are written in any order. The file is empty at first, and reads as zero where
/// nothing was written.
#[derive(Debug, Clone)]
pub struct Layout {
    places: Places,
    tables: Tables,
}

impl Layout {
    /// The layout of an image for a disk of `size` bytes. `name` is the last part of the file's name.
    ///
    /// # Errors
    /// A choice is out of its range; the disk is too large for the format, or its blocks have to be written in order.
    pub fn new(image: &NewImage, size: u64, name: &str, birth: &Birth) -> Result<Self> {
        let size = whole_sectors(size)?;
        let (places, tables) = match image {
            NewImage::Vmdk(_) if image.is_stream() => {
                return Err(Error::unsupported("a streamOptimized VMDK is written in the order of its disk"));
            }
            NewImage::Vmdk(new) => {
                if let Some(flat) = image.flat_name(name) {
                    let (places, text) = vmdk::flat(new, size, &flat, birth)?;
                    (places, Tables::FlatVmdk { text })
                } else {
                    let (places, tables) = vmdk::layout(new, size, name, birth)?;
                    (places, Tables::Vmdk(tables))
                }
            }
            NewImage::Vhdx(new) => {
                let (places, tables) = vhdx::layout(new, size, birth)?;
                (places, Tables::Vhdx(tables))
            }
            NewImage::Vpc(new) => {
                let (places, tables) = vpc::layout(new, size, birth)?;
                (places, Tables::Vpc(tables))
            }
            NewImage::Vdi(new) => {
                let (places, tables) = vdi::layout(new, size, birth)?;
                (places, Tables::Vdi(tables))
            }
        };
        Ok(Self { places, tables })
    }

    /// Bytes of the disk.
    pub fn virtual_size(&self) -> u64 {
        self.places.size
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> u64 {
        self.places.block
    }

    /// The offset in the file of the first byte of the disk, if the whole disk lies in one piece.
    pub fn linear(&self) -> Option<u64> {
        (self.places.allocation == Allocation::Fixed).then_some(self.places.first)
    }

    /// The table of the image without any block.
    pub fn empty_table(&self) -> BlockTable {
        BlockTable::new(match self.places.allocation {
            Allocation::Fixed => 0,
            Allocation::Dynamic => self.places.blocks(),
        })
    }

    /// The offset in the file of a block's data, if it has a place.
    pub fn find(&self, table: &BlockTable, index: u64) -> Option<u64> {
        Some(self.places.host(self.places.of(table, index)?))
    }

    /// Gives a block without a place the next one; its offset in the file.
    ///
    /// # Errors
    /// The file can't be longer.
    pub fn allocate(&self, table: &mut BlockTable, index: u64) -> Result<u64> {
        let place = table.insert(index, self.places.most).ok_or_else(|| {
            Error::unsupported("files of this format can't have so much data: choose another format")
        })?;
        Ok(self.places.host(u64::from(place)))
    }

    /// Bytes that have to be right before the data of each block that has a place; none in most formats.
    pub fn mark(&self) -> &[u8] {
        match self.places.allocation {
            Allocation::Fixed => &[],
            Allocation::Dynamic => &self.places.mark,
        }
    }

    /// Tables: written when all blocks are, before the headers.
    pub fn tables<'a>(&'a self, table: &'a BlockTable) -> Box<dyn Iterator<Item = Part> + 'a> {
        let places = &self.places;
        match &self.tables {
            Tables::Vmdk(tables) => Box::new(tables.tables(places, table)),
            Tables::FlatVmdk { .. } => Box::new(std::iter::empty()),
            Tables::Vhdx(tables) => Box::new(tables.tables(places, table)),
            Tables::Vpc(_) => Box::new(vpc::Tables::tables(places, table)),
            Tables::Vdi(_) => Box::new(vdi::Tables::tables(places, table)),
        }
    }

    /// Headers: they make the file an image, so they are written when all else is durable.
    pub fn headers(&self, table: &BlockTable) -> Vec<Part> {
        match &self.tables {
            Tables::Vmdk(tables) => tables.headers(),
            Tables::FlatVmdk { .. } => Vec::new(),
            Tables::Vhdx(tables) => tables.headers(),
            Tables::Vpc(tables) => tables.headers(&self.places, table.used()),
            Tables::Vdi(tables) => tables.headers(&self.places, table.used()),
        }
    }

    /// All bytes of the image file, if the blocks are those of another ([`NewImage::flat_name`]). They are written last.
    pub fn descriptor(&self) -> Option<&[u8]> {
        match &self.tables {
            Tables::FlatVmdk { text } => Some(text),
            _ => None,
        }
    }

    /// Bytes of the whole file.
    pub fn file_len(&self, table: &BlockTable) -> u64 {
        self.len_of(table.used())
    }

    /// Bytes of the whole file when each block has a place.
    pub fn longest(&self) -> u64 {
        self.len_of(u32::try_from(self.places.blocks()).unwrap_or(u32::MAX))
    }

    fn len_of(&self, used: u32) -> u64 {
        let end = self.places.end(used);
        match &self.tables {
            Tables::Vpc(_) => end.saturating_add(vpc::FOOTER),
            Tables::Vmdk(_) | Tables::FlatVmdk { .. } | Tables::Vhdx(_) | Tables::Vdi(_) => end,
        }
    }
}
